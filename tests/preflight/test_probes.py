"""The graded probes: sound settings pass, and each broken part fails the probe that is meant to find it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, FalconConfig, GPT2Config, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.setting_roles import names_of
from ppo_rlhf.core import rewards as core_rewards
from ppo_rlhf.ppo import loop, losses
from ppo_rlhf.ppo.experience import estimate_advantages, shape_rewards
from ppo_rlhf.preflight import probes

ALL = ("one token", "prompt", "delayed reward", "constant reward", "KL penalty")
ONE_TOKEN, PROMPT, DELAYED, CONSTANT, PENALTY = probes.PROBES


def outcome(probe: probes.Probe, model: PreTrainedModel | None = None, **settings) -> probes.Outcome:
    return probes.train_probe(probe, probes.probe_config(PPOConfig(**settings)), model or probes.tiny_model(None)[0])


def broken(model: PreTrainedModel | None = None, **settings) -> dict[str, str]:
    """Run all probes and return the complaints of those that failed, by the probe's name."""
    config = PPOConfig(**settings)
    found = list(probes.run_probes(config, model or probes.tiny_model(None)[0]))
    assert tuple(each.name for each in found) == (ALL if probes.brings_back(config) else ALL[:-1])
    return {each.name: each.broken for each in found if each.broken}


def rewards_patched(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change the shaped rewards `[B, T]`, given them and the responses' tokens, before advantages are estimated."""

    def patched(rollouts, scores, shaping):
        return change(shape_rewards(rollouts, scores, shaping), rollouts.responses.response_ids)

    monkeypatch.setattr(loop, "shape_rewards", patched)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer iterations: enough where nothing is broken, as the next test shows."""
    monkeypatch.setattr(probes, "ITERATIONS", 8)
    monkeypatch.setattr(probes, "CONSTANT_ITERATIONS", 6)


def test_a_group_larger_than_the_probes_batch_is_its_batch():
    config = probes.probe_config(PPOConfig(responses_per_prompt=512, per_device_train_batch_size=512))
    assert config.batch_size == 512


def test_few_iterations_are_enough_where_nothing_is_broken(short: None):
    assert broken() == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_default_settings_pass_every_probe(seed: int):
    assert broken(seed=seed) == {}


def test_a_policy_loss_of_the_wrong_sign_is_found_by_each_probe_in_which_a_policy_learns(monkeypatch, short: None):
    right = losses.clipped_policy_loss

    def wrong(logprobs, old_logprobs, advantages, mask, **options):
        return right(logprobs, old_logprobs, -advantages, mask, **options)

    monkeypatch.setattr(losses, "clipped_policy_loss", wrong)
    found = broken()
    assert set(found) == {"one token", "prompt", "delayed reward", "KL penalty"}
    assert "the policy does not follow a reward" in found["one token"]
    assert "the critic" not in found["delayed reward"]  # which has no paid response to be judged by


def test_a_reward_one_token_too_early_is_found_by_the_value_of_the_last_token(monkeypatch, short: None):
    def early(rewards: Tensor, tokens: Tensor) -> Tensor:
        return rewards if rewards.shape[1] == 1 else torch.cat([rewards[:, 1:], torch.zeros_like(rewards[:, :1])], 1)

    rewards_patched(monkeypatch, early)
    found = outcome(DELAYED)
    assert "the critic does not see the reward of the last token" in found.broken
    assert "the policy" not in found.broken  # which solves the problem all the same


@pytest.mark.slow
def test_a_reward_one_token_too_late_is_lost_and_no_probe_learns(monkeypatch, short: None):
    rewards_patched(monkeypatch, lambda rewards, _: torch.cat([torch.zeros_like(rewards[:, :1]), rewards[:, :-1]], 1))
    assert all(outcome(probe).broken for probe in probes.PROBES)


@pytest.mark.slow
def test_a_critic_whose_targets_are_zero_is_found_where_values_matter(monkeypatch, short: None):
    def zeroed(*args):
        experience = estimate_advantages(*args)
        return dataclasses.replace(experience, returns=torch.zeros_like(experience.returns))

    monkeypatch.setattr(loop, "estimate_advantages", zeroed)
    found = broken()
    assert set(found) == {"delayed reward", "constant reward"}
    assert "the critic does not carry a reward to the first token" in found["delayed reward"]
    assert "the policy" not in found["delayed reward"]
    assert "the critic does not learn what is paid" in found["constant reward"]


def test_where_gamma_is_0_no_reward_reaches_an_earlier_token(short: None):
    found = outcome(DELAYED, gamma=0.0)
    assert "the policy does not learn from a reward two tokens later" in found.broken
    assert outcome(ONE_TOKEN, gamma=0.0).broken == ""


def test_a_policy_that_cannot_see_the_prompt_fails_the_probe_of_the_prompt(short: None):
    model, _ = probes.tiny_model(None)
    model.get_input_embeddings().register_forward_hook(lambda _module, _args, output: torch.ones_like(output))
    assert outcome(ONE_TOKEN, model).broken == ""
    found = outcome(PROMPT, model)
    assert "the policy does not learn to read the prompt" in found.broken
    assert int(found.measured.split("%")[0]) < 40  # a quarter is what one token for all prompts is paid


def test_a_bonus_for_some_token_is_found_by_the_constant_reward(monkeypatch, short: None):
    rewards_patched(monkeypatch, lambda rewards, tokens: rewards + 0.1 * (tokens == 5))
    found = outcome(CONSTANT)
    assert found.broken.startswith("the policy moves without a reason")


@pytest.mark.slow
def test_a_kl_penalty_of_the_wrong_sign_is_found_by_no_probe_but_its_own(monkeypatch, short: None):
    right = core_rewards.shape_rewards

    def wrong(scores, penalty, mask, kl_coef, **options):
        return right(scores, -penalty, mask, kl_coef, **options)

    monkeypatch.setattr(core_rewards, "shape_rewards", wrong)
    found = broken()
    assert set(found) == {"KL penalty"}
    assert found["KL penalty"].startswith("the KL penalty does not bring the policy back")


@pytest.mark.parametrize(
    ("settings", "is_run"),
    [
        ({}, True),
        ({"kl_coef": 0.0}, False),
        ({"kl_estimator": "k2"}, False),
        ({"kl_estimator": "k3", "kl_in": "loss"}, True),
    ],
)
def test_the_penalty_is_probed_where_it_leads_to_the_reference_and_else_named(settings: dict, is_run: bool):
    config = PPOConfig(**settings)
    assert probes.brings_back(config) is is_run
    assert any("not probed: ppo.kl_coef" in line for line in probes.describe(config)) is not is_run


def test_training_that_stops_fails_the_probe_with_the_reason(monkeypatch):
    rewards_patched(monkeypatch, lambda rewards, _: rewards * torch.nan)
    found = broken()
    assert set(found) == set(ALL)
    assert all("training stopped" in line for line in found.values())


def test_the_probes_leave_the_model_as_it_is():
    model, _ = probes.tiny_model(GPT2Config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome(ONE_TOKEN, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("config", "kind", "says"),
    [
        (GPT2Config(), "gpt2", ""),
        (FalconConfig(), "falcon", ""),
        (Qwen3MoeConfig(), "qwen3_moe", ""),
        (BertConfig(), "llama", "because BertConfig "),
        (None, "llama", "there is no model yet"),
    ],
    ids=["gpt2", "falcon", "moe", "bert", "none"],
)
def test_the_tiny_model_is_of_the_architecture_or_says_why_not(config: PretrainedConfig | None, kind: str, says: str):
    model, words = probes.tiny_model(config)
    assert model.config.model_type == kind
    assert says in words
    assert ("because" in words) == bool(says)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    assert model.config.num_hidden_layers == 2


def test_the_probes_set_a_value_of_their_own_for_exactly_the_settings_declared_so():
    replaced = set(names_of(PPOConfig, lambda roles: roles.probe == "replaced"))
    assert replaced == {*probes.SIZES, "value_learning_rate", "total_episodes", "response_length", "positive_threshold"}


def test_the_settings_taken_are_trained_with_and_the_others_are_named():
    config = PPOConfig(
        gamma=0.9, kl_coef=0.3, kl_in="loss", kl_estimator="k2", reward_clip=0.5, critic_warmup_iterations=2
    )
    used = probes.probe_config(config)
    assert (used.gamma, used.kl_in, used.kl_estimator, used.reward_clip) == (0.9, "loss", "k2", 0.5)
    assert used.kl_coef == pytest.approx(0.05 * 0.5)
    sizes, replaced, missing = probes.describe(config)
    assert "batch 256, 4 epochs" in sizes
    assert replaced == "replaced for the probes: ppo.kl_coef=0.025"
    assert missing == "not probed: ppo.critic_warmup_iterations"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1.0),
        ({"reward_scale": 3.0}, 3.0),
        ({"reward_scale": 3.0, "reward_clip": 2.0}, 2.0),
        ({"reward_normalisation": "batch"}, 2.0),
    ],
)
def test_what_a_score_of_1_pays_is_known(settings: dict, expected: float):
    assert probes.unit(PPOConfig(**settings)) == expected


SOUND = [
    {"kl_coef": 0.0},
    {"kl_coef": 0.2},
    {"kl_estimator": "k2"},
    {"kl_estimator": "k3"},
    {"kl_estimator": "full"},
    *({"kl_in": "loss", "kl_estimator": name} for name in ("k2", "k3", "k3+", "full")),
    {"lam": 0.3},
    {"lam": 1.0, "gamma": 0.95},
    {"lam": 0.9, "lam_critic": 1.0},
    {"lam_alpha": 0.05},
    {"gamma": 0.5},
    {"whiten_advantages": False},
    {"whiten_rewards": True},
    {"reward_normalisation": "running"},
    {"reward_normalisation": "batch"},
    {"reward_scale": 10.0},
    {"reward_scale": 0.01},
    {"reward_clip": 0.5},
    {"entropy_coef": 0.02},
    {"positive_coef": 0.1, "positive_threshold": 3.0},
    {"cliprange": 0.1, "cliprange_value": 0.1},
    {"cliprange_high": 0.28, "dual_clip": 3.0},
    *({"loss_aggregation": f"seq_mean_token_{name}"} for name in ("sum", "mean")),
    {"loss_aggregation": "token_sum_fixed_length"},
    {"importance_cap": 2.0},
    {"importance_low": 0.7, "importance_high": 6.0},
    {"value_freeze": "attention"},
    {"cliprange_value": None},
    {"value_model": "shared"},
    {"value_model": "shared", "reward_scale": 10.0},
    {"value_model": "shared", "kl_coef": 0.0, "vf_coef": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.2},
    {"responses_per_prompt": 8},
    {"weight_decay": 0.1},
    {"max_grad_norm": 0.1, "adam_epsilon": 1e-5},
    {"adam_beta1": 0.8, "adam_beta2": 0.95},
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("settings", SOUND, ids=lambda settings: ", ".join(f"{k}={v}" for k, v in settings.items()))
def test_sound_settings_pass_every_probe(settings: dict, seed: int):
    assert broken(seed=seed, **settings) == {}


@pytest.mark.slow
@pytest.mark.parametrize("config", [GPT2Config(), FalconConfig(), Qwen3MoeConfig()], ids=["gpt2", "falcon", "moe"])
def test_other_architectures_pass_every_probe(config: PretrainedConfig):
    assert broken(probes.tiny_model(config)[0]) == {}
