"""Critics: what predicts the return at every position, with a backbone of its own or on the policy's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.forward import backbone_of

OwnBackbone = Callable[[PreTrainedModel], PreTrainedModel]
"""Makes, from a backbone, one whose values can be trained without changing those of the first."""


class ValueModel(nn.Module):
    """A linear value head on the last hidden states of a backbone.

    Attributes:
        backbone: Transformer without a language-model head.
        value_head: `Linear(hidden_size, 1)`.
    """

    backbone: PreTrainedModel
    value_head: nn.Linear

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Return the value of the state that ends at each position, `[B, S]`, float32 or wider.

        The value at the last prompt token is V(s_0), the state that the first response token is chosen in.
        """
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return self.values(hidden)

    def values(self, states: Tensor) -> Tensor:
        """Return the values `[…]` of the backbone's last hidden states `[…, H]`, float32 or wider."""
        head = self.value_head
        with torch.autocast(states.device.type, enabled=False):  # one number a token: 16 bits would save nothing
            values: Tensor = head(states.to(head.weight.dtype)).squeeze(-1)
        return values if values.dtype == torch.float64 else values.float()


class Critic(ValueModel):
    """A causal backbone with a linear value head.

    Attributes:
        backbone: Transformer without a language-model head.
        value_head: `Linear(hidden_size, 1)`.
    """

    def __init__(self, backbone: PreTrainedModel, value_head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head

    @classmethod
    def from_policy(
        cls, policy: PreTrainedModel, *, value_head: nn.Linear | None = None, own_backbone: OwnBackbone | None = None
    ) -> Critic:
        """Start from the policy's backbone.

        Args:
            policy: A causal language model.
            value_head: Copied if given; else the head starts at zero, so that the first values are 0 everywhere.
            own_backbone: Makes the critic's backbone; None copies all weights, and all of them train.
        """
        return cls((own_backbone or copy_to_train)(backbone_of(policy)), make_value_head(policy, value_head))

    @classmethod
    def from_reward_model(
        cls, reward_model: PreTrainedModel, policy: PreTrainedModel, *, own_backbone: OwnBackbone | None = None
    ) -> Critic:
        """Start from the reward model's backbone and its score head.

        Args:
            reward_model: Ours or a transformers sequence classifier, with one label.
            policy: What the critic values the states of; its device is the critic's.
            own_backbone: As in `from_policy`.

        Raises:
            ModelError: The reward model reads another vocabulary than the policy, or has no linear score head.
        """
        ours, theirs = (model.config.get_text_config().vocab_size for model in (policy, reward_model))
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
        head = _new_head(score.in_features, policy)
        with torch.no_grad():
            head.weight.copy_(score.weight)
            nn.init.zeros_(head.bias) if score.bias is None else head.bias.copy_(score.bias)
        backbone = (own_backbone or copy_to_train)(backbone_of(reward_model))
        if own_backbone is None:
            backbone = backbone.to(dtype=head.weight.dtype)  # type: ignore[call-arg]
        return cls(backbone.to(policy.device), head)  # type: ignore[arg-type]


class SharedCritic(ValueModel):
    """A linear value head on the policy's own last hidden states: a shared trunk, as TRL's value-head models have it.

    The policy is no submodule: the critic's parameters, and what is saved of it, are the head alone.

    Attributes:
        value_head: `Linear(hidden_size, 1)`.
    """

    def __init__(self, policy: PreTrainedModel, value_head: nn.Linear) -> None:
        super().__init__()
        self.value_head = value_head
        self._trunk_of = (policy,)  # a tuple hides it from nn.Module

    @classmethod
    def from_policy(cls, policy: PreTrainedModel, value_head: nn.Linear | None = None) -> SharedCritic:
        """Put a head on the policy: a copy of the one given, or one that starts at zero."""
        return cls(policy, make_value_head(policy, value_head))

    @property
    def backbone(self) -> PreTrainedModel:  # type: ignore[override]  # only read elsewhere, too
        """The policy's."""
        return backbone_of(self._trunk_of[0])


def copy_to_train(backbone: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a backbone in which every weight trains, float32 or wider."""
    copied = copy.deepcopy(backbone)
    return copied.to(_trainable_dtype(copied.dtype)).requires_grad_(True)  # type: ignore[arg-type]


def make_value_head(policy: PreTrainedModel, start: nn.Linear | None) -> nn.Linear:
    """Return a value head that fits the policy: a copy of `start`, or zeros.

    Raises:
        ModelError: `start` is for states of another width, or the policy does not say how wide its states are.
    """
    head = _new_head(_width(policy), policy)
    with torch.no_grad():
        if start is None:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        elif start.weight.shape != head.weight.shape:
            raise ModelError(
                f"The value head (v_head.summary) reads states of width {start.in_features}, the policy's have "
                f"{head.in_features}: they do not belong together"
            )
        else:
            head.weight.copy_(start.weight)
            head.bias.copy_(start.bias)
    return head


def _new_head(width: int, policy: PreTrainedModel) -> nn.Linear:
    return nn.Linear(width, 1, device=policy.device, dtype=_trainable_dtype(policy.dtype))


def _trainable_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _width(policy: PreTrainedModel) -> int:
    config = policy.config.get_text_config()
    # OPT's smallest projects its states to another width before the heads; every other config has this one name
    width = getattr(config, "word_embed_proj_dim", None) or getattr(config, "hidden_size", None)
    if width is None:
        raise ModelError(f"{type(policy).__name__}: its config has no hidden_size, so no value head fits it")
    return int(width)
