"""The critic that PPO trained on the disk: its values are those of the training, whoever opens it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from ppo_rlhf.checkpoints.exports import exported_critic
from ppo_rlhf.checkpoints.model_card import CRITIC_TITLE, may_write_card, render_critic_card
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.critic import BIAS, WEIGHT
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel, with_mean
from ppo_rlhf.pipelines.ppo import nodes
from ppo_rlhf.ppo.run_setup import build_critic, load_stored_critic, policy_to_train
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.ppo_runs import Run, build_model, tensors_equal, weights_of
from tests.tiny_models import save, tiny_model

IDS = torch.tensor([[3, 9, 14, 6, 5, 7], [5, 7, 4, 12, 20, 3]])
LORA = {"use_peft": True, "lora_r": 2, "dtype": "float64"}  # in float32 merging rounds by 1e-6
SHARED = {"value_model": "shared"}
KINDS: dict[str, dict[str, Any]] = {
    "own backbone": {},
    "own backbone, GPT-2": {"kind": "gpt2"},
    "LoRA": LORA,
    "shared": SHARED,
    "shared, LoRA": {**SHARED, **LORA},
    "reward_init": {"value_model": "reward_init"},
    "reward_init, LoRA": {"value_model": "reward_init", **LORA},
}


def trained(make_run: Any, kind: str = "llama", **settings: Any) -> Run:
    """A run after an iteration that moved its critic, in float32 as most runs unless the settings say otherwise."""
    settings = {"dtype": "float32", "learning_rate": 1e-2, "lam": 0.9, **settings}
    dtype = getattr(torch, settings["dtype"])
    reward_model = CausalLMRewardModel.from_causal_lm(build_model(kind, seed=2, dtype=dtype))
    run: Run = make_run(kind, reward_model=reward_model, **settings)
    before = values_of(run)
    run.iteration()
    with torch.no_grad():
        run.state.learner.critic.value_head.bias.add_(0.5)  # so that a head without one would not pass
    assert float((values_of(run) - before).abs().max()) > 0.4
    return run


@torch.no_grad()
def values_of(run: Run) -> torch.Tensor:
    positions = torch.arange(IDS.shape[1]).expand(IDS.shape)
    return run.state.learner.critic(IDS, torch.ones_like(IDS), positions)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_and_trls_names_give_the_values_of_the_training(make_run: Any, tmp_path: Path, kind: str):
    run = trained(make_run, **KINDS[kind])
    expected = values_of(run)
    exported_critic(run.state.learner, run.state.sampler.tokenizer).save(tmp_path / "critic")
    assert torch.equal(values_of(run), expected), "the export changed the critic that trains"
    model, report = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "critic", dtype="auto", output_loading_info=True
    )
    assert model.dtype == expected.dtype == getattr(torch, run.config.dtype)
    assert (model.config.num_labels, report["missing_keys"]) == (1, set())
    with torch.no_grad():
        assert_close(model(IDS).logits[..., 0], expected, rtol=0.0, atol=1e-6)
        # as TRL's AutoModelForCausalLMWithValueHead: the language model's last states, and the head beside them
        language_model = AutoModelForCausalLM.from_pretrained(tmp_path / "critic", dtype="auto")
        states = language_model(IDS, output_hidden_states=True)
        weights = load_file(tmp_path / "critic" / "model.safetensors")
        found = torch.nn.functional.linear(states.hidden_states[-1], weights[WEIGHT], weights[BIAS])[..., 0]
    assert_close(found, expected, rtol=0.0, atol=1e-6)
    assert not any("lora" in name for name in weights)


@pytest.mark.parametrize("start", [{}, LORA], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("kind", ["own backbone, GPT-2", "shared, LoRA"])
def test_the_next_run_starts_from_its_values(make_run: Any, tmp_path: Path, kind: str, start: dict[str, Any]):
    run = trained(make_run, **KINDS[kind])
    exported_critic(run.state.learner, run.state.sampler.tokenizer).save(tmp_path / "critic")
    handle = PretrainedHandle(str(tmp_path / "critic"))
    config = PPOConfig(value_model="pretrained", device="cpu", **{"dtype": run.config.dtype, **start})
    stored, dtype = load_stored_critic(handle, config), getattr(torch, config.dtype)
    policy = policy_to_train(build_model(KINDS[kind].get("kind", "llama"), dtype=dtype), config)
    critic = build_critic(config, policy, None, stored_critic=stored)
    with torch.no_grad():
        found = critic(IDS, torch.ones_like(IDS), torch.arange(6).expand(IDS.shape))
    assert_close(found, values_of(run).to(found.dtype), rtol=0.0, atol=1e-6)
    assert all(p.requires_grad for p in critic.value_head.parameters())


def test_what_the_reward_model_says_of_itself_is_not_said_of_a_critic_that_started_from_it(make_run: Any):
    classifier = CausalLMRewardModel.from_causal_lm(build_model()).to_classifier(0, 2)
    classifier.config.held_out_accuracy, classifier.config.held_out_interval = 0.75, [0.7, 0.8]
    state = make_run(reward_model=with_mean(classifier), value_model="reward_init").state
    config = exported_critic(state.learner, state.sampler.tokenizer).model.config
    told = {"score_mean", "held_out_accuracy", "held_out_interval", "problem_type"}
    assert told <= classifier.config.to_dict().keys()
    assert not told & config.to_dict().keys()


def test_an_architecture_without_token_classifier_is_stored_in_our_form_which_is_said(
    make_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = trained(make_run, "bitnet")
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        exported = exported_critic(run.state.learner, run.state.sampler.tokenizer)
    [line] = [message for message in caplog.messages if "critic" in message]
    assert line.endswith("importing ppo_rlhf: transformers has no token classifier of the kind bitnet.")
    exported.save(tmp_path / "critic")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    with torch.no_grad():
        found = model.score(model.backbone(IDS).last_hidden_state)[..., 0]
        assert_close(found, values_of(run), rtol=0.0, atol=1e-6)
    start = PretrainedHandle(str(tmp_path / "critic")).critic()
    assert torch.equal(start.score.weight, run.state.learner.critic.value_head.weight)


def test_a_stored_critic_is_no_policy_and_no_reward_model(make_run: Any, tmp_path: Path):
    exported_critic(trained(make_run).state.learner, trained(make_run).state.sampler.tokenizer).save(
        tmp_path / "critic"
    )
    handle = PretrainedHandle(str(tmp_path / "critic"))
    handle.check_critic()
    with pytest.raises(ModelError, match="a token classifier, as critics are stored, and cannot generate"):
        handle.causal_lm()
    with pytest.raises(ModelError, match=r"a reward model is a sequence classifier .* this is a LlamaForTokenClass"):
        handle.reward_model()


def test_a_token_classifier_with_two_labels_or_a_policy_is_no_critic(tmp_path: Path):
    model = build_model()
    config = model.config
    config.num_labels = 2
    two = save(tmp_path / "two", AutoModelForTokenClassification.from_config(config))
    for place, why in ((two, "this model has 2"), (save(tmp_path / "policy", model), "this is a LlamaForCausalLM")):
        with pytest.raises(ModelError, match=rf"a critic is a token or sequence classifier with num_labels=1, {why}"):
            PretrainedHandle(place).critic()


def test_the_pipeline_exports_it_only_if_it_is_asked_to(make_run: Any, tmp_path: Path):
    for is_asked in (False, True):
        run = trained(make_run, export_critic=is_asked)
        dataset = PretrainedModelDataset(str(tmp_path / "ppo_critic"))
        reward = RewardConfig([RewardComponentConfig(type="model", weight=2.0)])
        found = nodes.export_critic(run.state, PretrainedHandle("models/reward"), reward, EvaluationConfig())
        dataset.save(found)
        assert dataset.exists() == (tmp_path / "ppo_critic").exists() == is_asked
    card = dataset.load().card()
    assert "- Reward: model `models/reward`, weight 2" in card


def test_a_script_saves_it_beside_the_policy_only_if_it_is_asked_to(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    policy = save(tmp_path / "sft", tiny_model())
    settings = {"total_episodes": 4, "per_device_train_batch_size": 4, "response_length": 8, "device": "cpu"}
    trainer = PPOTrainer(PPOConfig(**settings, export_critic=True), policy)
    trainer.save_pretrained(tmp_path / "saved")
    again = PPOTrainer(PPOConfig(**settings), policy, value_model=tmp_path / "saved" / "critic")
    assert tensors_equal(weights_of(again.state.learner.critic), weights_of(trainer.state.learner.critic))
    assert CRITIC_TITLE in (tmp_path / "saved" / "critic" / "README.md").read_text()
    again.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other" / "critic").exists()
    line = f"{tmp_path}/saved/critic has the critic of an earlier policy; the critic of this policy is not saved."
    assert line not in caplog.messages
    again.save_pretrained(tmp_path / "saved")
    assert line in caplog.messages


@pytest.mark.parametrize("kind", ["llama", "bitnet"])
def test_the_cards_example_prints_the_values(make_run: Any, tmp_path: Path, kind: str):
    run = trained(make_run, kind)
    critic = exported_critic(run.state.learner, run.state.sampler.tokenizer)
    card = render_critic_card(
        run.state.learner,
        run.state.progress,
        ["type function `mine:score`"],
        critic.model,
        prompts="me/data",
        run_id="run7",
    )
    replace(critic, card=card).save(tmp_path / "critic")
    for said in ("12 responses in 1 iterations", "mine:score", "run7", "- me/data", "value-model", "`me/data`"):
        assert said in card
    assert ("AutoModelForCausalLMWithValueHead" in card) == (kind == "llama")
    assert str(tmp_path) not in card + (tmp_path / "critic" / "config.json").read_text()
    assert may_write_card(tmp_path / "critic")
    example = card.partition("```python\n")[2].partition("```")[0]
    example = example.replace("path or hub id of this model", str(tmp_path / "critic"))
    example = example.replace("A prompt and the beginning of its response", "a g l d c e")
    printed: list[torch.Tensor] = []
    exec(example, names := {"print": printed.append})
    assert torch.equal(names["ids"], IDS[:1])
    assert_close(printed[0].detach(), values_of(run)[0], rtol=0.0, atol=1e-6)
