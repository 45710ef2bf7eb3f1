"""What the processor that computes is: who made it, and which types of numbers it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
AMD, INTEL = "AuthenticAMD", "GenuineIntel"


def lacks_fast_instructions(dtype: torch.dtype) -> bool:
    """Whether a CPU takes longer for products of a 16-bit type than of float32: by no instructions or slow ones."""
    return dtype in SIXTEEN_BITS and not _stands_in and (not has_instructions(dtype) or _has_slow_ones(dtype))


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies a 16-bit type (AVX-512 or AMX on x86), as oneDNN says.

    Torch multiplies such matrices without a library where it does not, at a fraction of float32's speed. True where
    torch has no oneDNN: nothing is known then.
    """
    if not torch.backends.mkldnn.is_available():
        return True
    operators = torch.ops.mkldnn  # looked up here: a torch without oneDNN has neither
    asked = operators._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else operators._is_mkldnn_fp16_supported
    return bool(asked()) and not (dtype == torch.bfloat16 and _is_emulated())


def _is_emulated() -> bool:
    """Whether oneDNN multiplies bfloat16 by AVX-512 without instructions for it: Intel's from Skylake to Ice Lake."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_f") and not found.get("avx512_bf16"))


@cache
def _has_slow_ones(dtype: torch.dtype) -> bool:
    """Whether this is one of Intel's since Sapphire Rapids that a virtual machine shows without AMX.

    The instructions of AVX-512 for bfloat16 do half as much there as float32's do.
    """
    found = torch.cpu.get_capabilities()
    since_sapphire_rapids = bool(found.get("avx512_bf16") and found.get("avx512_fp16"))
    return dtype == torch.bfloat16 and _vendor() == INTEL and since_sapphire_rapids and not found.get("amx_bf16")


_stands_in: list[bool] = []


@contextmanager
def standing_in_for_a_gpu() -> Iterator[None]:
    """Within the block, in which fake tensors lie on the CPU for want of a GPU, no type lacks them."""
    _stands_in.append(True)
    try:
        yield
    finally:
        _stands_in.pop()


def is_amd_with(*capabilities: str) -> bool:
    """Whether this is one of AMD's processors with one of these sets of vector instructions, as torch names them."""
    return torch.backends.cpu.get_cpu_capability() in capabilities and _vendor() == AMD


@cache
def _vendor() -> str:
    """Return the maker's name that the processor gives, empty where Linux does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
