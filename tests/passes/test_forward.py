"""Hidden states and logits without padding, against the model's own forward pass on one sequence at a time."""

import copy
import logging

import pytest
import torch
import transformers
from packaging.version import Version
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPT2ForSequenceClassification,
    GraniteConfig,
    MistralConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
    RobertaConfig,
)

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.reward_model import sequence_scores
from ppo_rlhf.passes import packed_attention
from ppo_rlhf.passes.forward import hidden_states, logits_of, packs
from ppo_rlhf.passes.packed_attention import NAME, PackedLayout, SharedLayout, place_rows, take_rows
from ppo_rlhf.passes.prefixes import shared_prefix
from ppo_rlhf.passes.token_rows import common_size, filled_size, right_padded
from tests.tiny_models import KINDS, MAMBA, composite_config, tiny_model

SEQUENCES = [[4, 7, 9, 12, 5], [6], [8, 10, 11], [3, 13, 14, 15, 16, 17, 18]]
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 25}
WIDER = {**LAYERS, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FULL = ["full_attention", "full_attention"]
ARCHITECTURES = {  # and whether they pack
    "llama": (None, True),
    "gpt2": (None, True),
    "bitnet": (None, True),
    "opt": (OPTConfig(**LAYERS, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, max_position_embeddings=32), True),
    "qwen2 with a window that no layer has": (
        Qwen2Config(**WIDER, **ENDS, use_sliding_window=True, sliding_window=3, max_window_layers=2),
        True,
    ),
    "granite, which scales its logits": (GraniteConfig(**WIDER, **ENDS, logits_scaling=3.0), True),
    "mistral with a window": (MistralConfig(**WIDER, **ENDS, sliding_window=3), False),
    "gemma2, which caps and has windows": (Gemma2Config(**WIDER, **ENDS, head_dim=4), False),
    "bloom, which has no positions": (BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=25), False),
}
WITH_ATTENTION_OF_THEIR_OWN = [
    BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=25),
    OpenAIGPTConfig(vocab_size=25, n_embd=16, n_layer=2, n_head=2, n_positions=32),
]
DISTURBED_BY_PADDING = [
    RobertaConfig(**LAYERS, intermediate_size=24, pad_token_id=1, is_decoder=True),  # positions begin after that id
    RecurrentGemmaConfig(**{**WIDER, **ENDS, "num_hidden_layers": 3}, head_dim=4, lru_width=16),  # convolves padding
]


def of_config(config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.double()


def architecture(name: str) -> tuple[torch.nn.Module, bool]:
    config, can = ARCHITECTURES[name]
    return (tiny_model(name).double() if config is None else of_config(config)), can


def composite(*layer_types: str) -> torch.nn.Module:
    return of_config(composite_config(**WIDER, **ENDS, head_dim=4, sliding_window=8, layer_types=list(layer_types)))


def one_by_one(backbone, sequences=SEQUENCES) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([backbone(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in sequences])


# --- hidden states and logits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_and_logits_are_those_of_single_sequences_whether_a_model_packs_or_not(name):
    model, can = architecture(name)
    if model.config._attn_implementation == "eager":  # its masks are not finite in float64
        model = model.float()
    assert packs(model.base_model) is can
    with torch.no_grad():
        states = hidden_states(model.base_model, right_padded(SEQUENCES, 0))
        logits = logits_of(model)(states)
        expected = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in SEQUENCES])
    assert_close(states, one_by_one(model.base_model), rtol=1e-5, atol=1e-5)  # a Llama's norm is float32
    assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_after_a_shared_prefix_are_those_of_single_sequences_whether_a_model_packs_or_not(name):
    """A model with windows or caps keeps the padded pass of whole rows."""
    model, can = architecture(name)
    if model.config._attn_implementation == "eager":
        model = model.float()
    backbone, shapes = model.base_model, []
    sequences = [[*range(3, 13), *ids] for ids in SEQUENCES] + [[9, 8, 7]]
    rows = right_padded(sequences, 0, prefix=shared_prefix(sequences))
    assert packs(backbone) is can
    backbone.get_input_embeddings().register_forward_pre_hook(lambda _, ids: shapes.append(tuple(ids[0].shape)))
    with torch.no_grad():
        states, places = hidden_states(backbone, rows), rows.places()
    assert shapes == [(1, 10 + 16 + 3) if can else (5, 17)]
    found = torch.cat([states[places[row, : len(ids)]] for row, ids in enumerate(sequences)])
    assert_close(found, one_by_one(backbone, sequences), rtol=1e-5, atol=1e-5)  # a Llama's norm is float32


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_packed_states_are_those_of_single_sequences(kind):
    found, expected = tiny_model(kind).double(), tiny_model(kind).double()
    hidden_states(found.base_model, right_padded(SEQUENCES, 0)).square().sum().backward()
    for ids in SEQUENCES:
        expected.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state.square().sum().backward()
    for (name, ours), theirs in zip(found.base_model.named_parameters(), expected.base_model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_sixteen_bit_attention_is_that_of_float32_up_to_rounding():
    """Also if rotary positions turn queries and keys into float32 under autocast."""
    backbone = tiny_model("llama").base_model
    with torch.no_grad():
        expected = hidden_states(backbone, right_padded(SEQUENCES, 0))
        with torch.autocast("cpu", torch.bfloat16):
            found = hidden_states(backbone, right_padded(SEQUENCES, 0))
    assert 0.0 < (found.float() - expected).norm() <= 0.05 * expected.norm()


# --- probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "can"),
    [
        (lambda: composite("sliding_attention", "full_attention"), False),
        (lambda: composite(*FULL), True),
        # its masks have the window although its configuration denies it
        (lambda: of_config(MistralConfig(**WIDER, **ENDS, sliding_window=8, layer_types=FULL)), False),
    ],
    ids=["within a composite configuration", "in no layer", "denied by the configuration"],
)
def test_a_window_longer_than_the_probe_is_found(make, can):
    backbone, longer = make().base_model, [[*range(3, 20)], [4, 5, 6], [*range(5, 18)]]
    assert packs(backbone) is can
    with torch.no_grad():
        found = hidden_states(backbone, right_padded(longer, 0))
    assert_close(found, one_by_one(backbone, longer), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("config", WITH_ATTENTION_OF_THEIR_OWN, ids=lambda config: config.model_type)
def test_a_model_that_reads_the_sequence_before_does_not_pack_even_with_the_small_weights_of_a_new_model(config):
    torch.manual_seed(0)
    assert not packs(AutoModelForCausalLM.from_config(config).eval().base_model)


def test_a_probe_leaves_neither_hooks_nor_gradients():
    backbone = tiny_model("llama").base_model.requires_grad_(True)
    assert packs(backbone)
    assert not backbone.get_input_embeddings()._forward_hooks
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_the_probe_of_padding_holds_one_gradient_at_a_time_and_none_of_the_embedding():
    backbone = tiny_model("llama", pad_token_id=0).base_model
    backbone.set_attn_implementation("eager")
    held = []

    def count(_: object) -> None:
        held.append([name for name, weight in backbone.named_parameters() if weight.grad is not None])

    for weight in backbone.parameters():
        weight.register_post_accumulate_grad_hook(count)
    assert not packs(backbone)
    names = {name for name, _ in backbone.named_parameters()} - {"embed_tokens.weight"}
    assert sorted(name for (name,) in held) == sorted(names)
    assert all(weight.grad is None for weight in backbone.parameters())


@pytest.mark.parametrize("config", DISTURBED_BY_PADDING, ids=lambda config: config.model_type)
def test_a_model_whose_states_padding_changes_is_refused(config):
    backbone = of_config(config).base_model
    with pytest.raises(ModelError, match=f"{type(backbone).__name__} .*padding"):
        packs(backbone)


def test_a_model_whose_gradients_beside_padding_are_not_finite_is_refused():
    model, seen = tiny_model("llama", pad_token_id=0), []

    def spoil(_module, arguments) -> None:
        if arguments[0].requires_grad:
            is_padding = (seen[-1] == 0)[..., None]
            arguments[0].register_hook(lambda gradient: gradient.masked_fill(is_padding, torch.nan))

    model.get_input_embeddings().register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model.model.layers[1].register_forward_pre_hook(spoil)
    assert packs(model.base_model)  # packed attention has no padding that could spoil gradients
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match=r"LlamaModel .*gradients"):
        packs(copy.deepcopy(model).base_model)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="these masks are finite in float64")
def test_float64_is_refused_where_transformers_masks_are_not_finite_in_it():
    with pytest.raises(ModelError, match=r"ppo\.dtype=float32"):
        packs(architecture("gemma2, which caps and has windows")[0].base_model)


def test_scaled_logits_have_the_gradient_of_the_models_own():
    model, _ = architecture("granite, which scales its logits")
    states = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    logits_of(model)(states)[:, 4].sum().backward()
    assert_close(states.grad, (model.lm_head.weight[4] / 3.0).expand(3, 16).detach(), rtol=0.0, atol=1e-12)


def test_logits_are_the_models_where_its_states_have_more_bits_than_its_weights():
    model = AutoModelForCausalLM.from_config(MAMBA).to(torch.bfloat16).eval()
    ids = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        states = model.base_model(ids).last_hidden_state
        assert states.dtype == torch.float32
        assert torch.equal(logits_of(model)(states[0]), model(ids).logits[0])


def test_a_model_whose_logits_do_not_come_from_its_states_is_refused():
    model = tiny_model()
    model.forward = lambda *_, **__: type("Output", (), {"logits": torch.randn(1, 4, 25)})
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: .*logits"):
        logits_of(model)


# --- a model that packs is still the user's model --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_packs_computes_generates_and_is_saved_as_before(tmp_path, kind):
    untouched, model, ids = tiny_model(kind), tiny_model(kind), torch.tensor([[4, 7, 9, 12]])
    assert packs(model.base_model)
    padded = {"input_ids": torch.tensor([[0, 0, 6, 8], [4, 7, 9, 12]]), "attention_mask": torch.ones(2, 4).long()}
    padded["attention_mask"][0, :2] = 0
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model(ids).logits, untouched(ids).logits)
    assert model.generate(**padded, **greedy).tolist() == untouched.generate(**padded, **greedy).tolist()
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, untouched(ids).logits)
    assert packs(loaded.base_model)


def test_a_copy_of_a_model_that_packs_packs_too_with_its_own_weights():
    model, rows = tiny_model(), right_padded(SEQUENCES, 0)
    assert packs(model.base_model)
    copied = copy.deepcopy(model)
    assert packs(copied.base_model)
    with torch.no_grad():
        before = hidden_states(copied.base_model, rows)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        assert torch.equal(hidden_states(copied.base_model, rows), before)
        assert not torch.allclose(hidden_states(model.base_model, rows), before)


def test_a_model_with_another_attention_keeps_it_and_is_padded():
    model = tiny_model()
    model.set_attn_implementation("eager")
    assert not packs(model.base_model)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        found = hidden_states(model.base_model, right_padded(SEQUENCES, 0))
    assert_close(found, one_by_one(model.base_model), rtol=1e-5, atol=1e-5)


# --- the packed layout -----------------------------------------------------------------------------------------------


def worked_out(query, key, value, lengths, scaling: float) -> torch.Tensor:
    """Return the attention of `[N, H, d]` to `[N, K, d]`, one token and one head after the other."""
    groups, rows, start = query.shape[1] // key.shape[1], [], 0
    for length in lengths:
        for i in range(start, start + length):
            heads = []
            for head in range(query.shape[1]):
                seen = slice(start, i + 1)
                weights = torch.softmax(key[seen, head // groups] @ query[i, head] * scaling, -1)
                heads.append(weights @ value[seen, head // groups])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [(5, 1, 3), (4, 4)], ids=["uneven", "even"])
def test_attention_within_sequences_is_that_worked_out_token_by_token(lengths):
    """Four heads share two keys, and values are narrower than keys."""
    generator, tokens = torch.Generator().manual_seed(1), sum(lengths)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 6))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    found = PackedLayout.of(lengths).attend(query, key, value, 0.3)
    assert_close(found, worked_out(query, key, value, lengths, 0.3), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(("own", "whole"), [((2, 1, 3), (4, 1)), ((2, 2), ())], ids=["uneven", "even"])
def test_attention_to_a_shared_prefix_is_that_of_whole_sequences_worked_out_token_by_token(own, whole):
    """Two own tokens after a prefix of three: in the packed row the own tokens are first."""
    generator, tokens = torch.Generator().manual_seed(1), sum(own) + 3 + sum(whole)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 6))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    prefix, first, pieces = [*range(sum(own), sum(own) + 3)], 0, []
    for length in own:
        pieces.append([*prefix, *range(first, first + length)])
        first += length
    places = [place for piece in pieces for place in piece] + [*range(sum(own) + 3, tokens)]
    lengths = [*map(len, pieces), *whole]
    once = [places.index(place) for place in range(tokens)]
    expected = worked_out(*(x[places] for x in given), lengths, 0.3)[once]
    found = SharedLayout.of(3, own, whole).attend(*given, 0.3)
    assert_close(found, expected, rtol=0.0, atol=1e-12)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    oracle = torch.autograd.grad((expected * weights).sum(), given)
    for ours, theirs in zip(torch.autograd.grad((found * weights).sum(), given), oracle, strict=True):
        assert_close(ours, theirs, rtol=0.0, atol=1e-12)


def test_a_layout_spreads_and_collects_again_and_the_padding_gets_no_gradient():
    layout, tokens = PackedLayout.of([1, 3, 2]), torch.arange(1.0, 7.0)[:, None].requires_grad_()
    spread = layout.spread(tokens)
    assert spread[:, :, 0].tolist() == [[1, 1, 1], [2, 3, 4], [5, 6, 1]]
    assert torch.equal(layout.collect(spread), tokens)
    (spread * torch.arange(9.0).view(3, 3, 1)).sum().backward()
    assert tokens.grad[:, 0].tolist() == [0.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("lengths", [(5, 3), (1,), (64,), (40, 30, 70), (1500, 700)], ids=str)
def test_filled_rows_have_one_of_few_sizes_and_no_longer_sequence(lengths):
    rows = right_padded([[7] * length for length in lengths], 0, fill=True)
    size, tokens = rows.packed_ids.shape[1], sum(lengths)
    found = tuple(rows.layout.starts.diff().tolist())
    assert size == filled_size(tokens) == sum(found)
    assert size % 64 == 0
    assert size - tokens < max(64, tokens / 16)
    assert found[: len(lengths)] == lengths
    assert rows.layout.shape == (len(found), max(lengths))
    assert int(rows.packed_positions.max()) == max(lengths) - 1
    assert rows.slots.shape == (tokens,)
    assert len({filled_size(count) for count in range(1, 4097)}) == 16 + 16 * 2


@pytest.mark.parametrize("multiple", [1, 16, 64])
def test_common_sizes_are_few_and_near(multiple):
    for octave in range(14):
        counts = range(2**octave, 2 ** (octave + 1))
        sizes = [common_size(count, multiple) for count in counts]
        assert len(set(sizes)) <= 16 + 1  # the last one is the next power of 2
        assert all(
            count <= size < count + max(multiple, count / 16) + 1 and size % multiple == 0
            for count, size in zip(counts, sizes, strict=True)
        )


def test_rows_are_placed_and_taken_with_their_gradients():
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    placed = place_rows(rows, torch.tensor([3, 0, 4]), 5)
    assert placed.tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [4.0, 5.0]]
    (placed * torch.arange(10.0).view(5, 2)).sum().backward()
    assert rows.grad.tolist() == [[6.0, 7.0], [0.0, 1.0], [8.0, 9.0]]
    rows.grad = None
    place_rows(rows, torch.tensor([1, 0]), 2).sum().backward()  # the last row is not placed
    assert rows.grad.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    table = torch.arange(8.0).view(4, 2).requires_grad_()
    taken = take_rows(table, torch.tensor([2, 0]))
    assert taken.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    (taken * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert table.grad.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("option", [{"sliding_window": 8}, {"softcap": 3.0}, {"is_causal": False}], ids=str)
def test_attention_other_than_plain_causal_is_refused(option):
    states = torch.randn(1, 2, 3, 4)
    given = (torch.nn.Module(), states, states, states, None)
    layout = PackedLayout.of([3])
    assert packed_attention._attend(*given, packed_layout=layout, scaling=None)[0].shape == (1, 3, 2, 4)
    with pytest.raises(NotImplementedError):
        packed_attention._attend(*given, packed_layout=layout, scaling=None, **option)


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, 18])
def test_a_classifier_scores_as_its_own_forward_does_wherever_its_pad_token_stands(pad):
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=25, num_labels=1, pad_token_id=pad)
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config).eval().double()
    sequences = [[3, 4, 18], [18, 18], [7, 0, 9, 0, 0], [5]]
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])
        assert_close(sequence_scores(model, sequences, pad), expected, rtol=0.0, atol=1e-10)


def test_that_a_model_needs_padding_is_said_once_with_its_name_however_often_it_is_loaded(caplog):
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        for path in ("models/of_a_test", "models/of_a_test", "models/other_of_a_test", "models/of_a_test"):
            model = AutoModelForCausalLM.from_config(MistralConfig(**WIDER, **ENDS, sliding_window=3))
            model.config._name_or_path = path
            assert not packs(model.base_model)
    assert caplog.messages == [
        "models/of_a_test (MistralModel) needs padding: its forward passes compute padding, too.",
        "models/other_of_a_test (MistralModel) needs padding: its forward passes compute padding, too.",
    ]
