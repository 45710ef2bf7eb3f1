import logging

import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.pipelines.ppo.nodes import configure_ppo, initialise_training_state, prepare_prompts
from ppo_rlhf.rewards.scorers import ModelScorer
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.tiny_models import DATED_TEMPLATE, save, set_today, tiny_model, word_tokenizer

PROMPTS = table_of({"prompt": [f"{a} {b}" for a in "abc" for b in "de"]})


@pytest.mark.parametrize(("maximum", "said"), [(4, True), (6, False), (7, False)])
def test_an_evaluation_table_of_which_not_all_is_used_is_said_to_be_cut(
    tmp_path, caplog, monkeypatch, maximum: int, said: bool
):
    monkeypatch.setattr("ppo_rlhf.runtime.log_lines.said", set())
    handle = PretrainedHandle(save(tmp_path / "policy", tiny_model()))
    settings = PromptsConfig(max_held_out=maximum, train_on_evaluation_prompts=True)
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        prepared = prepare_prompts(PROMPTS, PROMPTS, handle, PPOConfig(response_length=4, device="cpu"), settings)
    assert prepared["evaluation_prompts"]["prompt"].tolist() == PROMPTS["prompt"][:maximum]
    assert prepared["training_prompts"]["prompt"].tolist() == prepared["prompt_dataset"].texts[:]
    line = f"Of 6 evaluation prompts, only the first {maximum} are used (prompts.max_held_out)."
    assert (line in caplog.messages) is said


@pytest.mark.parametrize(("is_meant", "trained"), [(False, "cdef"), (True, "abcdef")])
def test_training_prompts_that_are_evaluated_are_counted(tmp_path, caplog, is_meant: bool, trained: str):
    handle, settings = (
        PretrainedHandle(save(tmp_path / "policy", tiny_model())),
        PPOConfig(response_length=4, device="cpu"),
    )
    tables = (table_of({"prompt": list(text)}) for text in ("abcdef", "bax"))
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        prepared = prepare_prompts(*tables, handle, settings, PromptsConfig(train_on_evaluation_prompts=is_meant))
    assert prepared["prompt_dataset"].texts == list(trained)
    (line,) = [line for line in caplog.messages if "train_on_evaluation_prompts" in line]
    assert line.startswith("2 of 6 prompts")
    assert ("left out" in line) is not is_meant


def test_nothing_is_said_of_prompts_that_are_held_out_here(tmp_path, caplog):
    handle = PretrainedHandle(save(tmp_path / "policy", tiny_model()))
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        prepare_prompts(PROMPTS, None, handle, PPOConfig(response_length=4, device="cpu"), PromptsConfig())
    assert [line for line in caplog.messages if "max_held_out" in line] == []


@pytest.mark.parametrize(("stop_token", "fits"), [("eos", True), ("period", False)], ids=["eos", "an end on top"])
def test_prompts_whose_responses_the_reward_model_cannot_read_are_refused_before_training(stop_token, fits):
    tokenizer, reward_model = word_tokenizer(), tiny_model("gpt2", reward=True, num_labels=1, n_positions=8)
    scorer = RewardScorer([("m", 1.0, ModelScorer(reward_model, tokenizer, tokenizer))], reward_model)
    settings = PPOConfig(response_length=5, device="cpu", value_model="separate", stop_token=stop_token)
    prompts = PromptDataset([[4], [4, 5, 6]], ["a", "a b c"], {})
    arguments = (TrainedModel(tiny_model(), tokenizer), tiny_model(), scorer, prompts, settings, None, None)
    if fits:
        assert initialise_training_state(*arguments).progress.iteration == 0
    else:
        with pytest.raises(ModelError, match=r"9, .*reward model.* 8"):
            initialise_training_state(*arguments)


def test_a_run_notes_the_date_that_its_template_prints_into_chats(monkeypatch):
    set_today(monkeypatch, 3)
    tokenizer, settings = word_tokenizer(chat_template=DATED_TEMPLATE), PPOConfig(response_length=5, device="cpu")
    scorer, chat = RewardScorer([("m", 1.0, lambda _: torch.zeros(2))]), '[{"role": "user", "content": "a"}]'
    for chats, origin in (([chat, None], {"printed_date": "03"}), ([], {}), ([None, None], {})):
        prompts = PromptDataset([[4], [5]], ["a", "b"], {}, chats)
        models = TrainedModel(tiny_model(), tokenizer), tiny_model()
        assert initialise_training_state(*models, scorer, prompts, settings, None, None).origin == origin


def test_the_start_says_how_many_processes_share_the_batch(caplog, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.INFO):
        configure_ppo(PPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_mini_batches=1))
    assert caplog.messages[-1] == "Processes: 2. Batch: 16 responses per iteration, 8 in each process."
