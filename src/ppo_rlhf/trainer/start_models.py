"""The models given to PPOTrainer, as objects or paths, prepared as the pipeline prepares the models that it loads."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.adapters import has_adapter
from ppo_rlhf.models.context_length import usable_context
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.directories import WEIGHTS, WEIGHTS_INDEX, check_model_directory, is_local
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import MADE_FROM, START, Origin
from ppo_rlhf.models.preparation import prepare
from ppo_rlhf.models.reward_model import with_mean
from ppo_rlhf.models.tokenizers import check_vocabulary, ensure_pad_token, templates_of
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.passes.capabilities import check_causal
from ppo_rlhf.ppo.run_setup import (
    AnyCritic,
    as_adapter,
    build_critic,
    critic_backbone,
    load_causal_lm,
    policy_to_train,
    prepare_reference,
    start_dtype,
)
from ppo_rlhf.runtime.paths import place
from ppo_rlhf.runtime.processes import is_main_process

log = logging.getLogger(__name__)

HOST = torch.device("cpu")
ModelSource = PreTrainedModel | str | Path
"""A model, or its directory or hub id."""


def check_model_paths(*sources: Any) -> None:
    """Raise `ModelError` if a path holds no model, before any model is loaded and before any request to the hub."""
    for source in sources:
        if isinstance(source, Path) and not source.expanduser().exists():
            raise ModelError(f"{source}: there is no such model directory. A hub id is given as text, not as a Path.")
        if isinstance(source, str | Path):
            check_model_directory(source)


def model_origin(source: ModelSource, role: str) -> Origin:
    """Return a model, or the model at a path or hub id, as an origin of a trained model.

    A model object has no digest, because a script may have changed its weights. If it was loaded from a directory with
    `made_from.json`, its origins are those of the directory.

    Raises:
        ModelError: `made_from.json` is damaged.
    """
    if isinstance(source, str | Path):
        return PretrainedHandle(str(source)).origin(role)
    name = source.name_or_path or ""
    if name and Path(name, MADE_FROM).is_file():
        return replace(PretrainedHandle(name).origin(role), digest=None)
    return Origin("model", role, place(name) or "a model without a name", on_hub=bool(name) and not is_local(name))


def take_policies(
    config: PPOConfig,
    policy: ModelSource | None,
    reference: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
) -> tuple[TrainedModel, PreTrainedModel]:
    """Return the policy to train, with its tokenizer and value head, and the frozen reference policy.

    A model object is changed in place: device, precision, no dropout. With `reference=None` the reference policy is a
    frozen copy of the policy. With LoRA the reference policy is the policy without the adapter.

    Raises:
        ConfigError: The policy or its tokenizer is missing, or policy and reference share weights.
        ModelError: The policy or the reference policy cannot be used.
    """
    source = config.sft_model_path if policy is None else policy
    if source is None:
        raise ConfigError("PPOTrainer has no policy: give one, or set sft_model_path in the PPOConfig")
    handle = PretrainedHandle(str(source)) if isinstance(source, str | Path) else None
    if handle is not None:
        tokenizer = tokenizer or handle.tokenizer()
        if (adapter := as_adapter(handle)) and is_main_process():
            log.info("Policy: %s%s.", source, adapter)
    if tokenizer is None:
        raise ConfigError("PPOTrainer: tokenizer is missing: the policy is an object, so give its tokenizer, too")
    base = _causal_lm(source, "policy", start_dtype(config), config, device)
    # Of a model on the hub, `value_head` finds only what loading has downloaded
    head = _left_out_head(base, "policy") if handle is None else handle.value_head()
    ensure_pad_token(tokenizer, base.config)
    check_vocabulary(tokenizer, base.config, "PPOTrainer")
    templates_of(tokenizer, "PPOTrainer: tokenizer")
    reference_device = HOST if config.offload_reference_policy else device
    if reference is not None:
        frozen = _causal_lm(reference, "reference policy", start_dtype(config), config, reference_device)
        policy_parameters = {id(parameter) for parameter in base.parameters()}
        if not config.use_peft and any(id(parameter) in policy_parameters for parameter in frozen.parameters()):
            raise ConfigError(
                "PPOTrainer: policy and reference_policy share weights, so the reference would train, too, and the KL "
                "would stay 0; give reference_policy=None for a frozen copy"
            )
        check_same_vocabulary(frozen, base, "reference policy")
    elif config.use_peft:
        frozen = base
    else:
        copied_source = source if isinstance(source, str | Path) else copy.deepcopy(base)
        frozen = _causal_lm(copied_source, "reference policy", start_dtype(config), config, reference_device)
    prepare_reference(frozen, config)
    made_from = (model_origin(source, START),)
    return TrainedModel(policy_to_train(base, config), tokenizer, value_head=head, made_from=made_from), frozen


def take_critic(
    config: PPOConfig, policy: TrainedModel, reward_model: PreTrainedModel | None, value_model: ModelSource | None
) -> AnyCritic:
    """Return the critic: from `value_model` if `value_model` is given, else as `ppo.value_model` says.

    `value_model` is a model, which is copied, or the directory of a stored critic. `compat.from_trl` sets
    `ppo.value_model=reward_init`. With `reward_init` `value_model` may be a sequence classifier, as in TRL's scripts:
    the reward model from which the critic is initialised.

    Raises:
        ConfigError: `value_model` contradicts `ppo.value_model`.
        ModelError: `value_model` cannot be used with this policy.
    """
    if value_model is None:
        return build_critic(config, policy.model, reward_model, policy.value_head)
    is_classifier = config.value_model == "reward_init" and hasattr(value_model, "score")
    if config.value_model not in ("separate", "pretrained") and not is_classifier:
        raise ConfigError(
            f"PPOTrainer: value_model and ppo.value_model={config.value_model} exclude each other: each says what the "
            "critic is initialised from; leave out value_model, or set ppo.value_model=separate"
        )
    dtype = start_dtype(config)
    if isinstance(value_model, str | Path):
        handle = PretrainedHandle(str(value_model))
        handle.check_critic("value model")
        value_model = handle.critic(dtype)
    start = with_mean(take_over(value_model, "value model", dtype, policy.model.device))
    check_same_vocabulary(start, policy.model, "value model")
    score = getattr(start, "score", None)
    if score is None and (start.get_output_embeddings() is not None or start.base_model is start):
        head = _left_out_head(start, "value model")
        return Critic.from_policy(start, value_head=head, own_backbone=critic_backbone(config))
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ModelError(
            "PPOTrainer: the value model has no linear head `score` with one output; give a sequence classifier with "
            "such a head (num_labels=1), a causal language model, or a backbone alone (model.base_model)"
        )
    return Critic.from_reward_model(start, policy.model, own_backbone=critic_backbone(config))


def take_over(model: Any, what: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Prepare a model in place as if it had been loaded from its directory: precision, device, no dropout.

    Only parameters are cast to `dtype`. Buffers such as rotary frequencies keep their dtype, as in from_pretrained.

    Raises:
        ModelError: The model is not a transformers model, has an adapter, is quantised or compiled, was made under
            inference_mode, or was wrapped by a trainer.
    """
    _check_model(model, what)
    prepare(model, f"PPOTrainer: the {what}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    return nn.Module.to(model, device)


def check_same_vocabulary(model: PreTrainedModel, policy: PreTrainedModel, what: str, remedy: str = "") -> None:
    """Raise `ModelError` if the vocabularies of a model and the policy differ in size; the message ends in `remedy`."""
    size, policy_size = (each.config.get_text_config().vocab_size for each in (model, policy))
    if size != policy_size:
        raise ModelError(f"PPOTrainer: the {what}'s vocabulary has {size} tokens, the policy's {policy_size}{remedy}")


def context_of_all(policy: PreTrainedModel, reference: PreTrainedModel, critic: AnyCritic) -> tuple[int | None, str]:
    """Return the shortest context of a run's models in tokens, and the reason for this limit (`usable_context`)."""
    models = {"policy": policy, "reference policy": reference, "critic": critic.backbone}
    limits = {what: usable_context(model.config) for what, model in models.items()}
    shortest = min(limits, key=lambda what: limits[what][0] or math.inf)
    context, why = limits[shortest]
    if shortest == "policy":
        return context, why
    return context, f". This is the context of the {shortest}; the policy has a longer context{why}"


def _causal_lm(
    source: ModelSource, what: str, dtype: torch.dtype, config: PPOConfig, device: torch.device
) -> PreTrainedModel:
    if isinstance(source, str | Path):
        return load_causal_lm(PretrainedHandle(str(source)), dtype, config, device)
    if config.load_in_4bit:
        raise ConfigError(
            f"PPOTrainer: ppo.load_in_4bit=true quantises a model while loading it, but the {what} is an object; give "
            "its directory or hub id"
        )
    model = take_over(source, what, dtype, device)
    if not model.can_generate():
        kind = type(model).__name__
        raise ModelError(
            f"PPOTrainer: the {what} is a {kind}, which has no language-modelling head; give a causal language model"
        )
    check_causal(model, f"PPOTrainer: the {what}")
    return model


def _left_out_head(model: PreTrainedModel, what: str) -> nn.Linear | None:
    """Return TRL's value head (`v_head`) from the directory or hub id that a model was loaded from, or None.

    transformers does not load TRL's value head with the model.
    """
    source = model.name_or_path or ""
    has_weights = any(Path(source, name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX)) or not is_local(source)
    head = PretrainedHandle(source).value_head() if source and has_weights else None
    if head is not None and is_main_process():
        log.warning("The value head (v_head) of the %s is read from %s; transformers does not load it.", what, source)
    return head


def _check_model(model: Any, what: str) -> None:
    reload = "save the original model, and give what from_pretrained loads"
    if isinstance(model, nn.Module) and has_adapter(model):
        raise ModelError(
            f"PPOTrainer: the {what} has an adapter; give the result of merge_and_unload().requires_grad_(True) of its "
            "PeftModel, which peft's AutoPeftModelForCausalLM loads from a folder. ppo.use_peft trains a new adapter"
        )
    if not isinstance(model, transformers.PreTrainedModel):
        raise ModelError(f"PPOTrainer: the {what} is a {type(model).__name__}, not a transformers model; {reload}")
    modules = list(model.modules())
    refused = {
        "is quantised; give the directory or hub id of the unquantised model, for 4 bits with ppo.load_in_4bit=true": (
            getattr(model, "is_quantized", False)
        ),
        "was wrapped by a trainer or by accelerate, so a copy would still use its weights; " + reload: any(
            "forward" in vars(module) for module in modules
        ),
        "was made under torch.inference_mode; load it outside the inference_mode block": any(
            parameter.is_inference() for parameter in model.parameters()
        ),
        f"is compiled; {reload}. ppo.compile=true compiles its layers": any(
            module._compiled_call_impl is not None for module in modules
        ),
    }
    for why, holds in refused.items():
        if holds:
            raise ModelError(f"PPOTrainer: the {what} {why}")
