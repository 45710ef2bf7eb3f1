"""Our reward model: pooled by length on either side of padding, saved and loaded, normalised in its head."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from tests.tiny_models import KINDS, save, tiny_model, word_tokenizer

SEQUENCES = [[4, 5, 6, 7, 8, 9, 10], [11, 12, 3], [13], [14, 3, 15, 16]]  # 3 is the end of text, also inside


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
    model.rescale(float(before.mean()), float(before.std()))
    saved = save(tmp_path / "reward", model, word_tokenizer())
    scores = PretrainedHandle(saved).reward_model()(*inputs).logits
    assert_close(scores, (before - before.mean()) / before.std(), rtol=1e-4, atol=1e-4)
    text = Path(saved, "config.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["text_config"]["model_type"] == kind


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
    assert (model.config.vocab_size, model.config.hidden_size, model.config.num_labels) == (25, 1024, 1)
