import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppo_rlhf.models.loading import PretrainedHandle, fuse_activations
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from tests.tiny_models import KINDS, save, tiny_model, word_tokenizer

SEQUENCES = [[4, 5, 6, 7, 8, 9, 10], [11, 12, 3], [13], [14, 3, 15, 16]]  # 3 is the end of text, also inside
NAN = math.nan


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
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_scores_as_each_sequence_alone(kind, side):
    """Whatever the pad token: here 3, the end of text, which also stands inside sequences."""
    model = reward_model(kind)
    alone = torch.cat([model(torch.tensor([sequence])).logits for sequence in SEQUENCES])
    ids, mask = padded(side, pad=3)
    batch = model(ids, mask).logits
    assert batch.shape == (len(SEQUENCES), 1)
    torch.testing.assert_close(batch, alone, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_the_head_on_the_backbones_last_state(kind):
    model = reward_model(kind)
    with torch.no_grad():
        model.score.bias.fill_(0.25)
    states = model.base_model(torch.tensor(SEQUENCES[:1])).last_hidden_state
    expected = (states[0, -1] * model.score.weight[0]).sum() + 0.25
    torch.testing.assert_close(model(torch.tensor(SEQUENCES[:1])).logits[0, 0], expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_states_at_padded_positions_reach_neither_score_nor_gradient(side):
    model = reward_model("llama")
    ids, mask = padded(side, pad=0)
    states = torch.randn(*ids.shape, 16, dtype=torch.float64).masked_fill(mask[..., None] == 0, NAN).requires_grad_()

    class Poisoned(nn.Module):
        def forward(self, input_ids, attention_mask, position_ids):
            return SimpleNamespace(last_hidden_state=states)

    model.backbone = Poisoned()
    scores = model(ids, mask).logits
    scores.sum().backward()
    assert scores.isfinite().all()
    assert states.grad.isfinite().all()
    assert model.score.weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back_with_its_bits_and_without_this_machines_paths(tmp_path, kind):
    source = save(tmp_path / "policy", tiny_model(kind))
    torch.manual_seed(1)
    model = CausalLMRewardModel.from_causal_lm(PretrainedHandle(source).causal_lm())
    model.rescale(0.3, 1.7)
    saved = save(tmp_path / "reward", model, word_tokenizer())
    again = PretrainedHandle(saved).reward_model()
    ids, mask = padded("right", pad=0)
    fuse_activations(model)
    assert torch.equal(again(ids, mask).logits, model(ids, mask).logits)
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


def test_rescaling_gives_scores_of_mean_zero_and_deviation_one():
    model = reward_model("gpt2")
    ids, mask = padded("right", pad=0)
    before = model(ids, mask).logits[:, 0].detach()
    model.rescale(float(before.mean()), float(before.std()))
    expected = (before - before.mean()) / before.std()
    torch.testing.assert_close(model(ids, mask).logits[:, 0], expected, rtol=1e-9, atol=1e-9)


def test_the_fresh_head_has_deviation_one_over_root_width_plus_one():
    """1024 weights: the sample deviation lies within 10 % of 1/sqrt(1025) but once in 10^5 seeds."""
    torch.manual_seed(0)
    model = CausalLMRewardModel.from_causal_lm(tiny_model("gpt2", n_embd=1024, n_layer=1))
    assert float(model.score.weight.detach().std()) == pytest.approx(1025**-0.5, rel=0.1)
    assert model.score.bias.tolist() == [0.0]


def test_the_configuration_tells_vocabulary_and_width_of_the_backbone():
    config = reward_model("gpt2").config
    assert (config.vocab_size, config.hidden_size, config.num_labels) == (25, 16, 1)
