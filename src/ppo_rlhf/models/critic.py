"""Critics, which predict the return at every position, with their own backbone or on the policy's backbone.

On disk, a value head has the weight names of TRL's `AutoModelForCausalLMWithValueHead`. The value head's weights are
stored with the language model's weights; transformers ignores them when it loads the language model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.passes.forward import backbone_of, width_of_states

VALUE_HEAD = WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
OwnBackbone = Callable[[PreTrainedModel], PreTrainedModel]
"""A function that returns a trainable backbone made from a given backbone. Training does not change the given
backbone."""


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

        The value at the last prompt token is V(s_0): s_0 is the state before the first response token is chosen.
        """
        hidden_states = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return self.values(hidden_states)

    def values(self, hidden_states: Tensor) -> Tensor:
        """Return the values `[…]` of the backbone's last hidden states `[…, H]`, float32 or wider."""
        head = self.value_head
        # Compute the value head in float32: the head is small, so 16 bits would save nothing
        with torch.autocast(hidden_states.device.type, enabled=False):
            values: Tensor = head(hidden_states.to(head.weight.dtype)).squeeze(-1)
        return values.to(compute_dtype(values))


class Critic(ValueModel):
    """A critic with its own backbone."""

    def __init__(self, backbone: PreTrainedModel, value_head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head

    @classmethod
    def from_policy(
        cls, policy: PreTrainedModel, *, value_head: nn.Linear | None = None, own_backbone: OwnBackbone | None = None
    ) -> Critic:
        """Make a critic from the policy's backbone, with a copy of `value_head` (None: a head of zeros).

        `own_backbone` makes the critic's backbone from the policy's backbone; if None, the critic's backbone is a copy
        of the policy's backbone, all of whose weights train.
        """
        return cls((own_backbone or copy_to_train)(backbone_of(policy)), make_value_head(policy, value_head))

    @classmethod
    def from_reward_model(
        cls,
        reward_model: PreTrainedModel,
        policy: PreTrainedModel,
        *,
        own_backbone: OwnBackbone | None = None,
        setting: str = "reward_init",
    ) -> Critic:
        """Make a critic on the policy's device, from the backbone and score head of a reward model or stored critic.

        `own_backbone` makes the critic's backbone from the model's backbone; if None, all weights of a copy train.
        `setting` is the value of `ppo.value_model`, for error messages.

        Raises:
            ModelError: The model's vocabulary size differs from the policy's, or the model has no linear score head.
        """
        score = check_start(reward_model, policy.config, setting)
        head = new_value_head(score.in_features, policy)
        # If the classifier's head has no bias, the value head keeps its own bias of 0
        head.load_state_dict({"bias": head.bias, **score.state_dict()})
        backbone = (own_backbone or copy_to_train)(backbone_of(reward_model))
        if own_backbone is None:
            nn.Module.to(backbone, head.weight.dtype)
        return cls(nn.Module.to(backbone, policy.device), head)


class SharedCritic(ValueModel):
    """A value head on the policy's hidden states: a shared trunk, as in TRL's models with a value head.

    The policy is not a submodule: only the head's parameters are parameters of the critic, and only the head's
    parameters are saved.
    """

    def __init__(self, policy: PreTrainedModel, value_head: nn.Linear | None = None) -> None:
        """Put a copy of `value_head` on the policy (None: a head of zeros)."""
        super().__init__()
        self.value_head = make_value_head(policy, value_head)
        self._policy = (policy,)  # the policy is in a tuple, so that nn.Module does not register it as a submodule

    @property
    def backbone(self) -> PreTrainedModel:  # type: ignore[override]  # read-only
        """The policy's backbone."""
        return backbone_of(self._policy[0])


def freeze_attention(backbone: PreTrainedModel) -> None:
    """Freeze the weights of a backbone's attention: of all modules with "attention" in the name of their class.

    Raises:
        ModelError: A layer of the architecture has no module with "attention" in the name of its class.
    """
    layers = [module for module in backbone.modules() if type(module).__name__ in (backbone._no_split_modules or ())]
    by_layer = [[each for each in layer.modules() if "attention" in type(each).__name__.lower()] for layer in layers]
    if not all(by_layer) or not by_layer:
        raise ModelError(
            f"ppo.value_freeze=attention: a layer of {type(backbone).__name__} has no module whose class has Attention "
            "in its name, so it is not known what to freeze; set ppo.value_freeze=none"
        )
    for attention in (each for modules in by_layer for each in modules):
        attention.requires_grad_(False)


def check_start(model: PreTrainedModel, policy: PretrainedConfig, setting: str) -> nn.Linear:
    """Return the score head of a model that a critic starts from.

    Raises:
        ModelError: The model's vocabulary size differs from the policy's, or the model has no linear score head.
    """
    ours, theirs = (config.get_text_config().vocab_size for config in (policy, model.config))
    if ours != theirs:
        raise ModelError(
            f"ppo.value_model={setting}: its model's vocabulary has {theirs} tokens, the policy's {ours}; set "
            "ppo.value_model=separate"
        )
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ModelError(
            f"ppo.value_model={setting}: {type(model).__name__} has no linear `score` head with one "
            "output; set ppo.value_model=separate"
        )
    return score


def copy_to_train(backbone: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a backbone, float32 or wider, whose weights all train."""
    dtype = torch.promote_types(backbone.dtype, torch.float32)
    return nn.Module.to(copy.deepcopy(backbone), dtype).requires_grad_(True)


def new_value_head(width: int, policy: PreTrainedModel) -> nn.Linear:
    """Return a value head of zeros on the policy's device, float32 or wider: before training, all values are 0."""
    head = nn.Linear(width, 1, device=policy.device, dtype=torch.promote_types(policy.dtype, torch.float32))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def make_value_head(policy: PreTrainedModel, start: nn.Linear | None) -> nn.Linear:
    """Return a value head that fits the policy: a copy of `start`, or zeros.

    Raises:
        ModelError: `start` has another input width than the policy's hidden states, or the policy's configuration
            names no width.
    """
    head = new_value_head(width_of_states(policy.config), policy)
    if start is None:
        return head
    if start.weight.shape != head.weight.shape:
        raise ModelError(
            f"The value head (v_head.summary) reads hidden states of width {start.in_features}, the policy's have "
            f"{head.in_features}: they do not belong together"
        )
    head.load_state_dict(start.state_dict())
    return head


def read_value_head(files: Sequence[Path]) -> nn.Linear | None:
    """Return the value head in a model directory's safetensors files, float32 or wider; None if the files have none.

    Raises:
        ModelError: The weights with the names of a value head do not form a linear layer with one output.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            tensors |= {name: weights.get_tensor(name) for name in set(VALUE_HEAD) & set(weights.keys())}
    if not tensors:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    width = shapes.get(WEIGHT, (0,))[-1]
    if shapes != {WEIGHT: (1, width), BIAS: (1,)}:
        raise ModelError(
            f"{files[0].parent}: its value head has {shapes}, expected {WEIGHT} (1, width) and {BIAS} (1,)"
        )
    head = nn.Linear(width, 1, dtype=torch.promote_types(tensors[WEIGHT].dtype, torch.float32))
    head.load_state_dict({"weight": tensors[WEIGHT], "bias": tensors[BIAS]})
    return head
