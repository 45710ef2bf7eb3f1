"""How many compiled shapes of 16-bit products oneDNN keeps on a CPU (docs/decisions/0017-few-compiled-shapes.md)."""

from __future__ import annotations

import os

VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
FEW, MANY = "32", "256"  # the first as `ppo_rlhf/__init__.py` sets it
SMALL = 2**23
"""Weights of a model up to which many are kept; measured with 4 and 24 million."""


def keep_shapes_of_small_models(weights: int) -> None:
    """Keep more of them for a policy of few `weights`: of responses of many lengths an iteration has some 200.

    A small model's products take little longer than compiling them does, and 70 MiB are not much for anybody. It works
    before the first such product of the process, where the environment did not ask for another number.
    """
    if weights <= SMALL and os.environ.get(VARIABLE) == FEW:
        os.environ[VARIABLE] = MANY
