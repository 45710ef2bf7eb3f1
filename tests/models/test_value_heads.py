"""Value heads on disk under TRL's names: written by hand and read, and written by us and read by transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.loading import PretrainedHandle, TrainedModel, fuse_activations
from ppo_rlhf.models.value_heads import read_value_head
from tests.tiny_models import KINDS, save, tiny_model, word_tokenizer

NAMES = {"v_head.summary.weight", "v_head.summary.bias"}


def add_value_head(folder, head: dict[str, torch.Tensor]) -> None:
    """What TRL's `AutoModelForCausalLMWithValueHead.save_pretrained` leaves: the head beside the model's weights."""
    file = f"{folder}/model.safetensors"
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})


def trl_head(width: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "v_head.summary.weight": torch.randn(1, width, generator=generator),
        "v_head.summary.bias": torch.randn(1, generator=generator),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_trl_wrote_gives_its_model_and_its_value_head(tmp_path, kind):
    model, head = tiny_model(kind), trl_head()
    folder = save(tmp_path / "policy", model)
    add_value_head(folder, head)
    handle = PretrainedHandle(folder)
    ids = torch.tensor([[4, 7, 9]])
    fuse_activations(model)
    assert torch.equal(handle.causal_lm()(ids).logits, model(ids).logits)
    found = handle.value_head()
    assert torch.equal(found.weight, head["v_head.summary.weight"])
    assert torch.equal(found.bias, head["v_head.summary.bias"])


def test_loading_a_model_with_a_value_head_says_nothing_and_of_other_strange_weights_one_line(tmp_path, capfd, caplog):
    folder = save(tmp_path / "policy", tiny_model())
    add_value_head(folder, trl_head())
    capfd.readouterr()
    PretrainedHandle(folder).causal_lm()
    assert (caplog.messages, *capfd.readouterr()) == ([], "", "")
    add_value_head(folder, {"aux.weight": torch.zeros(1)})
    PretrainedHandle(folder).causal_lm()
    assert caplog.messages == [f"{folder}: not part of a language model, left out: aux.weight."]
    assert "aux" not in capfd.readouterr().err  # nor does transformers show a table of it


def test_a_value_head_in_another_shard_is_found_by_the_index(tmp_path):
    head = trl_head()
    save_file({"v_head.summary.weight": head["v_head.summary.weight"]}, tmp_path / "one.safetensors")
    save_file({"v_head.summary.bias": head["v_head.summary.bias"]}, tmp_path / "two.safetensors")
    shards = {"v_head.summary.weight": "one.safetensors", "v_head.summary.bias": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert torch.equal(read_value_head(tmp_path).weight, head["v_head.summary.weight"])


def test_a_value_head_of_sixteen_bits_is_read_in_float32(tmp_path):
    save_file({name: tensor.bfloat16() for name, tensor in trl_head().items()}, tmp_path / "model.safetensors")
    assert read_value_head(tmp_path).weight.dtype == torch.float32


def test_a_plain_model_has_no_value_head(tmp_path):
    assert PretrainedHandle(save(tmp_path / "policy", tiny_model())).value_head() is None


@pytest.mark.parametrize(
    "head",
    [
        {"v_head.summary.weight": torch.zeros(1, 16)},
        {"v_head.summary.weight": torch.zeros(2, 16), "v_head.summary.bias": torch.zeros(2)},
    ],
)
def test_a_value_head_of_another_shape_is_refused(tmp_path, head):
    save_file(head, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"its value head has v_head\.summary\.weight .* are expected, as TRL writes"):
        read_value_head(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_plain_unless_it_is_given_a_value_head(tmp_path, kind):
    model, head = tiny_model(kind), nn.Linear(16, 1)
    TrainedModel(model, word_tokenizer()).save(tmp_path / "plain")
    TrainedModel(model, word_tokenizer(), value_head=head).save(tmp_path / "with_head")
    plain, with_head = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "with_head"))
    assert with_head.keys() - plain.keys() == NAMES
    assert all(torch.equal(with_head[name], plain[name]) for name in plain)
    assert torch.equal(with_head["v_head.summary.weight"], head.weight)
    assert torch.equal(with_head["v_head.summary.bias"], head.bias)
    ids = torch.tensor([[4, 7, 9]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with_head")
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_an_average_is_saved_as_a_model_of_its_own_below_the_model(tmp_path):
    model, average = tiny_model(seed=0), tiny_model(seed=1)
    TrainedModel(model, word_tokenizer(), average=average).save(tmp_path / "policy")
    ids = torch.tensor([[4, 7, 9]])
    for folder, expected in (("policy", model), ("policy/ema", average)):
        handle = PretrainedHandle(str(tmp_path / folder))
        assert torch.equal(handle.causal_lm()(ids).logits, expected(ids).logits)
        assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()
