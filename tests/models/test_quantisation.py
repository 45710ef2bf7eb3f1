"""4-bit weights, as far as tests can run without bitsandbytes: refusals, and the configuration for transformers.

tests/ppo/test_qlora.py has the runs with bitsandbytes itself.
"""

import pytest
import torch
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models import loading, quantisation
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.quantisation import check_bitsandbytes, four_bit_bytes, is_quantised
from tests.tiny_models import save, tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("needed", ["no-such-package>=1", "torch>=999"], ids=["missing", "too old"])
def test_without_a_bitsandbytes_that_is_new_enough_one_line_says_what_to_install(monkeypatch, tmp_path, needed):
    monkeypatch.setattr(quantisation, "NEEDED", Requirement(needed))
    handle = PretrainedHandle(save(tmp_path, tiny_model()))
    with pytest.raises(ConfigError, match=r"ppo\.load_in_4bit") as refused:
        handle.causal_lm(quantised_on=CPU)
    assert f'pip install "{needed}"' in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_version_that_is_new_enough_is_no_problem(monkeypatch):
    monkeypatch.setattr(quantisation, "NEEDED", Requirement("torch>=2"))
    check_bitsandbytes("ppo.load_in_4bit=true")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_is_asked_for_doubly_quantised_nf4_that_computes_in_the_runs_type(monkeypatch, tmp_path, dtype):
    asked = {}
    load = AutoModelForCausalLM.from_pretrained

    def spy(place, *, quantization_config, device_map, **options):
        asked.update(quantization_config.to_dict(), device_map=device_map, dtype=options["dtype"])
        return load(place, **options)

    monkeypatch.setattr(loading, "check_bitsandbytes", lambda settings: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    PretrainedHandle(save(tmp_path, tiny_model())).causal_lm(dtype, quantised_on=CPU)
    assert asked["load_in_4bit"]
    assert (asked["bnb_4bit_quant_type"], asked["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert asked["bnb_4bit_compute_dtype"] == str(dtype).removeprefix("torch.")
    assert (asked["dtype"], asked["device_map"]) == (dtype, {"": CPU})


def test_no_layer_of_a_plain_model_counts_as_quantised():
    assert not any(is_quantised(module) for module in tiny_model("gpt2").modules())


def test_4_bits_cost_4127_thousandths_of_a_bit_a_number():
    """Dettmers et al. 2023, section 3: 8/64 + 32/(64 x 256) bits of scales."""
    assert 8 * four_bit_bytes(torch.empty(4096, 4096, device="meta")) / 4096**2 == pytest.approx(4.127, abs=5e-4)
