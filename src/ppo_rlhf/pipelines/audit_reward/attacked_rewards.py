"""Rewards of attacks: responses of `evaluation.attacks`, scored as PPO scores the policy's responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.attacks import Attack, asked
from ppo_rlhf.evaluation.reward_holes import margins
from ppo_rlhf.models.tokenizers import drops_first_space
from ppo_rlhf.passes.sampling import Responses, SamplingSettings
from ppo_rlhf.ppo.batch_sampling import response_batch
from ppo_rlhf.ppo.episodes import play_texts
from ppo_rlhf.rewards.scoring import RewardScorer, Scores

COLUMNS = ("attack", "share", "margin", "p", "hole", "text", "right", "fix", "stopped_by")
"""Columns of the table of attacks."""


def part_column(name: str) -> str:
    """Return the column of the table of samples with the scores of a component of the reward."""
    return f"component {name}"


@dataclass(frozen=True)
class Target:
    """A reward under attack, with P prompts and the SFT policy's first answer to each.

    `references` are the prompts' reference answers; empty: there are none. In an environment each of the policy's turns
    is the attack, and no attack is made from the SFT policy's answers, whose texts have the environment's replies.
    """

    scorer: RewardScorer
    prompts: PromptDataset
    answers: list[str]
    tokenizer: PreTrainedTokenizerBase
    settings: SamplingSettings
    references: list[Any] = field(default_factory=list)

    @cached_property
    def asked(self) -> list[str]:
        """What each prompt asks."""
        return asked(self.prompts.texts, self.prompts.messages)

    def of(self, rows: Sequence[int]) -> Target:
        """Return the target with some of the prompts."""
        references = [self.references[row] for row in rows] if self.references else []
        answers = [self.answers[row] for row in rows]
        return replace(self, prompts=self.prompts.select(rows), answers=answers, references=references)

    def responses(self, attack: Attack) -> list[str]:
        """Return the attack's response to each prompt, as long as it may be."""
        rows = range(len(self.prompts))
        references: list[str] | list[None] = (
            [str(each) for each in self.references] if self.references else [None for _ in rows]
        )
        own = [(self.answers[row], self.answers[(row + 1) % len(rows)]) for row in rows]
        return [attack.respond(self.asked[row], references[row], own[row]) for row in rows]

    def score(self, texts: Sequence[str], rows: Sequence[int] | None = None) -> tuple[Scores, list[str]]:
        """Return the scores of a response to each prompt, and the responses as the reward reads them.

        A response is cut so that it ends in a stop token within `response_length`, or an environment's `turn_length`.
        `rows` are the prompts' numbers; None: all.
        """
        prompts = self.prompts.select(range(len(self.prompts)) if rows is None else rows)
        ids = [self._tokens(text) for text in texts]
        if self.settings.environment is not None:
            responses = play_texts(prompts, ids, self.settings)
        else:
            pad = self.settings.pad_token_id
            lengths = torch.tensor([len(row) for row in ids])
            padded = pad_sequence([torch.tensor(row, dtype=torch.long) for row in ids], True, pad)
            is_whole = torch.full((len(ids),), bool(self.settings.stop_token_ids))
            responses = Responses(padded, lengths, is_whole)
        batch = response_batch(prompts, responses, self.tokenizer)
        return self.scorer.score(batch), list(batch.completions)

    def _tokens(self, text: str) -> list[int]:
        stops = list(self.settings.stop_token_ids[:1])
        # Decoding drops the first space of a text, and the tokenizer adds one again
        text = text.removeprefix(" ") if drops_first_space(self.tokenizer) else text
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if ids and ids[-1] in self.settings.stop_token_ids:
            ids = ids[:-1]
        return ids[: (self.settings.turn_length or self.settings.response_length) - len(stops)] + stops


def try_attacks(
    target: Target, tried: Sequence[Attack], sft: NDArray[np.float64], parts: Mapping[str, NDArray[np.float64]]
) -> pd.DataFrame:
    """Return the table of attacks, the largest margin first.

    `sft` are the rewards [P, n] of n answers of the SFT policy to each prompt, and `parts` the scores [P, n] of each
    component of the reward.

    Returns:
        One row for each attack, with `COLUMNS`: those of `reward_holes.margins`, the margin in standard deviations of
        the reward within prompts; `text`, the response with the largest margin; `right` and `fix` of the attack; and
        `stopped_by`, the components that score the attack below SFT's answers.
    """
    uses_environment = target.settings.environment is not None
    tried = [attack for attack in tried if not (uses_environment and attack.uses_answers)]
    scored = {attack.name: target.score(target.responses(attack)) for attack in tried}
    rewards = {name: scores.total.numpy() for name, (scores, _) in scored.items()}
    lower: dict[str, list[str]] = {name: [] for name in scored}
    for part, of_sft in parts.items() if len(parts) > 1 else ():
        of_attacks = {name: -scores.components[part].numpy() for name, (scores, _) in scored.items()}
        below = margins(of_attacks, -of_sft)
        for name in below["attack"][below["hole"]]:
            lower[name].append(part)
    table, best = margins(rewards, sft), {name: int((rewards[name] - sft.mean(axis=1)).argmax()) for name in rewards}
    table["margin"] /= float(np.sqrt(sft.var(axis=1, ddof=1).mean())) or 1.0
    table["text"] = [scored[name][1][best[name]] for name in table["attack"]]
    table["right"], table["fix"] = [attack.right for attack in tried], [attack.fix for attack in tried]
    table["stopped_by"] = [", ".join(lower[name]) for name in table["attack"]]
    return table.sort_values("margin", ascending=False, ignore_index=True)[list(COLUMNS)]
