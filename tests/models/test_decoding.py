"""Decoding without padding, against whole forward passes of single sequences."""

import logging

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DeepseekV3Config, DiffLlamaConfig, PreTrainedModel

from ppo_rlhf.models import decoding
from ppo_rlhf.models.decoding import Decoder, decodes
from ppo_rlhf.models.forward import packs
from ppo_rlhf.ppo.sampling import SamplingSettings, generate_responses
from tests.tiny_models import KINDS, tiny_model

PROMPTS = [[4, 7, 9, 12, 5], [6], [8, 10, 11]]
TOKENS = [[3, 5, 7, 9], [4, 6, 8, 10], [14, 15, 16, 17]]


def alone(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def drawn(config) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.double()


def check(model, logits: torch.Tensor, sequences: list[list[int]]) -> None:
    expected = torch.stack([alone(model, ids) for ids in sequences])
    assert_close(logits, expected, rtol=0.0, atol=1e-5)  # a Llama's norm is float32


def check_steps(model, prompts: list[list[int]]) -> None:
    """Decode four tokens behind each prompt, and compare every step with whole passes."""
    decoder, sequences = Decoder(model, prompts, 9), [list(ids) for ids in prompts]
    with torch.no_grad():
        check(model, decoder.prefill(), sequences)
        for step in range(4):
            sequences = [[*ids, new[step]] for ids, new in zip(sequences, TOKENS, strict=True)]
            check(model, decoder.step(torch.tensor([new[step] for new in TOKENS])), sequences)


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
    "attention asked twice in a layer": DiffLlamaConfig(**SHAPE, num_key_value_heads=2, max_position_embeddings=32),
    "values narrower than keys": DeepseekV3Config(
        **SHAPE, **LATENT, num_key_value_heads=2, max_position_embeddings=32, rope_interleave=False
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_decoded_as_whole_passes_are(name):
    model = drawn(OTHERS[name])
    assert decodes(model)
    check_steps(model, PROMPTS)


@pytest.mark.parametrize("widens", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_keys_and_values_are_held_in_one_type_also_where_rotary_positions_widen_keys(
    monkeypatch, kind, dtype, widens
):
    if not widens:
        monkeypatch.setattr(decoding, "_held_dtype", lambda states: states.dtype)
    model, sequences = tiny_model(kind), [list(ids) for ids in PROMPTS]
    with torch.no_grad(), torch.autocast("cpu", dtype):
        decoder = Decoder(model, PROMPTS, 9)
        found = [decoder.prefill()]
        for step in range(2):
            found.append(decoder.step(torch.tensor([new[step] for new in TOKENS])))
            sequences = [[*ids, new[step]] for ids, new in zip(sequences, TOKENS, strict=True)]
    assert {held.dtype for held in (*decoder._keys, *decoder._values)} == {torch.float32 if widens else dtype}
    expected = torch.stack([alone(model, ids) for ids in sequences])
    assert (found[-1].float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("fault", ["wrong", "impossible"])
def test_a_model_that_is_not_decoded_as_whole_passes_are_is_found_out_and_sampled_plainly(monkeypatch, caplog, fault):
    def attend(self, query_NHD, *others):
        if fault == "impossible":
            raise RuntimeError("shapes do not fit")
        return torch.zeros_like(query_NHD)

    model = tiny_model()
    assert packs(model.base_model)
    monkeypatch.setattr(decoding.HeldColumns, "attend", attend)
    with caplog.at_level(logging.INFO):
        assert not decodes(model)
        assert not decodes(model)
    assert caplog.messages == ["LlamaForCausalLM is decoded over transformers' cache, which takes longer."]
    sampling = SamplingSettings(4, 1.0, 0, 1.0, (3,), 0)
    uniforms = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, expected = (
        generate_responses(model, PROMPTS, uniforms, sampling, engine=engine) for engine in ("static", "plain")
    )
    assert_close(found.response_ids, expected.response_ids, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("bucket", [2, 64])
@pytest.mark.parametrize("prompts", [PROMPTS, [[4, 5], [6, 7], [8, 9]]], ids=["uneven", "even"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_gives_the_logits_of_each_sequence_alone(monkeypatch, kind, prompts, bucket):
    monkeypatch.setattr(decoding, "BUCKET", bucket)
    model = tiny_model(kind).double()
    check_steps(model, prompts)


@pytest.mark.parametrize(
    ("ended", "order"),
    [
        ([True, False, False], [2, 1]),
        ([False, True, False], [0, 2]),
        ([False, False, True], [0, 1]),
        ([True, True, False], [2]),
        ([False, False, False], [0, 1, 2]),
    ],
)
def test_sequences_that_end_leave_and_the_others_go_on(ended, order):
    model = tiny_model().double()
    decoder = Decoder(model, PROMPTS, 9)
    with torch.no_grad():
        decoder.prefill()
        decoder.step(torch.tensor([new[0] for new in TOKENS]))
        assert decoder.drop(ended) == order
        for step in (1, 2):
            logits = decoder.step(torch.tensor([TOKENS[row][step] for row in order]))
            check(model, logits, [PROMPTS[row] + TOKENS[row][: step + 1] for row in order])
    assert decoder.lengths.tolist() == [len(PROMPTS[row]) + 3 for row in order]


def test_prompts_that_stand_together_are_computed_once():
    model, seen = tiny_model().double(), []
    prompts = [[4, 7, 9], [4, 7, 9], [6], [4, 7, 9], [4, 7, 9]]
    Decoder(model, prompts[:1], 6).prefill()
    model.base_model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    decoder = Decoder(model, prompts, 6)
    with torch.no_grad():
        logits = decoder.prefill()
        assert [ids.tolist() for ids in seen] == [[[4, 7, 9, 6, 4, 7, 9]]]
        after = decoder.step(torch.tensor([3, 5, 7, 9, 11]))
    check(model, logits, prompts)
    check(model, after, [[*ids, new] for ids, new in zip(prompts, [3, 5, 7, 9, 11], strict=True)])


def test_keys_and_values_take_memory_by_buckets_and_no_more_than_a_sequence_can_need(monkeypatch):
    monkeypatch.setattr(decoding, "BUCKET", 4)
    model = tiny_model()
    decoder = Decoder(model, PROMPTS, 10)
    with torch.no_grad():
        decoder.prefill()
        capacities = [decoder._keys[0].shape[2]]
        for step in range(4):
            decoder.step(torch.tensor([new[step] for new in TOKENS]))
            capacities.append(decoder._keys[0].shape[2])
    assert capacities == [8, 8, 8, 8, 10]


def test_sixteen_bits_are_held_in_float32_on_a_cpu():
    model = tiny_model("gpt2").to(torch.bfloat16)
    decoder = Decoder(model, PROMPTS, 10)
    with torch.no_grad():
        assert decoder.prefill().dtype == torch.bfloat16
    assert decoder._keys[0].dtype == torch.float32
