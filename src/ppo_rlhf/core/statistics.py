"""Means, variances and whitening over real tokens only; a judge's win rate corrected by people's answers.

Masks select entries and are never multiplied with them, so NaN in padding changes no result. Tensors may have any
shape, and masks may have holes. A mask without a True entry gives 0.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv
from torch import Tensor

from ppo_rlhf.core.checks import as_bool, check_shape, compute_dtype, select
from ppo_rlhf.core.errors import CheckpointError, DataError

WHITENING_EPSILON = 1e-8  # whitening adds this constant to the variance before taking the square root


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `x` where `mask` is True, as a scalar tensor; 0 if `mask` is all False.

    Raises ShapeError if the shapes differ.
    """
    check_shape("masked_mean", None, x=x, mask=mask)
    selected = as_bool(mask)
    dtype = compute_dtype(x)
    return select(x, selected, dtype).sum() / selected.sum().clamp(min=1).to(dtype)


def masked_variance(x: Tensor, mask: Tensor, *, unbiased: bool) -> Tensor:
    """Return the variance of `x` where `mask` is True, as a scalar tensor.

    If `unbiased` is True, the variance divides by n − 1 (Bessel) instead of n. With fewer than two selected numbers the
    variance is 0, never NaN. Raises ShapeError if the shapes differ.
    """
    check_shape("masked_variance", None, x=x, mask=mask)
    return _moments(x, as_bool(mask), unbiased=unbiased)[1]


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    moments: tuple[Tensor | float, Tensor | float] | None = None,
) -> Tensor:
    """Return (x − mean) · rsqrt(variance + 1e-8), with the Bessel-corrected variance.

    Args:
        x: Any shape.
        mask: Mask with the shape of `x`, True on the entries to whiten.
        shift_mean: False adds the mean back after scaling, so that the result keeps the mean of `x`.
        moments: Global (mean, Bessel-corrected variance) to use instead of the moments of this call, so that all shards
            of a batch are whitened with the same moments.

    The result is 0 where `mask` is False. One selected entry, or entries that are all equal, give exactly 0 (the mean
    if `shift_mean` is False). Raises ShapeError if the shapes differ.
    """
    check_shape("masked_whiten", None, x=x, mask=mask)
    selected = as_bool(mask)
    dtype = compute_dtype(x)
    mean, variance = moments or _moments(x, selected, unbiased=True)
    variance = torch.as_tensor(variance, dtype=dtype, device=x.device)
    # If the squared deviations overflow float32, compute the variance again in float64
    if dtype != torch.float64 and not bool(variance.isfinite()):
        return masked_whiten(x.double(), mask, shift_mean=shift_mean, moments=moments).to(dtype)
    scale = torch.rsqrt(variance + WHITENING_EPSILON)
    whitened = (select(x, selected, dtype) - mean) * scale
    if not shift_mean:
        whitened = whitened + mean
    return select(whitened, selected, dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the returns' variance that the critic explains: 1 − Var(returns − values) / Var(returns), a scalar.

    1 is a perfect critic, 0 a critic as good as the constant mean return, and a negative number a worse critic. The
    result is 0 if the returns do not vary or fewer than two returns are selected. Raises ShapeError if the shapes
    differ.
    """
    check_shape("explained_variance", None, values=values, returns=returns, mask=mask)
    selected = as_bool(mask)
    dtype = compute_dtype(values, returns)
    targets = select(returns, selected, dtype)
    residual_variance = _moments(targets - select(values, selected, dtype), selected, unbiased=False)[1]
    variance = _moments(targets, selected, unbiased=False)[1]
    varies = variance > 0
    return torch.where(varies, 1.0 - residual_variance / torch.where(varies, variance, 1.0), 0.0)


@torch.no_grad()
def correlation(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Pearson's correlation, Cov(values, returns) / √(Var(values) · Var(returns)), a scalar in −1..1.

    The result is 0 if the values or the returns do not vary, or fewer than two entries are selected. Raises ShapeError
    if the shapes differ.
    """
    check_shape("correlation", None, values=values, returns=returns, mask=mask)
    selected, dtype = as_bool(mask), compute_dtype(values, returns)
    (mean_v, var_v), (mean_r, var_r) = (_moments(x.to(dtype), selected, unbiased=False) for x in (values, returns))
    covariance = masked_mean((values.to(dtype) - mean_v) * (returns.to(dtype) - mean_r), selected)
    scale = var_v.sqrt() * var_r.sqrt()
    return torch.where(scale > 0, covariance / torch.where(scale > 0, scale, 1.0), 0.0).clamp(-1.0, 1.0)


def corrected_win_rate(
    people: ArrayLike,
    judge_on_people: ArrayLike,
    judge_on_others: ArrayLike,
    *,
    pairs: Sequence[Hashable] | None = None,
    persons: Sequence[Hashable] | None = None,
    weights: ArrayLike | None = None,
) -> tuple[float, float, float]:
    """Return the win rate by people, and the ends of its 95 % interval, which a judge of any bias makes narrower.

    With people's outcomes Y, the judge's F of the same pairs and the judge's G of other pairs, the estimate is
    mean(Y) - λ (mean(F) - mean(G)): the judge's errors cancel, whatever they are, if the answered pairs are a random
    sample of all pairs. λ = Cov(Y, F) / ((1 + n / N) Var(F)), from 0 to 1, gives the least variance; it is 0 for a
    judge that knows nothing. Source: Angelopoulos, Duchi and Zrnic 2023, PPI++ (arXiv:2311.01453), section 6.

    The interval is that of the Beta distribution with the mean and the variance of the estimate, which stays in 0..1.
    Mean and variance are those of n + 2 answers: half an answer is added to each combination of a win or a loss by
    people and by the judge. So the interval keeps a width where the judge happens to be right on all n, and its
    coverage near 0 and 1. n counts clusters, by Kish's formula if their weights differ.

    Args:
        people: Outcomes [n] by people: 1 for a win, 0 for a loss, ½ for a tie.
        judge_on_people: Outcomes [n] of the same pairs by the judge.
        judge_on_others: Outcomes [N] by the judge of a random sample of other pairs. N = 0: people alone decide.
        pairs: The pair [n] of each answer, or its prompt: answers to one pair are correlated.
        persons: Who gave each answer [n]. The interval is then for people like these, else for these people only.
        weights: One over the probability [n] with which a pair was chosen for people; None: all are alike.

    With `pairs` and `persons` the variance is clustered in two ways: Cameron, Gelbach and Miller 2011, Journal of
    Business & Economic Statistics 29, 238-249.

    Raises:
        DataError: There is no answer, lengths differ, an outcome is not from 0 to 1, or a weight is not above 0.
    """
    answers, judge, others = (np.asarray(each, np.float64) for each in (people, judge_on_people, judge_on_others))
    shares = np.ones(len(answers)) if weights is None else np.asarray(weights, np.float64)
    lengths = {len(each) for each in (answers, judge, shares, pairs, persons) if each is not None}
    if len(lengths) > 1 or lengths == {0}:
        raise DataError(f"corrected_win_rate: the arguments of answers have {sorted(lengths)} entries; give n >= 1.")
    outcomes = np.concatenate([answers, judge, others])
    if not ((outcomes >= 0.0) & (outcomes <= 1.0)).all() or not ((shares > 0.0) & (shares < math.inf)).all():
        raise DataError("corrected_win_rate: an outcome must be from 0 to 1, and a weight above 0.")
    shares = shares / shares.sum()
    clusters = [_codes(names) for names in (pairs, persons) if names is not None] or [np.arange(len(answers))]
    count = min(1.0 / float(np.square(np.bincount(codes, shares)).sum()) for codes in clusters)
    estimate = _with_judge(answers, judge, others, shares, count)[0]
    # The same with half an answer in each combination of two outcomes
    total = count + 2.0
    shares = np.append(count * shares, [0.5] * 4) / total
    answers, judge = np.append(answers, [0.0, 0.0, 1.0, 1.0]), np.append(judge, [0.0, 1.0, 0.0, 1.0])
    mean, deviations, judge_variance = _with_judge(answers, judge, others, shares, total)
    single = np.square(deviations[:-4]).sum()
    ways = [np.square(np.bincount(codes, deviations[:-4])).sum() for codes in clusters]
    squares = max(*ways, sum(ways) - (len(ways) - 1) * single, 0.0) + 2.0 * np.square(deviations[-4:]).sum()
    variance = squares * total / (total - 1.0) + judge_variance
    mean = min(max(mean, 0.5 / total), 1.0 - 0.5 / total)
    size = max(1.0, mean * (1.0 - mean) / variance - 1.0)
    low, high = betaincinv(mean * size, (1.0 - mean) * size, [0.025, 0.975])
    return estimate, min(estimate, float(low)), max(estimate, float(high))


def _codes(names: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return a number for each name, the same for equal names."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


def _with_judge(
    answers: NDArray[np.float64],
    judge: NDArray[np.float64],
    others: NDArray[np.float64],
    shares: NDArray[np.float64],
    count: float,
) -> tuple[float, NDArray[np.float64], float]:
    """Return PPI++'s estimate, the deviation of each answer in it, and the variance that comes from the other pairs.

    `shares` of the answers add up to 1; `count` is the number of answers that they are worth.
    """
    if not len(others):
        mean = float(shares @ answers)
        return mean, shares * (answers - mean), 0.0
    all_pairs, of_all = np.append(judge, others), np.append(count * shares, np.ones(len(others)))
    size = of_all.sum()
    variance = of_all @ np.square(all_pairs - of_all @ all_pairs / size) / (size - 1.0)
    covariance = shares @ ((answers - shares @ answers) * (judge - shares @ judge))
    weight = float(np.clip(covariance / variance / (1.0 + count / len(others)), 0.0, 1.0)) if variance > 0.0 else 0.0
    rest = answers - weight * judge
    mean = shares @ rest + weight * others.mean()
    return float(np.clip(mean, 0.0, 1.0)), shares * (rest - shares @ rest), weight**2 * variance / len(others)


class RunningMoments:
    """Mean and variance of all numbers seen so far, in float64 (parallel update of Chan et al. 1983).

    Attributes:
        count: Number of numbers seen so far.
        mean: Mean of the numbers; 0 before the first number.
        m2: Sum of the numbers' squared distances from the mean.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0

    @property
    def variance(self) -> float:
        """Bessel-corrected variance; 0 before the second number."""
        return self.m2 / (self.count - 1) if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        """Square root of `variance`."""
        return math.sqrt(self.variance)

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the numbers of `x` where `mask` (None: all) is True; ShapeError unless `x` and `mask` have one shape."""
        if mask is not None:
            check_shape("RunningMoments.update", None, x=x, mask=mask)
            x = x[as_bool(mask)]
        x = x.detach().to("cpu", torch.float64).flatten()
        new = x.numel()
        if not new:
            return
        new_mean, new_variance = (float(m) for m in _moments(x, torch.ones_like(x, dtype=torch.bool), unbiased=False))
        total = self.count + new
        difference = new_mean - self.mean
        self.m2 += new_variance * new + difference * difference * self.count * new / total
        self.mean += difference * new / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        """Return count, mean and m2 as plain numbers."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict()`; raise CheckpointError unless its keys are count, mean and m2."""
        if set(state) != {"count", "mean", "m2"}:
            raise CheckpointError(
                f"RunningMoments.load_state_dict: got the keys {sorted(state)}; count, m2 and mean are expected. "
                "Give the state of the checkpoint's reward moments."
            )
        self.count, self.mean, self.m2 = int(state["count"]), float(state["mean"]), float(state["m2"])


def _moments(x: Tensor, selected: Tensor, *, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the selected entries, computed from their distances to the lowest selected entry.

    A mean that is computed without the distances has a rounding error if all entries are equal, which whitening
    multiplies by 1e4.
    """
    dtype = compute_dtype(x)
    count = selected.sum()
    numbers = x.detach().to(dtype)
    lowest = torch.where(selected, numbers, math.inf).amin() if x.numel() else numbers.new_zeros(())
    pivot = torch.where(count > 0, lowest, 0.0)
    offsets = select(x.to(dtype) - pivot, selected, dtype)
    mean_offset = offsets.sum() / count.clamp(min=1)
    squares = select((offsets - mean_offset).square(), selected, dtype)
    variance = squares.sum() / (count - int(unbiased)).clamp(min=1)
    return pivot + mean_offset, variance
