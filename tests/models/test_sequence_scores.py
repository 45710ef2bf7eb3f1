"""Scores of a batch are those that a reward model gives to single sequences, whatever classifier it is."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    RobertaConfig,
    XLNetConfig,
)

from ppo_rlhf.models.preparation import prepare
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.sequence_scores import sequence_scores
from tests.tiny_models import KINDS, draw_weights, tiny_model

END = 3  # the encoder-decoder reads its hidden state here
SEQUENCES = [[4, 6, 7, 8, 9, 10, 11, END], [12, 13, END], [14, END]]
SIZES = {"vocab_size": 50, "num_labels": 1, "eos_token_id": END, "bos_token_id": None}
LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {**SIZES, **LAYERS, "max_position_embeddings": 40}
DECODER = {**WORDS, "num_key_value_heads": 2, "pad_token_id": 0}
BART = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
CLASSIFIERS = {
    "bert": BertConfig(**WORDS, pad_token_id=0),
    "roberta, whose positions start after the pad token's id": RobertaConfig(**WORDS, pad_token_id=1),
    "xlnet, which reads the last column": XLNetConfig(
        **SIZES, d_model=16, n_layer=2, n_head=2, d_inner=24, pad_token_id=5
    ),
    "bart": BartConfig(**SIZES, **BART, d_model=16, pad_token_id=1, encoder_ffn_dim=24, decoder_ffn_dim=24),
    "gpt2": GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=40, pad_token_id=0),
    "llama": LlamaConfig(**DECODER),
    "mistral, with a window": MistralConfig(**DECODER, sliding_window=3),
}


def assert_scores_alone(model, pad_id: int) -> None:
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([ids])).logits[:, 0] for ids in SEQUENCES])
        assert len({round(score, 3) for score in alone.tolist()}) == len(SEQUENCES)
        assert_close(sequence_scores(model, SEQUENCES, pad_id), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_a_classifiers_batch_scores_as_single_sequences_do(config):
    model = prepare(draw_weights(AutoModelForSequenceClassification.from_config(config), 0.4))
    assert_scores_alone(model, config.pad_token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_our_reward_models_batch_scores_as_single_sequences_do(kind):
    torch.manual_seed(0)
    assert_scores_alone(CausalLMRewardModel.from_causal_lm(tiny_model(kind)), pad_id=END)
