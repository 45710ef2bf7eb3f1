"""Critics on disk: transformers' token classifier whose one label is the value of the state that ends at a token.

verl stores critics as token classifiers, too. For architectures without a token classifier in transformers (BitNet), a
critic is stored as a `CausalLMRewardModel`, whose score of a sequence is the value of the state after the sequence.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from ppo_rlhf.core.errors import ModelError, in_one_line
from ppo_rlhf.models.reward_model import SCORE_MEAN, CausalLMRewardModel
from ppo_rlhf.passes.capabilities import PROBE_ERRORS, are_close, probe_ids, probing


def to_token_classifier(backbone: PreTrainedModel, value_head: nn.Linear) -> PreTrainedModel:
    """Return a token classifier that shares the critic's weights, and whose `.logits [B, S, 1]` are the values.

    Raises:
        ModelError: No token classifier computes the critic's values; the error message has the reason.
    """
    config = copy.deepcopy(backbone.config)
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ModelError(f"transformers has no token classifier of the kind {config.model_type}")
    kind: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)]
    # An empty name_or_path, because the saved configuration would contain the path of a folder of this machine
    config.num_labels, config.name_or_path = 1, ""
    # Values of the reward model's configuration, if the critic started from a reward model
    for of_a_reward_model in (SCORE_MEAN, "held_out_accuracy", "held_out_interval", "trained_from", "problem_type"):
        vars(config).pop(of_a_reward_model, None)
    ids = probe_ids(backbone, 4)[None].to(backbone.device)
    try:
        with torch.device("meta"):
            model = kind(config).eval()
        if type(model.base_model) is not type(backbone):
            raise ModelError(f"{kind.__name__} has another backbone than {type(backbone).__name__}")
        setattr(model, model.base_model_prefix, backbone)
        setattr(model, _name_of_head(model), value_head)
        with probing(backbone):
            values = value_head(backbone(input_ids=ids, use_cache=False).last_hidden_state.to(value_head.weight.dtype))
            same = are_close(model(ids).logits, values)
    except PROBE_ERRORS as error:
        raise ModelError(f"{kind.__name__} does not fit: {in_one_line(error)}") from error
    if not same:
        raise ModelError(f"{kind.__name__} computes other values")
    return cast("PreTrainedModel", model)


def from_token_classifier(model: PreTrainedModel) -> CausalLMRewardModel:
    """Return the model from which a critic starts: it shares a token classifier's backbone and head, named `score`.

    Raises:
        ModelError: The classifier has no linear head with one output on its backbone.
    """
    head = getattr(model, _name_of_head(model))
    return CausalLMRewardModel.from_parts(cast("PreTrainedModel", model.base_model), head)


def is_token_classifier(config: PretrainedConfig) -> bool:
    """Return whether a configuration belongs to a token classifier of transformers."""
    architecture = next(iter(config.architectures or ()), None)
    return architecture in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()


def _name_of_head(model: PreTrainedModel) -> str:
    others = {name: part for name, part in model.named_children() if name != model.base_model_prefix}
    heads = [name for name, part in others.items() if isinstance(part, nn.Linear)]
    if len(heads) != 1 or cast(nn.Linear, others[heads[0]]).out_features != 1:
        raise ModelError(f"{type(model).__name__} has no linear head with one output on its backbone")
    return heads[0]
