"""The critic: a transformer of its own that predicts the return at every position."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import ModelError


class Critic(nn.Module):
    """A causal backbone with a linear value head.

    Attributes:
        backbone: Transformer without a language-model head.
        value_head: `Linear(hidden_size, 1)`.
    """

    def __init__(self, backbone: PreTrainedModel, value_head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Return the value of the state that ends at each position, `[B, S]`, float32 or wider.

        The value at the last prompt token is V(s_0), the state that the first response token is chosen in.
        """
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        values = self.value_head(hidden).squeeze(-1)
        return values if values.dtype == torch.float64 else values.float()

    @classmethod
    def from_policy(cls, policy: PreTrainedModel) -> Critic:
        """Copy the policy's backbone; the head starts at zero, so that the first values are 0 everywhere."""
        backbone = copy.deepcopy(policy.base_model)
        head = nn.Linear(_width(backbone), 1, device=policy.device, dtype=policy.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return cls(backbone.requires_grad_(True), head)

    @classmethod
    def from_reward_model(cls, reward_model: PreTrainedModel, policy: PreTrainedModel) -> Critic:
        """Copy the reward model's backbone and its score head.

        Raises:
            ModelError: The reward model reads another vocabulary than the policy, or has no linear score head.
        """
        ours, theirs = policy.config.vocab_size, reward_model.config.vocab_size
        if ours != theirs:
            raise ModelError(
                f"ppo.value_model=reward_init: the reward model's vocabulary has {theirs} tokens, the policy's {ours}; "
                "set ppo.value_model=separate"
            )
        score = getattr(reward_model, "score", None)
        if not isinstance(score, nn.Linear) or score.out_features != 1:
            raise ModelError(
                f"ppo.value_model=reward_init: {type(reward_model).__name__} has no linear `score` head with one "
                "output; set ppo.value_model=separate"
            )
        backbone = copy.deepcopy(reward_model.base_model)
        head = nn.Linear(score.in_features, 1, device=policy.device, dtype=policy.dtype)
        with torch.no_grad():
            head.weight.copy_(score.weight)
            nn.init.zeros_(head.bias) if score.bias is None else head.bias.copy_(score.bias)
        return cls(backbone.to(policy.device, policy.dtype).requires_grad_(True), head)


def _width(backbone: PreTrainedModel) -> int:
    width = getattr(backbone.config, "hidden_size", None)  # every transformers config maps its own name to this one
    if width is None:
        raise ModelError(f"{type(backbone).__name__}: its config has no hidden_size, so no value head fits it")
    return int(width)
