"""Scores of a batch are those that a reward model gives to each sequence alone, whatever classifier it is."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AlbertConfig,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
    T5Config,
    XLMRobertaConfig,
    XLNetConfig,
)

from ppo_rlhf.models.loading import prepare
from ppo_rlhf.models.sequence_scores import sequence_scores
from tests.tiny_models import draw_weights

END = 3  # the encoder-decoders read their state here
SEQUENCES = [[4, 6, 7, 8, 9, 10, 11, END], [12, 13, END], [14, END]]
SIZES = {"vocab_size": 50, "num_labels": 1, "eos_token_id": END, "bos_token_id": None}
LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {**SIZES, **LAYERS, "max_position_embeddings": 40}
DECODER = {**WORDS, "num_key_value_heads": 2, "pad_token_id": 0}
ENDS_TO_END = {**SIZES, "d_model": 16, "pad_token_id": 1, "decoder_start_token_id": 1}
CLASSIFIERS = {
    "bert": BertConfig(**WORDS, pad_token_id=0),
    "roberta, whose positions begin behind the pad token's id": RobertaConfig(**WORDS, pad_token_id=1),
    "xlm-roberta": XLMRobertaConfig(**WORDS, pad_token_id=1),
    "mpnet": MPNetConfig(**WORDS, pad_token_id=1),
    "albert": AlbertConfig(**WORDS, embedding_size=8, pad_token_id=0),
    "distilbert": DistilBertConfig(**SIZES, dim=16, n_layers=2, n_heads=2, hidden_dim=24, pad_token_id=0),
    "deberta-v2": DebertaV2Config(**WORDS, pad_token_id=0, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "modernbert": ModernBertConfig(**WORDS, pad_token_id=0),
    "xlnet, which reads the last place of a row": XLNetConfig(
        **SIZES, d_model=16, n_layer=2, n_head=2, d_inner=24, pad_token_id=5
    ),
    "t5": T5Config(**ENDS_TO_END, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "bart": BartConfig(
        **ENDS_TO_END, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=40,
    ),
    "gpt2": GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=2, n_positions=40, pad_token_id=0),
    "llama": LlamaConfig(**DECODER),
    "mistral, with a window": MistralConfig(**DECODER, sliding_window=3),
}  # fmt: skip


@pytest.mark.parametrize("config", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_a_batch_scores_as_each_sequence_alone(config):
    model = prepare(draw_weights(AutoModelForSequenceClassification.from_config(config), 0.4))
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([ids])).logits[:, 0] for ids in SEQUENCES])
        assert len({round(score, 3) for score in alone.tolist()}) == len(SEQUENCES)
        assert_close(sequence_scores(model, SEQUENCES, config.pad_token_id), alone, rtol=1e-4, atol=1e-4)
