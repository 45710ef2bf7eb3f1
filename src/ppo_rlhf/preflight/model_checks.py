"""Checks of models by their configuration and their tokenizer, before any weight is read.

The pipelines' nodes make the same checks. Problems that only weights show are found by the node that reads the weights;
docs/tuning.md lists both kinds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.evaluation.policy import check_vocabularies
from ppo_rlhf.models.adapters import check_critic_targets, check_targets
from ppo_rlhf.models.critic import check_start
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.stop_tokens import stop_token_ids
from ppo_rlhf.models.tokenizers import same_vocabulary
from ppo_rlhf.passes.capabilities import check_causal, gradient_of_later_tokens
from ppo_rlhf.passes.compilation import layers_of
from ppo_rlhf.passes.forward import backbone_of
from ppo_rlhf.passes.gradient_checkpointing import check_gradient_checkpointing
from ppo_rlhf.pipelines.critic_pretraining.training import CriticPretrainingConfig, pretraining_config
from ppo_rlhf.ppo.run_setup import check_export, lora_settings
from ppo_rlhf.preflight.probes import shrunk
from ppo_rlhf.preflight.request import MADE_BY, PROMPTS, RunRequest
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer, check_chats, check_scorable
from ppo_rlhf.rewards.shaping import check_normalisation
from ppo_rlhf.runtime.log_lines import quiet_transformers
from ppo_rlhf.runtime.names import STATE
from ppo_rlhf.runtime.paths import below_project

SMALL = 2_000_000
"""Largest number of parameters of a model that is built to try an architecture."""
OWN_CODE = "transformers_modules."  # transformers imports Python code of a model's directory as modules of this package
_WITHOUT_OWN_CODE = {
    "reward_model": "Set reward_model_path or give functions as reward, and run `--pipelines align`.",
    "pretrained_critic": "Set ppo.critic_warmup_iterations, which trains a critic at the start of each run.",
}


def check_model(run: RunRequest, name: str) -> Iterator[str]:
    """Find a model that is missing, incomplete or of the wrong kind, or whose tokenizer belongs to another model."""
    if not run.needs(name) or not isinstance(run.catalog.get(name), PretrainedModelDataset):
        return
    if name in MADE_BY and (why := run.why_missing(name)):
        yield why
        return
    if run.source(name) is None:  # the policy starts from random weights, or check_settings asks for its start
        return
    handle = run.catalog[name].load()
    if name == "reward_model":
        handle.check_reward_model()
    elif name == "pretrained_critic":
        handle.check_critic()
    else:
        handle.check_causal_lm()
    has_own_code = name == run.start and type(handle.config()).__module__.startswith(OWN_CODE)
    for output, fix in _WITHOUT_OWN_CODE.items() if has_own_code else ():
        if run.writes(output):
            yield f"{handle.source} has Python code of its own, which is not saved with a {output} trained on it. {fix}"
    run.models[name], run.tokenizers[name] = handle, handle.tokenizer()


def check_reward_model(run: RunRequest, path: str) -> None:
    """Refuse a reward model of a component's `path` that is missing, incomplete or of the wrong kind."""
    handle = PretrainedHandle(below_project(path, run.project_path))
    handle.check_reward_model()
    run.models[path], run.tokenizers[path] = handle, handle.tokenizer()


def check_direction(run: RunRequest) -> None:
    """Refuse a policy that attends to later tokens: an encoder, or a model with attention in both directions."""
    for name in ("base_model", "sft_policy", "ppo_policy"):
        if name in run.models and (small := _small(run.models[name])) is not None:
            check_causal(small, run.models[name].source)


def check_policy(run: RunRequest) -> None:
    """Refuse to evaluate a policy whose vocabulary differs from the SFT policy's."""
    if "ppo_policy" in run.models and "sft_policy" in run.models:
        check_vocabularies(run.models["ppo_policy"], run.models["sft_policy"])


def check_stops(run: RunRequest) -> None:
    """Refuse a stop token that the tokenizer does not have."""
    ppo = run.group("ppo", PPOConfig)
    if ppo is not None and run.start in run.models:
        _stops(run, ppo)


def check_adapter(run: RunRequest) -> None:
    """Refuse an SFT policy that is an adapter where PPO needs a whole model, or weights that cannot be quantised."""
    ppo = run.group("ppo", PPOConfig)
    if ppo is None or "sft_policy" not in run.models or not run.writes(STATE):
        return
    handle = run.models["sft_policy"]
    handle.check_quantisable(ppo.load_in_4bit)
    check_export(handle.source, ppo)


def check_model_options(run: RunRequest) -> None:
    """Refuse settings of PPO that the architecture does not support. No weights are read."""
    ppo = run.group("ppo", PPOConfig)
    is_set = ppo is not None and (ppo.use_peft or ppo.gradient_checkpointing or ppo.compile)
    # A run that reads `ppo_policy` evaluates a trained policy and does not train
    if ppo is None or not is_set or run.start not in run.models or run.reads("ppo_policy"):
        return
    empty = run.models[run.start].empty_causal_lm()
    if ppo.gradient_checkpointing:
        check_gradient_checkpointing(empty)
    if ppo.compile:
        layers_of(empty)
    if ppo.use_peft:
        check_targets(empty, lora_settings(ppo))
        if ppo.value_model == "separate":
            check_critic_targets(backbone_of(empty), lora_settings(ppo))


def check_critic(run: RunRequest) -> Iterator[str]:
    """Find a `value_model` from which the critic cannot start."""
    ppo, pretraining = run.group("ppo", PPOConfig), run.group("critic_pretraining", CriticPretrainingConfig)
    reward = run.group("reward", RewardConfig)
    for name, group in {"ppo": ppo, "critic_pretraining": pretraining}.items():
        if group is None or run.reads("ppo_policy"):  # a run that evaluates a trained policy has no critic
            continue
        setting, fix = f"{name}.value_model={group.value_model}", f"Set {name}.value_model=separate."
        start = run.critic_start(group.value_model)
        both = [run.tokenizers[name] for name in ("sft_policy", start) if name in run.tokenizers]
        if start == "reward_model" and reward is not None and not reward.needs_model:
            yield f"{setting}: no entry of reward.components is of type model. {fix}"
        elif len(both) == 2 and not same_vocabulary(*both):
            policy, model = run.source("sft_policy"), run.source(start) or start
            yield f"{setting}: {policy} and {model} have different vocabularies. {fix}"
        elif name == "ppo" and run.writes(STATE) and {start, run.start} <= run.models.keys():
            check_start(run.models[start].empty_critic(), run.models[run.start].config(), group.value_model)
    if ppo is not None and pretraining is not None:
        pretraining_config(pretraining, ppo)


def check_scorer(run: RunRequest) -> None:
    """Refuse a reward that cannot score the responses: the scorer is built without the weights of reward models.

    A reward model must read a training prompt with a full response, and its chat template each kind of chat.
    """
    ppo, tokenizer = run.group("ppo", PPOConfig), run.tokenizers.get(run.start)
    if ppo is None or tokenizer is None:
        return
    trains = run.writes(STATE) or run.writes("pretrained_critic")
    for reward in {tuple(reward.model_paths): reward for reward in reversed(run.rewards)}.values():
        if trains:
            check_normalisation(reward.normalise, ppo)
        if not {path or "reward_model" for path in reward.model_paths} <= run.models.keys():
            continue
        model = run.models.get("reward_model")
        scorer = build_reward_scorer(reward, model, tokenizer, device="meta", offload=ppo.offload_reward_model)
        if reward.needs_model:
            for source, prompts in _chats(run, ppo):
                check_chats(scorer, prompts, source)
        if trains and "prompt_dataset" in run.data and run.start in run.models:
            check_scorable(scorer, run.data["prompt_dataset"].lengths, ppo.response_length, _stops(run, ppo))


def _chats(run: RunRequest, ppo: PPOConfig) -> Iterator[tuple[str, PromptDataset]]:
    """Yield (path, prompts) of each table with chats; the rows are those of the user's file."""
    settings = run.group("prompts", PromptsConfig)
    if settings is not None and any(prompts.has_chats for prompts in run.prompts.values()):
        reader = PromptReader.of(run.data["sft_policy"], ppo)
        for name in (name for name in PROMPTS if run.data.get(name) is not None):
            source = str(run.source(name))
            yield source, PromptDataset.of_table(reader.tokenise(run.data[name], settings.column, source))


def _stops(run: RunRequest, ppo: PPOConfig) -> tuple[int, ...]:
    """Return the token ids that end a response of the policy."""
    handle = run.models[run.start]
    return stop_token_ids(
        run.tokenizers[run.start],
        handle.generation_config(),
        stop_token=ppo.stop_token,
        stop_token_id=ppo.stop_token_id,
        vocabulary=handle.config().get_text_config().vocab_size,
    )


def _small(handle: PretrainedHandle) -> PreTrainedModel | None:
    """Return a small random model of a policy's architecture.

    Return None if the architecture cannot be built so small, or if its gradients are not finite.
    """
    config = handle.config().get_text_config()
    # Python code in the model's directory, not transformers, defines the architecture
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    try:
        config = shrunk(config)
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                if AutoModelForCausalLM.from_config(config).num_parameters() > SMALL:
                    return None
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model.eval() if gradient_of_later_tokens(model).isfinite().all() else None
    # Architectures refuse small sizes by many types of errors: leave the check to the node that builds the model
    except Exception:
        return None


MODEL_CHECKS = (check_direction, check_policy, check_stops, check_adapter, check_model_options, check_critic)
