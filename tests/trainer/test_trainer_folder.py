"""A folder of checkpoints belongs to one run: its settings, models, reward and prompts."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import Origin
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.rewards.scorers import score_by_function
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.runtime.metrics_file import ITERATION, METRICS, read_lines
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import save, tiny_model, word_tokenizer
from tests.trainer.test_trainer import GOOD_STEP, PROMPTS, assert_same_bits, config, early_letters, repeatable, weights


def late_letters(completions: list[str]) -> list[float]:
    return [sum(c > "k" for c in text.split()) for text in completions]


def trainer_of(policy: Any = None, **given: Any) -> PPOTrainer:
    given = {"reward": early_letters, "prompts": PROMPTS, **given}
    return PPOTrainer(config(save_interval=1), policy or tiny_model(), None, word_tokenizer(), **given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of iterations 2 and 3, the last of a run."""
    trainer_of().train(output_dir=tmp_path / "run")
    return tmp_path / "run"


def test_a_new_run_is_not_written_among_the_checkpoints_of_another(folder: Path):
    before = sorted(folder.rglob("*"))
    for trainer in (trainer_of(), trainer_of(reward=late_letters)):
        with pytest.raises(ConfigError, match=rf"^{folder} .* iteration 3: .*resume_from_checkpoint=True"):
            trainer.train(output_dir=folder)
        assert trainer.state.progress.iteration == 0
        trainer.step(**GOOD_STEP)
        with pytest.raises(ConfigError, match="resume_from_checkpoint=True"):
            trainer.save_checkpoint(folder)
    assert sorted(folder.rglob("*")) == before


def test_the_sign_of_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trainer_of().train(output_dir="~/run")
    again = trainer_of()
    again.load_checkpoint("~/run/iteration_000002")
    again.train(resume_from_checkpoint="~/run/iteration_000002")
    again.save_pretrained("~/policy")
    again.save_checkpoint("~/more")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more", "policy", "run"]


def test_a_policy_of_a_script_names_its_start_model_reward_model_and_critic_with_their_origins(tmp_path: Path):
    """Models of paths have digests; objects, whose weights the script may have changed, have none."""
    base = Origin("model", "start model", "org/base", "b45e", on_hub=True)
    model = TrainedModel(tiny_model(), word_tokenizer(), made_from=(base,))
    reward = TrainedModel(CausalLMRewardModel.from_causal_lm(tiny_model()), word_tokenizer(), made_from=(base,))
    model.save(tmp_path / "sft")
    reward.save(tmp_path / "reward")
    sft, scorer = (PretrainedHandle(str(tmp_path / name)) for name in ("sft", "reward"))
    digests = {}
    for kind, given in (("path", (sft.source, scorer.source)), ("object", (sft.causal_lm(), scorer.reward_model()))):
        trainer_of(given[0], reward=given[1], value_model=scorer.source).save_pretrained(tmp_path / kind)
        made_from = PretrainedHandle(str(tmp_path / kind)).origin("start model").made_from
        assert [(each.role, each.source) for each in made_from] == [
            ("start model", "sft"),
            ("reward model", "reward"),
            ("critic at the start", "reward"),
        ]
        assert {each.made_from for each in made_from} == {(base,)}
        digests[kind] = [each.digest for each in made_from]
        assert "base_model: org/base\n" in (tmp_path / kind / "README.md").read_text()
    assert digests["path"] == [sft.fingerprint(), scorer.fingerprint(), scorer.fingerprint()]
    assert digests["object"] == [None, None, scorer.fingerprint()]
    trainer_of(tiny_model()).save_pretrained(tmp_path / "path")
    [unknown] = PretrainedHandle(str(tmp_path / "path")).origin("start model").made_from
    assert unknown == Origin("model", "start model", "a model without a name")


def test_a_classifier_of_ours_keeps_its_name_as_a_reward_model(tmp_path: Path):
    """`with_mean` makes another model of it, without a name."""
    classifier = CausalLMRewardModel.from_causal_lm(tiny_model()).to_classifier(pad_id=1, eos_id=2)
    classifier.name_or_path = "org/reward"
    trainer_of(reward=classifier).save_pretrained(tmp_path)
    assert PretrainedHandle(str(tmp_path)).origin("start model").made_from[1].source == "org/reward"


def test_a_run_resumes_in_its_own_folder(folder: Path, tmp_path: Path):
    """The folder is also accepted after load_checkpoint, and after calls of step()."""
    shutil.rmtree(folder / "iteration_000003")
    resumed, stepped = trainer_of(), trainer_of()
    resumed.load_checkpoint(folder / "iteration_000002")
    resumed.train(output_dir=folder)
    stepped.step(**GOOD_STEP)
    stepped.save_checkpoint(tmp_path / "steps")
    stepped.step(**GOOD_STEP)
    stepped.save_checkpoint(tmp_path / "steps")
    stepped.train(output_dir=tmp_path / "steps")
    assert resumed.state.progress.iteration == stepped.state.progress.iteration == 3


def test_going_on_from_an_older_checkpoint_than_the_newest_whole_one_needs_another_folder(folder: Path, tmp_path: Path):
    """Its metrics would be set aside, and the newer one could not be resumed any more."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    older = folder / "iteration_000002"
    for use in (
        lambda trainer: trainer.train(resume_from_checkpoint=older, output_dir=folder),
        lambda trainer: (trainer.load_checkpoint(older), trainer.save_checkpoint(folder)),
    ):
        with pytest.raises(ConfigError, match=rf"^{older}: .* newer checkpoint iteration_000003, .* move "):
            use(trainer_of())
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    elsewhere = trainer_of()
    elsewhere.train(resume_from_checkpoint=older, output_dir=tmp_path / "other")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    numbers = [line.step for line in read_lines(tmp_path / "other" / METRICS) if line.kind == ITERATION]
    assert numbers == [1, 2, 3]  # the other folder has the whole run
    assert repeatable(elsewhere.history) == repeatable([line.metrics for line in read_lines(folder / METRICS)])


def test_of_a_folder_whose_newest_checkpoint_is_damaged_the_one_before_goes_on(folder: Path):
    (folder / "iteration_000003" / "state.json").write_text("{")
    resumed = trainer_of()
    resumed.train(resume_from_checkpoint=True, output_dir=folder)
    assert [line.step for line in read_lines(folder / METRICS)] == [1, 2, 3]
    assert len((folder / "metrics.attempt_001.jsonl").read_bytes().splitlines()) == 1


REWARD_MODEL = CausalLMRewardModel.from_causal_lm(tiny_model(seed=5))
OF_WEIGHT_2 = RewardScorer([("early_letters", 2.0, partial(score_by_function, early_letters, "early_letters"))])
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("reward", {"reward": late_letters}),
    ("reward", {"reward": REWARD_MODEL}),
    ("reward", {"reward": OF_WEIGHT_2}),
    ("prompts", {"prompts": [*PROMPTS[:-1], "p"]}),
    ("prompts", {"prompts": {"prompt": PROMPTS, "answer": list("abcdefg")}}),
    ("value_model", {"value_model": tiny_model(seed=3)}),
    ("policy", {"policy": tiny_model(seed=3)}),
]


@pytest.mark.parametrize(
    ("named", "given"), [*OTHERS[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS[1:])]
)
def test_a_run_is_not_resumed_with_other_prompts_models_or_another_reward(folder: Path, named: str, given: Any):
    trainer = trainer_of(**given)
    with pytest.raises(ConfigError, match=rf"(?m)^{named}: .*_000003\b"):
        trainer.train(resume_from_checkpoint=True, output_dir=folder)
    assert trainer.state.progress.iteration == 0


def test_a_run_resumes_with_a_reward_function_that_was_fixed(folder: Path, caplog: pytest.LogCaptureFixture):
    def early_letters(prompts: list[str], completions: list[str]) -> list[float]:
        return [0.5] * len(completions)

    trainer = trainer_of(reward=early_letters)
    with caplog.at_level("WARNING", "ppo_rlhf"):
        trainer.train(resume_from_checkpoint=True, output_dir=folder)
    assert "reward functions changed" in caplog.text
    assert trainer.state.progress.iteration == 3


@pytest.mark.slow
def test_a_reward_model_is_known_by_its_weights(tmp_path: Path):
    """The same reward model may be given as an object or as a path; another model of the same shape is refused."""
    path = save(tmp_path / "reward", REWARD_MODEL)
    trainer_of(reward=REWARD_MODEL).train(output_dir=tmp_path / "run")
    given = CausalLMRewardModel.from_pretrained(path), PretrainedHandle(path).tokenizer()
    for reward in (path, given):
        again = trainer_of(reward=reward)
        again.train(resume_from_checkpoint=tmp_path / "run" / "iteration_000002")
        assert len(again.history) == 3
    other = trainer_of(reward=CausalLMRewardModel.from_causal_lm(tiny_model(seed=6)))
    with pytest.raises(ConfigError, match=r"^reward: "):
        other.train(resume_from_checkpoint=True, output_dir=tmp_path / "run")


@pytest.mark.slow
def test_a_trainer_without_reward_and_prompts_loads_the_checkpoint_of_one_with_them(folder: Path):
    trainer = PPOTrainer(config(save_interval=1), tiny_model(), None, word_tokenizer())
    trainer.load_checkpoint(folder / "iteration_000003")
    with pytest.raises(ConfigError, match=r"^reference_policy: "):
        PPOTrainer(config(), tiny_model(), tiny_model(seed=1), word_tokenizer()).load_checkpoint(
            folder / "iteration_000003"
        )
    whole = trainer_of()
    whole.train()
    assert_same_bits(weights(trainer.policy), weights(whole.policy))
