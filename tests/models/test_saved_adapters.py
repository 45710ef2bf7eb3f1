"""Adapters of other programs, in place of a whole model. Oracle: peft, which loads each onto its base."""

import pytest
import torch
from peft import (
    LoraConfig,
    get_peft_model,
)
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import LoraSettings, save_adapter, with_adapter
from ppo_rlhf.models.loading import PretrainedHandle
from tests.tiny_adapters import adapter_of
from tests.tiny_models import save, tiny_model, word_tokenizer

IDS = torch.tensor([[4, 5, 6, 7, 8, 9]])


def test_an_adapter_on_the_hub_is_merged_into_its_base_on_the_hub(on_the_hub, tmp_path):
    save(on_the_hub("org/base", "main", "0"), tiny_model())
    base = AutoModelForCausalLM.from_pretrained("org/base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(on_the_hub("org/adapter", "v1", "1"))
    handle = PretrainedHandle("org/adapter@v1")
    assert_close(handle.causal_lm()(IDS).logits, adapted.eval()(IDS).logits)
    assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()  # the base's
    assert handle.base.source == "org/base"


def test_the_fingerprint_of_an_adapter_on_the_hub_follows_its_weights(on_the_hub, tmp_path):
    base = tiny_model()
    save(on_the_hub("org/base", "main", "0"), base)
    for commit in "12":
        adapter_of(base, on_the_hub("org/adapter", "main", commit), "org/base", seed=int(commit))
    first, second, newest = (
        PretrainedHandle(source).fingerprint()
        for source in (f"org/adapter@{'1' * 40}", f"org/adapter@{'2' * 40}", "org/adapter")
    )
    assert first != second == newest
    (on_the_hub("org/adapter", "main", "2") / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"org/adapter: this adapter has no adapter_model\.safetensors"):
        PretrainedHandle("org/adapter").causal_lm()


def test_an_adapter_stands_for_its_base_with_it_merged(tmp_path):
    base = tiny_model()
    path = save(tmp_path / "base", base)
    adapted = adapter_of(base, tmp_path / "adapter", path)
    handle = PretrainedHandle(str(tmp_path / "adapter"))
    ids = torch.tensor([[3, 4, 5, 6]])
    assert_close(handle.causal_lm()(ids).logits, adapted.eval()(ids).logits)
    assert not torch.equal(handle.causal_lm()(ids).logits, base.eval()(ids).logits)
    assert handle.tokenizer().get_vocab() == PretrainedHandle(path).tokenizer().get_vocab()
    assert handle.generation_config().eos_token_id == PretrainedHandle(path).generation_config().eos_token_id
    before = handle.fingerprint()
    assert before != PretrainedHandle(path).fingerprint()
    adapter_of(base, tmp_path / "adapter", path, lora_alpha=3)
    assert PretrainedHandle(str(tmp_path / "adapter")).fingerprint() != before


def test_an_adapter_of_a_reward_model_scores_with_its_own_head(tmp_path):
    base = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=0)
    adapted = adapter_of(base, tmp_path / "adapter", save(tmp_path / "base", base), "c_attn", task_type="SEQ_CLS")
    ids = torch.tensor([[3, 4, 5, 6]])
    assert_close(PretrainedHandle(str(tmp_path / "adapter")).reward_model()(ids).logits, adapted.eval()(ids).logits)


def test_an_adapter_with_a_score_head_makes_a_reward_model_of_a_language_model(tmp_path):
    """As TRL's RewardTrainer writes it with LoRA: the head is among the adapter's weights."""
    path = save(tmp_path / "base", tiny_model("gpt2", pad_token_id=0))
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    adapted = adapter_of(base, tmp_path / "adapter", path, "c_attn", task_type="SEQ_CLS")
    handle, ids = PretrainedHandle(str(tmp_path / "adapter")), torch.tensor([[3, 4, 5, 6]])
    model = handle.reward_model()
    assert_close(model(ids).logits, adapted.eval()(ids).logits)
    assert model(ids).logits.shape == (1, 1)
    with pytest.raises(ModelError, match="this is a GPT2LMHeadModel"):
        PretrainedHandle(path).reward_model()  # the base is none


@pytest.mark.parametrize("source", ["org/base@v2", "adapter"])
def test_a_policys_own_adapter_is_merged_into_the_revision_or_adapter_that_it_started_from(
    on_the_hub, tmp_path, monkeypatch, source
):
    monkeypatch.chdir(tmp_path)
    save(on_the_hub("org/base", "main", "0"), tiny_model())
    save(on_the_hub("org/base", "v2", "1"), tiny_model(seed=1))
    adapter_of(tiny_model(seed=1), tmp_path / "adapter", "org/base", revision="v2")
    start = PretrainedHandle(source).causal_lm()
    assert start.name_or_path == start.config.name_or_path == source
    settings = LoraSettings(2, 4, "q_proj")
    policy = with_adapter(start, settings, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    save_adapter(policy, tmp_path / "trained", settings)
    assert_close(PretrainedHandle(str(tmp_path / "trained")).causal_lm()(IDS).logits, policy(IDS).logits)


def test_an_adapter_whose_base_is_nowhere_is_refused_with_its_name(tmp_path):
    adapter_of(tiny_model(), tmp_path / "adapter", "/no/such/base")
    with pytest.raises(ModelError, match="the base of this adapter cannot be loaded: /no/such/base"):
        PretrainedHandle(str(tmp_path / "adapter")).causal_lm()
