"""Attention in torch's kernel for sequences of different lengths. Oracle: the padded path."""

import pytest
import torch
from torch.nn.attention import varlen
from torch.testing import assert_close

from ppo_rlhf.passes import packed_attention
from ppo_rlhf.passes.forward import hidden_states, packs
from ppo_rlhf.passes.packed_attention import PackedLayout, SharedLayout
from ppo_rlhf.passes.prefixes import shared_prefix
from ppo_rlhf.passes.token_rows import right_padded
from ppo_rlhf.passes.transfers import to_device
from tests.tiny_models import tiny_model

SEQUENCES = [[4, 7, 9, 12, 5], [6], [8, 10, 11], [3, 13, 14, 15, 16, 17, 18]]
LENGTHS = (5, 1, 3)
EIGHT_WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def heads(tokens: int, **options) -> list[torch.Tensor]:
    """Return queries of four heads, and keys and values of two heads, each of width 16."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(tokens, count, 16, generator=generator) for count in (4, 2, 2)]
    return [tensor.to(**options).requires_grad_() for tensor in drawn]


def kernel_by_hand(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """The kernel as its documentation describes it, sequence by sequence, with an explicit window mask."""
    assert query.shape[1] == key.shape[1] or enable_gqa
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert int(starts_q.diff().max()) <= longest_q
    assert int(starts_k.diff().max()) <= longest_k
    left, right = (float("inf") if side == -1 else side for side in window_size)
    groups, rows = query.shape[1] // key.shape[1], []
    for first, end, first_k, end_k in zip(
        *(each for x in (starts_q, starts_k) for each in (x[:-1], x[1:])), strict=True
    ):
        q = query[first:end].transpose(0, 1)
        k, v = (x[first_k:end_k].repeat_interleave(groups, dim=1).transpose(0, 1) for x in (key, value))
        # A window is counted from the last key, so that the last query sees all keys
        at, place = torch.arange(end - first) + len(k[0]) - (end - first), torch.arange(len(k[0]))
        seen = (at[:, None] - place <= left) & (place - at[:, None] <= right)
        scores = (q @ k.transpose(1, 2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
        rows.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(rows)


@pytest.fixture
def kernel_everywhere(monkeypatch):
    """Take the kernel's code path on a CPU, with a Python version of the kernel."""
    calls = []

    def kernel(*tensors, enable_gqa=False, **options):
        calls.append(options)
        return kernel_by_hand(*tensors, **options, enable_gqa=enable_gqa)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(packed_attention, "kernel_fits", lambda query, value: True)
    return calls


@pytest.mark.parametrize("queries", [2, 4])
def test_a_kernel_that_knows_no_shared_keys_gets_them_repeated(monkeypatch, queries):
    """The kernel of torch 2.11 has no `enable_gqa`."""

    def older(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale=None, window_size=(-1, -1)):
        assert query.shape == key.shape == value.shape
        given = query, key, value, starts_q, starts_k, longest_q, longest_k
        return kernel_by_hand(*given, scale=scale, window_size=window_size, enable_gqa=False)

    layout, (query, key, value) = PackedLayout.of(LENGTHS), heads(sum(LENGTHS))
    given = query[:, :queries], key, value
    expected = layout.attend(*given, None)
    monkeypatch.setattr(varlen, "varlen_attn", older)
    monkeypatch.setattr(packed_attention, "kernel_fits", lambda query, value: True)
    found = layout.attend(*given, None)
    assert_close(found, expected, rtol=0.0, atol=1e-5)
    oracle = torch.autograd.grad(expected.square().sum(), (query, key, value))
    for ours, theirs in zip(torch.autograd.grad(found.square().sum(), (query, key, value)), oracle, strict=True):
        assert_close(ours, theirs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "calls"),
    [(PackedLayout.of(LENGTHS), 1), (SharedLayout.of(4, [2, 1], [2]), 2), (SharedLayout.of(3, [3, 3], []), 2)],
    ids=["whole rows", "a shared prefix", "rows of equal lengths"],
)
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_kernel_is_asked_for_what_the_padded_path_computes(monkeypatch, kernel_everywhere, scaling, layout, calls):
    given = heads(sum(LENGTHS))
    weights = torch.linspace(-1.0, 1.0, sum(LENGTHS) * 4 * 16).view(-1, 4, 16)
    found = layout.attend(*given, scaling)
    gradients = torch.autograd.grad((found * weights).sum(), given)
    assert len(kernel_everywhere) == calls
    monkeypatch.undo()
    expected = layout.attend(*given, scaling)
    assert_close(found, expected, rtol=0.0, atol=1e-5)
    oracle = torch.autograd.grad((expected * weights).sum(), given)
    for ours, theirs in zip(gradients, oracle, strict=True):
        assert_close(ours, theirs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_that_attends_by_the_kernel_has_the_hidden_states_of_the_padded_path(
    monkeypatch, kernel_everywhere, kind
):
    backbone, rows = tiny_model(kind).base_model, right_padded(SEQUENCES, 0)
    with torch.no_grad():
        assert packs(backbone)
        found = hidden_states(backbone, rows)
        assert kernel_everywhere
        monkeypatch.undo()
        assert_close(found, hidden_states(backbone, rows), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("made", [PackedLayout.of(LENGTHS), SharedLayout.of(4, [2, 1], [2])], ids=["whole", "shared"])
def test_torchs_kernel_takes_these_arguments(monkeypatch, made):
    """On the device `meta` torch checks arguments and computes nothing."""
    query, key, value = heads(sum(LENGTHS), device="meta", dtype=torch.bfloat16)
    monkeypatch.setattr(packed_attention, "kernel_fits", lambda query, value: True)
    monkeypatch.setattr(packed_attention, "as_autocast", lambda states: states)  # `meta` has none
    (layout,) = to_device([made], query.device)
    attended = layout.attend(query, key, value, None)
    attended.sum().backward()
    assert attended.shape == query.shape == query.grad.shape
    assert key.grad.shape == key.shape


class OnGpu:
    """The properties of tensors that `kernel_fits` checks."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype, self.shape = dtype, (9, 4, width)


@pytest.mark.parametrize(
    ("query", "value", "fits"),
    [
        (OnGpu(64), OnGpu(64), True),
        (OnGpu(64, torch.float16), OnGpu(64), True),
        (OnGpu(64, torch.float32), OnGpu(64), False),
        (OnGpu(20), OnGpu(20), False),
        (OnGpu(64), OnGpu(32), False),
        (OnGpu(256), OnGpu(256), False),
        (torch.zeros(9, 4, 64, dtype=torch.bfloat16), torch.zeros(9, 4, 64), False),
    ],
    ids=["bfloat16", "float16", "float32", "odd width", "narrower values", "too wide", "CPU"],
)
def test_the_kernel_is_for_cuda_in_sixteen_bits_and_heads_that_it_knows(monkeypatch, query, value, fits):
    monkeypatch.setattr(packed_attention, "_has_kernel", lambda device: True)
    assert packed_attention.kernel_fits(query, value) is fits


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_before_ampere_take_the_padded_path(monkeypatch, capability, has):
    packed_attention._has_kernel.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_attention._has_kernel(torch.device("cuda")) is has
    packed_attention._has_kernel.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sequences", [SEQUENCES, [[*range(3, 15), *ids] for ids in SEQUENCES]], ids=["own", "alike"])
def test_on_a_gpu_states_and_gradients_are_those_of_the_padded_path_up_to_rounding(monkeypatch, dtype, sequences):
    """Both paths are compared with float32: the kernel's error may be only slightly larger than the padded path's."""

    def run(way: torch.dtype) -> list[torch.Tensor]:
        backbone = tiny_model("llama", **EIGHT_WIDE).base_model.to("cuda")
        rows = right_padded(sequences, 0, prefix=shared_prefix(sequences)).to(torch.device("cuda"))
        with torch.autocast("cuda", way, enabled=way != torch.float32):
            states = hidden_states(backbone, rows).float()
        states.square().sum().backward()
        return [states.detach(), *(parameter.grad for parameter in backbone.parameters())]

    exact, by_kernel = run(torch.float32), run(dtype)
    assert packed_attention._has_kernel(torch.device("cuda"))
    monkeypatch.setattr(packed_attention, "kernel_fits", lambda query, value: False)
    for kernel, padded, true in zip(by_kernel, run(dtype), exact, strict=True):
        assert (kernel - true).norm() <= 2.0 * (padded - true).norm() + 1e-3 * true.norm()
