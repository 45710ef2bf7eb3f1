"""Pairs of responses for people to compare: sampled from one policy, or one response each from two policies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Set
from dataclasses import replace
from typing import Annotated, Literal

import pandas as pd
import torch
from pydantic import AfterValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms, generator
from ppo_rlhf.data.chats import TOOLS, Chat
from ppo_rlhf.data.prompt_dataset import PromptDataset, as_json
from ppo_rlhf.ppo.batch_sampling import response_batch, sample_responses
from ppo_rlhf.ppo.engines import SamplingSettings
from ppo_rlhf.runtime.paths import last_name

NOISE, SIDE = "feedback", "feedback side"
COLUMNS = ("number", "pair", "prompt", "prompt_chat", "tools", "columns", "response_a", "response_b", "policy_is_a")
_NAME = re.compile(r"[\w][\w .+-]{0,199}")


def _check_name(name: str | None) -> str | None:
    if name is not None and (not _NAME.fullmatch(name) or name.lower() == "default"):
        raise ValueError("a queue's name has letters, digits, space, _ . + - (at most 200), and is not `default`")
    return name


@settings_group("feedback")
class FeedbackConfig:
    """Which responses people compare, and in which of MLflow's review queues."""

    policy: str = "sft_policy"
    """Whose responses are compared: sft_policy, ppo_policy (as the catalog has them), or a path or hub id."""
    against: str | None = None
    """Another policy, named likewise: one response of each is compared. None: two responses of `policy`."""
    queue: Annotated[str | None, AfterValidator(_check_name)] = None
    """The queue's name. None: the policy's; of two policies `<policy> against <against>`."""
    pairs: Annotated[int, Field(ge=1)] = 40
    """Pairs that a run adds; those with equal responses are left out of it."""
    prompts: Literal["training", "held_out"] | None = None
    """Which prompts are answered. None: training prompts; those that training holds out where policies are compared."""
    temperature: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Of the responses. None: ppo.temperature, or the one that ppo_policy was trained with."""
    instruction: str = "Which response is better?"
    """What the page asks."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Responses generated at a time."""
    seed: Seed = 42
    """Fixes the order of the prompts, the noise, and which response is A."""

    def __post_init__(self) -> None:
        if self.against == self.policy:
            raise ConfigError(f"feedback.against={self.against} is feedback.policy, too. Name another one, or null.")

    @property
    def queue_name(self) -> str:
        """The queue's name, of the policies if none is set."""
        named = [re.sub(r"[^\w.+-]", "-", last_name(each)) for each in (self.policy, self.against) if each]
        return self.queue or " against ".join(named)

    @property
    def held_out(self) -> bool:
        """Whether prompts are answered that training holds out."""
        return (self.prompts or ("held_out" if self.against else "training")) == "held_out"

    def names(self, policy: str) -> bool:
        """Return whether this policy's responses are compared."""
        return policy in (self.policy, self.against)


def sample_comparisons(
    policies: tuple[PreTrainedModel, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    sampling: SamplingSettings,
    ppo: PPOConfig,
    feedback: FeedbackConfig,
    *,
    start: int,
    pairs: int,
    known: Set[str] = frozenset(),
) -> tuple[pd.DataFrame, int]:
    """Sample the pairs `start`, `start + 1`, …, and draw which response is A; return them, and how many were equal.

    Prompt, noise and side of a pair depend only on the seed and its number. Two policies get the same noise, as in an
    evaluation; a policy that is there twice gets two. Pairs of equal responses are left out, and `known` pairs.

    Returns:
        Columns `COLUMNS`, one row a pair. `policy_is_a` says whether A is the first policy's; `pair` is `pair_key`.
    """
    if not pairs:
        return pd.DataFrame(columns=[*COLUMNS]), 0
    chosen = prompts.select(episode_prompts(feedback.seed, 1, start + pairs, len(prompts))[start:])
    if feedback.temperature is not None:
        sampling = replace(sampling, temperature=feedback.temperature)
    is_one, texts = policies[0] is policies[1], []
    for side, policy in enumerate(policies):
        streams = [2 * number + (side if is_one else 0) for number in range(start, start + pairs)]
        noise = torch.cat([episode_uniforms(feedback.seed, NOISE, n, 1, sampling.response_length) for n in streams])
        responses = sample_responses(policy, chosen, noise, sampling, ppo, batch_size=feedback.batch_size)
        texts.append([*response_batch(chosen, responses, tokenizer).completions])
    rows, equal, seen = [], 0, {*known}
    messages, tools = chosen.messages or [None] * pairs, chosen.columns.get(TOOLS, [None] * pairs)
    for row, both in enumerate(zip(*texts, strict=True)):
        chat = messages[row]
        key = pair_key(chosen.texts[row] if chat is None else chat, *both)
        if both[0] == both[1]:
            equal += 1
        elif key not in seen:
            seen.add(key)
            number = start + row
            is_a = bool(torch.randint(2, (1,), generator=generator(feedback.seed, SIDE, number)))
            sides = both if is_a else both[::-1]
            others = {name: values[row] for name, values in chosen.columns.items()}
            shown = None if chat is None else as_json(chat), None if chat is None else as_json(tools[row])
            rows.append([number, key, chosen.texts[row], *shown, as_json(others), *sides, is_a])
    return pd.DataFrame(rows, columns=[*COLUMNS]), equal


def pair_key(prompt: str | Chat, response_a: str, response_b: str) -> str:
    """Return what is the same for a pair whichever response is A: it names a pair and tells nothing of its sides."""
    text = json.dumps([prompt, sorted([response_a, response_b])], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
