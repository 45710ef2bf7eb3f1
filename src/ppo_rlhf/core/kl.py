"""Estimates of the KL between policy and reference from sampled tokens, and controllers of the KL coefficient.

Direction: policy minus reference. A positive k1 means drift: the policy gives the tokens that it sampled more
probability than the reference does.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_rlhf.core.checks import check_choice, check_range, check_shape, compute_dtype
from ppo_rlhf.core.errors import CheckpointError, TrainingError

# The KL estimators and the policy loss clamp log-ratios to ± this many nats before exp
LOG_RATIO_LIMIT = 20.0
# The adaptive KL controller's proportional error is clipped to ± this limit, as in Ziegler et al. (2019)
ADAPTIVE_ERROR_LIMIT = 0.2
# Smallest factor by which the KL controller multiplies its coefficient: the published formula can give a factor of 0
ADAPTIVE_SMALLEST_FACTOR = 0.1


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Estimate KL(policy || reference) per sampled token by one of `KL_ESTIMATORS`.

    `logprobs` and `reference_logprobs` belong to the sampled tokens. The result has the shape of the two tensors,
    usually [B, T], and is in nats per token. `kl_estimate` applies no mask: NaN in padding stays NaN until
    `shape_rewards` or `aggregate_loss` applies the mask. No gradient flows from a position where the log-probabilities'
    difference is not finite. Raises ShapeError if the shapes differ, and ConfigError if `KL_ESTIMATORS` has no function
    for the estimator.

    Source: Schulman (2020), "Approximating KL Divergence", with q = policy and p = reference; k3+ as in verl.
    """
    check_shape("kl_estimate", None, logprobs=logprobs, reference_logprobs=reference_logprobs)
    check_choice("kl_estimate", KL_ESTIMATORS, estimator=estimator)
    dtype = compute_dtype(logprobs, reference_logprobs)
    difference = logprobs.to(dtype) - reference_logprobs.to(dtype)
    # Detach positions where the difference is NaN, as in padding: an incoming gradient of 0 times NaN would be NaN
    return KL_ESTIMATORS[estimator](torch.where(difference.isfinite(), difference, difference.detach()))


def _k1(difference: Tensor) -> Tensor:
    """Return d: unbiased, may be negative."""
    return difference


def _k2(difference: Tensor) -> Tensor:
    """Return d²/2: biased, >= 0."""
    return 0.5 * difference.square()


def _k3(difference: Tensor) -> Tensor:
    """Return exp(−d) − 1 + d: unbiased, >= 0.

    d is floored at −20, so that exp stays finite; below the floor the gradient is 0.
    """
    floored = difference.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-floored.clamp(max=LOG_RATIO_LIMIT)) + floored


def _k3_plus(difference: Tensor) -> Tensor:
    """Return k3's value with k2's gradient, d · ∇logprobs, whose mean is the gradient of KL(policy || reference)."""
    k2 = _k2(difference)
    return _k3(difference).detach() + (k2 - k2.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "k3+": _k3_plus}
"""The functions of the KL estimators that need only d = logprobs − reference_logprobs of the sampled tokens. `full`
needs the whole vocabulary and is computed with the log-probabilities."""


class FixedKLController:
    """A constant KL coefficient, in reward units per nat.

    Raises ConfigError unless the coefficient is finite and >= 0.
    """

    def __init__(self, kl_coef: float) -> None:
        check_range(type(self).__name__, at_least=0.0, kl_coef=kl_coef)
        self.kl_coef = float(kl_coef)

    def update(self, observed_kl: float, num_episodes: int) -> None:
        """Do nothing, because a fixed KL coefficient never changes."""

    def state_dict(self) -> dict[str, float]:
        """Return `{"kl_coef": …}`; all other attributes of a KL controller are configuration, not state."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load the KL coefficient from `state`; raise CheckpointError unless `kl_coef` is the only key of `state`."""
        if set(state) != {"kl_coef"}:
            raise CheckpointError(
                f"{type(self).__name__}.load_state_dict: got the keys {sorted(state)}; exactly 'kl_coef' is expected. "
                "Give the state of the checkpoint's KL controller."
            )
        self.kl_coef = float(state["kl_coef"])


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that steers the KL to a target: coef ← coef · max(0.1, 1 + e · num_episodes / horizon).

    e = clip(observed_kl / target − 1, −0.2, 0.2). The published rule has no floor of 0.1: if one update spans five or
    more horizons, the published factor becomes 0 or negative, and the coefficient never recovers.

    `kl_coef` is the first coefficient, in reward units per nat (a coefficient of 0 would stay 0 for ever). `target` is
    the wanted KL, in nats summed over a response. `horizon` is the number of episodes over which a constant error e
    changes the coefficient by about the factor 1 + e. Raises ConfigError unless `kl_coef`, `target` and `horizon` are >
    0.

    Source: Ziegler et al. (2019), "Fine-Tuning Language Models from Human Preferences", section 2.2.
    """

    def __init__(self, kl_coef: float, target: float, horizon: float) -> None:
        check_range("AdaptiveKLController", above=0.0, kl_coef=kl_coef, target=target, horizon=horizon)
        super().__init__(kl_coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, observed_kl: float, num_episodes: int) -> None:
        """Update the KL coefficient after one iteration of `num_episodes` responses, counted over all ranks.

        `observed_kl` is the mean over the iteration's responses of the KL summed over a response (nats, k1), not the
        mean per token. Raises TrainingError if `observed_kl` is NaN, and ConfigError if `num_episodes` is negative.
        """
        check_range("AdaptiveKLController.update", at_least=0, num_episodes=num_episodes)
        observed = float(observed_kl)
        if observed != observed:
            raise TrainingError(
                "AdaptiveKLController.update: observed_kl is NaN; it must be a number of nats. Log-probabilities of "
                "the policy or the reference were not finite: lower ppo.learning_rate, or go back to a checkpoint."
            )
        error = min(max(observed / self.target - 1.0, -ADAPTIVE_ERROR_LIMIT), ADAPTIVE_ERROR_LIMIT)
        self.kl_coef *= max(ADAPTIVE_SMALLEST_FACTOR, 1.0 + error * num_episodes / self.horizon)
