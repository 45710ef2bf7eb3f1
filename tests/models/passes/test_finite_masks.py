"""Float64 beside padding: finite and that of each sequence alone where transformers masks, refused where it cannot."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, MptConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.loading import prepare
from ppo_rlhf.models.passes.trunks import backbone_of, packs
from tests.tiny_models import draw_weights

LAYERS = {"vocab_size": 25, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA2 = Gemma2Config(
    **LAYERS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=4, sliding_window=3,
)  # fmt: skip
BLOOM = BloomConfig(**LAYERS, hidden_size=16, n_layer=3, n_head=2)
MPT = MptConfig(**LAYERS, d_model=16, n_layers=3, n_heads=2, expansion_ratio=2, max_seq_len=32)
SEQUENCE = [4, 7, 9, 12, 5]
PADDED = {
    "on the left": ([0] * 6, []),
    "on the right, beyond a window": ([], [0] * 6),
    "on both sides": ([0] * 2, [0] * 5),
}


def model_of(config, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    return prepare(draw_weights(AutoModelForCausalLM.from_config(config), 0.4).to(dtype))


@pytest.mark.parametrize("before_and_behind", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("config", [GEMMA2, BLOOM], ids=["gemma2", "bloom"])
def test_float64_states_beside_padding_are_those_of_the_sequence_alone(config, before_and_behind):
    model, (before, behind) = model_of(config), before_and_behind
    mask = torch.tensor([[*[0] * len(before), *[1] * len(SEQUENCE), *[0] * len(behind)]])
    ids, positions = torch.tensor([[*before, *SEQUENCE, *behind]]), (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=torch.tensor([SEQUENCE]), use_cache=False).logits
    assert_close(found[mask.bool()], alone[0], rtol=1e-5, atol=1e-5)  # these models' softmax is one of float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_other_types_are_transformers_own(dtype):
    model_of(BLOOM)
    places = {"batch_size": 2, "q_length": 4, "kv_length": 4, "dtype": dtype}
    places["attention_mask"] = torch.tensor([[True] * 4, [False, False, True, True]])
    found, expected = ALL_MASK_ATTENTION_FUNCTIONS["eager"](**places), eager_mask(**places)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("config", [GEMMA2, BLOOM], ids=["gemma2", "bloom"])
def test_a_model_with_finite_masks_may_be_padded_in_float64(config):
    assert not packs(backbone_of(model_of(config)))


def test_a_model_whose_own_masks_give_nan_in_float64_is_refused_with_what_to_set():
    with pytest.raises(ModelError) as caught:
        packs(backbone_of(model_of(MPT)))
    assert str(caught.value) == (
        "MptModel cannot do without padding, and in float64 its states beside padding are not finite. Set "
        "ppo.dtype=float32"
    )
    assert not packs(backbone_of(model_of(MPT, torch.float32)))


def test_a_model_that_is_not_finite_alone_either_is_not_said_to_suffer_from_padding():
    model = model_of(GEMMA2)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    assert not packs(backbone_of(model))
