"""Recorded steps against steps that are computed anew, with a recorder that calls the function again.

What only CUDA can show is marked: that a captured graph gives the same, and that the host waits for nothing.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close
from transformers import MixtralConfig, MixtralForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import LoraSettings, with_adapter
from ppo_rlhf.models.passes import decoding
from ppo_rlhf.models.passes.decoding import Decoder
from ppo_rlhf.models.passes.recorded_steps import CudaGraphs, RecordedSteps, _NoReading, check_recordable
from tests.tiny_models import KINDS, tiny_model

PROMPTS = [[4, 7, 9, 12, 5], [6], [8, 10, 11], [4, 4], [13]]
LONGEST = 16


class Again:
    """Records a step by keeping it: to replay is to run it again into the same tensor."""

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self, step):
        self.recordings += 1
        for _ in range(2):  # as before a capture: to run a step again must change nothing
            step()
        result = step()
        return lambda: result.copy_(step()), result.fill_(torch.nan)


def tokens_of(step: int, rows: list[int], device="cpu") -> torch.Tensor:
    return torch.tensor([3 + (5 * row + 7 * step) % 20 for row in rows], device=device)


def decode(model, recorded: RecordedSteps | None, prompts=PROMPTS, steps: int = 9) -> list[torch.Tensor]:
    """All logits of a batch in which rows end after steps 2 and 5."""
    device = model.device
    with torch.no_grad(), nullcontext() if recorded is None else recorded.decoding():
        decoder, rows = Decoder(model, prompts, LONGEST, recorded=recorded), list(range(len(prompts)))
        logits = [decoder.prefill().clone()]
        for step in range(steps):
            logits.append(decoder.step(tokens_of(step, rows, device)).clone())
            ending = {2: {1}, 5: {3}}.get(step, set())
            if ending & set(rows):
                rows = [rows[i] for i in decoder.drop([row in ending for row in rows])]
    return logits


def check(found: list[torch.Tensor], expected: list[torch.Tensor], atol: float) -> None:
    assert [logits.shape for logits in found] == [logits.shape for logits in expected]
    for first, second in zip(found, expected, strict=True):
        assert_close(first, second, rtol=0.0, atol=atol)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(decoding, "BUCKET", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_give_the_logits_of_steps_that_are_computed_anew(kind):
    model = tiny_model(kind).double()
    check(decode(model, RecordedSteps(model, Again())), decode(model, None), 1e-10)


def test_a_step_is_recorded_once_for_a_power_of_two_of_rows_and_a_bucket_of_columns():
    model, again = tiny_model().double(), Again()
    recorded = RecordedSteps(model, again)
    decode(model, recorded)
    # 5 rows of at most 6, 7, 8 columns, then 4 of 9, 10, 11, then 3, which are computed as 4, of 12, 13, 14
    assert list(recorded._steps) == [(5, 8), (4, 12), (4, 16)]
    decode(model, recorded)
    assert again.recordings == 3
    decode(model, recorded, PROMPTS[:2], steps=2)
    assert list(recorded._steps)[3:] == [(2, 8)]


def test_a_second_batch_uses_the_same_memory_and_the_weights_as_they_are_then():
    model, again = tiny_model("gpt2").double(), Again()
    recorded = RecordedSteps(model, again)
    first = decode(model, recorded)
    held = [recorded._token_ids, recorded._lengths, *recorded._keys, *recorded._values]
    addresses, recordings = [tensor.data_ptr() for tensor in held], again.recordings
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    second = decode(model, recorded, PROMPTS[::-1])
    check(second, decode(model, None, PROMPTS[::-1]), 1e-10)
    assert not torch.allclose(first[1], second[1])
    held = [recorded._token_ids, recorded._lengths, *recorded._keys, *recorded._values]
    assert [tensor.data_ptr() for tensor in held] == addresses
    assert again.recordings == recordings


def test_what_an_earlier_batch_left_is_not_read_even_if_it_is_not_finite():
    model = tiny_model().double()
    recorded = RecordedSteps(model, Again())
    decode(model, recorded)
    for held in (recorded._keys, recorded._values):
        for tensor in held:
            tensor.fill_(torch.nan)
    check(decode(model, recorded), decode(model, None), 1e-10)


def test_a_larger_batch_or_longer_sequences_make_room_anew_and_a_smaller_batch_fits():
    model, again = tiny_model().double(), Again()
    recorded = RecordedSteps(model, again)
    for prompts in (PROMPTS[:2], PROMPTS, PROMPTS[1:3]):
        check(decode(model, recorded, prompts), decode(model, None, prompts), 1e-10)
    assert recorded._keys[0].shape[:3] == (5, 1, LONGEST)
    with torch.no_grad(), recorded.decoding():
        Decoder(model, PROMPTS[:1], LONGEST + 1, recorded=recorded).prefill()
    assert recorded._keys[0].shape[:3] == (5, 1, LONGEST + 4)
    assert not recorded._steps


def test_weights_that_lie_elsewhere_are_recorded_anew():
    model, again = tiny_model().double(), Again()
    recorded = RecordedSteps(model, again)
    decode(model, recorded)
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    before = again.recordings
    check(decode(model, recorded), decode(model, None), 1e-10)
    assert again.recordings == 2 * before


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "with an adapter"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_under_autocast_logits_are_equal_but_for_rounding_also_after_the_weights_changed(kind, adapted):
    model, again = tiny_model(kind), Again()
    if adapted:
        model = with_adapter(model, LoraSettings(2, 4, "all-linear+head"), torch.Generator().manual_seed(1))
    recorded = RecordedSteps(model, again)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = decode(model, recorded), decode(model, None)
        check(found, expected, 0.03)  # logits of up to 5, in steps of 1/32 or less; in float32 they are off by 0.05
        assert max(float((a - b).abs().max()) for a, b in zip(expected, decode(model, None), strict=True)) > 0.04
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05)
    assert again.recordings == 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_with_another_precision_steps_are_recorded_anew():
    model = tiny_model("gpt2")
    recorded = RecordedSteps(model, Again())
    with torch.autocast("cpu", torch.bfloat16):
        decode(model, recorded)
    check(decode(model, recorded), decode(model, None), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_nothing_of_the_device(kind):
    model = tiny_model(kind)

    def record(step):
        with _NoReading("a step"):
            result = step()
        return lambda: None, result

    with torch.autocast("cpu", torch.bfloat16):
        check(decode(model, RecordedSteps(model, record), steps=1), decode(model, None, steps=1), 0.03)


def test_models_that_need_padding_are_refused():
    model = tiny_model("llama", num_hidden_layers=2)
    model.config.sliding_window = 4
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be decoded without padding"):
        RecordedSteps(model, Again())


@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_forward_pass_reads_nothing_of_the_device_can_be_recorded(kind):
    check_recordable(tiny_model(kind, pad_token_id=0))


def test_experts_are_refused_since_their_products_read_the_sizes_of_groups():
    config = MixtralConfig(
        vocab_size=25,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        sliding_window=None,
    )
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=r"MixtralForCausalLM reads from the device \("):
        check_recordable(MixtralForCausalLM(config).eval())


def test_models_whose_forward_pass_picks_by_a_mask_are_refused(monkeypatch):
    model = tiny_model()
    norm = model.model.norm.forward
    monkeypatch.setattr(
        model.model.norm, "forward", lambda states: norm(states[torch.ones(states.shape[:2]) > 0][None])
    )
    with pytest.raises(ModelError, match=r"LlamaForCausalLM reads from the device \(index\)"):
        check_recordable(model)


def test_models_whose_forward_pass_reads_from_the_device_are_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match=r"LlamaForCausalLM reads from the device \(_local_scalar_dense\)"):
        check_recordable(tiny_model("llama", rope_parameters=scaling))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_captured_steps_give_the_logits_of_steps_that_are_computed_anew_on_a_gpu(kind):
    model = tiny_model(kind).double().cuda()
    recorded = RecordedSteps(model, CudaGraphs(model.device))
    for _ in range(2):
        check(decode(model, recorded), decode(model, None), 1e-10)
        check(decode(model, recorded, PROMPTS[::-1]), decode(model, None, PROMPTS[::-1]), 1e-10)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_captured_steps_under_autocast_are_equal_but_for_rounding_on_a_gpu(kind):
    model = tiny_model(kind).cuda()
    recorded = RecordedSteps(model, CudaGraphs(model.device))
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            check(decode(model, recorded), decode(model, None), 0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_host_waits_for_nothing_in_a_captured_step(kind):
    model = tiny_model(kind).cuda()
    recorded = RecordedSteps(model, CudaGraphs(model.device))
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad(), recorded.decoding():
        decoder = Decoder(model, PROMPTS, LONGEST, recorded=recorded)
        decoder.prefill()
        tokens = tokens_of(0, list(range(len(PROMPTS))), "cuda")
        decoder.step(tokens)
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder.step(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
