"""Passes of two models at the same time on a CPU, each on half of its threads.

A pass alone leaves cores idle: in Python, between layers, in whatever works on too little to be cut in two, and at the
end of each product, where one core waits for the other. Two passes that know nothing of each other fill these gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.model_rules import excludes_lanes
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.products.processors import is_amd_with
from ppo_rlhf.ppo.host_memory import share_one_heap

First = TypeVar("First")
Second = TypeVar("Second")

SMALL = 2**23
"""Weights of a policy up to which two lanes are taken unasked. Larger products leave fewer gaps (docs/speed.md)."""
MIDDLING = 2**25
"""Likewise where an optimiser step has few tokens; in float32 on AMD's processors alone: on Intel's it did not pay."""
FEW_TOKENS = 512
"""So few. What a second core does not speed up, Python, AdamW and the casts of weights, is then a large part of a step,
and the activations of two models take little memory."""


def most_tokens_side_by_side(config: PPOConfig, policy: PreTrainedModel, *, on_cpu: bool) -> float:
    """Return up to how many tokens in an optimiser step policy and critic compute side by side; 0: never.

    It is as `ppo.side_by_side` says; if that is null, where it pays: on a CPU, for small models, on threads that can be
    halved, and where no other setting excludes it.
    """
    if config.side_by_side is not None:
        return math.inf if config.side_by_side else 0.0
    if any(excludes_lanes(config)) or not on_cpu or torch.get_num_threads() % 2:
        return 0.0
    weights = policy.num_parameters()
    if weights <= SMALL:
        return math.inf
    pays = config.dtype in ("bfloat16", "float16") or is_amd_with("AVX2", "AVX512")
    return float(FEW_TOKENS) if pays and weights <= MIDDLING else 0.0


def side_by_side(
    first: Callable[[], First], second: Callable[[], Second], *, at_once: bool = True
) -> tuple[First, Second]:
    """Call both and return what they return: at the same time, or without `at_once` one after the other.

    `first` is called in this thread. Both compute on half of torch's threads; with gradients if there are gradients
    here. Of an odd number one rests: what `first` computes in one call and `second` in another is to round alike.

    When this returns or raises, neither is running any more. An interrupt is raised when `second` has ended; one more
    is raised at once, so that nobody is held up by what hangs.
    """
    if not at_once:
        return first(), second()
    threads = torch.get_num_threads()
    half = max(1, threads // 2)
    other = _other_thread().submit(_call, second, half, torch.is_grad_enabled())
    try:
        torch.set_num_threads(half)
        result = first()
        wait([other])
    except BaseException:  # of `first`, or an interrupt while `second` is waited for
        wait([other])
        raise
    finally:
        torch.set_num_threads(threads)  # last: the other thread's first operation takes what anyone has set
    return result, other.result()


def _call(function: Callable[[], Second], threads: int, grad_enabled: bool) -> Second:
    torch.set_num_threads(threads)  # of this thread alone
    with torch.set_grad_enabled(grad_enabled):
        return function()


@cache
def _other_thread() -> ThreadPoolExecutor:
    """Return the thread for the second pass; one for good, since what libraries keep for each thread is kept once."""
    share_one_heap()
    return ThreadPoolExecutor(1, thread_name_prefix="second-lane")
