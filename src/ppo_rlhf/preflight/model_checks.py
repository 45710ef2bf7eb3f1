"""Checks of models by their configuration and their tokenizer, before any weight is read.

The pipelines' nodes make the same checks. Problems that only weights show are found by the node that reads the weights;
docs/tuning.md lists both kinds.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader
from ppo_rlhf.evaluation.policy import check_vocabularies
from ppo_rlhf.models.capabilities import check_causal, gradient_of_later_tokens
from ppo_rlhf.models.critic import check_start
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.quiet import quiet_transformers
from ppo_rlhf.models.stop_tokens import stop_token_ids
from ppo_rlhf.models.tokenizers import same_vocabulary
from ppo_rlhf.ppo.build import check_export
from ppo_rlhf.preflight.probes import shrunk
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.rendering import Rendering
from ppo_rlhf.rewards.scorers import NOTHING_TO_OFFLOAD, check_context
from ppo_rlhf.rewards.shaping import check_normalisation
from ppo_rlhf.runtime.names import STATE

SMALL = 2_000_000
"""Largest number of parameters of a model that is built to try an architecture."""


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


def check_room(run: RunRequest, reader: PromptReader, training: Dataset) -> None:
    """Refuse a reward model whose context is too short for the longest training prompt with a full response."""
    ppo, names = run.group("ppo", PPOConfig), [name for name in run.reward_models if name in run.models]
    trains = run.writes(STATE) or run.writes("pretrained_critic")
    if ppo is None or run.start not in run.models or not names or not trains:
        return
    longest = max(PromptDataset.of_table(reader.fit(training, "training prompts")).lengths)
    for name in names:
        rendering, config = Rendering(run.tokenizers[name], reader.tokenizer), run.models[name].config()
        called = "the reward model" if name == "reward_model" else f"the reward model {name}"
        check_context(rendering, config, longest, ppo.response_length, _stops(run, ppo), called)


def check_adapter(run: RunRequest) -> None:
    """Refuse an SFT policy that is an adapter where PPO needs a whole model, or weights that cannot be quantised."""
    ppo = run.group("ppo", PPOConfig)
    if ppo is None or "sft_policy" not in run.models or not run.writes(STATE):
        return
    handle = run.models["sft_policy"]
    handle.check_quantisable(ppo.load_in_4bit)
    check_export(handle.source, ppo)


def check_reward(run: RunRequest) -> None:
    """Refuse `ppo.offload_reward_model` without a reward model, and components that nothing would normalise."""
    ppo, reward = run.group("ppo", PPOConfig), run.group("reward", RewardConfig)
    if ppo is None or reward is None:
        return
    if ppo.offload_reward_model and not reward.needs_model:
        raise ConfigError(NOTHING_TO_OFFLOAD)
    if run.writes(STATE) or run.writes("pretrained_critic"):
        check_normalisation(reward.normalise, ppo)


def check_critic_start(run: RunRequest) -> None:
    """Refuse a start model for the critic that has another vocabulary size or no linear score head."""
    ppo = run.group("ppo", PPOConfig)
    name = "" if ppo is None else run.critic_start(ppo.value_model)
    if ppo is None or not run.writes(STATE) or not {name, run.start} <= run.models.keys():
        return
    if not same_vocabulary(run.tokenizers[name], run.tokenizers[run.start]):
        return  # the critic starts from a model with another vocabulary, which `check_critic` reports
    check_start(run.models[name].empty_critic(), run.models[run.start].config(), ppo.value_model)


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


MODEL_CHECKS = (check_direction, check_policy, check_stops, check_adapter, check_reward, check_critic_start)
