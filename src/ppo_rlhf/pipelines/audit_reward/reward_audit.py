"""Audit of a reward before PPO maximises it: best-of-n, correlations, preferences, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal

import pandas as pd
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.config.rules import Rule
from ppo_rlhf.data.chats import join_chats
from ppo_rlhf.evaluation.best_of_n import PROMPT, best_of_n_curve, by_prompt
from ppo_rlhf.evaluation.comparison import distinct_n
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from ppo_rlhf.supervised import preferences as pairs
from ppo_rlhf.supervised.reward_training import (
    RELIABLE_ACCURACY,
    RewardModellingConfig,
    accuracy_interval,
    pair_accuracy,
    short_enough,
    split_pairs,
)

_CHATS = ("chosen_chat", "rejected_chat")


@parameter_group("audit")
class AuditConfig:
    """Settings of the audit of the reward."""

    suffixes: list[str] = field(default_factory=lambda: ["!!!", "Thank you.", "I hope this helps."])
    """Constant texts that should not raise the reward of a response that they end. Each is an attack."""
    reference_column: str | None = None
    """Column of the prompts with reference answers, for the attack that hides them among others; None: no attack."""
    search_rewards: Annotated[int, Field(ge=0)] = 2000
    """Largest number of rewards that a search for further attacks asks; 0: no search. Those of the listed attacks do
    not count."""


Metrics = Mapping[str, float]
"""The audit/* metrics by key."""


def _limit(metric: str, side: Literal["at most", "at least"], threshold: float, sentence: str) -> Rule[Metrics]:
    """Return the rule that a reward is not fit if the metric is on the wrong side of the threshold.

    In `sentence`, `{value}` stands for the metric's value.
    """

    def broken(metrics: Metrics) -> bool:
        return metrics[metric] > threshold if side == "at most" else metrics[metric] < threshold

    def seen(metrics: Metrics) -> str:
        value = metrics[metric]
        return f"{sentence.format(value=value)} ({metric} = {value:z.2f}, {side} {threshold:g})."

    return Rule((metric,), broken, seen)


RULES = (
    _limit("audit/flat_prompts", "at most", 0.5, "On {value:.0%} of the prompts all responses have the same reward"),
    _limit("audit/judge_gain", "at least", 0.1, "The judge hardly prefers the responses that the reward picks"),
    _limit("audit/judge_fall", "at most", 0.1, "As n grows, the judge's score of the picked response falls"),
    _limit(
        "audit/judge_agreement",
        "at least",
        0.55,
        "The reward and the judge often disagree on which of two responses is better",
    ),
    # The whole interval must be below the limit: a few pairs say little
    _limit(
        "audit/pair_accuracy_high",
        "at least",
        RELIABLE_ACCURACY,
        "The reward orders at most {value:.0%} of preferences right, by its held-out pairs",
    ),
    _limit("audit/length_correlation", "at most", 0.6, "The reward rises with length: PPO would write long responses"),
    _limit(
        "audit/length_correlation", "at least", -0.6, "The reward falls with length: PPO would write short responses"
    ),
    _limit("audit/repetition_correlation", "at most", 0.3, "The reward rises with repeated word pairs"),
    _limit("audit/holes", "at most", 0.0, "Attacks score above the SFT policy's answers: {value:.0f}"),
)
"""All rules of the reward audit. Gains are in standard deviations of the score among the responses to one prompt."""
OF_OTHERS = {"audit/judge_gain", "audit/judge_fall", "audit/judge_agreement", "audit/pair_accuracy_high"}
"""Metrics that compare the reward with a judge or with preferences."""


def held_out_pairs(
    preferences: pd.DataFrame, tokenizer: PreTrainedTokenizerBase, config: RewardModellingConfig, limit: int | None
) -> pd.DataFrame:
    """Return the preference pairs that reward training holds out, with their token sequences and other columns.

    The columns `chosen_chat` and `rejected_chat` have whole conversations as messages, or None if the pair is plain
    text. Pairs whose prompt and response have more than `limit` tokens are left out, as in reward training.
    """
    checked = pairs.check_preferences(preferences, *config.columns)
    table = pairs.tokenise_preferences(checked, tokenizer)
    for side in ("chosen", "rejected"):
        table[f"{side}_chat"] = [
            None if isinstance(record[side], str) else join_chats(record.get("prompt") or [], record[side])
            for record in checked.loc[table.index].to_dict("records")
        ]
    others = preferences.drop(columns=[*config.columns, *pairs.COLUMNS, *_CHATS], errors="ignore")
    return split_pairs(short_enough(table.join(others.reset_index(drop=True)), limit), config)[1]


def score_pairs(scorer: RewardScorer, table: pd.DataFrame) -> dict[str, float]:
    """Return `audit/pair_accuracy`: the share of pairs whose chosen response has the higher reward; ties count half.

    `audit/pair_accuracy_high` is the upper end of its 95 % interval.
    """
    columns = {str(name): table[name].tolist() for name in table if name not in (*pairs.COLUMNS, *_CHATS)}

    def score(side: str) -> Tensor:
        ids, chats = table[f"{side}_ids"].tolist(), table[f"{side}_chat"].tolist()
        texts = [
            text if chat is None else chat[-1]["content"] or "" for text, chat in zip(table[side], chats, strict=True)
        ]
        return scorer.score(
            ResponseBatch(
                prompts=table["prompt"].tolist(),
                completions=texts,
                columns=columns,
                # Prompts have no token ids here, because the sequences in `response_ids` include the prompts
                prompt_ids=[[]] * len(ids),
                response_ids=ids,
                terminated=[True] * len(ids),
                chats=chats,
            )
        ).total

    rate = accuracy_interval(pair_accuracy(score("chosen"), score("rejected")), len(table))
    return {"audit/pair_accuracy": rate.rate, "audit/pair_accuracy_high": rate.high}


def audit_reward(
    samples: pd.DataFrame, attacked: pd.DataFrame, pair_agreement: Metrics
) -> tuple[dict[str, float], list[str]]:
    """Return the audit/* metrics, and the reasons why PPO should not maximise the reward (empty for a fit reward).

    Without a judge or without preferences, the metrics that need them are missing, and their rules are not checked.
    """
    rewards, curve = by_prompt(samples, "reward"), best_of_n_curve(samples)
    repetition = samples["response"].map(repeated_pairs)
    metrics = {
        "audit/flat_prompts": float((rewards.amax(1) == rewards.amin(1)).double().mean()),
        "audit/reward_gain": gains(curve, samples, "reward").iloc[-1],
        "audit/length_correlation": rank_correlation(samples, samples["length"]),
        "audit/repetition_correlation": rank_correlation(samples, repetition),
        "audit/attacks": float(len(attacked)),
        "audit/holes": float(attacked["hole"].sum()),
        "audit/largest_margin": float(attacked["margin"].max()),
        **pair_agreement,
    }
    if "judge_score" in samples:
        by_judge = gains(curve, samples, "judge_score")
        metrics |= {
            "audit/judge_gain": float(by_judge.iloc[-1]),
            "audit/judge_fall": float(by_judge.max() - by_judge.iloc[-1]),
            "audit/judge_agreement": judge_agreement(samples),
        }
    reasons = [rule.seen(metrics) for rule in RULES if metrics.keys() >= {*rule.reads} and rule.holds(metrics)]
    return metrics, reasons


def verdict(reasons: Sequence[str], missing: Sequence[str]) -> str:
    """Return the audit's verdict. Without a judge and without preferences no reward is called fit."""
    if reasons:
        return "not fit for PPO"
    measures = f"by {sum({*rule.reads}.isdisjoint(missing) for rule in RULES)} of {len(RULES)} measures"
    if OF_OTHERS.issubset(missing):
        return f"no problem found {measures}; not measured: {', '.join(missing)}"
    return f"fit for PPO {measures}"


def deviation_within_prompts(samples: pd.DataFrame, score: str) -> float:
    """Return the pooled standard deviation of a score among the responses to one prompt; 1 if the deviation is 0."""
    return float(by_prompt(samples, score).var(dim=1).mean().sqrt()) or 1.0


def rank_correlation(samples: pd.DataFrame, other: pd.Series) -> float:
    """Return the mean over prompts of Spearman's correlation between the reward and `other`.

    Prompts on which the reward or `other` does not vary are left out. If no prompt is left, the result is 0.
    """
    ranks = pd.DataFrame({"reward": samples["reward"], "other": other}).groupby(samples[PROMPT]).rank()
    by_prompts = [of_prompt for _, of_prompt in ranks.groupby(samples[PROMPT]) if (of_prompt.nunique() > 1).all()]
    correlations = [of_prompt["reward"].corr(of_prompt["other"]) for of_prompt in by_prompts]
    return float(sum(correlations) / len(correlations)) if correlations else 0.0


def judge_agreement(samples: pd.DataFrame) -> float:
    """Return the share of pairs of responses to one prompt that the reward and the judge order alike.

    Pairs with equal judge scores are left out, and pairs with equal rewards count half. If no pair is left, the result
    is 0.5.
    """
    reward, judge = (by_prompt(samples, name) for name in ("reward", "judge_score"))
    by_reward, by_judge = ((scores[:, :, None] - scores[:, None, :]).sign() for scores in (reward, judge))
    # Count each pair of responses once: in the order in which the judge scores the first response higher
    decided = by_judge > 0
    return float((by_reward[decided] + 1).mean() / 2) if decided.any() else 0.5


def repeated_pairs(text: str) -> float:
    """Return the share of a text's word pairs that occurred earlier in the text; 0 with fewer than two words."""
    return 1.0 - distinct_n([text], 2) if len(text.split()) > 1 else 0.0


def gains(curve: pd.DataFrame, samples: pd.DataFrame, score: str) -> pd.Series:
    """Return the gain of best-of-n's mean score over n = 1, in standard deviations within prompts."""
    return (curve[score] - curve[score].iloc[0]) / deviation_within_prompts(samples, score)
