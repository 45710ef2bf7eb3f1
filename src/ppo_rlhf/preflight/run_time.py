"""How long an iteration of a run takes: `kedro doctor` times passes through few layers with random weights.

Every layer of a model costs the same, so the times of two numbers of layers give the time of all layers
(docs/memory.md).
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import in_one_line
from ppo_rlhf.passes.gradient_checkpointing import enable_gradient_checkpointing, recomputing
from ppo_rlhf.ppo.precision import frozen_dtype
from ppo_rlhf.ppo.run_setup import policy_to_train

LAYERS = (2, 6)
"""Numbers of layers that are timed."""
MOST_TOKENS = 512
"""Tokens of a pass, if one response with its prompt is not longer."""
MOST_SECONDS = 30.0
"""Both precisions together are timed for no longer, except for the call during which the time ends."""
ENOUGH_S = 0.5
FASTER = 1.25
"""bfloat16 is recommended if float32 takes this many times longer."""


class NotTimedError(Exception):
    """The reason why a run is not timed."""


@dataclass(frozen=True)
class Work:
    """The work of one iteration."""

    policy: PretrainedConfig  # configuration of the policy
    prompt_length: int  # tokens of a prompt
    decoded_rows: int  # responses decoded at the same time
    shared_length: int = 0  # tokens with which all prompts begin, which a pass computes once
    trust_remote_code: bool = False


class PassTimes(NamedTuple):
    """Seconds of a model's passes."""

    step: float  # of one decoding step of all rows that are decoded at the same time
    forward: float  # of one response with its prompt
    backward: float  # forward and backward of one response with its prompt
    optimiser: float  # of one optimiser step


def describe(config: PPOConfig, work: Work, device: torch.device) -> Iterator[tuple[Literal["ok", "advice"], str]]:
    """Yield in words how long the run takes here, and whether bfloat16 is faster where the run computes in float32."""
    deadline = time.monotonic() + MOST_SECONDS
    try:
        times = time_passes(config, work, device, deadline)
    except NotTimedError as reason:
        yield "ok", f"not timed: {reason}"
        return
    half, full = math.ceil(config.response_length / 2), config.response_length
    seconds = [iteration_seconds(config, work, times, length) for length in (half, full)]
    whole = [each * config.num_total_batches for each in seconds]
    yield (
        "ok",
        f"{_range(*seconds)} an iteration, {_range(*whole)} for all {config.num_total_batches:,}, with responses of "
        f"{half} to {full} tokens; without the reward and evaluations",
    )
    if device.type != "cpu" or config.dtype != "float32":
        return
    with contextlib.suppress(NotTimedError):
        in_16_bits = time_passes(replace(config, dtype="bfloat16"), work, device, deadline)
        faster = seconds[-1] / iteration_seconds(config, work, in_16_bits, full)
        if faster >= FASTER:
            yield "advice", f"this CPU is {faster:.1f} times faster in 16 bits: ppo.dtype=bfloat16 (other numbers)"


def time_passes(config: PPOConfig, work: Work, device: torch.device, deadline: float) -> PassTimes:
    """Return how long passes through the policy take on this machine.

    Args:
        config: The run's settings, with the `dtype` to time.
        work: What else decides the work of an iteration.
        device: Where the run computes.
        deadline: The value of `time.monotonic` at which timing ends.

    Raises:
        NotTimedError: Timing would end after the deadline, or the run computes in a way that is not timed.
    """
    if config.rollout_engine == "vllm" or config.environment is not None or config.load_in_4bit:
        raise NotTimedError("vLLM, environments and 4-bit weights cannot be timed with random weights")
    layers = getattr(work.policy.get_text_config(), "num_hidden_layers", None)
    if layers is None:
        raise NotTimedError(f"{type(work.policy).__name__} does not say how many layers the model has")
    started, found = time.monotonic(), list[PassTimes]()
    few = LAYERS if layers > LAYERS[-1] else (layers,)
    for number in few:
        try:
            found.append(_times(config, work, number, device, deadline))
        except NotTimedError:
            raise
        except Exception as error:  # architectures refuse a number of layers by many types of errors
            raise NotTimedError(in_one_line(error)) from error
        _check_time(deadline, (time.monotonic() - started) * (len(few) / len(found) - 1))
    times = found[0]
    if len(few) == 2:
        more = (layers - few[0]) / (few[1] - few[0])
        times = PassTimes(*(a + max(0.0, b - a) * more for a, b in zip(*found, strict=True)))
    return times


def iteration_seconds(config: PPOConfig, work: Work, times: PassTimes, length: int) -> float:
    """Return the seconds of an iteration whose responses have `length` tokens, without the reward and evaluations."""
    rows, critics = config.local_batch_size, 0 if config.value_model == "shared" else 1
    groups = math.ceil(rows / work.decoded_rows)

    def computed(tokens: int, passes: int) -> float:
        """Return by how many timed rows as many tokens have as passes over all rows of `tokens` tokens compute."""
        repeated = (rows - passes) * work.shared_length
        return (rows * tokens - repeated) / (work.prompt_length + config.response_length)

    sampled = times.forward * computed(work.prompt_length, groups) + groups * length * times.step
    passed = computed(work.prompt_length + length, math.ceil(rows / config.local_micro_batch_size))
    measured = passed * times.forward * (2 + critics)  # by policy, reference policy and critic
    epochs = config.num_ppo_epochs + critics * (config.num_critic_epochs or config.num_ppo_epochs)
    steps = epochs * config.num_mini_batches
    return sampled + measured + epochs * passed * times.backward + steps * times.optimiser


def _check_time(deadline: float, more_s: float = 0.0) -> None:
    if time.monotonic() + more_s > deadline:
        raise NotTimedError(f"a few layers alone take longer than {MOST_SECONDS:.0f} s here")


def _times(config: PPOConfig, work: Work, layers: int, device: torch.device, deadline: float) -> PassTimes:
    """Return the times of passes through a model with `layers` layers."""
    policy, trusted = with_layers(work.policy, layers), {"trust_remote_code": work.trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        base = AutoModelForCausalLM.from_config(policy, dtype=torch.float32, **trusted).to(device)
        model = policy_to_train(base, config)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    dtype = frozen_dtype(config)
    tokens = work.prompt_length + config.response_length
    rows = max(1, min(config.per_device_train_batch_size, MOST_TOKENS // tokens))
    ids = torch.ones(rows, tokens, dtype=torch.int64, device=device)
    decoded = torch.ones(work.decoded_rows, 1, dtype=torch.int64, device=device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, fused=True)

    def loss(tokens: Tensor, kept: int) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype.itemsize == 2):
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
        return cross_entropy(logits.float().flatten(0, 1), tokens[:, -kept:].flatten())

    def forward(tokens: Tensor, kept: int) -> None:
        with torch.no_grad():
            loss(tokens, kept)

    def backward() -> None:
        with recomputing(model):
            loss(ids, config.response_length).backward()

    def seconds(call: Callable[[], object]) -> float:
        _check_time(deadline)
        return _seconds(call, device)

    return PassTimes(
        step=seconds(lambda: forward(decoded, 1)),
        forward=seconds(lambda: forward(ids, config.response_length)) / rows,
        backward=seconds(backward) / rows,
        optimiser=seconds(optimiser.step),
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of a few calls; the first one, which warms up, counts only if it takes long."""
    taken = list[float]()
    while not taken or (len(taken) < 4 and sum(taken) < ENOUGH_S):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _range(least: float, most: float) -> str:
    """Return two times in words, in the unit of the second one."""
    unit, size = _unit(most)
    return f"{_rounded(least / size)} to {_rounded(most / size)} {unit}"


def in_words(seconds: float) -> str:
    """Return a time in words, in the unit that suits it."""
    unit, size = _unit(seconds)
    return f"{_rounded(seconds / size)} {unit}"


def _rounded(number: float) -> str:
    """Return a number of two significant digits, without an exponent."""
    return f"{float(f'{number:.2g}'):g}"


def _unit(seconds: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in (("h", 3600), ("min", 60)) if seconds >= 1.5 * size), ("s", 1))


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a model's configuration with fewer layers."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = layers
    for name, value in text.to_dict().items():
        if name.endswith("layer_types") and value:
            setattr(text, name, value[:layers])
    return small
