"""The names by which a setting chooses a formula. No torch in here: settings can be read without waiting for it."""

from typing import Literal, get_args

KLEstimator = Literal["k1", "k2", "k3", "k3+", "full"]
KL_ESTIMATORS: tuple[str, ...] = tuple(name for name in get_args(KLEstimator) if name != "full")
"""Those that need only the log-probabilities of the sampled tokens."""

LossAggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "token_sum_fixed_length"]
LOSS_AGGREGATIONS: tuple[str, ...] = get_args(LossAggregation)
