"""PPO end to end where the optimum is known: a one-token, KL-penalised bandit, under each estimator and place of KL.

Maximising E[r] - beta KL(pi || reference) gives pi = reference x exp(r / beta) / Z, and there the penalised reward
r - beta log(pi / reference) is beta log Z for every token (Rafailov et al. 2023, arXiv:2305.18290, appendix A.1). k1
in the reward and k2 in the loss have that gradient. k3 in the loss has the gradient of KL(reference || pi) instead:
sum over a of pi_a r_a - beta KL(reference || pi) is largest where pi_a = beta reference_a / (lambda - r_a).
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.rewards.scoring import RewardScorer

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


def optimum_of_the_reverse_penalty(reference: Tensor, beta: float) -> Tensor:
    """beta reference_a / (lambda - r_a), lambda above the largest reward found by bisection so that it sums to 1."""
    low, high = float(REWARDS.max()), float(REWARDS.max()) + beta
    for _ in range(200):
        middle = (low + high) / 2
        too_much = float((beta * reference / (middle - REWARDS)).sum()) > 1.0
        low, high = (middle, high) if too_much else (low, middle)
    return beta * reference / (high - REWARDS)


def total_variation(first: Tensor, second: Tensor) -> float:
    return 0.5 * float((first - second).abs().sum())


@pytest.fixture
def train(make_run):
    def to_the_end(beta: float, *, batch: int = 256, value_model: str = "separate", **settings) -> Outcome:
        run = make_run(
            prompts=PromptDataset([PROMPT], ["a b"], {}),
            scorer=RewardScorer([("token", 1.0, lambda batch: REWARDS[[ids[0] for ids in batch.response_ids]])]),
            model={"spread": 0.2},
            dtype="float32",
            response_length=1,
            stop_token="none",
            temperature=TEMPERATURE,
            missing_eos_penalty=None,
            kl_coef=beta,
            whiten_advantages=False,
            learning_rate=1e-2,
            value_model=value_model,
            value_learning_rate=None if value_model == "shared" else 3e-2,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            num_ppo_epochs=4,
            total_episodes=batch * 50,
            local_rollout_forward_batch_size=batch,
            **settings,
        )
        reference = distribution(run.reference)
        while not run.state.progress.finished:
            metrics = run.iteration()
        return Outcome(reference, distribution(run.state.learner.policy), metrics)

    return to_the_end


@pytest.mark.parametrize(
    ("beta", "value_model"), [(0.25, "separate"), pytest.param(0.5, "shared", marks=pytest.mark.slow)]
)
def test_with_k1_in_the_reward_training_reaches_the_optimum_of_this_penalty_and_of_no_other(train, beta, value_model):
    outcome = train(beta, value_model=value_model)
    assert total_variation(outcome.policy, optimum(outcome.reference, beta)) < 0.02
    assert total_variation(outcome.policy, optimum(outcome.reference, 2 * beta)) > 0.05
    assert total_variation(outcome.policy, optimum(outcome.reference, beta / 2)) > 0.05
    assert total_variation(outcome.policy, optimum_of_the_reverse_penalty(outcome.reference, beta)) > 0.05
    assert total_variation(outcome.policy, outcome.reference) > 0.1

    log_partition = (outcome.reference * torch.exp(REWARDS / beta)).sum().log()
    penalised = REWARDS - beta * (outcome.policy / outcome.reference).log()
    assert float((outcome.policy * (penalised - beta * log_partition).abs()).sum()) < 0.02

    # the metrics, against exact expectations under the final policy: 256 samples, so five standard errors
    policy, log_ratio = outcome.policy, (outcome.policy / outcome.reference).log()
    for name, values in (("objective/kl", log_ratio), ("objective/scores", REWARDS)):
        mean = float(policy @ values)
        error = float(policy @ (values - mean).square()) ** 0.5 / 16
        assert outcome.metrics[name] == pytest.approx(mean, abs=5 * error)
    assert outcome.metrics["objective/entropy"] == pytest.approx(float(-(policy @ policy.log())), abs=0.02)
    assert outcome.metrics["objective/rlhf_reward"] == pytest.approx(float(beta * log_partition), abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "close"), [("k2", 0.02), ("k3+", 0.02), ("full", 0.03)])
def test_with_the_gradient_of_the_kl_in_the_loss_training_reaches_the_same_optimum(train, estimator, close):
    """At the optimum the noise of k2 cancels that of the reward, since r - beta log(pi / reference) is a constant."""
    outcome = train(0.5, kl_in="loss", kl_estimator=estimator)
    assert total_variation(outcome.policy, optimum(outcome.reference, 0.5)) < close
    assert total_variation(outcome.policy, optimum(outcome.reference, 1.0)) > 0.05
    paid, scored = (outcome.metrics[f"objective/{name}"] for name in ("rlhf_reward", "scores"))
    assert paid == pytest.approx(scored, rel=1e-6)  # the KL is not part of the reward, which is float32


@pytest.mark.slow
def test_with_k3_in_the_loss_training_reaches_the_optimum_of_the_reverse_penalty(train):
    outcome = train(0.5, kl_in="loss", kl_estimator="k3", value_model="shared")
    wanted = optimum_of_the_reverse_penalty(outcome.reference, 0.5)
    assert_close(wanted.sum(), torch.tensor(1.0).double(), rtol=0.0, atol=1e-9)
    assert total_variation(outcome.policy, wanted) < 0.02
    assert total_variation(outcome.policy, optimum_of_the_reverse_penalty(outcome.reference, 1.0)) > 0.05
    assert total_variation(outcome.policy, optimum(outcome.reference, 0.5)) > 0.05


@pytest.mark.slow
def test_k2_in_the_reward_ends_away_from_the_optimum_as_the_advice_says(train):
    outcome = train(0.5, kl_estimator="k2")
    wanted = optimum(outcome.reference, 0.5)
    assert total_variation(outcome.policy, wanted) > 0.2
    rare = wanted < outcome.reference  # tokens that the optimum makes rarer become rarer still
    assert float(outcome.policy[rare].sum()) < float(wanted[rare].sum())


@pytest.mark.slow
def test_the_kl_over_the_vocabulary_in_the_reward_holds_nothing_back_as_the_advice_says(train):
    """The KL of a state does not depend on the token drawn there: the policy ends at the best token."""
    outcome = train(0.5, kl_estimator="full")
    assert float(outcome.policy[REWARDS.argmax()]) > 0.9
    assert total_variation(outcome.policy, optimum(outcome.reference, 0.5)) > 0.5


@pytest.mark.slow
def test_an_entropy_bonus_reaches_the_optimum_of_the_reward_with_entropy(train):
    """Without a KL penalty, maximising E[r] + c H gives pi proportional to exp(r / c)."""
    outcome = train(0.0, entropy_coef=0.5)
    assert total_variation(outcome.policy, torch.softmax(REWARDS / 0.5, dim=0)) < 0.04
    for wrong in (0.25, 1.0):
        assert total_variation(outcome.policy, torch.softmax(REWARDS / wrong, dim=0)) > 0.1
