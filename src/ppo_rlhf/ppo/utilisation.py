"""Model FLOP/s utilisation of the update: which share of a GPU's peak its real work was (Chowdhery et al. 2022, B)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch

from ppo_rlhf.core.randomness import update_minibatches
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.operations import UpdateOperations
from ppo_rlhf.ppo.state import TrainingState


@dataclass(frozen=True)
class Peak:
    """Dense peaks of a GPU, 10^12 operations per second."""

    half: float  # bfloat16 and float16 on tensor cores, sums in float32
    tf32: float  # float32 on tensor cores, rounded to 10 bits
    float32: float  # without tensor cores


_A100, _H100_SXM = Peak(312.0, 156.0, 19.5), Peak(989.5, 494.5, 67.0)
_H100_PCIE = Peak(756.5, 378.0, 51.0)
PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA L4": Peak(121.0, 60.0, 30.3),
    "NVIDIA L40S": Peak(362.05, 183.0, 91.6),
    "NVIDIA GeForce RTX 4090": Peak(165.2, 82.6, 82.6),
    "NVIDIA GeForce RTX 3090": Peak(71.0, 35.6, 35.6),
}
"""By CUDA's name of the device, to the letter: a part of a GPU (MIG) or a mobile version is none of these. From
NVIDIA's data sheets of A100, H100 (SXM and PCIe), H200, L4 and L40S, halved where they give the rate with sparsity, and
from its whitepapers on the architectures GA102 (3090) and Ada (4090)."""


def device_name(device: torch.device) -> str | None:
    """Return CUDA's name of a device; None of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def peak_flops(name: str | None, dtype: str) -> float | None:
    """Return the peak, operations per second, of a device in a precision as `ppo.dtype` names it; None: not known."""
    peak = PEAKS.get(name or "")
    if peak is None or dtype == "float64":
        return None
    if dtype != "float32":
        return 1e12 * peak.half
    return 1e12 * (peak.float32 if torch.get_float32_matmul_precision() == "highest" else peak.tf32)


def update_utilisation(
    state: TrainingState, experience: Experience, steps: int, seconds: float, name: str | None
) -> float | None:
    """Return the share of a device's peak that an update reached in real work (see `operations`).

    Args:
        state: Its models were trained.
        experience: On this.
        steps: Minibatches that went through the models, the one that ended the update early included.
        seconds: Duration of the update.
        name: CUDA's name of the device.

    Returns:
        None if the device's peak is not known, or a model's operations are not: it computes padding, or has other
        matrices than linear layers.
    """
    peak, rollouts, config = peak_flops(name, state.config.dtype), experience.rollouts, state.config
    operations = None if peak is None or rollouts.padded else UpdateOperations.of(state.policy, state.critic)
    if peak is None or operations is None:
        return None
    responses = rollouts.lengths.tolist()
    lengths = [len(ids) + n for ids, n in zip(rollouts.prompts.prompt_ids, responses, strict=True)]
    minibatches = update_minibatches(
        config.seed, rollouts.iteration, config.num_ppo_epochs, config.local_batch_size, config.num_mini_batches
    )
    rows = [row for minibatch in islice(minibatches, steps) for row in minibatch]
    learns = rollouts.iteration > config.critic_warmup_iterations
    total = operations.count([lengths[i] for i in rows], [responses[i] for i in rows], policy_learns=learns)
    return total / (seconds * peak)
