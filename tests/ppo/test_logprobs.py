"""Log-probabilities of responses against one unpadded row at a time, in plain torch."""

import pytest
import torch
from ppo_rlhf.models.products import compiled_shapes
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo import logprobs as scoring
from ppo_rlhf.ppo.accelerator import autocast
from ppo_rlhf.ppo.batch import make_batch
from ppo_rlhf.ppo.logprobs import response_logprobs, response_statistics, scatter_rows

PROMPTS = [[3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15, 16, 17]]
LENGTHS = [6, 1, 4, 6, 2]
KINDS = ["gpt2", "llama", "bitnet"]


def responses(garbage: int) -> torch.Tensor:
    rows = [[3 + (7 * row + 2 * t) % 20 for t in range(length)] for row, length in enumerate(LENGTHS)]
    return torch.tensor([row + [garbage] * (6 - len(row)) for row in rows])


def one_row_at_a_time(model, temperature: float) -> torch.Tensor:
    """log softmax of the tempered logits at the position before each response token; no padding, no mask, no cache."""
    expected = torch.zeros(len(PROMPTS), 6, dtype=torch.float64)
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        tokens = prompt + responses(0)[row, :length].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0].double()
        table = torch.log_softmax(logits / temperature, dim=-1)
        for t in range(length):
            position = len(prompt) + t
            expected[row, t] = table[position - 1, tokens[position]]
    return expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_logprobs_equal_those_of_single_unpadded_rows_whatever_the_batch_size(make_model, kind, batch_size):
    model = make_model(kind)
    found = response_logprobs(model, PROMPTS, responses(0), torch.tensor(LENGTHS), 0.7, batch_size)
    assert found.dtype == torch.float64
    assert_close(found, one_row_at_a_time(model, 0.7), rtol=0.0, atol=1e-10)


def test_temperature_divides_the_logits(make_model):
    model = make_model("llama")
    for temperature in (0.5, 1.0, 2.0):
        found = response_logprobs(model, PROMPTS, responses(0), torch.tensor(LENGTHS), temperature, 3)
        assert_close(found, one_row_at_a_time(model, temperature), rtol=0.0, atol=1e-10)


def test_padding_is_zero_and_neither_its_id_nor_what_stood_there_matters(make_model):
    model = make_model("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[1] = 1e4  # token 1 occurs in padding only: were it read, all would change
    lengths = torch.tensor(LENGTHS)
    plain = response_logprobs(model, PROMPTS, responses(0), lengths, 1.0, 5, pad_token_id=0)
    poisoned = response_logprobs(model, PROMPTS, responses(22), lengths, 1.0, 5, pad_token_id=1)
    is_padding = torch.arange(6) >= lengths[:, None]
    assert torch.equal(plain[is_padding], torch.zeros(int(is_padding.sum()), dtype=torch.float64))
    # the tied output layer sees token 1 as well, the same in both
    assert torch.equal(plain, poisoned)


def test_a_float32_model_gives_float32_without_gradient(make_model):
    found = response_logprobs(make_model(dtype=torch.float32), PROMPTS, responses(0), torch.tensor(LENGTHS), 1.0, 5)
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_half_precision_logits_are_widened(make_model):
    model = make_model(dtype=torch.bfloat16)
    packed = make_batch(PROMPTS[:2], responses(0)[:2], torch.tensor(LENGTHS[:2]), 0)
    assert response_statistics(model, packed, 1.0).logprobs.dtype == torch.float32
    assert response_logprobs(model, PROMPTS, responses(0), torch.tensor(LENGTHS), 1.0, 5).dtype == torch.float32


def test_scattered_rows_land_in_their_rows_and_first_columns():
    target = torch.full((3, 4), -1.0)
    scatter_rows(target, [2, 0], torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    assert target.tolist() == [[3.0, 4.0, -1.0, -1.0], [-1.0] * 4, [1.0, 2.0, -1.0, -1.0]]


@pytest.mark.parametrize("options", [{}, {"with_entropy": True}], ids=["log-probabilities", "with entropy"])
def test_logits_in_chunks_give_the_same_values_and_gradients_as_all_at_once(make_model, monkeypatch, options):
    found = []
    for held in (2**24, 3 * 23, 23):  # all 19 tokens at once, 3 at a time, 1 at a time
        monkeypatch.setattr(scoring, "LOGITS_HELD", held)
        model = make_model("gpt2")
        packed = make_batch(PROMPTS, responses(0), torch.tensor(LENGTHS), 0)
        statistics = response_statistics(model, packed, 0.7, **options)
        entropy = 0.0 if statistics.entropy is None else statistics.entropy.square().sum()
        (statistics.logprobs.square().sum() + entropy).backward()
        found.append((statistics, [p.grad for p in model.parameters()]))
    for statistics, gradients in found[1:]:
        assert_close(statistics.logprobs, found[0][0].logprobs, rtol=0.0, atol=1e-12)
        for chunked, whole in zip(gradients, found[0][1], strict=True):
            assert_close(chunked, whole, rtol=0.0, atol=1e-10)


def test_of_many_tokens_no_more_logits_are_held_than_the_limit(make_model, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_HELD", 4 * 23)
    monkeypatch.setattr(compiled_shapes, "lacks_fast_instructions", lambda _: False)
    model, sizes = make_model("gpt2"), []
    packed = make_batch(PROMPTS, responses(0), torch.tensor(LENGTHS), 0)
    response_statistics(model, packed, 1.0)  # the first time it asks the model what it can
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: sizes.append(logits.shape))
    response_statistics(model, packed, 1.0).logprobs.sum().backward()
    assert sorted(sizes) == [(3, 23)] * 2 + [(4, 23)] * 8  # 5 chunks; the backward pass computes them again
    sizes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        response_statistics(model.float(), packed, 1.0)
    assert sizes == [(4, 23)] * 5  # the last one filled up: each number of tokens is compiled here
    sizes.clear()
    monkeypatch.setattr(scoring, "LOGITS_HELD", 18 * 23)
    with torch.autocast("cpu", torch.bfloat16):
        response_statistics(model, packed, 1.0)
    assert sizes == [(18, 23), (16, 23)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_the_heads_chunks_add_up_in_float32_under_autocast(monkeypatch, dtype):
    """With autocast's cache all chunks would share one copy of the weight, and add up in its type."""
    generator = torch.Generator().manual_seed(0)
    states, targets = torch.randn(64, 8, generator=generator), torch.randint(31, (64,), generator=generator)
    head = torch.nn.Linear(8, 31, bias=False)

    def gradient() -> torch.Tensor:
        head.weight.grad = None
        with autocast(PPOConfig(dtype=dtype), torch.device("cpu"), keeps_copies=False):
            logprobs, _ = scoring.token_statistics(head, states, targets, 1.0, 31)
        logprobs.sum().backward()
        return head.weight.grad

    monkeypatch.setattr(scoring, "LOGITS_HELD", 8 * 31)
    found = gradient()
    of_chunks = []
    monkeypatch.setattr(scoring, "LOGITS_HELD", 2**24)
    for start in range(0, 64, 8):
        chunk = slice(start, start + 8)
        head.weight.grad = None
        with autocast(PPOConfig(dtype=dtype), torch.device("cpu"), keeps_copies=False):
            logprobs, _ = scoring.token_statistics(head, states[chunk], targets[chunk], 1.0, 31)
        logprobs.sum().backward()
        of_chunks.append(head.weight.grad)
    assert_close(found, torch.stack(of_chunks).sum(0), rtol=0.0, atol=1e-5)


def test_logits_are_computed_for_response_positions_alone(make_model):
    model, rows = make_model("llama"), []
    packed = make_batch(PROMPTS, responses(0), torch.tensor(LENGTHS), 0)
    response_statistics(model, packed, 1.0)
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    response_statistics(model, packed, 1.0)
    assert rows == [19]
