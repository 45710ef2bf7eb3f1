"""Value heads on disk under TRL's names, and models that are saved with one, or with a moving average."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.loading import PretrainedHandle, TrainedModel
from ppo_rlhf.models.value_heads import read_value_head
from tests.tiny_models import KINDS, save, tiny_model, word_tokenizer

WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
HEAD = {WEIGHT: torch.linspace(-1.0, 1.0, 16)[None], BIAS: torch.tensor([0.5])}
IDS = torch.tensor([[4, 7, 9]])


def add_weights(folder: str, more: dict[str, torch.Tensor]) -> None:
    """As TRL's `AutoModelForCausalLMWithValueHead.save_pretrained`: beside the model's own weights."""
    file = f"{folder}/model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_trl_wrote_gives_its_model_and_its_value_head(tmp_path, kind, caplog, capfd):
    model = tiny_model(kind)
    folder = save(tmp_path / "policy", model)
    assert PretrainedHandle(folder).value_head() is None
    add_weights(folder, HEAD)
    capfd.readouterr()
    loaded, head = PretrainedHandle(folder).causal_lm(), PretrainedHandle(folder).value_head()
    assert (caplog.messages, *capfd.readouterr()) == ([], "", "")
    assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0.0, atol=1e-5)
    assert torch.equal(head.weight, HEAD[WEIGHT])
    assert torch.equal(head.bias, HEAD[BIAS])


def test_other_weights_that_the_model_does_not_have_are_named_in_one_line(tmp_path, capfd, caplog):
    folder = save(tmp_path / "policy", tiny_model())
    add_weights(folder, {"aux.weight": torch.zeros(1)})
    PretrainedHandle(folder).causal_lm()
    assert len(caplog.messages) == 1
    assert "aux.weight" in caplog.messages[0]
    assert "aux" not in capfd.readouterr().err  # nor does transformers show a table of it


def test_a_sharded_value_head_of_sixteen_bits_is_read_in_float32(tmp_path):
    save_file({WEIGHT: HEAD[WEIGHT].bfloat16()}, tmp_path / "one.safetensors")
    save_file({BIAS: HEAD[BIAS].bfloat16()}, tmp_path / "two.safetensors")
    shards = {WEIGHT: "one.safetensors", BIAS: "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    head = read_value_head(tmp_path)
    assert head.weight.dtype == torch.float32
    assert torch.equal(head.weight, HEAD[WEIGHT].bfloat16().float())


@pytest.mark.parametrize("head", [{WEIGHT: torch.zeros(1, 16)}, {WEIGHT: torch.zeros(2, 16), BIAS: torch.zeros(2)}])
def test_a_value_head_of_another_shape_is_refused(tmp_path, head):
    save_file(head, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"v_head\.summary\.weight"):
        read_value_head(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_plain_unless_it_is_given_a_value_head(tmp_path, kind):
    model, head = tiny_model(kind), nn.Linear(16, 1)
    TrainedModel(model, word_tokenizer()).save(tmp_path / "plain")
    TrainedModel(model, word_tokenizer(), value_head=head).save(tmp_path / "with_head")
    plain, with_head = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "with_head"))
    assert with_head.keys() - plain.keys() == {WEIGHT, BIAS}
    assert all(torch.equal(with_head[name], plain[name]) for name in plain)
    assert torch.equal(with_head[WEIGHT], head.weight)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with_head")
    assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0.0, atol=1e-5)


def test_an_average_is_saved_as_a_model_directory_below_the_model(tmp_path):
    model, average = tiny_model(seed=0), tiny_model(seed=1)
    TrainedModel(model, word_tokenizer(), average=average).save(tmp_path / "policy")
    for folder, expected in (("policy", model), ("policy/ema", average)):
        handle = PretrainedHandle(str(tmp_path / folder))
        assert_close(handle.causal_lm()(IDS).logits, expected(IDS).logits, rtol=0.0, atol=1e-5)
        assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()
