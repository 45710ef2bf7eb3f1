"""Batches of prompts and responses, and their log-probabilities against one unpadded row at a time, in plain torch."""

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, GraniteConfig, GraniteForCausalLM

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.passes import response_logprobs as module
from ppo_rlhf.passes.forward import backbone_of, hidden_states_at
from ppo_rlhf.passes.response_logprobs import response_statistics
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.passes.sequences import make_batch
from ppo_rlhf.ppo.forward_passes import compute_logprobs

PROMPTS = [[3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15, 16, 17]]
LENGTHS = [6, 1, 4, 6, 2]  # 19 tokens
KINDS = ["gpt2", "llama", "bitnet"]

# --- batches, worked by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0, 7], ids=["pad id", "pad id that is a token, too"])
def test_responses_follow_their_prompts_and_rows_are_padded_to_the_longest(p):
    given = torch.tensor([[1, 2, 50, 50, 50], [3, 50, 50, 50, 50], [7, 7, 7, 50, 50]])  # 50: to be ignored
    batch = make_batch([[4], [5, 6], [7, 7, 7]], given, torch.tensor([2, 1, 3]), p)
    assert batch.rows.input_ids.tolist() == [[4, 1, 2, p, p, p], [5, 6, 3, p, p, p], [7, 7, 7, 7, 7, 7]]
    assert batch.rows.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert batch.rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert batch.rows.packed_ids.tolist() == [[4, 1, 2, 5, 6, 3, 7, 7, 7, 7, 7, 7]]
    assert batch.shape == (3, 3)
    # states: a prompt's last token, then its response; the packed row is 4 1 2 | 5 6 3 | 7 7 7 7 7 7
    assert batch.state_positions.tolist() == [0, 1, 2, 4, 5, 8, 9, 10, 11]
    assert batch.predicting.tolist() == [0, 1, 3, 5, 6, 7]
    assert batch.targets.tolist() == [1, 2, 3, 7, 7, 7]
    assert batch.scatter_responses(torch.arange(1.0, 7.0)).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert batch.scatter_states(torch.arange(1.0, 10.0)).tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert given[1].tolist() == [3, 50, 50, 50, 50]


GEMMA_3N = Gemma3nTextConfig(
    **{"vocab_size": 25, "vocab_size_per_layer_input": 25, "hidden_size": 16, "hidden_size_per_layer_input": 4},
    **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 24},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_kv_shared_layers": 0, "laurel_rank": 4},
    **{"activation_sparsity_pattern": [0.0, 0.0], "max_position_embeddings": 64, "pad_token_id": 2},
)


def test_gradients_of_gemma_3n_are_finite_for_prompts_of_unequal_length():
    """Its embedding of padding is 0, and it takes the root of the square of that: the gradient there is not finite."""
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(GEMMA_3N)
    batch = make_batch(PROMPTS, responses(0), torch.tensor(LENGTHS), 2)
    states = hidden_states_at(backbone_of(model), batch.rows, batch.state_positions)
    response_statistics(model, batch, states, 1.0)[0].sum().backward()
    assert model.model.embed_tokens.weight.grad.any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


GRANITE = GraniteConfig(
    **{"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "logits_scaling": 3.0},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0},
)

# --- log-probabilities -----------------------------------------------------------------------------------------------


def responses(garbage: int) -> torch.Tensor:
    rows = [[3 + (7 * row + 2 * t) % 20 for t in range(length)] for row, length in enumerate(LENGTHS)]
    return torch.tensor([row + [garbage] * (6 - len(row)) for row in rows])


def logprobs(model, temperature: float = 1.0, batch_size: int = 5, garbage: int = 0, pad_token_id: int = 0):
    given = Responses(responses(garbage), torch.tensor(LENGTHS), torch.ones(len(LENGTHS), dtype=torch.bool))
    sizes = {"device": model.device, "batch_size": batch_size, "pad_token_id": pad_token_id}
    return compute_logprobs(model, PROMPTS, given, PPOConfig(), temperature=temperature, **sizes)


def statistics(model, batch, temperature: float = 1.0, **options):
    states = hidden_states_at(backbone_of(model), batch.rows, batch.state_positions)
    return response_statistics(model, batch, states, temperature, **options)


@pytest.fixture
def batch():
    return make_batch(PROMPTS, responses(0), torch.tensor(LENGTHS), 0)


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


@pytest.mark.parametrize(("batch_size", "temperature"), [(1, 0.7), (2, 2.0), (64, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_single_unpadded_rows_whatever_the_batch_size(make_model, kind, batch_size, temperature):
    model = make_model(kind)
    actual = logprobs(model, temperature, batch_size)
    assert (actual.dtype, actual.requires_grad) == (torch.float64, False)
    assert_close(actual, one_row_at_a_time(model, temperature), rtol=0.0, atol=1e-10)


def test_padding_is_zero_and_neither_its_id_nor_its_token_matters(make_model):
    model = make_model("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[1] = 1e4  # token 1 occurs in padding only: were it read, all would change
    plain = logprobs(model)
    assert not plain[torch.arange(6) >= torch.tensor(LENGTHS)[:, None]].any()
    assert torch.equal(plain, logprobs(model, garbage=22, pad_token_id=1))


def test_half_precision_logits_are_widened(make_model, batch):
    model = make_model(dtype=torch.bfloat16)
    assert statistics(model, batch)[0].dtype == torch.float32
    assert logprobs(model).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "with_entropy", "with_kl"),
    [
        ("gpt2", False, False),
        ("gpt2", True, False),
        ("gpt2", True, True),
        ("gpt2", False, True),
        ("granite", True, True),
    ],
)
def test_logits_in_chunks_give_the_values_and_gradients_of_all_at_once(
    make_model, monkeypatch, batch, kind, with_entropy, with_kl
):
    """Granite scales its logits: its head is no plain linear layer."""
    actual, reference = [], make_model("llama", seed=3) if with_kl else None
    for held in (2**24, 3 * 23):  # all 19 tokens at once, 3 at a time
        monkeypatch.setattr(module, "logits_held", lambda _, held=held: held)
        torch.manual_seed(0)
        model = make_model("gpt2") if kind == "gpt2" else GraniteForCausalLM(GRANITE).double()
        tables = statistics(model, batch, 0.7, with_entropy=with_entropy, reference=reference)
        assert [table is not None for table in tables] == [True, with_entropy, with_kl]
        given = [table for table in tables if table is not None]
        sum(table.square().sum() for table in given).backward()
        actual.append((given, [p.grad for p in model.parameters()]))
    whole, chunked = actual
    for ours, theirs in zip(chunked[0], whole[0], strict=True):
        assert_close(ours, theirs, rtol=0.0, atol=1e-12)
    assert reference is None or all(p.grad is None for p in reference.parameters())
    for ours, theirs in zip(chunked[1], whole[1], strict=True):
        assert_close(ours, theirs, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_over_the_vocabulary_is_that_of_single_unpadded_rows(make_model, batch, kind):
    model, reference = make_model(kind), make_model(kind, seed=5)
    actual = statistics(model, batch, 0.7, reference=reference)[2]
    expected = torch.zeros(len(PROMPTS), 6, dtype=torch.float64)
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        ids = torch.tensor([prompt + responses(0)[row, :length].tolist()])
        with torch.no_grad():
            log_p, log_q = (
                torch.log_softmax(m(ids, use_cache=False).logits[0].double() / 0.7, dim=-1) for m in (model, reference)
            )
        of_all = (log_p.exp() * (log_p - log_q)).sum(-1)
        expected[row, :length] = of_all[len(prompt) - 1 : -1]
    assert_close(actual.detach(), expected, rtol=0.0, atol=1e-10)
    assert float(expected.max()) > 0.1


def test_logits_are_computed_only_for_response_tokens_and_no_more_are_held_than_the_limit(
    make_model, monkeypatch, batch
):
    model, sizes = make_model("gpt2"), []
    statistics(model, batch)  # the model is probed at the first call

    def shapes_of(logprobs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda logits, *others: sizes.append(tuple(logits.shape[1:])) or logprobs(logits, *others)

    monkeypatch.setattr(module, "token_logprobs", shapes_of(module.token_logprobs))
    statistics(model, batch)
    assert sizes == [(19, 23)]
    sizes.clear()
    monkeypatch.setattr(module, "logits_held", lambda _: 4 * 23)
    statistics(model, batch)[0].sum().backward()
    assert sorted(sizes) == [(3, 23)] * 2 + [(4, 23)] * 8  # 5 chunks; the backward pass computes them again
