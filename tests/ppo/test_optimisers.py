"""The optimisers' groups and settings, and the learning rates over the iterations, each schedule in closed form."""

import math
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from packaging.requirements import Requirement
from torch.optim import AdamW

from ppo_rlhf.config import LearningRateSchedule, PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models import quantisation
from ppo_rlhf.ppo.optimisers import (
    build_optimizer,
    check_trains,
    learning_rate_factor,
    moment_bytes,
    set_learning_rates,
)
from ppo_rlhf.ppo.run_setup import check_libraries
from tests.ppo_runs import Run


def factors(iterations: int, **settings) -> list[float]:
    config = PPOConfig(per_device_train_batch_size=1, total_episodes=iterations, **settings)
    return [learning_rate_factor(config, iteration) for iteration in range(1, iterations + 1)]


def test_schedules_without_a_warm_up_have_their_closed_forms():
    """A linear schedule starts at the peak, and its last step is not zero."""
    cosine = [0.5 * (1.0 + math.cos(math.pi * step / 7)) for step in range(7)]
    assert factors(4) == pytest.approx([1.0, 0.75, 0.5, 0.25], rel=0.0, abs=1e-12)
    assert factors(7, lr_scheduler_type="cosine") == pytest.approx(cosine, rel=0.0, abs=1e-12)
    assert factors(7, lr_scheduler_type="cosine_with_restarts") == pytest.approx(cosine, rel=0.0, abs=1e-12)
    assert factors(5, lr_scheduler_type="constant") == [1.0] * 5


def test_a_warm_up_rises_to_the_peak_in_equal_steps_and_the_decay_follows():
    linear = factors(10, warmup_ratio=0.4)
    assert linear == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], rel=0.0, abs=1e-12)
    cosine = factors(10, warmup_ratio=0.4, lr_scheduler_type="cosine")
    decay = [0.5 * (1.0 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert cosine == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, *decay], rel=0.0, abs=1e-12)
    constant = factors(10, warmup_ratio=0.4, lr_scheduler_type="constant")
    assert constant == pytest.approx([1 / 4, 2 / 4, 3 / 4, *[1.0] * 7], rel=0.0, abs=1e-12)


@pytest.mark.parametrize(("ratio", "warmup"), [(0.0, 0), (0.01, 1), (0.1, 2), (0.5, 7), (0.99, 13)])
def test_a_warm_up_is_its_share_of_the_iterations_rounded_up(ratio, warmup):
    actual = factors(13, warmup_ratio=ratio, lr_scheduler_type="constant")
    assert actual == pytest.approx([min(1.0, i / max(1, warmup)) for i in range(1, 14)], rel=0.0, abs=1e-12)


def rates_of(run: Run, iteration: int) -> tuple[float, float]:
    state = run.state
    set_learning_rates(state.learner.policy_optimizer, state.learner.critic_optimizer, run.config, iteration)
    policy_rate, critic_rate = (
        each.param_groups[0]["lr"] for each in (state.learner.policy_optimizer, state.learner.critic_optimizer)
    )
    return policy_rate, critic_rate


@pytest.mark.parametrize("name", get_args(LearningRateSchedule))
def test_no_rate_of_any_schedule_is_zero_or_above_the_peak(name):
    for ratio in (0.0, 0.01, 0.5, 0.99):
        for iterations in (1, 2, 7, 40):
            actual = factors(iterations, warmup_ratio=ratio, lr_scheduler_type=name)
            assert min(actual) > 0.0
            assert max(actual) == pytest.approx(1.0, rel=0.0, abs=1e-12)


def test_both_optimisers_follow_one_schedule_with_their_own_peaks_or_the_policys(make_run):
    run = make_run(learning_rate=1e-3, value_learning_rate=4e-3, total_episodes=36)  # 3 iterations
    for iteration, factor in [(1, 1.0), (2, 2 / 3), (3, 1 / 3)]:
        rates = rates_of(run, iteration)
        assert rates == pytest.approx((1e-3 * factor, 4e-3 * factor), rel=1e-12)
        assert run.state.learner.policy_optimizer.param_groups[0]["lr"] == rates[0]
        assert run.state.learner.critic_optimizer.param_groups[0]["lr"] == rates[1]
    assert rates_of(make_run(learning_rate=1e-3, value_learning_rate=None), 1) == (1e-3, 1e-3)


RESTING = {"critic_warmup_iterations": 2, "total_episodes": 72, "warmup_ratio": 0.5}  # 6 iterations, 4 of the policy
POLICYS, CRITICS = [1 / 2, 2 / 2, 1.0, 1 / 2], [1 / 3, 2 / 3, 3 / 3, 1.0, 2 / 3, 1 / 3]  # warm-ups of 2 and of 3


def test_the_policys_schedule_begins_when_the_policy_does_and_the_critics_with_the_run(make_run):
    run = make_run(learning_rate=1e-3, value_learning_rate=4e-3, **RESTING)
    actual = [rates_of(run, iteration) for iteration in range(1, 7)]
    assert [rate for rate, _ in actual] == pytest.approx([0.0, 0.0, *(1e-3 * f for f in POLICYS)], rel=1e-12)
    assert [rate for _, rate in actual] == pytest.approx([4e-3 * f for f in CRITICS], rel=1e-12)


def test_a_shared_trunk_has_the_critics_schedule_while_only_the_head_learns_and_the_policys_after(make_run):
    run = make_run(learning_rate=1e-3, value_model="shared", **RESTING)
    expected = [1e-3 * f for f in (*CRITICS[:2], *POLICYS)]
    for iteration, rate in enumerate(expected, start=1):
        assert rates_of(run, iteration) == pytest.approx((rate, rate), rel=1e-12)
        assert run.state.learner.policy_optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-12)


def test_a_rate_of_its_own_gives_the_head_of_a_shared_trunk_the_critics_schedule(make_run):
    run = make_run(learning_rate=1e-3, value_learning_rate=4e-3, value_model="shared", **RESTING)
    actual = [rates_of(run, iteration) for iteration in range(1, 7)]
    assert [rate for rate, _ in actual] == pytest.approx([0.0, 0.0, *(1e-3 * f for f in POLICYS)], rel=1e-12)
    assert [rate for _, rate in actual] == pytest.approx([4e-3 * f for f in CRITICS], rel=1e-12)


# --- AdamW -----------------------------------------------------------------------------------------------------------


def test_each_optimiser_is_adamw_without_decay_on_exactly_its_own_parameters(make_run):
    state = make_run("gpt2").state
    for optimizer, module in (
        (state.learner.policy_optimizer, state.learner.policy),
        (state.learner.critic_optimizer, state.learner.critic),
    ):
        (group,) = optimizer.param_groups
        assert isinstance(optimizer, AdamW)
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.0)
        assert {id(p) for p in group["params"]} == {id(p) for p in module.parameters()}
        assert len(group["params"]) == len(set(map(id, group["params"])))  # tied embeddings are stepped once


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_norms_and_biases_are_in_the_group_without_decay(make_run, kind):
    state = make_run(kind, weight_decay=0.1).state
    names = {
        id(p): name for module in (state.learner.policy, state.learner.critic) for name, p in module.named_parameters()
    }
    for optimizer in (state.learner.policy_optimizer, state.learner.critic_optimizer):
        decays, stays = optimizer.param_groups
        assert (decays["weight_decay"], stays["weight_decay"]) == (0.1, 0.0)
        vectors = {names[id(p)] for p in stays["params"]}
        assert all(any(word in name for word in ("bias", "norm", "ln_")) for name in vectors)
        assert not any(word in names[id(p)] for p in decays["params"] for word in ("bias", "norm", "ln_"))


def test_a_model_must_have_a_weight_that_trains():
    layer = torch.nn.Linear(1, 1)
    layer.weight.requires_grad_(False)
    check_trains(layer, "policy")
    layer.bias.requires_grad_(False)
    with pytest.raises(ModelError, match=r"policy.*requires_grad"):
        check_trains(layer, "policy")


def test_adams_betas_and_epsilon_are_the_settings():
    config = PPOConfig(adam_beta1=0.5, adam_beta2=0.75, adam_epsilon=0.25)
    (group,) = build_optimizer(torch.nn.Linear(1, 1), 0.1, config).param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.5, 0.75), 0.25)


def test_8_bit_adamw_is_bitsandbytes_with_the_same_settings(monkeypatch):
    built = {}

    def build(groups, **settings):
        built.update(settings, decays=[group["weight_decay"] for group in groups])
        return torch.optim.SGD(groups)

    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=build))
    config = PPOConfig(optim="adamw_8bit", adam_beta1=0.5, adam_beta2=0.75, adam_epsilon=0.25, weight_decay=0.1)
    build_optimizer(torch.nn.Linear(2, 2), 0.3, config)
    assert built == {"lr": 0.3, "betas": (0.5, 0.75), "eps": 0.25, "decays": [0.1, 0.0]}


def test_8_bit_adamw_without_bitsandbytes_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(quantisation, "NEEDED", Requirement("no-such-package>=1"))
    with pytest.raises(ConfigError, match=r"ppo\.optim=adamw_8bit") as refused:
        check_libraries(PPOConfig(optim="adamw_8bit"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("optim", "numbers", "size"),
    [("adamw_torch_fused", 8192, 8192 * 8), ("adamw_8bit", 8192, 2 * (8192 + 32 * 4)), ("adamw_8bit", 4095, 4095 * 8)],
)
def test_moments_take_4_bytes_each_or_1_and_a_scale_for_256_of_them(optim, numbers, size):
    assert moment_bytes(torch.empty(numbers, device="meta"), PPOConfig(optim=optim)) == size
