"""Builds the models and the training state of a run from its configuration."""

from __future__ import annotations

import logging
from functools import partial
from typing import assert_never

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo import EIGHT_BIT
from ppo_rlhf.config.ppo_rules import device_problems, sharding_problems
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.core.kl import AdaptiveKLController, FixedKLController
from ppo_rlhf.core.randomness import generator
from ppo_rlhf.models.adapters import (
    LoraSettings,
    check_targets,
    describe_mixture,
    has_adapter,
    with_adapter,
    without_adapter,
)
from ppo_rlhf.models.averages import WeightAverage
from ppo_rlhf.models.critic import Critic, OwnBackbone, SharedCritic, freeze_attention
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import START
from ppo_rlhf.models.quantisation import check_bitsandbytes
from ppo_rlhf.models.stop_tokens import stop_token_ids
from ppo_rlhf.models.stored_weights import store_linear_weights
from ppo_rlhf.models.tokenizers import unused_ids
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.passes.capabilities import check_causal
from ppo_rlhf.passes.compilation import check_compiler, compile_layers
from ppo_rlhf.passes.forward import backbone_of, logits_of, packs
from ppo_rlhf.passes.gradient_checkpointing import enable_gradient_checkpointing
from ppo_rlhf.passes.sampling import Engine, SamplingSettings
from ppo_rlhf.passes.transfers import to_host
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.environments import reply_by_function
from ppo_rlhf.ppo.experience import Shaping
from ppo_rlhf.ppo.forward_passes import CriticForward, PolicyForward
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.optimisers import build_optimizer, check_trains, peak_learning_rates
from ppo_rlhf.ppo.precision import frozen_dtype, make_accelerator, trained_dtype, with_dtype, wrap
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.ppo.vllm import check_vllm, vllm_engine
from ppo_rlhf.runtime.processes import is_main_process, join_processes, shards_models
from ppo_rlhf.runtime.user_functions import load_function

log = logging.getLogger(__name__)

AnyCritic = Critic | SharedCritic


def start_dtype(config: PPOConfig) -> torch.dtype:
    """Return the dtype in which policy, reference policy and critic are loaded.

    With `use_peft` the loaded weights never train.
    """
    return frozen_dtype(config) if config.use_peft else trained_dtype(config)


def lora_settings(config: PPOConfig) -> LoraSettings:
    """Return the rank, alpha and target modules of the run's LoRA adapters."""
    return LoraSettings(config.lora_r, config.lora_alpha, config.lora_target_modules)


def load_policies(
    sft_policy: PretrainedHandle, config: PPOConfig, device: torch.device
) -> tuple[TrainedModel, PreTrainedModel]:
    """Return the policy to train (with its tokenizer and a stored value head, if any) and the frozen reference policy.

    With `use_peft` the weights are loaded once: the reference policy is the loaded model, and the policy is the same
    model with an adapter. With `offload_reference_policy` the reference policy is in the host's memory while it is not
    used.

    Raises:
        ConfigError: A setting needs another device, a compiler that is missing, or vLLM, which is missing.
        ModelError: The model cannot be loaded, or no adapter fits it.
    """
    check_device(config, device)
    reference_device = torch.device("cpu") if config.offload_reference_policy else device
    reference = load_causal_lm(sft_policy, start_dtype(config), config, reference_device)
    prepare_reference(reference, config)
    base = reference if config.use_peft else load_causal_lm(sft_policy, trained_dtype(config), config, device)
    policy = policy_to_train(base, config)
    made_from = (sft_policy.origin(START),)
    return TrainedModel(policy, sft_policy.tokenizer(), sft_policy.value_head(), made_from=made_from), reference


def prepare_reference(reference: PreTrainedModel, config: PPOConfig) -> None:
    """Freeze a reference policy that was loaded in `start_dtype`, in place, and store, offload and compile it.

    In 16 bits only the weights of linear layers are stored in 16 bits, as autocast casts the policy's, so that policy
    and reference policy do the same arithmetic.
    """
    store_linear_weights(reference.requires_grad_(False), frozen_dtype(config))
    if config.offload_reference_policy:
        to_host(reference)
    if config.compile:
        compile_layers(reference)


def load_causal_lm(
    handle: PretrainedHandle, dtype: torch.dtype, config: PPOConfig, device: torch.device
) -> PreTrainedModel:
    """Return a causal language model on a device; with `load_in_4bit` the model's weights are in 4 bits."""
    return nn.Module.to(handle.causal_lm(dtype, quantised_on=device if config.load_in_4bit else None), device)


def as_adapter(handle: PretrainedHandle) -> str:
    """Return a remark for a log line if a model source is an adapter, else "".

    The remark names the adapter's base model, and the number of tokens if the adapter enlarges the vocabulary.
    """
    if handle.base is None:
        return ""
    size, base_size = (each.config().get_text_config().vocab_size for each in (handle, handle.base))
    growth = "" if size == base_size else f", whose vocabulary goes from {base_size:,} to {size:,} tokens"
    return f" (an adapter, merged into {handle.base.source}{growth})"


def check_libraries(config: PPOConfig) -> None:
    """Raise `ConfigError` if a setting needs bitsandbytes and bitsandbytes is missing."""
    settings = []
    if config.load_in_4bit:
        settings.append("ppo.load_in_4bit=true")
    if config.optim == EIGHT_BIT:
        settings.append("ppo.optim=adamw_8bit")
    if settings:
        check_bitsandbytes(" and ".join(settings))


def check_device(config: PPOConfig, device: torch.device) -> None:
    """Raise `ConfigError` if a setting needs another device or unsharded models, or the compiler or vLLM is missing."""
    if config.rollout_engine == "vllm":
        check_vllm(device)
    problems = [*device_problems(config, device.type)]
    if shards_models():
        problems += sharding_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))
    if config.compile:
        check_compiler(device)


def policy_to_train(model: PreTrainedModel, config: PPOConfig) -> PreTrainedModel:
    """Return the policy to train: `model` itself, or with `use_peft` the frozen weights of `model` with a new adapter.

    Raises:
        ModelError: The adapter does not fit the model, or `lora_target_modules` names a layer that the model lacks.
    """
    if not config.use_peft:
        return model
    check_targets(model, lora_settings(config))
    if (line := describe_mixture(model, lora_settings(config))) and is_main_process():
        log.warning(line)
    return with_adapter(model, lora_settings(config), generator(config.seed, "policy adapter"))


def critic_backbone(config: PPOConfig) -> OwnBackbone | None:
    """Return a function that puts the critic's adapter on a model; without `use_peft` return None."""
    if not config.use_peft:
        return None
    return partial(with_adapter, settings=lora_settings(config), generator=generator(config.seed, "critic adapter"))


def build_critic(
    config: PPOConfig,
    policy: PreTrainedModel,
    reward_model: PreTrainedModel | None,
    value_head: nn.Linear | None = None,
    stored_critic: PreTrainedModel | None = None,
) -> AnyCritic:
    """Return the critic that `ppo.value_model` names; with `use_peft` its backbone is an adapter on shared weights.

    With `value_model` `shared` or `separate` the critic's head starts as `value_head`, or at zero if `value_head` is
    None.

    Raises:
        ConfigError: `value_model` is `reward_init` without a reward model, or `pretrained` without a stored critic.
        ModelError: The model from which the critic is initialised has another vocabulary or no linear score head, or
            the value head or the adapter does not fit the policy.
    """
    own_backbone = critic_backbone(config)
    match config.value_model:
        case "shared":
            return SharedCritic(policy, value_head)
        case "separate":
            start = without_adapter(policy) if has_adapter(policy) else policy
            return Critic.from_policy(start, value_head=value_head, own_backbone=own_backbone)
        case "pretrained":
            if stored_critic is None:
                raise ConfigError(
                    "ppo.value_model=pretrained: no stored critic is given; give PPOTrainer a value_model, or the "
                    "pipeline a critic_path: critic_pretraining stores a critic there"
                )
            return Critic.from_reward_model(stored_critic, policy, own_backbone=own_backbone, setting="pretrained")
        case "reward_init":
            if reward_model is None:
                raise ConfigError(
                    "ppo.value_model=reward_init copies the critic from the reward model, but no reward component is "
                    "of type model; set ppo.value_model=separate"
                )
            return Critic.from_reward_model(reward_model, policy, own_backbone=own_backbone)
        case unknown:
            assert_never(unknown)


def freeze_critic(critic: AnyCritic, config: PPOConfig) -> None:
    """Freeze the critic's weights that `ppo.value_freeze` names.

    Raises:
        ModelError: The weights to freeze cannot be found in the critic's architecture.
    """
    match config.value_freeze:
        case "none":
            return
        case "attention":
            freeze_attention(critic.backbone)
        case unknown:
            assert_never(unknown)
    total, trained = (
        sum(weight.numel() for weight in critic.parameters() if weight.requires_grad or not only) / 1e6
        for only in (False, True)
    )
    if is_main_process():
        log.info(
            "Critic: %.3g M parameters, of which %.3g M train; its %s is frozen (ppo.value_freeze).",
            *(total, trained, config.value_freeze),
        )


def load_stored_critic(stored: PretrainedHandle | None, config: PPOConfig) -> PreTrainedModel | None:
    """Return the stored critic in the dtype of the critic's weights, with its head as `score`.

    Returns None if `stored` is None or `ppo.value_model` is not `pretrained`.

    Raises:
        ModelError: The stored critic cannot be loaded, or does not have exactly one label.
    """
    if stored is None or config.value_model != "pretrained":
        return None
    return stored.critic(start_dtype(config))


def build_state(
    policy: PreTrainedModel, critic: AnyCritic, tokenizer: PreTrainedTokenizerBase, config: PPOConfig
) -> TrainingState:
    """Return the state of a new run: policy and critic prepared for training, new optimisers, wrapped forward passes.

    Raises:
        ConfigError: The stop token cannot be resolved with this tokenizer, or a setting needs bitsandbytes.
        ModelError: The critic attends to later tokens, all weights of a model are frozen, the policy has no stop token,
            or an architecture does not support gradient checkpointing or compilation.
        RewardError: `ppo.environment` cannot be imported.
    """
    config = with_dtype(config)
    check_libraries(config)
    check_export(policy.name_or_path, config)
    check_trains(policy, "policy")
    freeze_critic(critic, config)
    check_trains(critic, "critic")
    check_causal(critic.backbone, "the value model")
    sampling = sampling_settings(config, tokenizer, policy)
    # Run the probes before the models are wrapped and compiled below; the probes' results are cached
    packs(backbone_of(policy))
    packs(critic.backbone)
    logits_of(policy)
    device = join_processes().device if shards_models() else policy.device
    for model in (policy, critic.backbone) if isinstance(critic, Critic) else (policy,):
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        if config.compile:
            compile_layers(model)
    shared = isinstance(critic, SharedCritic)
    accelerator = make_accelerator(config, device, finds_unused=shared and config.critic_warmup_iterations > 0)
    policy_forward = wrap(accelerator, PolicyForward(policy, critic, config.temperature))
    critic_forward = None if isinstance(critic, SharedCritic) else wrap(accelerator, CriticForward(critic))
    policy_rate, critic_rate = peak_learning_rates(config)
    # A shared trunk's value head with a rate of its own has its own optimiser; otherwise the policy's has the head
    is_one = shared and config.value_learning_rate is None
    policy_optimizer = build_optimizer(policy_forward if is_one else policy, policy_rate, config)
    learner = Learner(
        config=config,
        policy=policy,
        critic=critic,
        accelerator=accelerator,
        policy_forward=policy_forward,
        critic_forward=critic_forward,
        policy_optimizer=policy_optimizer,
        critic_optimizer=policy_optimizer if is_one else build_optimizer(critic, critic_rate, config),
        policy_average=None if config.ema_decay is None else WeightAverage(policy, config.ema_decay),
    )
    return TrainingState(
        config,
        learner,
        Sampler(config, policy, tokenizer, sampling),
        Shaping(config, kl_controller_of(config)),
        Progress(config),
    )


def kl_controller_of(config: PPOConfig) -> FixedKLController:
    """Return the new KL controller that `ppo.kl_controller` names."""
    match config.kl_controller:
        case "fixed":
            return FixedKLController(config.kl_coef)
        case "adaptive":
            return AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon)
        case unknown:
            assert_never(unknown)


def engine_of(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> Engine | None:
    """Return the engine that samples in a separate program; None if this program samples."""
    match config.rollout_engine:
        case "static" | "hf":
            return None
        case "vllm":
            return vllm_engine(config, tokenizer)
        case unknown:
            assert_never(unknown)


def check_export(name: str | None, config: PPOConfig) -> None:
    """Raise `ModelError` if `ppo.export=adapter` and peft cannot load the base model of the adapter to export.

    `name` is the directory or hub id that the policy was loaded from.
    """
    if config.export != "adapter":
        return
    why = None if name else "the policy is an object without a name (name_or_path)"
    if name and (handle := PretrainedHandle(name)).gguf:
        why = f"{name} is a GGUF file"
    elif name and handle.base is not None:
        why = f"{name} is an adapter itself"
    if why:
        raise ModelError(f"ppo.export=adapter: {why}, so peft could not load its base; set ppo.export=merged")


def sampling_settings(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel
) -> SamplingSettings:
    """Return the sampling settings of a run with the given tokenizer and policy."""
    environment = None
    if config.environment is not None:
        environment = partial(reply_by_function, load_function(config.environment), config.environment, tokenizer)
    stops = stops_of(config, tokenizer, policy)
    return SamplingSettings(
        engine=engine_of(config, tokenizer),
        response_length=config.response_length,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_token_ids=stops,
        unused_ids=unused_ids(tokenizer, policy.config.get_text_config().vocab_size, stops),
        pad_token_id=int(tokenizer.pad_token_id),
        min_response_length=config.min_response_length,
        environment=environment,
        turn_length=config.turn_length,
    )


def stops_of(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> tuple[int, ...]:
    """Return the stop token ids of a policy's responses, in ascending order."""
    return stop_token_ids(
        tokenizer,
        policy.generation_config,
        stop_token=config.stop_token,
        stop_token_id=config.stop_token_id,
        vocabulary=policy.config.get_text_config().vocab_size,
    )
