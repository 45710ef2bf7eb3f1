"""States, logits and scores without padding, against the model's own forward pass on one sequence at a time."""

import pytest
import torch
from ppo_rlhf.models.passes.finite_masks import keep_masks_finite
from ppo_rlhf.models.passes.plain_attention import PlainAttention
from ppo_rlhf.models.products import compiled_shapes
from ppo_rlhf.models.products.compiled_shapes import ROUND
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    Gemma2Config,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPTJConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MistralConfig,
    MistralForSequenceClassification,
    OpenAIGPTConfig,
    OPTConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
    RobertaConfig,
)

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models import forward as trunks
from ppo_rlhf.models import packed_attention as packed_attention_module
from ppo_rlhf.models.forward import has_plain_attention, hidden_states, logits_of, packing, packs
from ppo_rlhf.models.packed_attention import NAME, PackedLayout, packed_attention, place_rows, take_rows
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.sequence_scores import sequence_scores
from ppo_rlhf.models.token_rows import right_padded
from tests.tiny_models import KINDS, composite_config, tiny_model

SEQUENCES = [[4, 7, 9, 12, 5], [6], [8, 10, 11], [3, 13, 14, 15, 16, 17, 18]]
WINDOW = 8
"""Tokens: more than models are asked with."""
FULL = ["full_attention", "full_attention"]
BEYOND_THE_WINDOW = [[*range(3, 20)], [4, 5, 6], [*range(5, 18)]]
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 25}
WIDER = {**LAYERS, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
OTHERS = {
    "qwen2": (Qwen2Config(**WIDER, **ENDS), True),
    "opt": (OPTConfig(**LAYERS, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, max_position_embeddings=32), True),
    "qwen2 with a window that no layer has": (
        Qwen2Config(**WIDER, **ENDS, use_sliding_window=True, sliding_window=3, max_window_layers=2),
        True,
    ),
    "mistral without a window": (MistralConfig(**WIDER, **ENDS, sliding_window=None), True),
    "granite": (GraniteConfig(**WIDER, **ENDS, logits_scaling=3.0), True),
    "mistral with a window": (MistralConfig(**WIDER, **ENDS, sliding_window=3), False),
    "gemma2, which caps and has windows": (Gemma2Config(**WIDER, **ENDS, head_dim=4), False),
    "bloom, which has no positions": (BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=25), False),
}


OTHER_BEHIND_PADDING = [
    RobertaConfig(**LAYERS, intermediate_size=24, pad_token_id=1, is_decoder=True),  # positions begin behind that id
    RecurrentGemmaConfig(**{**WIDER, **ENDS, "num_hidden_layers": 3}, head_dim=4, lru_width=16),  # convolves padding
]


OF_THEIR_OWN_ATTENTION = [
    BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=25),
    GPTJConfig(vocab_size=25, n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4),
    CodeGenConfig(vocab_size=25, n_embd=16, n_layer=2, n_head=4, n_positions=32, rotary_dim=4),
    OpenAIGPTConfig(vocab_size=25, n_embd=16, n_layer=2, n_head=2, n_positions=32),
]


def other(name: str) -> tuple[torch.nn.Module, bool]:
    config, can = OTHERS[name]
    return of_config(config), can


def of_config(config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    keep_masks_finite()
    return model.double()


def composite(*layer_types: str) -> torch.nn.Module:
    return of_config(
        composite_config(**WIDER, **ENDS, head_dim=4, sliding_window=WINDOW, layer_types=list(layer_types))
    )


def states_one_by_one(backbone, sequences=SEQUENCES) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([backbone(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in sequences])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_states_are_those_of_each_sequence_alone(kind):
    backbone = tiny_model(kind).base_model.double()
    assert packs(backbone)
    with torch.no_grad():
        found = hidden_states(backbone, right_padded(SEQUENCES, 0))
    assert_close(found, states_one_by_one(backbone), rtol=0.0, atol=1e-6)  # a Llama's norm is float32


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_asked_and_give_the_same_states_and_logits_whether_they_pack_or_not(name):
    model, can = other(name)
    assert packs(model.base_model) is can
    with torch.no_grad():
        states = hidden_states(model.base_model, right_padded(SEQUENCES, 0))
        logits = logits_of(model)(states)
        expected = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in SEQUENCES])
    assert_close(states, states_one_by_one(model.base_model), rtol=0.0, atol=1e-5)
    assert_close(logits, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "can"),
    [
        (lambda: composite("sliding_attention", "full_attention"), False),
        (lambda: composite(*FULL), True),
        # its masks have the window all the same
        (lambda: of_config(MistralConfig(**WIDER, **ENDS, sliding_window=WINDOW, layer_types=FULL)), False),
    ],
    ids=["within a composite configuration", "in no layer of it", "denied by the configuration"],
)
def test_a_window_longer_than_what_a_model_is_asked_with_is_known_all_the_same(make, can):
    backbone = make().base_model
    assert packs(backbone) is can
    with torch.no_grad():
        found = hidden_states(backbone, right_padded(BEYOND_THE_WINDOW, 0))
    assert_close(found, states_one_by_one(backbone, BEYOND_THE_WINDOW), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("config", OF_THEIR_OWN_ATTENTION, ids=lambda config: config.model_type)
def test_what_a_model_reads_of_other_sequences_is_found_before_it_has_learnt_to_read_anything(config):
    """Weights as transformers draws them: what comes before changes a state by less than a hundredth."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert not packs(model.base_model)


def test_asking_a_model_leaves_nothing_behind():
    backbone = tiny_model("llama").base_model.requires_grad_(True)
    assert packs(backbone)
    assert not backbone.get_input_embeddings()._forward_hooks
    assert all(parameter.grad is None for parameter in backbone.parameters())


@pytest.mark.parametrize("config", OTHER_BEHIND_PADDING, ids=lambda config: config.model_type)
def test_a_model_whose_states_behind_padding_are_others_is_refused(config):
    backbone = of_config(config).base_model
    with pytest.raises(ModelError) as caught:
        packs(backbone)
    assert str(caught.value) == (
        f"{type(backbone).__name__} cannot do without padding, and its states behind padding are not those of the "
        "sequence alone: it reads the padding, or counts positions in its own way. It cannot be trained"
    )


def test_the_configuration_within_a_composite_one_says_what_layers_attend_to():
    assert has_plain_attention(composite(*FULL).base_model)
    assert not has_plain_attention(composite("full_attention", "sliding_attention").base_model)


def test_attention_within_a_window_is_refused():
    states = torch.randn(1, 2, 3, 4)

    def attend(window: int | None) -> torch.Tensor:
        layout = PackedLayout.of([3])
        given = {"packed_layout": layout, "scaling": None, "sliding_window": window}
        return packed_attention_module._attend(torch.nn.Module(), states, states, states, None, **given)[0]

    assert attend(None).shape == (1, 3, 2, 4)
    with pytest.raises(NotImplementedError, match=r"asked for: \['sliding_window'\]"):
        attend(WINDOW)


def test_logits_behind_a_scale_have_the_gradient_of_the_models_own():
    model, _ = other("granite")
    states = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    logits_of(model)(states)[:, 4].sum().backward()
    assert_close(states.grad, (model.lm_head.weight[4] / 3.0).expand(3, 16).detach(), rtol=0.0, atol=1e-12)


def test_a_model_that_reads_more_of_its_trunks_output_than_the_states_finds_it():
    shape = {**WIDER, "num_local_experts": 2, "num_experts_per_tok": 1, "logits_scaling": 3.0}
    torch.manual_seed(0)
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**shape, **ENDS)).eval()
    ids = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        states = model.base_model(ids, use_cache=False).last_hidden_state[0]
        found = logits_of(model)(states)
        assert_close(found, model(ids, use_cache=False).logits[0], rtol=0.0, atol=1e-6)


def test_a_model_that_fails_with_given_states_is_refused():
    model = other("granite")[0]
    forward = model.forward

    def needs_ids(*_, **given):
        return forward(input_ids=given["input_ids"], use_cache=False)

    model.forward = needs_ids
    with pytest.raises(ModelError, match="its logits cannot be computed from its last hidden states: KeyError"):
        logits_of(model)


def test_a_model_whose_logits_do_not_come_from_its_states_is_refused():
    model = tiny_model()
    model.forward = lambda *_, **__: type("Output", (), {"logits": torch.randn(1, 4, 25)})
    with pytest.raises(ModelError, match="LlamaForCausalLM: its logits cannot be computed from its last hidden states"):
        logits_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_packed_states_are_those_of_each_sequence_alone(kind):
    found, expected = tiny_model(kind).double(), tiny_model(kind).double()
    with packing(found):
        hidden_states(found.base_model, right_padded(SEQUENCES, 0)).square().sum().backward()
    for ids in SEQUENCES:
        expected.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state.square().sum().backward()
    for (name, ours), theirs in zip(found.base_model.named_parameters(), expected.base_model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_attention_on_a_cpu_is_computed_plainly_and_is_that_of_float32_up_to_rounding(
    monkeypatch, dtype, kind
):
    """Also where rotary positions, which autocast leaves in float32, make queries and keys float32."""
    monkeypatch.setattr(packed_attention_module, "lacks_fast_instructions", lambda _: False)
    backbone, plain, fused = tiny_model(kind).base_model, [], []
    attend, causal = PlainAttention.attend, packed_attention_module.causal_attention
    monkeypatch.setattr(PlainAttention, "attend", lambda *given: plain.append(given[1].dtype) or attend(*given))
    monkeypatch.setattr(packed_attention_module, "causal_attention", lambda *x: fused.append(1) or causal(*x))
    packs(backbone)
    fused.clear()
    with torch.no_grad():
        expected = hidden_states(backbone, right_padded(SEQUENCES, 0))
        assert (len(plain), len(fused)) == (0, 2)
        with torch.autocast("cpu", dtype):
            found = hidden_states(backbone, right_padded(SEQUENCES, 0))
    assert (plain, len(fused)) == ([dtype, dtype], 2)
    assert (found.float() - expected).norm() <= 0.05 * expected.norm()


def test_a_row_is_rounded_up_unless_all_sequences_are_of_one_length():
    rows = right_padded(SEQUENCES, 0).filled
    assert rows.packed_ids.shape == (1, ROUND)
    assert rows.packed_ids[0].tolist() == [token for ids in SEQUENCES for token in ids]  # 16 already
    assert rows.layout.width == ROUND
    longer = right_padded([*SEQUENCES, [19]], 0)
    assert longer.packed_ids.shape == (1, ROUND + 1)
    assert longer.filled.packed_ids.shape == (1, 2 * ROUND)
    assert longer.filled.packed_ids[0, ROUND:].tolist() == [19] * 16  # the last token, again and again
    assert longer.filled.packed_positions[0, ROUND:].tolist() == [0] * 16
    even = right_padded([[4, 5, 6], [7, 8, 9]], 0).filled
    assert even.packed_ids.tolist() == [[4, 5, 6, 7, 8, 9]]
    assert even.layout.is_even


def test_a_row_is_filled_up_only_where_each_number_of_tokens_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled_shapes, "lacks_fast_instructions", lambda _: False)
    backbone, seen, rows = tiny_model().base_model, [], right_padded([*SEQUENCES, [19]], 0)
    assert packs(backbone)
    backbone.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    with torch.no_grad():
        assert len(hidden_states(backbone, rows)) == ROUND + 1
        with torch.autocast("cpu", torch.bfloat16):
            assert len(hidden_states(backbone, rows)) == ROUND + 1
        backbone.bfloat16()
        assert len(hidden_states(backbone, rows)) == ROUND + 1
        monkeypatch.setattr(trunks, "fills_rows", lambda model: model is backbone)
        backbone.float()
        assert len(hidden_states(backbone, rows)) == ROUND + 1
    assert seen == [ROUND + 1, 2 * ROUND, 2 * ROUND, 2 * ROUND]


def test_what_fills_up_a_row_changes_nothing(monkeypatch):
    monkeypatch.setattr(trunks, "fills_rows", lambda *_: True)
    backbone = tiny_model("gpt2").base_model.double()
    whole = [*SEQUENCES, [19]]
    with torch.no_grad():
        found = hidden_states(backbone, right_padded(whole, 0))
        alone = backbone(torch.tensor([[19]]), use_cache=False).last_hidden_state[0]
    assert len(found) == sum(map(len, whole))
    assert_close(found[-1:], alone, rtol=0.0, atol=1e-12)


def test_the_attention_of_a_model_is_its_own_again_after_the_block_and_after_an_error():
    backbone = tiny_model().base_model
    before = backbone.config._attn_implementation
    with pytest.raises(KeyError), packed_attention(backbone):  # noqa: PT012
        assert backbone.config._attn_implementation == NAME
        raise KeyError
    assert backbone.config._attn_implementation == before


def test_the_attention_of_each_part_of_a_composite_model_is_its_own_again():
    backbone = composite(*FULL).base_model
    text, vision = backbone.config.text_config, backbone.config.vision_config
    text._attn_implementation = "eager"
    with packed_attention(backbone):
        assert text._attn_implementation == NAME
    found = [config._attn_implementation for config in (backbone.config, text, vision)]
    assert found == ["sdpa", "eager", "sdpa"]


def test_nobody_looks_for_padding_where_there_is_none_and_afterwards_as_before(monkeypatch):
    """GPT-2 does, in every pass without a mask: a GPU would be waited for, and the warning would be wrong."""
    backbone, looked = tiny_model("gpt2").base_model, []
    backbone.config.pad_token_id = SEQUENCES[0][0]
    monkeypatch.setattr(
        type(backbone), "warn_if_padding_and_no_attention_mask", lambda self, ids, mask: looked.append(ids)
    )
    assert packs(backbone)
    looked.clear()  # to find that out it was asked plainly, too
    with torch.no_grad(), packed_attention(backbone, backbone):  # as policy and critic on one trunk
        hidden_states(backbone, right_padded(SEQUENCES, 0))
        assert not looked
    with torch.no_grad():
        backbone(torch.tensor([SEQUENCES[0]]), use_cache=False)
    assert len(looked) == 1


def test_rows_are_placed_and_taken_with_their_gradients():
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    slots = torch.tensor([3, 0, 4])
    placed = place_rows(rows, slots, 5)
    assert placed.tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [4.0, 5.0]]
    (placed * torch.arange(10.0).view(5, 2)).sum().backward()
    assert rows.grad.tolist() == [[6.0, 7.0], [0.0, 1.0], [8.0, 9.0]]
    table = torch.arange(8.0).view(4, 2).requires_grad_()
    taken = take_rows(table, torch.tensor([2, 0]))
    assert taken.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    (taken * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert table.grad.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]


def test_a_layout_spreads_with_zeros_and_collects_again():
    for layout, width in ((PackedLayout.of([1, 3, 2]), 3), (PackedLayout.of([1, 3, 2], fill=True), ROUND)):
        tokens = torch.arange(1.0, 7.0 + layout.more)[:, None]
        spread = layout.spread(tokens)
        assert spread.shape == (3, width, 1)
        assert spread[:, :3, 0].tolist() == [[1, 0, 0], [2, 3, 4], [5, 6, 0]]
        assert not spread[:, 3:].any()
        assert torch.equal(layout.collect(spread)[:6], tokens[:6])


def test_what_fills_up_a_row_is_no_part_of_attention_and_has_no_gradient():
    layout = PackedLayout((1, 3), 3, torch.tensor([0, 3, 4, 5]), more=2)
    tokens = torch.tensor([[1.0], [2.0], [3.0], [4.0], [torch.nan], [torch.nan]], requires_grad=True)
    spread = layout.spread(tokens)
    assert spread.shape == (2, 3, 1)
    assert spread.sum() == 10.0
    collected = layout.collect(spread * 2)
    assert collected.flatten().tolist() == [2.0, 4.0, 6.0, 8.0, 0.0, 0.0]
    (collected * torch.arange(1.0, 7.0)[:, None]).sum().backward()
    assert tokens.grad.flatten().tolist() == [2.0, 4.0, 6.0, 8.0, 0.0, 0.0]
    rows = right_padded([[1] * ROUND] * 20 + [[2]], 0).filled  # 15 tokens more than there are
    assert rows.packed_ids.numel() == len(rows.slots) + 15
    assert rows.layout.width == ROUND  # not as wide as a last sequence that went on


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_model_scores_packed_sequences_as_each_alone(kind):
    torch.manual_seed(0)
    model = CausalLMRewardModel.from_causal_lm(tiny_model(kind)).double()
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids])).logits[0] for ids in SEQUENCES])
        assert_close(sequence_scores(model, SEQUENCES, 3), alone, rtol=0.0, atol=1e-6)


def test_a_classifier_that_needs_padding_is_padded_with_its_own_pad_id_and_scores_as_alone():
    config = MistralConfig(**{**WIDER, **ENDS, "pad_token_id": 24}, sliding_window=3, num_labels=1)
    torch.manual_seed(0)
    model = MistralForSequenceClassification(config).eval().double()
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids])).logits[0] for ids in SEQUENCES])
        assert_close(sequence_scores(model, SEQUENCES, 0), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("pad", [0, 3, 18])
def test_a_classifier_of_transformers_scores_as_its_own_forward_does_wherever_its_pad_token_stands(pad):
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=25, num_labels=1, pad_token_id=pad)
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config).eval().double()
    sequences = [[3, 4, 18], [18, 18], [7, 0, 9, 0, 0], [5]]
    asked, forward = [], model.forward
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])
        model.forward = lambda **inputs: pytest.fail("computes padding") if asked else forward(**inputs)
        sequence_scores(model, [[4, 5]], pad)  # the first time it asks the model what it can
        asked.append(True)
        assert_close(sequence_scores(model, sequences, pad), expected, rtol=0.0, atol=1e-10)
