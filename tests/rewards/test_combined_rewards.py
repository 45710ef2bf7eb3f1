"""Rewards that may disagree (`reward.combine`): by plain Python, in the loop, in a checkpoint, from several models."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_rlhf.checkpoints.files import Checkpoint
from ppo_rlhf.checkpoints.store import read_checkpoint, write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.core.option_names import RewardCombination
from ppo_rlhf.core.reward_combination import combine_scores, disagreement
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.experience import completion_rows
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer, check_scorable, models_of, reward_model_accuracy
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.checkpoints.support import assert_same, everything
from tests.ppo_runs import Run, build_run
from tests.rewards.test_normalised_components import PLAIN, always, lengths, letters, rare
from tests.tiny_models import save, tiny_model, word_tokenizer

FUNCTIONS = {"length": lengths, "letters": letters, "rare": rare}
COMBINED: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": statistics.fmean,
    "min": min,
    "mean_minus_std": lambda scores: statistics.fmean(scores) - statistics.pstdev(scores),
}


def test_each_declared_combination_is_tried_here():
    assert set(COMBINED) == set(get_args(RewardCombination))


def build(combine: Any, normalise: Any = "component", **settings: Any) -> Run:
    components = [(name, 1.0, function) for name, function in FUNCTIONS.items()]
    scorer = RewardScorer(components, normalise=normalise, combine=combine)
    return build_run(scorer=scorer, **{**PLAIN, "reward_normalisation": "running", **settings})


@pytest.mark.parametrize("how", COMBINED)
def test_combinations_of_given_numbers_are_those_of_plain_python(how: str):
    scores = [[1.0, -2.0, 0.5, 3.0], [1.0, 4.0, 0.5, -3.0], [1.0, 0.25, -7.5, 2.0]]
    expected = [COMBINED[how](list(column)) for column in zip(*scores, strict=True)]
    found = combine_scores(torch.tensor(scores, dtype=torch.float64), how)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-12)


def test_two_scores_less_their_deviation_are_the_lower_one():
    scores = torch.randn(2, 50, dtype=torch.float64)
    torch.testing.assert_close(combine_scores(scores, "mean_minus_std"), scores.amin(0), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(disagreement(scores), (scores[0] - scores[1]).abs() / 2, rtol=0.0, atol=1e-12)
    with pytest.raises(ConfigError, match="combine_scores: how='median' is unknown"):
        combine_scores(scores, "median")


def z_scores(seen: list[dict[str, np.ndarray]], how: str) -> np.ndarray:
    """The last batch's z-scores [K, B], over it or over all batches up to it, with n - 1 under the variance."""
    rows = []
    for name in FUNCTIONS:
        over = np.concatenate([each[name] for each in (seen if how == "running" else seen[-1:])])
        rows.append((seen[-1][name] - over.mean()) / np.sqrt(over.var(ddof=1) + 1e-8))
    return np.array(rows)


@pytest.mark.parametrize(
    ("combine", "normalise", "how"),
    [
        ("min", "component", "running"),
        ("min", "component", "batch"),
        ("mean_minus_std", "component", "running"),
        ("mean", "component", "running"),
        ("mean", "total", "none"),
    ],
)
def test_a_run_is_paid_the_combination_and_reports_the_mean_and_the_disagreement(combine, normalise, how):
    run, seen = build(combine, normalise, reward_normalisation=how), []
    for iteration in range(2):
        rollouts, scores, rewards, experience = run.before_update()
        seen.append({name: values.numpy() for name, values in scores.components.items()})
        raw = np.array(list(seen[-1].values()))
        np.testing.assert_allclose(scores.total.numpy(), raw.mean(0), rtol=0.0, atol=1e-9)
        scale = raw if normalise == "total" else z_scores(seen, how)
        expected = [COMBINED[combine](list(column)) for column in scale.T]
        last = rewards.gather(1, rollouts.responses.lengths[:, None] - 1)[:, 0]
        np.testing.assert_allclose(last.numpy(), expected, rtol=0.0, atol=1e-8)
        # disagreement has the run's unit, whatever the reward is normalised by
        apart = z_scores(seen, "running").std(0)
        rows = completion_rows(experience, run.state.sampler.tokenizer)
        np.testing.assert_allclose([row["disagreement"] for row in rows], apart, rtol=0.0, atol=1e-9)
        metrics = run.iteration()
        assert metrics["reward/disagreement"] == pytest.approx(apart.mean(), abs=1e-9)
        assert metrics["objective/scores"] == pytest.approx(raw.mean(), rel=1e-12)
        assert run.state.shaping.component_moments["rare"].count == 12 * (iteration + 1)


def test_a_weighted_sum_has_neither_the_metric_nor_the_column():
    run = build("sum", "total")
    experience = run.before_update()[-1]
    assert experience.disagreement is None
    assert "disagreement" not in completion_rows(experience, run.state.sampler.tokenizer)[0]
    assert "reward/disagreement" not in run.iteration()
    assert run.state.extra_state()["component_moments"] == {}


@pytest.mark.parametrize(("normalise", "lines"), [("total", 0), ("component", 1)])
def test_a_component_that_does_not_vary_is_named_only_where_it_is_normalised_alone(normalise, lines, caplog):
    components = [("rare", 1.0, rare), ("always", 1.0, always)]
    scorer = RewardScorer(components, normalise=normalise, combine="mean")
    build_run(scorer=scorer, **PLAIN, reward_normalisation="running").iteration()
    assert len([line for line in caplog.messages if "reward/always" in line]) == lines


def test_rewards_that_always_agree_are_one_reward():
    def of(combine: Any, names: str) -> Run:
        scorer = RewardScorer([(name, 1.0, letters) for name in names], normalise="component", combine=combine)
        return build_run(scorer=scorer, **PLAIN, reward_normalisation="running")

    one = build_run(scorer=RewardScorer([("a", 1.0, letters)]), **PLAIN, reward_normalisation="running")
    several = {combine: of(combine, "abc") for combine in ("mean", "min", "mean_minus_std")}
    for _ in range(2):
        expected = one.before_update()[2]
        for run in several.values():
            torch.testing.assert_close(run.before_update()[2], expected, rtol=0.0, atol=1e-9)
            assert run.iteration()["reward/disagreement"] == pytest.approx(0.0, abs=1e-12)
        one.iteration()


@pytest.mark.parametrize(("combine", "normalise"), [("min", "component"), ("mean", "total")])
def test_a_resumed_run_equals_one_that_went_on(combine, normalise, tmp_path: Path):
    whole = build(combine, normalise, total_episodes=36)
    whole.iteration()
    directory = write_checkpoint(tmp_path, whole.state)
    resumed = build(combine, normalise, total_episodes=36)
    read_checkpoint(Checkpoint(directory), resumed.state)
    for run in (whole, resumed):
        while not run.state.progress.finished:
            run.iteration()
    assert_same(everything(resumed.state), everything(whole.state))
    disagreements = [[row["reward/disagreement"] for row in run.state.progress.history] for run in (whole, resumed)]
    assert disagreements[0] == disagreements[1]


def test_prompts_that_are_drawn_again_keep_the_combination():
    run = build("min", responses_per_prompt=2, drop_uniform_prompts=2)
    rollouts = run.rollouts()
    assert rollouts.scores is not None
    assert rollouts.scores.combine == "min"


# --- settings --------------------------------------------------------------------------------------------------------


def function(reference: str, **settings: Any) -> dict[str, Any]:
    return {"type": "function", "function": f"builtins:{reference}", **settings}


@pytest.mark.parametrize(
    ("components", "settings", "message"),
    [
        ([function("len")], {"combine": "mean"}, r"^reward\.combine=mean: len is the only component"),
        (
            [function("len"), function("sum", weight=0.5)],
            {"combine": "mean"},
            r"^reward\.combine=mean: sum has weight=0\.5, but only combine=sum weighs components",
        ),
        (
            [function("len"), function("sum")],
            {"combine": "min"},
            r"^reward\.combine=min compares the components' scores, which need one scale: set reward\.normalise=comp",
        ),
        (
            [function("len"), function("sum")],
            {"combine": "mean_minus_std"},
            r"^reward\.combine=mean_minus_std compares the components' scores, which need one scale",
        ),
        (
            [function("len"), function("sum", name="disagreement")],
            {"combine": "mean"},
            r"^reward\.combine=mean: the metric reward/disagreement exists; give the component another name",
        ),
        ([function("len", path="m")], {}, r"path=m belongs to type model, not function"),
        (
            [{"type": "model", "path": "a/rm"}, {"type": "model", "path": "b/rm"}],
            {},
            r"two components are called rm\. Give each a unique name",
        ),
        ([function("len"), function("sum")], {"combine": "median"}, r"reward\.combine='?median"),
    ],
)
def test_a_combination_that_means_nothing_is_refused_in_a_line(components, settings, message):
    with pytest.raises(ConfigError, match=message):
        RewardConfig(components=components, **settings)


def test_a_scorer_of_a_script_is_held_to_the_same_rules():
    with pytest.raises(ConfigError, match=r"^reward\.combine=min compares"):
        RewardScorer([("a", 1.0, letters), ("b", 1.0, rare)], combine="min")


def test_rewards_per_token_are_refused_with_a_combination():
    def by_token(batch: ResponseBatch) -> Tensor:
        return torch.zeros(len(batch), max(map(len, batch.response_ids)))

    scorer = RewardScorer([("a", 1.0, letters), ("b", 1.0, by_token)], combine="mean")
    run = build_run(scorer=scorer, **PLAIN)
    with pytest.raises(ConfigError, match=r"^reward\.combine=mean combines scores of whole responses, but b returns"):
        loop.score_responses(run.rollouts(), run.scorer, run.state.sampler, run.state.progress)


def test_a_reward_models_name_is_the_last_part_of_its_path():
    paths = ["data/models/rm_a", "org/rm.b@main", None]
    config = RewardConfig(components=[{"type": "model", "path": path} for path in paths])  # type: ignore[list-item]
    assert [component.title for component in config.components] == ["rm_a", "rm.b", "model"]
    assert config.model_paths == paths
    assert config.needs_catalogued_model
    assert not RewardConfig(components=[{"type": "model", "path": "rm"}]).needs_catalogued_model  # type: ignore[list-item]


# --- several reward models -------------------------------------------------------------------------------------------


def reward_model(folder: Path, seed: int, accuracy: float | None = None, context: int = 32) -> str:
    torch.manual_seed(seed)
    model = CausalLMRewardModel.from_causal_lm(tiny_model(max_position_embeddings=context))
    torch.nn.init.normal_(model.score.weight)
    if accuracy is not None:
        model.config.held_out_accuracy, model.config.held_out_interval = accuracy, [accuracy - 0.1, accuracy + 0.1]
    return save(folder, model)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    return [reward_model(tmp_path / "rm_a", 1, 0.7), reward_model(tmp_path / "rm_b", 2, 0.6, context=16)]


def test_each_component_is_scored_by_the_model_of_its_path(two: list[str]):
    components: Any = [{"type": "model", "path": path} for path in two]
    again: Any = {"type": "model", "path": two[0], "name": "again"}
    config = RewardConfig(components=[*components, {"type": "model"}, again], combine="mean")
    scorer = build_reward_scorer(config, PretrainedHandle(two[1]), word_tokenizer(), dtype=torch.float64)
    batch = ResponseBatch(["a b"] * 2, ["c", "d"], {}, [[4, 5]] * 2, [[6], [7]], [False, False])
    scores = scorer.score(batch)
    for name, path in (("rm_a", two[0]), ("rm_b", two[1]), ("model", two[1]), ("again", two[0])):
        model = PretrainedHandle(path).reward_model(torch.float64)
        expected = torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in ([4, 5, 6], [4, 5, 7])])
        torch.testing.assert_close(scores.components[name], expected.detach(), rtol=0.0, atol=1e-10)
    assert not torch.equal(scores.components["rm_a"], scores.components["rm_b"])
    assert scorer.model is models_of(scorer)[0]  # the critic starts from the first
    assert len(models_of(scorer)) == 3  # the path that two components name is loaded once
    assert reward_model_accuracy(PretrainedHandle(two[1]), config) == (0.6, 0.5, 0.7)
    with pytest.raises(ModelError, match=f"the reward model {two[1]}'s context is 16"):
        check_scorable(scorer, [10], 8, [2])


def test_a_trainer_maximises_the_combination_of_models_by_path(tmp_path: Path, two: list[str]):
    components: Any = [{"type": "model", "path": path} for path in two]
    settings: dict[str, Any] = {"combine": "min", "normalise": "component"}
    sizes = {"total_episodes": 8, "per_device_train_batch_size": 4, "response_length": 6}
    config = PPOConfig(**sizes, device="cpu", reward_normalisation="running", value_model="reward_init")  # type: ignore[arg-type]
    sft = save(tmp_path / "sft", tiny_model())

    def trainer(paths: list[Any]) -> PPOTrainer:
        return PPOTrainer(config, sft, reward=RewardConfig(components=paths, **settings), prompts=["a b", "c d"])

    first = trainer(components)
    history = first.train()
    assert history[-1]["reward/disagreement"] > 0.0
    assert history[-1]["objective/scores"] == pytest.approx(
        (history[-1]["reward/rm_a"] + history[-1]["reward/rm_b"]) / 2
    )
    # a resumed run compares every reward model, not only the first
    other: Any = {"type": "model", "path": reward_model(tmp_path / "other" / "rm_b", 3)}
    origins = [trainer([components[0], second]).state.origin["reward"] for second in (components[1], other)]
    assert origins[0] == first.state.origin["reward"] != origins[1]
