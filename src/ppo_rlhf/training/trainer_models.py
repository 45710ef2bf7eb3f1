"""The models that a person hands to PPOTrainer, as objects or paths, made what a run of the pipeline would load."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.adapters import has_adapter
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.loading import PretrainedHandle, TrainedModel, check_vocabulary, prepare, steady_context
from ppo_rlhf.models.offloading import to_host
from ppo_rlhf.models.tokenizers import ensure_pad_token
from ppo_rlhf.ppo.accelerator import frozen_dtype, trained_dtype
from ppo_rlhf.ppo.build import (
    AnyCritic,
    build_critic,
    check_device,
    critic_backbone,
    policy_to_train,
    prepare_to_score,
)

HOST = torch.device("cpu")
ModelSource = PreTrainedModel | str | Path
"""A model, or the directory or hub id of one."""


def take_policies(
    config: PPOConfig,
    policy: ModelSource | None,
    reference: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
) -> tuple[TrainedModel, PreTrainedModel]:
    """Return the policy, which trains, with tokenizer and value head, and the frozen reference.

    Args:
        config: Hyperparameters; its `sft_model_path` stands in for a policy that is not given.
        policy: A causal language model. An object is changed in place: device, precision, dropout off, and it trains
            itself, but with LoRA.
        reference: The same, frozen. None: the policy as it is now; with LoRA its weights without the adapter.
        tokenizer: The policy's; None takes the one that lies with it.
        device: Where the models go.

    Raises:
        ConfigError: The policy or its tokenizer is missing, or one model is to be both policy and reference.
        ModelError: A model cannot be used.
    """
    source = config.sft_model_path if policy is None else policy
    if source is None:
        raise ConfigError("PPOTrainer has no policy: give one, or set sft_model_path in the PPOConfig")
    head = None
    if isinstance(source, str | Path):
        handle = PretrainedHandle(str(source))
        head, tokenizer = handle.value_head(), tokenizer or handle.tokenizer()
    if tokenizer is None:
        raise ConfigError("PPOTrainer: a policy that is given as an object comes without its tokenizer; give that too")
    base = _causal_lm(source, "policy", frozen_dtype(config) if config.use_peft else trained_dtype(config), device)
    ensure_pad_token(tokenizer, base.config)
    check_vocabulary(tokenizer, base.config, "PPOTrainer")
    check_device(config, device)
    waits = HOST if config.offload_reference_policy else device
    if reference is not None:
        frozen = _causal_lm(reference, "reference policy", frozen_dtype(config), waits)
        complaint = (
            "policy and reference_policy share weights, so the reference would train too and the KL would stay 0; give "
            "reference_policy=None for a frozen copy"
        )
        _check_apart(base, frozen, config, complaint)
        check_same_vocabulary(frozen, base, "reference policy")
    elif config.use_peft:
        frozen = base
    else:
        again = source if isinstance(source, str | Path) else copy.deepcopy(base)
        frozen = _causal_lm(again, "reference policy", frozen_dtype(config), waits)
    frozen.requires_grad_(False)
    if config.offload_reference_policy:
        to_host(frozen)
    prepare_to_score(frozen, config)
    return TrainedModel(policy_to_train(base, config), tokenizer, value_head=head), frozen


def take_critic(
    config: PPOConfig,
    policy: TrainedModel,
    reference: PreTrainedModel,
    reward_model: PreTrainedModel | None,
    value_model: PreTrainedModel | Critic | None,
) -> AnyCritic:
    """Return the critic: from the model given, or the one that `ppo.value_model` asks for.

    A model is copied. A Critic is taken over as the policy is: changed in place, and it trains itself, but with LoRA;
    what it has frozen stays frozen.

    Raises:
        ConfigError: A model is given, and `ppo.value_model` asks for another one, or another model has its weights.
        ModelError: The model given cannot be used with this policy.
    """
    if value_model is None:
        return build_critic(config, policy.model, reward_model, policy.value_head)
    if config.value_model != "separate":
        raise ConfigError(
            f"PPOTrainer's value_model and ppo.value_model={config.value_model} exclude each other: both say where the "
            "critic starts; leave one out"
        )
    dtype = frozen_dtype(config) if config.use_peft else trained_dtype(config)
    given = value_model.backbone if isinstance(value_model, Critic) else value_model
    if isinstance(value_model, Critic):
        others = {"policy": policy.model, "reference policy": reference, "reward model": reward_model}
        for what, other in others.items():
            complaint = (
                f"value_model, a Critic, shares weights with the {what}, so that one would change with the other; give "
                "it a copy of the model, or set ppo.value_model=shared for one trunk"
            )
            if other is not None:
                _check_apart(given, other, config, complaint)
    start = take_over(given, "value model", dtype, policy.model.device)
    check_same_vocabulary(start, policy.model, "value model")
    if isinstance(value_model, Critic):
        return _critic_to_train(value_model, config)
    score = getattr(start, "score", None)
    if score is None:
        return Critic.from_policy(start, own_backbone=critic_backbone(config))
    _check_head(score, "score")
    return Critic.from_reward_model(start, policy.model, own_backbone=critic_backbone(config))


def take_over(model: Any, what: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a model, in place, what loading it from its directory would give: precision, device, no dropout.

    Parameters alone get the type: buffers such as rotary frequencies stay as they are, as when weights are loaded. They
    get memory of their own.

    Raises:
        ModelError: It is no transformers model, has an adapter, or was wrapped by a trainer.
    """
    _check_model(model, what)
    prepare(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype).clone()
    return nn.Module.to(model, device)


def check_same_vocabulary(model: PreTrainedModel, policy: PreTrainedModel, what: str, remedy: str = "") -> None:
    """Raise `ModelError` if a model reads another number of tokens than the policy."""
    theirs, ours = (each.config.get_text_config().vocab_size for each in (model, policy))
    if theirs != ours:
        raise ModelError(f"PPOTrainer: the {what}'s vocabulary has {theirs} tokens, the policy's {ours}{remedy}")


def context_of_all(policy: PreTrainedModel, reference: PreTrainedModel, critic: AnyCritic) -> tuple[int | None, str]:
    """Return how many tokens all models of a run read, and why no more than that (`models.loading.steady_context`)."""
    models = {"policy": policy, "reference policy": reference, "critic": critic.backbone}
    limits = {what: steady_context(model.config) for what, model in models.items()}
    shortest = min(limits, key=lambda what: limits[what][0] or math.inf)
    context, why = limits[shortest]
    if shortest == "policy":  # the first of those that read as few
        return context, why
    return context, f". That is the {shortest}'s context; the policy's is longer{why}"


def _causal_lm(source: ModelSource, what: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if isinstance(source, str | Path):
        return nn.Module.to(PretrainedHandle(str(source)).causal_lm(dtype), device)
    return take_over(source, what, dtype, device)


def _critic_to_train(critic: Critic, config: PPOConfig) -> Critic:
    """Return the critic itself, or with `use_peft` another over its frozen backbone, with an adapter and a new head."""
    _check_head(critic.value_head, "value_head")
    critic.value_head.to(critic.backbone.device, trained_dtype(config))
    own_backbone = critic_backbone(config)
    if own_backbone is None:
        return critic
    return Critic(own_backbone(critic.backbone), copy.deepcopy(critic.value_head))


def _check_head(head: Any, name: str) -> None:
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"PPOTrainer: the value model's `{name}` is not a linear head with one output; give a sequence classifier "
            "with num_labels=1, or a causal language model"
        )


def _check_model(model: Any, what: str) -> None:
    saved = "save it, and give what from_pretrained loads of it"
    if not isinstance(model, transformers.PreTrainedModel):
        raise ModelError(f"PPOTrainer: the {what} is a {type(model).__name__}, not a transformers model; {saved}")
    if has_adapter(model):
        raise ModelError(
            f"PPOTrainer: the {what} has an adapter; merge it (merge_and_unload). ppo.use_peft trains a new one"
        )
    if any("forward" in vars(module) for module in model.modules()):
        raise ModelError(
            f"PPOTrainer: the {what} was wrapped by a trainer or by accelerate: its copies would run the original's "
            f"weights; {saved}"
        )


def _check_apart(trained: nn.Module, other: PreTrainedModel, config: PPOConfig, complaint: str) -> None:
    """Raise `ConfigError` with the complaint if a model that trains has a weight of another (adapters leave it be)."""
    own = {id(parameter) for parameter in trained.parameters()}
    if not config.use_peft and any(id(parameter) in own for parameter in other.parameters()):
        raise ConfigError(f"PPOTrainer: {complaint}")
