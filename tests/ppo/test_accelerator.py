"""Device, precision and kernels of a run."""

import platform

import psutil
import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.ppo.precision import (
    autocast,
    deterministic,
    device_of,
    frozen_dtype,
    make_accelerator,
    precision_warning,
    resolve_device,
    trained_dtype,
    with_dtype,
)
from ppo_rlhf.ppo.run_setup import check_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "trained", "frozen", "computed"),
    [
        ("float32", torch.float32, torch.float32, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16, torch.bfloat16),
        ("float64", torch.float64, torch.float64, torch.float64),
    ],
)
def test_sixteen_bits_are_for_frozen_weights_and_products_and_what_trains_is_wider(dtype, trained, frozen, computed):
    config = PPOConfig(dtype=dtype)
    assert (trained_dtype(config), frozen_dtype(config)) == (trained, frozen)
    layer, given = torch.nn.Linear(2, 2).to(trained), torch.ones(1, 2, dtype=trained)
    with autocast(config, CPU):
        assert layer(given).dtype == computed
    assert layer(given).dtype == trained
    assert make_accelerator(config, CPU).scaler is None
    assert trained_dtype(PPOConfig(dtype="float16")) == torch.float32


@pytest.mark.parametrize(
    ("device", "has_instructions", "expected"),
    [("cuda", True, "bfloat16"), ("cuda", False, "float32"), ("cpu", True, "float32")],
)
def test_auto_is_bfloat16_on_a_gpu_with_instructions_for_it_and_else_float32(
    monkeypatch, device, has_instructions, expected
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_instructions)
    config = with_dtype(PPOConfig(device=device))
    assert config == PPOConfig(device=device, dtype=expected)
    assert (trained_dtype(config), frozen_dtype(config)) == (torch.float32, getattr(torch, expected))
    assert with_dtype(PPOConfig(device=device), "float64").dtype == "float64"  # as a resumed run began
    given = PPOConfig(device=device, dtype="float64")
    assert with_dtype(given) is given


def test_float32_products_on_cuda_read_tf32_unless_kernels_are_deterministic(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for deterministic_kernels in (False, True):
            device_of(PPOConfig(device="cuda", deterministic=deterministic_kernels))
            assert torch.backends.cuda.matmul.allow_tf32 is not deterministic_kernels
            device_of(PPOConfig(device="cpu", deterministic=not deterministic_kernels))
            assert torch.backends.cuda.matmul.allow_tf32 is not deterministic_kernels
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_runs_of_several_precisions_in_one_process_each_get_their_own():
    for dtype, expected in (("bfloat16", "bf16"), ("float32", "no"), ("bfloat16", "bf16")):
        assert make_accelerator(PPOConfig(dtype=dtype), CPU).mixed_precision == expected


def test_auto_is_the_best_device_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cpu") == CPU


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives memory back by other rules")
def test_a_run_on_the_cpu_gives_large_freed_blocks_back(monkeypatch):
    """By its own rule glibc would keep the blocks of the second round, below a block that is still in use."""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    resolve_device("cpu")
    before = psutil.Process().memory_info().rss
    for _ in range(2):
        blocks = [torch.ones(2**19) for _ in range(64)]  # 2 MiB each
        del blocks[:-1]
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_accelerates_use_of_the_cpu_holds_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match=r"device=cuda: .*ACCELERATE_USE_CPU"):
        resolve_device("cuda")


@pytest.mark.parametrize("name", ["gpu0", "cuda:2"])
def test_a_device_that_torch_or_this_machine_does_not_have_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=f"device={name}"):
        resolve_device(name)


def test_float16_on_the_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"ppo\.dtype=float16"):
        PPOConfig(dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match=r"ppo\.dtype=float16"):  # `auto` is the CPU on this machine
        check_device(PPOConfig(dtype="float16"), CPU)


@pytest.mark.parametrize(
    ("capabilities", "dtype", "device", "warns"),
    [
        ({"avx2": True, "avx512_bf16": False}, "bfloat16", "cpu", True),
        ({"avx512_bf16": True}, "bfloat16", "cpu", False),
        ({"avx2": True}, "float32", "cpu", False),
        ({"avx2": True}, "bfloat16", "cuda", False),
    ],
)
def test_a_processor_without_bfloat16_instructions_is_warned_of(monkeypatch, capabilities, dtype, device, warns):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    warning = precision_warning(PPOConfig(dtype=dtype), torch.device(device))
    assert (warning is not None) is warns
    if warning is not None:
        assert "ppo.dtype=bfloat16" in warning
        assert "float32" in warning


@pytest.mark.parametrize("warned_only", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_deterministic_kernels_are_only_for_the_block(before, warned_only):
    def setting() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    torch.use_deterministic_algorithms(before, warn_only=warned_only)
    try:
        kept = setting()
        with deterministic(PPOConfig(deterministic=False)):
            assert setting() == kept
        with pytest.raises(KeyError), deterministic(PPOConfig(deterministic=True)):  # noqa: PT012
            assert setting() == (True, False)
            raise KeyError
        assert setting() == kept
    finally:
        torch.use_deterministic_algorithms(False)
