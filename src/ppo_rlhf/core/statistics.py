"""Means, variances and whitening over real tokens only.

Masks select entries and are never multiplied with them, so NaN in padding changes no result. Tensors may have any
shape, and masks may have holes. A mask without a True entry gives 0.
"""

import math

import torch
from torch import Tensor

from ppo_rlhf.core.checks import as_bool, check_shape, compute_dtype, select
from ppo_rlhf.core.errors import CheckpointError

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
