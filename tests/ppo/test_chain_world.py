"""A chain world whose values are known: advantages, bootstrapping and truncation against exact expectations.

At each token the response continues with probability P, else it stops, and a response that stops with k tokens is paid
score(k). Nothing is sampled: every path that `response_length` allows is one row, weighed by its probability, so that
an expectation is a sum. The true value obeys V_t = (1 - P) score(t + 1) + P gamma V_{t+1}, without end.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.kl import FixedKLController
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.ppo.experience import Experience, Shaping, estimate_advantages, shape_rewards
from ppo_rlhf.rewards.scoring import RewardScorer, Scores

P, WIDTH, FAR = 0.8, 5, 400
UNFINISHED = -3.0  # the score that a reward model gives to a response that was cut off


def score(length: int) -> float:
    return 2.0 - 0.25 * length


def true_values(gamma: float) -> Tensor:
    """V_0 .. V_WIDTH by the recursion, from a state so late that what comes after it weighs 1e-30."""
    value, values = 0.0, []
    for t in reversed(range(FAR)):
        value = (1 - P) * score(t + 1) + P * gamma * value
        values.append(value)
    return torch.tensor(values[::-1][: WIDTH + 1], dtype=torch.float64)


@dataclass(frozen=True)
class World:
    experience: Experience
    probabilities: Tensor  # [rows], of each path
    values: Tensor  # [WIDTH + 1]
    mask: Tensor

    def expected(self, numbers: Tensor, t: int) -> float:
        """E[numbers_t] over the paths that reach state t."""
        here = self.mask[:, t]
        return float((self.probabilities * numbers[:, t])[here].sum() / self.probabilities[here].sum())


@pytest.fixture
def world(make_rollouts):
    def build(gamma: float = 1.0, lam: float = 0.95, **settings) -> World:
        """Rows: stopped after 1 .. WIDTH tokens, then the one that was cut off."""
        config = PPOConfig(gamma=gamma, lam=lam, whiten_advantages=False, kl_coef=0.0, **settings)
        lengths = [*range(1, WIDTH + 1), WIDTH]
        terminated = [True] * WIDTH + [False]
        values = true_values(gamma)
        rollouts = make_rollouts(lengths, terminated, WIDTH, values=values.expand(WIDTH + 1, WIDTH + 1).clone())
        total = torch.tensor([*(score(k) for k in range(1, WIDTH + 1)), UNFINISHED], dtype=torch.float64)
        scores = Scores(total, {})
        shaping = Shaping(config, FixedKLController(0.0))
        rewards = shape_rewards(rollouts, scores, shaping)
        experience = estimate_advantages(rollouts, scores, rewards, shaping)
        paths = [*((1 - P) * P ** (k - 1) for k in range(1, WIDTH + 1)), P**WIDTH]
        probabilities = torch.tensor(paths, dtype=torch.float64)
        assert float(probabilities.sum()) == pytest.approx(1.0)
        return World(experience, probabilities, values, rollouts.mask)

    return build


GAMMA_LAMBDA = [(1.0, 0.95), (0.9, 0.0), (0.95, 1.0)]


@pytest.mark.parametrize(("gamma", "lam"), GAMMA_LAMBDA)
def test_with_true_values_and_bootstrapping_returns_are_unbiased_in_every_state_for_every_lambda(world, gamma, lam):
    chain = world(gamma, lam, truncated_responses="bootstrap")
    for t in range(WIDTH):
        assert chain.expected(chain.experience.returns, t) == pytest.approx(float(chain.values[t]), abs=1e-9)
        assert chain.expected(chain.experience.advantages, t) == pytest.approx(0.0, abs=1e-9)
    assert float(chain.experience.advantages.abs().max()) > 0.5  # each path has an advantage: only their mean is 0


@pytest.mark.parametrize(
    ("settings", "paid"),
    [
        ({}, UNFINISHED),
        ({"missing_eos_penalty": 1.5}, UNFINISHED - 1.5),
        ({"truncated_responses": "penalise", "missing_eos_penalty": 1.5}, UNFINISHED - 1.5),
        ({"truncated_responses": "replace", "missing_eos_penalty": 1.5}, -1.5),
    ],
    ids=["keep", "missing_eos_penalty", "penalise", "replace"],
)
def test_without_bootstrapping_returns_are_off_by_what_being_cut_off_is_worth(world, settings, paid):
    """Monte Carlo: a cut-off path yields gamma^{T-1-t} paid in place of gamma^{T-t} V_T, with probability P^{T-t}."""
    gamma = 0.9
    chain = world(gamma, 1.0, **settings)
    for t in range(WIDTH):
        reached = P ** (WIDTH - t)
        instead = gamma ** (WIDTH - 1 - t) * (paid - gamma * float(chain.values[WIDTH]))
        expected = float(chain.values[t]) + reached * instead
        assert chain.expected(chain.experience.returns, t) == pytest.approx(expected, abs=1e-9)


def test_a_masked_response_leaves_the_mean_of_those_that_stopped(world):
    """Weighed by the paths that count, the mean return is E[score | stopped], gamma 1, Monte Carlo."""
    chain = world(1.0, 1.0, truncated_responses="mask")
    stopped = chain.probabilities[:-1]
    actual = float((stopped * chain.experience.returns[:-1, 0]).sum() / stopped.sum())
    by_hand = sum((1 - P) * P ** (k - 1) * score(k) for k in range(1, WIDTH + 1)) / (1 - P**WIDTH)
    assert actual == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.slow
def test_a_critic_learns_the_true_values_while_the_policy_stands_still(make_run):
    """Two tokens, score r_a + r_b: V(s_0) = E[score], V(s_1 after a) = r_a + E[r_b | a], exact over the vocabulary."""
    prompt, tau = [3, 4], 0.8
    rewards = torch.linspace(-1.0, 1.0, 23)[torch.randperm(23, generator=torch.Generator().manual_seed(4))]

    def two_rewards(batch):
        return rewards[torch.tensor(batch.response_ids)].sum(-1)

    run = make_run(
        prompts=PromptDataset([prompt], ["a b"], {}),
        scorer=RewardScorer([("tokens", 1.0, two_rewards)]),
        model={"spread": 0.2},
        dtype="float32",
        response_length=2,
        stop_token="none",
        temperature=tau,
        missing_eos_penalty=None,
        kl_coef=0.0,
        lam=1.0,
        value_learning_rate=1e-2,
        cliprange_value=10.0,
        per_device_train_batch_size=256,
        gradient_accumulation_steps=1,
        num_mini_batches=2,
        num_ppo_epochs=2,
        total_episodes=256 * 41,
        critic_warmup_iterations=40,
        local_rollout_forward_batch_size=256,
    )
    while run.state.progress.iteration < 40:
        run.iteration()

    def probabilities(ids: Tensor) -> Tensor:
        return torch.softmax(run.reference(ids).logits[:, -1].double() / tau, dim=-1)

    with torch.no_grad():
        first = probabilities(torch.tensor([prompt]))[0]
        rows = torch.tensor([[*prompt, token] for token in range(23)])
        after = rewards.double() + probabilities(rows) @ rewards.double()
        actual = run.state.learner.critic(rows, torch.ones_like(rows), torch.arange(3).expand(23, 3)).double()
    assert float(actual[0, 1]) == pytest.approx(float(first @ after), abs=0.1)
    spread = float((first @ (after - first @ after).square()) ** 0.5)
    error = float((first @ (actual[:, 2] - after).square()) ** 0.5)
    assert error < 0.3 * spread  # explains nine tenths of what there is to know after the first token
    assert float(first @ actual[:, 2]) == pytest.approx(float(first @ after), abs=0.1)
