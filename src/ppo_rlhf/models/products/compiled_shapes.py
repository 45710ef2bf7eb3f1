"""Which products on a CPU have few shapes, and of how many shapes oneDNN keeps the code that it compiled.

It compiles code for each shape, and responses of many lengths make many: docs/decisions/0017-few-compiled-shapes.md.
"""

from __future__ import annotations

import os

import torch

from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.products.processors import SIXTEEN_BITS, lacks_fast_instructions

VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
FEW, MANY = "32", "256"  # the first as `ppo_rlhf/__init__.py` sets it
SMALL = 2**23
"""Weights of a model up to which many are kept; measured with 4 and 24 million."""
ROUND = 16
"""Tokens come in multiples of this, or of its double, fourfold …, up to a twelfth of them: 3 % too many on average."""


def keep_shapes_of_small_models(weights: int) -> None:
    """Keep more of them for a policy of few `weights`: of responses of many lengths an iteration has some 200.

    A small model's products take little longer than compiling them does, and 70 MiB are not much for anybody. It works
    before the first product of the process that oneDNN computes, where the environment did not ask for another number.
    """
    if weights <= SMALL and os.environ.get(VARIABLE) == FEW:
        os.environ[VARIABLE] = MANY


def fills_rows(model: PreTrainedModel) -> bool:
    """Whether a forward pass is given rows of no sequence, so that there are few different numbers (`rounded_up`).

    In 16 bits on a CPU that has fast instructions for them, so that oneDNN computes. In float32 these rows take
    as long as compiling does.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype
    return model.device.type == "cpu" and dtype in SIXTEEN_BITS and not lacks_fast_instructions(dtype)


def rounded_up(tokens: int) -> int:
    """Return a number of tokens that is not much larger, so that there are few different ones.

    On a CPU every new number of them costs a product 0.6 MiB, as long as oneDNN keeps the code that it compiled.
    """
    step = ROUND
    while 2 * step <= tokens / 12:
        step *= 2
    return -(-tokens // step) * step
