"""Finds out which kind of model a directory or hub id holds, from the configuration and the shape of the head."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.directories import WEIGHTS, WEIGHTS_INDEX, hub_answers
from ppo_rlhf.models.reward_model import MODEL_TYPE, SCORE_MEAN
from ppo_rlhf.models.stored_critic import is_token_classifier

SCORE_HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
"""Weight names of the heads of sequence classifiers."""


def check_generates(config: PretrainedConfig, source: str) -> None:
    """Raise `ModelError` unless a configuration belongs to a causal language model whose weights are not quantised."""
    if config.model_type == MODEL_TYPE or hasattr(config, SCORE_MEAN):
        raise ModelError(f"{source}: a reward model cannot generate. Give a causal language model.")
    if is_token_classifier(config):
        raise ModelError(
            f"{source}: this is a token classifier, as critics are stored, and cannot generate. Give a causal language "
            "model."
        )
    own_code = getattr(config, "auto_map", None) or {}
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or AutoModelForCausalLM.__name__ in own_code
    if config.is_encoder_decoder or not is_known:
        kind = type(config).__name__
        raise ModelError(f"{source}: {kind} configures no causal language model. Give a decoder-only model.")
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "bitsandbytes":
        raise ModelError(
            f"{source}: its weights were saved in 4 or 8 bits. Give the original, unquantised model; "
            "ppo.load_in_4bit=true quantises it while it is loaded."
        )


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether a configuration belongs to a sequence classifier of transformers, this project, or remote code."""
    architecture, own_code = next(iter(config.architectures or ()), None), getattr(config, "auto_map", None) or {}
    return (
        architecture in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
        or config.model_type == MODEL_TYPE
        or AutoModelForSequenceClassification.__name__ in own_code
    )


def rows_of_head(find: Callable[[str], Path | None]) -> int | None:
    """Return the number of outputs of a classifier's head; None if the classifier has no head or the file is missing.

    `find` maps the name of a model's file to the file's path, or to None if the file is missing.
    """
    if (file := find(WEIGHTS)) is None and (index := find(WEIGHTS_INDEX)) is not None:
        shards = json.loads(index.read_bytes())["weight_map"]
        file = next((find(shard) for name, shard in shards.items() if name in SCORE_HEADS), None)
    if file is None:
        return None
    with safe_open(file, framework="pt") as weights:
        names = [name for name in SCORE_HEADS if name in set(weights.keys())]
        return next(iter(weights.get_slice(names[0]).get_shape()), None) if names else None


@cache
def rows_on_hub(name: str, revision: str) -> int | None:
    """Return the number of outputs of the head of a classifier on the hub, as `rows_of_head` does.

    Only the headers of the classifier's weights files are downloaded.
    """
    if not hub_answers():
        return None
    try:
        files = get_safetensors_metadata(name, revision=revision).files_metadata.values()
    # The head's size is unknown; loading the weights will raise the error that the user sees
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError):
        return None
    heads = [file.tensors[head] for head in SCORE_HEADS for file in files if head in file.tensors]
    return heads[0].shape[0] if heads else None


def parts_left_out(config: PretrainedConfig, model: PreTrainedModel) -> str:
    """Return the names of the parts of a checkpoint, such as vision, that a model loaded from its text part lacks."""
    parts, text = config.sub_configs, type(model.config)
    if text not in parts.values():
        return ""
    return " and ".join(name.removesuffix("_config") for name, part in parts.items() if part is not text)
