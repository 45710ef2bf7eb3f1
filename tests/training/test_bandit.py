"""PPO end to end where the optimum is known: a one-token, KL-penalised bandit.

Maximising E[r] - beta KL(pi || reference) gives pi = reference x exp(r / beta) / Z, and there the penalised reward
r - beta log(pi / reference) is beta log Z for every token (Rafailov et al. 2023, arXiv:2305.18290, appendix A.1).
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.training.prompts import PromptDataset
from ppo_rlhf.training.rewards import RewardScorer

BETA = 0.5
TEMPERATURE = 0.8
PROMPT = [3, 4]
SHUFFLED = torch.randperm(23, generator=torch.Generator().manual_seed(4))
REWARDS = torch.linspace(-1.0, 1.0, 23, dtype=torch.float64)[SHUFFLED]


@dataclass(frozen=True)
class Outcome:
    reference: Tensor  # [V], probabilities of the first token
    policy: Tensor
    metrics: dict[str, float]


def distribution(model) -> Tensor:
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([PROMPT])).logits[0, -1].double() / TEMPERATURE, dim=-1)


def optimum(reference: Tensor, beta: float) -> Tensor:
    weights = reference * torch.exp(REWARDS / beta)
    return weights / weights.sum()


def total_variation(first: Tensor, second: Tensor) -> float:
    return 0.5 * float((first - second).abs().sum())


@pytest.fixture
def outcome(make_run) -> Outcome:
    run = make_run(
        prompts=PromptDataset([PROMPT], ["a b"], {}),
        scorer=RewardScorer([("token", 1.0, lambda batch: REWARDS[[ids[0] for ids in batch.response_ids]])]),
        model={"spread": 0.2},
        dtype="float32",
        response_length=1,
        stop_token="none",
        temperature=TEMPERATURE,
        missing_eos_penalty=None,
        kl_coef=BETA,
        kl_estimator="k1",
        whiten_advantages=False,
        learning_rate=1e-2,
        value_learning_rate=3e-2,
        per_device_train_batch_size=256,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=4,
        total_episodes=256 * 50,
        local_rollout_forward_batch_size=256,
    )
    reference = distribution(run.reference)
    while not run.state.finished:
        metrics = run.iteration()
    return Outcome(reference, distribution(run.state.policy), metrics)


def test_training_reaches_the_optimal_policy_of_this_penalty_and_of_no_other(outcome):
    assert total_variation(outcome.policy, optimum(outcome.reference, BETA)) < 0.01
    assert total_variation(outcome.policy, optimum(outcome.reference, 2 * BETA)) > 0.1
    assert total_variation(outcome.policy, optimum(outcome.reference, BETA / 2)) > 0.1
    assert total_variation(outcome.policy, outcome.reference) > 0.1

    log_partition = (outcome.reference * torch.exp(REWARDS / BETA)).sum().log()
    penalised = REWARDS - BETA * (outcome.policy / outcome.reference).log()
    assert_close(penalised, torch.full_like(penalised, float(BETA * log_partition)), rtol=0.0, atol=0.03)

    # the metrics, against exact expectations under the final policy: 256 samples, so five standard errors
    policy, log_ratio = outcome.policy, (outcome.policy / outcome.reference).log()
    for name, values in (("objective/kl", log_ratio), ("objective/scores", REWARDS)):
        mean = float(policy @ values)
        error = float(policy @ (values - mean).square()) ** 0.5 / 16
        assert outcome.metrics[name] == pytest.approx(mean, abs=5 * error)
    assert outcome.metrics["objective/entropy"] == pytest.approx(float(-(policy @ policy.log())), abs=0.02)
    assert outcome.metrics["objective/rlhf_reward"] == pytest.approx(float(BETA * log_partition), abs=0.02)
