"""Sample pairs of responses for people to compare: two responses of one policy, or one response of each of two
policies.

Each pair has a number that no other pair of the project has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Set
from dataclasses import replace
from typing import Annotated, Literal

import pandas as pd
from pydantic import AfterValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import Seed, parameter_group
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.randomness import episode_prompts, episode_uniforms
from ppo_rlhf.data.chats import TOOLS
from ppo_rlhf.data.prompt_dataset import PromptDataset, as_json
from ppo_rlhf.passes.halvings import ROLLOUTS, Halving
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.people.answers import NUMBERS, RANDOM
from ppo_rlhf.ppo.batch_sampling import response_batch, sample_responses
from ppo_rlhf.runtime.paths import last_name
from ppo_rlhf.runtime.processes import on_main

SHOWN = ("number", "prompt", "prompt_chat", "tools", "columns", "response_a", "response_b", "cut_off_a", "cut_off_b")
COLUMNS = (*SHOWN, "place", "policy_is_a", RANDOM)
_NAME = re.compile(r"[\w][\w .+-]{0,199}")


def _check_name(name: str | None) -> str | None:
    if name is not None and (not _NAME.fullmatch(name) or name.lower() == "default"):
        raise ValueError(
            "a queue's name consists of at most 200 letters, digits, spaces and _ . + -, and is not `default`"
        )
    return name


@parameter_group("feedback")
class FeedbackConfig:
    """Settings for the responses that people compare, and for the program that asks people."""

    policy: str = "sft_policy"
    """Whose responses are compared: sft_policy or ppo_policy, a path or a hub id."""
    against: str | None = None
    """A second policy, named like `policy`; None: both responses are `policy`'s. With a second policy each pair has one
    response of each policy."""
    queue: Annotated[str | None, AfterValidator(_check_name)] = None
    """Name of the pairs, in MLflow of their review queue; None: `<policy>`, or `<policy> against <against>`."""
    pairs: Annotated[int, Field(ge=1, le=100_000)] = 40
    """Pairs of responses that a run samples. Pairs of equal responses are left out after sampling."""
    asked: Annotated[int, Field(ge=1)] | None = None
    """Number of these pairs, drawn at random, that people are asked about; None: all. The judge of the evaluation
    compares all pairs, and people's answers correct it. Only where two policies are compared."""
    prompts: Literal["training", "held_out"] | None = None
    """Which prompts; None: held-out ones if two policies are compared, else training prompts."""
    temperature: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Sampling temperature; None: ppo.temperature, or the one that ppo_policy was trained with."""
    instruction: str = "Which response is better?"
    """The question that MLflow's page shows."""
    export: str | None = None
    """A new file for the pairs; None: one in their folder, and a review queue of MLflow. A relative path is below the
    project."""
    answers: str | None = None
    """People's answers for `human_evaluation`: a file of JSON lines or CSV, or `mlflow:<queue>`; None: that of
    `queue`."""
    seed: Seed = 42
    """Seed of the order of the prompts. The sampling noise and the side of a response are drawn without a seed."""

    def __post_init__(self) -> None:
        if self.against == self.policy:
            raise ConfigError(
                f"feedback.against={self.against} equals feedback.policy. Set feedback.against to another policy, or "
                "to null."
            )
        if self.asked is not None and (self.against is None or self.asked > self.pairs):
            raise ConfigError(
                f"feedback.asked={self.asked} with feedback.pairs={self.pairs} and feedback.against={self.against}: "
                "people are asked about some of the pairs of two policies. Set feedback.against, and more pairs."
            )

    @property
    def queue_name(self) -> str:
        """The name of the pairs; derived from the policies' names if `queue` is None."""
        named = [re.sub(r"[^\w.+-]", "-", last_name(each)) for each in (self.policy, self.against) if each]
        return self.queue or " against ".join(named)

    @property
    def held_out(self) -> bool:
        """Whether the pairs of responses use held-out prompts."""
        return (self.prompts or ("held_out" if self.against else "training")) == "held_out"

    def names(self, policy: str) -> bool:
        """Return whether `policy` is one of the compared policies."""
        return policy in (self.policy, self.against)


def sample_comparisons(
    policies: tuple[PreTrainedModel, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    sampling: SamplingSettings,
    ppo: PPOConfig,
    feedback: FeedbackConfig,
    *,
    place: int,
    numbers: Set[int] = frozenset(),
    known: Set[tuple[str, frozenset[str]]] = frozenset(),
) -> pd.DataFrame:
    """Sample `feedback.pairs` pairs of responses, and draw each pair's response A.

    The prompts begin at `place` in the seeded order of the prompts. Noise, sides and numbers come from the operating
    system's random numbers, unlike all other noise of this package: from the seed and the number anybody who may load
    the policies could sample the responses again, and would know whose each is. So only the returned table tells it,
    and repeats it. Two policies get the same sampling noise, as in an evaluation; a policy that is compared with itself
    gets different noise for each response. Pairs of equal responses and pairs whose `contents` are in `known` are left
    out; no pair gets one of the given `numbers`.

    Returns:
        A table with the columns `COLUMNS`, one row per pair. `place` is the prompt's place in the order; `policy_is_a`
        is True if response A is the first policy's; `cut_off_a` and `cut_off_b` are True if the response ended at the
        length limit; `random_sample` is True of the pairs that people are asked about, a random sample of all.
    """
    pairs = feedback.pairs
    noise_seed, sides, free, order = on_main(lambda: _drawn(pairs, numbers))
    chosen = prompts.select(episode_prompts(feedback.seed, 1, place + pairs, len(prompts))[place:])
    if feedback.temperature is not None:
        sampling = replace(sampling, temperature=feedback.temperature)
    batch = ppo.local_rollout_forward_batch_size
    halving = Halving("sampling of pairs", ROLLOUTS)
    is_same, texts, cut_off = policies[0] is policies[1], [], []
    for side, policy in enumerate(policies):
        noise = episode_uniforms(noise_seed, "feedback", side if is_same else 0, pairs, sampling.response_length)
        responses = sample_responses(policy, chosen, noise, sampling, ppo, batch_size=batch, halving=halving)
        texts.append([*response_batch(chosen, responses, tokenizer).completions])
        cut_off.append((~responses.terminated).tolist())
    rows, seen = [], {*known}
    messages, tools = chosen.messages or [None] * pairs, chosen.columns.get(TOOLS, [None] * pairs)
    for row, pair in enumerate(zip(*texts, strict=True)):
        chat, content = messages[row], contents(chosen.texts[row], *pair)
        if pair[0] != pair[1] and content not in seen:
            seen.add(content)
            first, second = (0, 1) if sides[row] else (1, 0)
            shown = pair[first], pair[second], cut_off[first][row], cut_off[second][row]
            columns = {name: values[row] for name, values in chosen.columns.items()}
            chat_cells = None if chat is None else as_json(chat), None if chat is None else as_json(tools[row])
            cells = free[row], chosen.texts[row], *chat_cells, as_json(columns), *shown, place + row, sides[row]
            rows.append((*cells, order[row]))
    table = pd.DataFrame(rows, columns=[*COLUMNS])
    return table.assign(**{RANDOM: table[RANDOM].rank() <= (feedback.asked or pairs)})


def _drawn(pairs: int, taken: Set[int]) -> tuple[int, list[bool], list[int], list[int]]:
    """Return a seed of the noise, sides, free numbers in rising order, and an order, from the operating system."""
    draw, free = random.SystemRandom(), set[int]()
    while len(free) < pairs:
        free |= {draw.choice(NUMBERS)} - taken
    sides = [bool(draw.getrandbits(1)) for _ in range(pairs)]
    return draw.getrandbits(63), sides, sorted(free), draw.sample(range(pairs), pairs)


def contents(prompt: str, *responses: str) -> tuple[str, frozenset[str]]:
    """Return what identifies a pair of responses in either order."""
    return prompt, frozenset(responses)
