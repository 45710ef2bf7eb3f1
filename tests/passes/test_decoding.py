"""Decoding without padding, against whole forward passes of single sequences."""

import logging

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DeepseekV3Config, DiffLlamaConfig

from ppo_rlhf.passes.decoding import Decoder, decodes
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.passes.forward import packs
from ppo_rlhf.passes.sampling import SamplingSettings
from tests.tiny_models import KINDS, draw_weights, tiny_model

PROMPTS = [[4, 7, 9, 12, 5], [6], [8, 10, 11]]
EVEN = [[4, 5], [6, 7], [8, 9]]
TOKENS = [[3, 5, 7, 9], [4, 6, 8, 10], [14, 15, 16, 17]]
SHAPE = {"vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LATENT = {  # values narrower than queries and keys
    "kv_lora_rank": 6,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}
OTHERS = {
    "two calls of attention in a layer": DiffLlamaConfig(**SHAPE, num_key_value_heads=2, max_position_embeddings=32),
    "values narrower than keys": DeepseekV3Config(
        **SHAPE, **LATENT, num_key_value_heads=2, max_position_embeddings=32, rope_interleave=False
    ),
}


def alone(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def check(model, logits: torch.Tensor, sequences: list[list[int]]) -> None:
    expected = torch.stack([alone(model, ids) for ids in sequences])
    assert_close(logits, expected, rtol=0.0, atol=1e-5)  # a Llama's norm is float32


def check_steps(model, prompts: list[list[int]]) -> None:
    """Decode four tokens after each prompt, and compare every step with whole passes."""
    decoder, sequences = Decoder(model, prompts, 9), [list(ids) for ids in prompts]
    with torch.no_grad():
        check(model, decoder.prefill(), sequences)
        for step in range(4):
            sequences = [[*ids, new[step]] for ids, new in zip(sequences, TOKENS, strict=True)]
            check(model, decoder.step(torch.tensor([new[step] for new in TOKENS])), sequences)


@pytest.mark.parametrize("prompts", [PROMPTS, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_gives_the_logits_of_single_sequences(kind, prompts):
    model = tiny_model(kind).double()
    assert decodes(model)
    check_steps(model, prompts)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_decoded_as_whole_passes_are(name):
    torch.manual_seed(0)
    model = draw_weights(AutoModelForCausalLM.from_config(OTHERS[name]), 0.3).eval().double()
    assert decodes(model)
    check_steps(model, PROMPTS)


def test_under_autocast_the_cache_is_in_its_type_and_the_logits_are_those_of_float32_up_to_rounding():
    """Rotary positions turn keys, but not values, into float32 under autocast."""
    model, sequences = tiny_model("llama"), [list(ids) for ids in PROMPTS]
    assert decodes(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        decoder = Decoder(model, PROMPTS, 9)
        decoder.prefill()
        for step in range(2):
            found = decoder.step(torch.tensor([new[step] for new in TOKENS]))
            sequences = [[*ids, new[step]] for ids, new in zip(sequences, TOKENS, strict=True)]
    assert {cache.dtype for cache in (*decoder._keys, *decoder._values)} == {torch.bfloat16}
    expected = torch.stack([alone(model, ids) for ids in sequences])
    assert (found.float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("fault", ["wrong", "impossible"])
def test_a_model_whose_decoding_differs_from_whole_passes_is_sampled_by_generate(monkeypatch, caplog, fault):
    attend = Decoder.attend

    def attend_wrongly(self, query_NHD, *others):
        if self._prompts is not None:
            return attend(self, query_NHD, *others)
        if fault == "impossible":
            raise RuntimeError("shapes do not fit")
        return torch.zeros_like(query_NHD)

    model = tiny_model()
    assert packs(model.base_model)
    monkeypatch.setattr(Decoder, "attend", attend_wrongly)
    with caplog.at_level(logging.INFO):
        assert not decodes(model)
        assert not decodes(model)
    assert len(caplog.messages) == 1
    sampling = SamplingSettings(4, 1.0, 0, 1.0, (3,), 0)
    uniforms = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, expected = (
        generate_responses(model, PROMPTS, uniforms, sampling, engine=engine) for engine in ("static", "hf")
    )
    assert torch.equal(found.response_ids, expected.response_ids)


@pytest.mark.parametrize(
    ("ended", "order"),
    [([True, False, False], [2, 1]), ([False, True, False], [0, 2]), ([True, True, False], [2])],
)
def test_sequences_that_end_leave_and_the_others_continue(ended, order):
    model = tiny_model().double()
    decoder = Decoder(model, PROMPTS, 9)
    assert packs(model.base_model)
    with torch.no_grad():
        decoder.prefill()
        decoder.step(torch.tensor([new[0] for new in TOKENS]))
        assert decoder.drop(ended) == order
        for step in (1, 2):
            logits = decoder.step(torch.tensor([TOKENS[row][step] for row in order]))
            check(model, logits, [PROMPTS[row] + TOKENS[row][: step + 1] for row in order])
    assert decoder.lengths.tolist() == [len(PROMPTS[row]) + 3 for row in order]
