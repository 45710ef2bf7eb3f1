"""Best-of-n from one table of samples: N responses to each of M prompts, scored by the reward and by the judge."""

from __future__ import annotations

from typing import Annotated

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from ppo_rlhf.config.parameter_groups import Seed, parameter_group
from ppo_rlhf.core.best_of_n import best_of_n_kl, best_of_n_mean

PROMPT = "prompt_number"
"""Column that best-of-n's table of samples has in addition to the columns of `PolicyEvaluation.to_frame`. Rows of one
prompt are adjacent."""


@parameter_group("best_of_n")
class BestOfNConfig:
    """Number of responses that the SFT policy samples for best-of-n and for the audit of the reward."""

    prompts: Annotated[int, Field(ge=2)] = 128
    """Largest number of held-out prompts."""
    samples: Annotated[int, Field(ge=2)] = 64
    """Responses to each prompt. The number is also the largest n of the best-of-n estimates."""
    seed: Seed = 42
    """Seed of the sampling noise."""


def by_prompt(samples: pd.DataFrame, column: str) -> Tensor:
    """Return a column of the table of samples as a float64 tensor `[M, N]` with one row for each prompt."""
    values = torch.tensor(samples[column].to_numpy(dtype="float64"))
    return values.reshape(samples[PROMPT].nunique(), -1)


def best_of_n_curve(samples: pd.DataFrame) -> pd.DataFrame:
    """Return a table of best-of-n for n = 1, 2, 4, … and N: KL (nats, an upper bound), mean reward, mean judge
    score.
    """
    rewards = by_prompt(samples, "reward")
    largest = rewards.shape[1]
    ns = [*(2**k for k in range(largest.bit_length()) if 2**k < largest), largest]
    scores = [name for name in ("reward", "judge_score") if name in samples]
    means = {name: [float(best_of_n_mean(rewards, by_prompt(samples, name), n).mean()) for n in ns] for name in scores}
    return pd.DataFrame({"n": ns, "kl": [best_of_n_kl(n) for n in ns], **means})
