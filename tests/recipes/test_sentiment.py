"""The reward of a sentiment classifier: the logit of class 1, independent of the other texts in the batch."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from ppo_rlhf.recipes import sentiment
from tests.tiny_models import PAD, VOCABULARY, draw_weights, save, word_tokenizer


def test_the_reward_is_the_logit_of_class_1_of_prompt_and_completion(tmp_path, monkeypatch):
    """Texts of three lengths in one batch; the longest is truncated to the tokenizer's 6 tokens."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**shape, vocab_size=len(VOCABULARY), pad_token_id=PAD, num_labels=2)
    model = draw_weights(BertForSequenceClassification(config).eval(), 0.3)
    saved = save(tmp_path / "classifier", model, word_tokenizer(model_max_length=6))
    monkeypatch.setattr(sentiment, "MODEL", saved)
    found = sentiment.positive_logit(["a b ", "c ", "a b c "], ["d", "e f g h i j", "a"], answer=[1, 2, 3])
    read = [[4, 5, 7], [6, 8, 9, 10, 11, 12], [4, 5, 6, 4]]
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0, 1].item() for ids in read]
    assert found == pytest.approx(expected, abs=1e-5)
