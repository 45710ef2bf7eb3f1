"""Each metric of an iteration from hand-made inputs, its formula worked out with plain numbers."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.kl import FixedKLController
from ppo_rlhf.passes.halvings import of_rollouts, of_updates
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.losses import StepSums, add_over_processes, summed_names
from ppo_rlhf.ppo.metrics import iteration_metrics, peak_memory_bytes
from ppo_rlhf.ppo.progress import Clock
from ppo_rlhf.rewards.scoring import Scores

NAN = torch.nan
STATUS = Path("/proc/self/status")
# The fixed names, without what other stages log (sft, reward_model, eval).
KEYS = {
    *("objective/kl", "objective/kl_per_token", "objective/kl_estimate", "objective/entropy", "objective/kl_coef"),
    *("objective/non_score_reward", "objective/rlhf_reward", "objective/scores", "objective/scores_std"),
    *("objective/scores_p05", "objective/scores_p50", "objective/scores_p95"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/grad_norm", "policy/rollout_logprob_gap"),
    *("loss/policy_avg", "loss/value_avg", "loss/total", "val/clipfrac_avg", "val/ratio", "val/ratio_var"),
    *("val/num_eos_tokens", "val/explained_variance", "val/correlation", "value/grad_norm"),
    *("response/length", "response/truncated_fraction", "lr/policy", "lr/value", "episode"),
    *("loss/kl_avg", "loss/entropy_avg", "loss/positive_avg"),
    *("optimiser/steps", "optimiser/skipped_steps", "optimiser/early_stops", "optimiser/loss_scale"),
    *("time/rollout_s", "time/score_s", "time/optimise_s", "time/iteration_s"),
    *("throughput/episodes_per_s", "throughput/generated_tokens_per_s", "memory/peak_bytes"),
}

LENGTHS = [1, 3, 2, 3]
TOKENS = sum(LENGTHS)


def table(*rows: list[float]) -> torch.Tensor:
    """[4, 3] in float64; what a row leaves out is padding and NaN."""
    return torch.tensor([row + [NAN] * (3 - len(row)) for row in rows], dtype=torch.float64)


OLD = table([-1.0], [-2.0, -0.5, -0.25], [-3.0, -1.0], [-0.5, -0.5, -0.5])
SAMPLER = table([-1.5], [-2.0, -0.25, -0.25], [-3.0, -1.0], [-0.5, -0.5, -1.5])
ENTROPY = table([0.5], [1.0, 2.0, 3.0], [0.25, 0.25], [1.0, 1.0, 1.0])
KL = [[0.5], [1.0, -0.5, 0.25], [0.0, 2.0], [-1.0, 0.0, 0.75]]
PENALTY = [[0.25], [0.5, 0.5, 0.0], [0.0, 1.0], [1.5, 0.0, 0.25]]
REWARDS = [[2.0], [0.0, 0.5, -1.0], [0.0, 3.0], [1.0, 0.0, 0.5]]
VALUES = [[0.5], [1.0, 0.0, -1.0], [2.0, 1.0], [0.0, 0.5, 0.5]]
RETURNS = [[1.0], [1.0, 0.5, -1.0], [1.0, 2.0], [0.0, 1.0, 0.0]]
SCORES = [2.0, -1.0, 3.5, 0.5]


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def zero_padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.nan_to_num(table(*rows))


@pytest.fixture
def experience(make_rollouts):
    values = torch.cat([table(*VALUES), torch.full((4, 1), NAN, dtype=torch.float64)], dim=1)
    tables = {"old_logprobs": OLD, "reference_logprobs": OLD - table(*KL), "sampler_logprobs": SAMPLER}
    rollouts = make_rollouts(LENGTHS, [True, False, True, True], 3, values, entropy=ENTROPY, **tables)
    rollouts = replace(rollouts, full_kl=table(*PENALTY))
    components = {"model": torch.tensor([1.0, 2.0, 3.0, 4.0]), "shape": torch.tensor([0.0, -1.0, 0.0, -1.0])}
    scores = Scores(torch.tensor(SCORES, dtype=torch.float64), components)
    # These tensors have 0 in padding, which sums over a response rely on.
    return Experience(rollouts, scores, *map(zero_padded, (REWARDS, RETURNS, RETURNS)), rollouts.mask, PPOConfig())


def step(norms: tuple[float, float], means: dict[str, float], **terms: float) -> StepSums:
    """Statistics of a step of 5 tokens; a term of the losses that is left out is 0."""
    sums = dict.fromkeys(summed_names(), 0.0) | terms | {name: 5 * mean for name, mean in means.items()}
    return StepSums(tokens=5, sums=sums, policy_grad_norm=norms[0], value_grad_norm=norms[1])


def means(approxkl: float, policy_clipfrac: float, value_clipfrac: float, ratio: float) -> dict[str, float]:
    return locals()


STEPS = [
    step((3.0, 10.0), means(0.01, 0.1, 0.4, 1.0), policy=0.5, value=2.0, kl=0.5, entropy=1.0, positive=4.0),
    step((5.0, 20.0), means(0.03, 0.3, 0.2, 1.2), policy=-0.1, value=1.0, kl=1.0, entropy=2.0),
    step((1.0, 30.0), means(0.02, 0.2, 0.0, 0.8), policy=-0.1, kl=1.5, entropy=6.0, positive=2.0),
]


def state_after(
    episode: int, steps: int, skipped: int, scaler: object = None, **config: object
) -> dict[str, SimpleNamespace]:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
    settings = {**sizes, "vf_coef": 0.25, "kl_estimator": "full", "dtype": "float32", "device": "cpu", **config}
    counters = {"optimiser_steps": steps, "skipped_steps": skipped, "early_stops": 2}
    clock = Clock()
    clock.seconds |= {"sampling": 2.0, "log-probabilities": 3.0, "values": 1.5, "rewards": 5.5, "update": 4.0}
    learner = SimpleNamespace(
        config=PPOConfig(**settings),
        device=torch.device("cpu"),
        halving=of_updates(),
        accelerator=SimpleNamespace(scaler=scaler, num_processes=1),
        policy_optimizer=SimpleNamespace(param_groups=[{"lr": 1e-5}]),
        critic_optimizer=SimpleNamespace(param_groups=[{"lr": 3e-5}]),
        **counters,
    )
    shaping = SimpleNamespace(config=learner.config, kl_controller=FixedKLController(0.1), component_moments={})
    progress = SimpleNamespace(episode=episode - 4, clock=clock)
    sampler = SimpleNamespace(halving=of_rollouts())
    return {"learner": learner, "sampler": sampler, "shaping": shaping, "progress": progress}


@pytest.fixture
def metrics(experience):
    return iteration_metrics(**state_after(96, 11, 1), experience=experience, steps=STEPS)


def test_the_keys_are_the_fixed_ones_and_one_for_each_component_and_every_value_is_a_finite_number(metrics):
    assert set(metrics) == KEYS | {"reward/model", "reward/shape"}
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def close(value: float, tolerance: float = 1e-12) -> object:
    return pytest.approx(value, rel=tolerance, abs=tolerance)


RESIDUALS = [target - value for target, value in zip(flat(RETURNS), flat(VALUES), strict=True)]
EXPECTED = {
    # KL is summed over a response or averaged over tokens
    "objective/kl": sum(flat(KL)) / 4,
    "objective/kl_per_token": sum(flat(KL)) / TOKENS,
    "objective/kl_estimate": sum(flat(PENALTY)) / 4,
    "objective/kl_coef": 0.1,
    # averages over tokens, without padding
    "objective/entropy": (0.5 + 6.0 + 0.5 + 3.0) / TOKENS,
    "policy/rollout_logprob_gap": (0.5 + 0.25 + 1.0) / TOKENS,
    "val/explained_variance": 1.0 - statistics.pvariance(RESIDUALS) / statistics.pvariance(flat(RETURNS)),
    "val/correlation": statistics.correlation(flat(VALUES), flat(RETURNS)),
    # averages over responses
    "objective/non_score_reward": -0.1 * sum(flat(PENALTY)) / 4,
    "objective/rlhf_reward": sum(flat(REWARDS)) / 4,
    "reward/model": 2.5,
    "reward/shape": -0.5,
    "response/length": TOKENS / 4,
    "response/truncated_fraction": 0.25,
    "val/num_eos_tokens": 3.0,
    # scores, sorted: -1, 0.5, 2, 3.5; quantile q is at position 3 q
    "objective/scores": 5.0 / 4,
    "objective/scores_std": statistics.stdev(SCORES),
    "objective/scores_p05": -1.0 + 0.15 * 1.5,
    "objective/scores_p50": 1.25,
    "objective/scores_p95": 2.0 + 0.85 * 1.5,
    # averages over optimiser steps
    "loss/policy_avg": 0.1,
    "loss/value_avg": 1.0,
    "loss/kl_avg": 1.0,
    "loss/entropy_avg": 3.0,
    "loss/positive_avg": 2.0,
    "policy/approxkl_avg": 0.02,
    "policy/clipfrac_avg": 0.2,
    "val/clipfrac_avg": 0.2,
    "val/ratio": 1.0,
    "val/ratio_var": 0.04,  # of 1.0, 1.2, 0.8 with Bessel's correction
    "policy/grad_norm": 3.0,
    "value/grad_norm": 20.0,
    # counters, rates and times are passed on
    **{"lr/policy": 1e-5, "lr/value": 3e-5, "episode": 96.0},
    **{"optimiser/steps": 11.0, "optimiser/skipped_steps": 1.0, "optimiser/early_stops": 2.0},
    **{"time/rollout_s": 5.0, "time/score_s": 7.0, "time/optimise_s": 4.0},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_metric_is_its_formula_worked_out_with_plain_numbers(metrics, name):
    assert metrics[name] == close(EXPECTED[name])


def test_the_total_loss_has_every_term_with_its_coefficient(experience):
    """Policy 0.1, value 1, KL 1 (price 0.1), entropy 3, NLL 2. KL in the reward leaves steps with KL 0."""
    state = state_after(
        96, 11, 1, vf_coef=0.25, entropy_coef=0.02, positive_coef=0.3, positive_threshold=9.0, kl_in="loss"
    )
    metrics = iteration_metrics(**state, experience=experience, steps=STEPS)
    assert metrics["loss/total"] == close(0.1 + 0.25 * 1.0 + 0.1 * 1.0 - 0.02 * 3.0 + 0.3 * 2.0)
    assert metrics["objective/non_score_reward"] == 0.0
    assert metrics["objective/kl_estimate"] == close(sum(flat(PENALTY)) / 4)


def test_the_loss_scale_is_the_scalers_in_float16_and_else_1(experience, metrics):
    state = state_after(96, 11, 1, scaler=SimpleNamespace(get_scale=lambda: 1024.0))
    assert iteration_metrics(**state, experience=experience, steps=STEPS)["optimiser/loss_scale"] == 1024.0
    assert metrics["optimiser/loss_scale"] == 1.0


def test_micro_batches_add_up_to_their_minibatch():
    """A loss comes divided by the minibatch's count; the other statistics as means over the micro-batch's tokens."""
    step = StepSums(tokens=5)
    for tokens, loss, ratio in ((2, 0.3, 1.5), (3, 0.1, 0.5)):
        numbers = {"policy": loss, "value": 2 * loss, "entropy": loss, "positive": 3 * loss}
        numbers |= {"approxkl": ratio, "ratio": ratio, "value_clipfrac": 1.0}
        step.add({name: torch.tensor(number) for name, number in numbers.items()}, tokens)
    (step,) = add_over_processes([step])
    expected = {"policy": 0.4, "value": 0.8, "kl": 0.0, "entropy": 0.4, "positive": 1.2}
    assert {name: step.sums[name] for name in expected} == {name: close(sum_, 1e-6) for name, sum_ in expected.items()}
    assert step.mean("ratio") == step.mean("approxkl") == close(0.9, 1e-6)
    assert step.mean("value_clipfrac") == 1.0


def test_steps_of_only_the_critic_count_in_the_critics_averages_and_in_no_other(experience):
    only_critic = replace(step((0.0, 40.0), means(0.0, 0.0, 0.5, 0.0), value=5.0), with_policy=False)
    given = state_after(96, 11, 1)
    plain, actual = (
        iteration_metrics(**given, experience=experience, steps=steps) for steps in (STEPS, [*STEPS, only_critic])
    )
    changed = {"loss/value_avg": 2.0, "val/clipfrac_avg": (0.4 + 0.2 + 0.5) / 4, "value/grad_norm": 25.0}
    assert {name: actual[name] for name in changed} == {name: close(value) for name, value in changed.items()}
    assert actual["loss/total"] - plain["loss/total"] == close(0.25 * (2.0 - 1.0))
    others = {name for name in plain if name.startswith(("policy/", "loss/", "val/", "value/"))}
    for name in others - changed.keys() - {"loss/total"}:
        assert actual[name] == plain[name], name


def test_throughput_is_per_second_of_the_iteration_and_of_generation(experience, monkeypatch):
    monkeypatch.setattr("ppo_rlhf.ppo.metrics.time.perf_counter", lambda: 8.0)
    state = state_after(4, 3, 0)
    state["progress"].clock.started = 0.0
    metrics = iteration_metrics(**state, experience=experience, steps=STEPS)
    assert metrics["time/iteration_s"] == 8.0
    assert metrics["throughput/episodes_per_s"] == 4 / 8.0
    assert metrics["throughput/generated_tokens_per_s"] == TOKENS / 2.0


def test_one_response_and_one_step_have_deviation_zero_not_nan(make_rollouts):
    rollouts = make_rollouts([2], [True], 2)
    zeros = torch.zeros(1, 2)
    experience = Experience(rollouts, Scores(torch.tensor([3.0]), {}), zeros, zeros, zeros, rollouts.mask, PPOConfig())
    metrics = iteration_metrics(**state_after(1, 1, 0, kl_estimator="k1"), experience=experience, steps=STEPS[:1])
    assert metrics["objective/scores_std"] == 0.0
    assert metrics["val/ratio_var"] == 0.0
    assert metrics["val/explained_variance"] == metrics["val/correlation"] == 0.0
    assert set(metrics) == KEYS


def test_the_keys_of_a_real_iteration_are_the_same(make_run):
    assert set(make_run().iteration()) == KEYS | {"reward/first_letters"}


@pytest.mark.skipif(not STATUS.is_file(), reason="the oracle is Linux's /proc/self/status")
def test_peak_memory_on_a_cpu_is_the_processes_high_water_mark_in_bytes(monkeypatch):
    """Also if another part of the process uses a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(int(line.split()[1]) * 1024, rel=0.02)


def test_peak_memory_on_a_gpu_is_that_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 + device.index)
    assert peak_memory_bytes(torch.device("cuda", 1)) == 8
