"""The names of KL estimators, loss aggregations and combinations of rewards; without importing torch, so that reading
settings is fast.
"""

from typing import Literal, get_args

KLEstimator = Literal["k1", "k2", "k3", "k3+", "full"]
"""`full` needs the whole vocabulary; `core.kl.KL_ESTIMATORS` has the functions of the others."""

LossAggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "token_sum_fixed_length"]
LOSS_AGGREGATIONS: tuple[str, ...] = get_args(LossAggregation)

RewardCombination = Literal["sum", "mean", "min", "mean_minus_std"]
"""`core.reward_combination.COMBINATIONS` has their functions."""
