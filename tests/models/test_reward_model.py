"""Our reward model: pooled by length on either side of padding, saved and loaded, normalised in its head.

Scores of a batch are those that a reward model gives to single sequences, whatever classifier it is.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    CodeGenConfig,
    FalconH1Config,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    XLNetConfig,
    pipeline,
)

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models import reward_model as reward_model_module
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.preparation import prepare
from ppo_rlhf.models.reward_model import CausalLMRewardModel, sequence_scores
from ppo_rlhf.supervised.reward_training import normalise_scores
from tests.tiny_models import (
    END,
    KINDS,
    MAMBA,
    PAD,
    UNKNOWN,
    VOCABULARY,
    draw_weights,
    save,
    tiny_model,
    word_tokenizer,
)

SEQUENCES = [
    [4, 5, 6, 7, 8, 9, 10],
    [11, 12, 3],
    [13],
    [14, 3, 15, 16],
]  # 3 is the end of text, here also within sequences

FALCON_H1 = FalconH1Config(
    **{"vocab_size": 25, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
    **{"mamba_n_groups": 1, "mamba_chunk_size": 8, "pad_token_id": 0},
)
SCORED = [[4, 6, 7, 8, 9, 10, 11, END], [12, 13, END], [14, END]]
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


def reward_model(kind: str) -> CausalLMRewardModel:
    torch.manual_seed(0)
    return CausalLMRewardModel.from_causal_lm(tiny_model(kind)).double()


def padded(side: str, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, SEQUENCES)) + 2
    ids, mask = [], []
    for sequence in SEQUENCES:
        fill = width - len(sequence)
        row, real = sequence + [pad] * fill, [1] * len(sequence) + [0] * fill
        ids.append(row if side == "right" else [pad] * fill + sequence)
        mask.append(real if side == "right" else real[::-1])
    return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_the_head_on_the_last_hidden_state_whatever_the_padding(kind):
    model = reward_model(kind)
    with torch.no_grad():
        model.score.bias.fill_(0.25)
    alone = [model.base_model(torch.tensor([sequence])).last_hidden_state[0, -1] for sequence in SEQUENCES]
    expected = torch.stack(alone) @ model.score.weight.T + 0.25
    for side in ("left", "right"):
        assert_close(model(*padded(side, pad=3)).logits, expected, rtol=0.0, atol=1e-10)


def test_a_name_that_transformers_takes_no_more_is_an_error_and_not_positions_left_out(monkeypatch):
    """Without positions GPT-2 also counts padding, and the scores of shorter sequences would be wrong."""
    for of_this_version in (LlamaForCausalLM, GPT2Model):
        monkeypatch.setattr(of_this_version, "forward", lambda self, input_ids, attention_mask, places: None)
    with pytest.raises(ModelError, match=r"transformers .* position_ids.*constraints\.txt"):
        reward_model("gpt2")


def test_in_sixteen_bits_it_scores_hidden_states_of_32():
    model = CausalLMRewardModel.from_causal_lm(AutoModelForCausalLM.from_config(MAMBA)).to(torch.bfloat16).eval()
    ids = torch.tensor(SEQUENCES[:1])
    with torch.no_grad():
        states = model.base_model(ids).last_hidden_state
        assert states.dtype == torch.float32
        assert torch.equal(model(ids).logits, model.score(states[:, -1].bfloat16()))


def test_a_saved_model_comes_back_with_the_buffers_that_its_architecture_does_not_save(tmp_path):
    """Falcon-H1 computes the factors of its Mamba layers from the configuration, in its outermost module."""
    model = CausalLMRewardModel.from_causal_lm(AutoModelForCausalLM.from_config(FALCON_H1))
    loaded = PretrainedHandle(save(tmp_path / "reward", model)).reward_model()
    kept = dict(model.named_buffers())
    factors = {name: buffer for name, buffer in loaded.named_buffers() if name.endswith("mup_vector")}
    assert len(factors) == 2
    for name, buffer in factors.items():
        assert_close(buffer, kept[name], rtol=0.0, atol=0.0)


def test_a_sequence_that_ends_in_the_pad_token_is_scored_there_by_ours_and_before_it_by_another_classifier():
    """As docs/algorithm.md (20) says: the policy may sample the pad token, and a response may be cut off at it."""
    config = LlamaConfig(
        vocab_size=25, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    config.pad_token_id, config.num_labels = PAD, 1
    other = draw_weights(LlamaForSequenceClassification(config).double().eval(), 0.5)
    ours = CausalLMRewardModel.from_causal_lm(tiny_model("llama").double())
    whole, without = [4, 5, 6, PAD], [4, 5, 6]
    for model, is_same in ((other, True), (ours, False)):
        with torch.no_grad():
            alone = [
                model(torch.tensor([ids]), torch.ones(1, len(ids)).long()).logits[0, 0] for ids in (whole, without)
            ]
            scores = sequence_scores(model, [whole, without], PAD)
        assert_close(scores, torch.stack(alone))
        assert (abs(float(scores[0] - scores[1])) < 1e-9) is is_same


def test_an_architecture_without_a_pad_id_in_its_configuration_scores(tmp_path):
    config = CodeGenConfig(vocab_size=25, n_embd=16, n_layer=2, n_head=4, n_positions=32, rotary_dim=4)
    assert not hasattr(config, "pad_token_id")
    policy = AutoModelForCausalLM.from_config(config)
    place = save(tmp_path / "reward", CausalLMRewardModel.from_causal_lm(policy), word_tokenizer(pad_token=None))
    handle = PretrainedHandle(place)
    assert handle.tokenizer().pad_token == "<unk>"
    model = handle.reward_model()
    ids = SEQUENCES[0]
    alone = model.score(model.base_model(torch.tensor([ids])).last_hidden_state[0, -1])
    assert_close(sequence_scores(model, SEQUENCES, pad_id=UNKNOWN)[:1], alone, rtol=0.0, atol=1e-5)


def test_texts_that_begin_alike_get_the_scores_that_each_gets_alone():
    """The second is the beginning of the others; its last token is its own."""
    model = CausalLMRewardModel.from_causal_lm(tiny_model("gpt2")).double()
    torch.nn.init.normal_(model.score.weight)
    template = [*range(4, 14)]
    sequences = [[*template, 5, 6], template, [13], [*template, 7]]
    tokens: list[int] = []
    model.base_model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: tokens.append(ids[0].numel()))
    with torch.no_grad():
        alone = torch.cat([sequence_scores(model, [ids], PAD) for ids in sequences])
        assert_close(sequence_scores(model, sequences, PAD), alone, rtol=0.0, atol=1e-12)
    assert tokens[-1] == 9 + 3 + 1 + 2 + 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states_at_padded_positions_reach_neither_score_nor_gradient(side):
    model = reward_model("llama")
    ids, mask = padded(side, pad=0)
    hidden = torch.randn(*ids.shape, 16, dtype=torch.float64)
    hidden = hidden.masked_fill(mask[..., None] == 0, math.nan).requires_grad_()

    class Poisoned(nn.Module):
        def forward(self, input_ids, attention_mask, position_ids):
            return SimpleNamespace(last_hidden_state=hidden)

    model.backbone = Poisoned()
    scores = model(ids, mask).logits
    scores.sum().backward()
    assert scores.isfinite().all()
    assert hidden.grad.isfinite().all()
    assert model.score.weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back_normalised_and_without_this_machines_paths(tmp_path, kind):
    source = save(tmp_path / "policy", tiny_model(kind))
    model = CausalLMRewardModel.from_causal_lm(PretrainedHandle(source).causal_lm())
    inputs = padded("right", pad=0)
    before = model(*inputs).logits.detach()
    normalise_scores(model, before)
    saved = save(tmp_path / "reward", model, word_tokenizer())
    scores = PretrainedHandle(saved).reward_model()(*inputs).logits
    assert_close(scores, (before - before.mean()) / before.std(), rtol=1e-4, atol=1e-4)
    text = Path(saved, "config.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["text_config"]["model_type"] == kind


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_as_transformers_own_classifier_it_gives_the_same_scores_up_to_the_mean_in_the_configuration(tmp_path, kind):
    """transformers' `from_pretrained` and pipeline read the same folder as our loader, without our code."""
    model = reward_model(kind)
    with torch.no_grad():
        model.score.bias.fill_(-0.25)
    ours, tokenizer = model(*padded("right", pad=PAD)).logits.detach(), word_tokenizer()
    saved = save(tmp_path / "reward", model.to_classifier(PAD, END), tokenizer)
    theirs = AutoModelForSequenceClassification.from_pretrained(saved, dtype="auto")
    assert type(theirs) is {"llama": LlamaForSequenceClassification, "gpt2": GPT2ForSequenceClassification}[kind]
    assert theirs.score.bias is None
    config = json.loads(Path(saved, "config.json").read_text())
    assert (config["model_type"], config["score_mean"]) == (kind, 0.25)
    assert str(tmp_path) not in Path(saved, "config.json").read_text()
    ids, mask = inputs = padded("right", pad=PAD)
    assert_close(theirs(ids, attention_mask=mask).logits - 0.25, ours, rtol=0.0, atol=1e-6)
    texts = [" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in SEQUENCES]
    shown = pipeline("text-classification", model=saved, dtype="auto")(texts)
    assert [row["score"] for row in shown] == pytest.approx((ours[:, 0] + 0.25).tolist(), abs=1e-6)
    loaded = PretrainedHandle(saved).reward_model(torch.float64)
    assert isinstance(loaded, CausalLMRewardModel)
    assert_close(loaded(*inputs).logits, ours, rtol=0.0, atol=1e-6)
    with pytest.raises(ModelError, match="generate"):
        PretrainedHandle(saved).causal_lm()


def test_a_pipeline_gives_the_score_of_our_own_form_and_not_its_sigmoid(tmp_path):
    model = reward_model("bitnet").float()
    saved = save(tmp_path / "reward", model)
    (shown,) = pipeline("text-classification", model=saved)(["a b c </s>"])
    assert shown["score"] == pytest.approx(model(torch.tensor([[4, 5, 6, END]])).logits.item(), abs=1e-5)


def test_the_head_reads_hidden_states_that_a_model_projects_to_another_width(tmp_path):
    """OPT's smallest model (350m) does."""
    shape = {"hidden_size": 16, "word_embed_proj_dim": 8, "ffn_dim": 24, "num_hidden_layers": 2}
    config = OPTConfig(**shape, num_attention_heads=2, vocab_size=len(VOCABULARY), do_layer_norm_before=False)
    model = CausalLMRewardModel.from_causal_lm(OPTForCausalLM(config).eval())
    ids = torch.tensor([[4, 5, 6, END]])
    expected = model.score(model.base_model(ids).last_hidden_state[:, -1])
    assert model.score.in_features == 8
    assert_close(model(ids).logits, expected, rtol=0.0, atol=1e-6)
    saved = save(tmp_path / "reward", model.to_classifier(PAD, END))
    assert_close(PretrainedHandle(saved).reward_model()(ids).logits, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "pad", "why"),
    [
        ("llama", END, "end of text"),
        ("bitnet", PAD, "bitnet"),
    ],
)
def test_a_model_that_no_classifier_of_transformers_can_hold_says_why(kind, pad, why):
    with pytest.raises(ModelError, match=why):
        reward_model(kind).to_classifier(pad, END)


def test_a_classifier_of_transformers_with_other_scores_is_not_taken(monkeypatch):
    """A classifier that pools at the first token."""
    first = {"forward": lambda self, ids, **_: SimpleNamespace(logits=self.score(self.model(ids)[0])[:, 0])}
    other = type("First", (LlamaForSequenceClassification,), first)
    monkeypatch.setattr(reward_model_module, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {LlamaConfig: other})
    with pytest.raises(ModelError, match="First"):
        reward_model("llama").to_classifier(PAD, END)


@pytest.mark.slow
def test_the_classifier_loads_in_a_process_that_knows_nothing_of_this_project(tmp_path):
    saved = save(tmp_path / "reward", reward_model("llama").to_classifier(PAD, END))
    code = f"""if True:
        import sys, transformers
        model = transformers.AutoModelForSequenceClassification.from_pretrained({saved!r})
        assert not any(name.startswith("ppo_rlhf") for name in sys.modules)
        print(type(model).__name__)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "LlamaForSequenceClassification"


def test_the_backbone_is_a_copy():
    policy = tiny_model()
    model = CausalLMRewardModel.from_causal_lm(policy)
    before = policy.model.embed_tokens.weight.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(policy.model.embed_tokens.weight, before)


def test_the_fresh_head_has_deviation_one_over_root_width_plus_one():
    """1024 weights: the sample deviation is within 10 % of 1/sqrt(1025) except for one seed in 10^5."""
    torch.manual_seed(0)
    model = CausalLMRewardModel.from_causal_lm(tiny_model("gpt2", n_embd=1024, n_layer=1))
    assert float(model.score.weight.detach().std()) == pytest.approx(1025**-0.5, rel=0.1)
    assert model.score.bias.tolist() == [0.0]
    assert (model.score.in_features, model.config.num_labels) == (1024, 1)


def assert_scores_alone(model, pad_id: int) -> None:
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([ids])).logits[:, 0] for ids in SCORED])
        assert len({round(score, 3) for score in alone.tolist()}) == len(SCORED)
        assert_close(sequence_scores(model, SCORED, pad_id), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_a_classifiers_batch_scores_as_single_sequences_do(config):
    model = prepare(draw_weights(AutoModelForSequenceClassification.from_config(config), 0.4))
    assert_scores_alone(model, config.pad_token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_our_reward_models_batch_scores_as_single_sequences_do(kind):
    torch.manual_seed(0)
    assert_scores_alone(CausalLMRewardModel.from_causal_lm(tiny_model(kind)), pad_id=END)
