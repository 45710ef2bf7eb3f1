"""What the numbers say in words: the headline, and what looks off, with where to turn."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ppo_rlhf.pipelines.reporting.curves import KL_WARNING, column
from ppo_rlhf.pipelines.reporting.measures import measure, write_number, write_share

MIN_KL = 0.5
MAX_CLIP_FRACTION = 0.3
MIN_REWARD_ACCURACY = 0.65


def verdict(summary: Mapping[str, float]) -> str:
    """Return who won in a few words; a win is claimed only if the whole interval is on one side of one half."""
    if summary["eval/win_rate_low"] > 0.5:
        return "PPO beats SFT"
    return "PPO loses to SFT" if summary["eval/win_rate_high"] < 0.5 else "No clear difference between PPO and SFT"


def headline(summary: Mapping[str, float], prompts: int, decided_by: str) -> str:
    """Return the result in one sentence."""
    low, high = write_share(summary["eval/win_rate_low"]), write_share(summary["eval/win_rate_high"])
    return (
        f"PPO's response is the better one on {write_share(summary['eval/win_rate'])} of {prompts:,} held-out prompts "
        f"(95% interval {low} to {high}; ties count half), decided by {decided_by}."
    )


def remarks(
    summary: Mapping[str, float],
    before_after: pd.DataFrame,
    history: pd.DataFrame,
    reward_model_accuracy: float | None = None,
) -> list[str]:
    """Return one sentence for each thing that looks off; an empty list if nothing does.

    Args:
        summary: The eval/* metrics.
        before_after: Columns `measure`, `sft`, `ppo`.
        history: The training metrics, one row an iteration.
        reward_model_accuracy: On held-out preference pairs, if a reward model was trained here.
    """
    sft = dict(zip(before_after["measure"], before_after["sft"], strict=True))
    ppo = dict(zip(before_after["measure"], before_after["ppo"], strict=True))
    return [
        *_about_the_result(summary, sft, ppo),
        *_about_the_drift(summary["eval/kl"]),
        *_about_the_text(sft, ppo),
        *_about_the_training(history, reward_model_accuracy),
    ]


def _about_the_result(summary: Mapping[str, float], sft: Mapping[str, float], ppo: Mapping[str, float]) -> list[str]:
    found = []
    if summary["eval/win_rate_high"] < 0.5:
        found.append("PPO lost to SFT. Look at the KL curve and the samples first: did it exploit the reward?")
    elif summary["eval/win_rate_low"] <= 0.5:
        found.append(
            "The win rate's interval contains 50%, so these prompts cannot tell the two policies apart. More held-out "
            "prompts (prompts.max_held_out) narrow it; more training (ppo.total_episodes) may move it."
        )
    if "judge_score" in ppo and ppo["reward"] > sft["reward"] and ppo["judge_score"] < sft["judge_score"]:
        found.append("The reward rose while the judge's score fell: the policy exploits its reward. Raise ppo.kl_coef.")
    return found


def _about_the_drift(kl: float) -> list[str]:
    if kl > KL_WARNING:
        return [
            f"KL is {write_number(kl, 1)} nats per response, above {KL_WARNING:g}: the policy is far from SFT. Read "
            "the samples for tricks, and raise ppo.kl_coef or train for less."
        ]
    if kl < MIN_KL:
        return [
            f"KL is {write_number(kl, 2)} nats per response: the policy has hardly moved. Raise ppo.learning_rate, "
            "lower ppo.kl_coef, or train longer."
        ]
    return []


def _about_the_text(sft: Mapping[str, float], ppo: Mapping[str, float]) -> list[str]:
    found = []
    if ppo["distinct_2"] < 0.5 * sft["distinct_2"]:
        found.append("Less than half as many distinct word pairs as SFT: stock phrases are taking over.")
    if "grammatical_rate" in ppo and ppo["grammatical_rate"] < 0.95 * sft["grammatical_rate"]:
        found.append(f"{measure('grammatical_rate').label} responses fell below 95% of SFT's rate.")
    if not 2 / 3 <= ppo["response_length"] / max(sft["response_length"], 1.0) <= 1.5:
        found.append(
            f"Responses went from {write_number(sft['response_length'], 1)} to "
            f"{write_number(ppo['response_length'], 1)} tokens: does the reward pay for length?"
        )
    if ppo["truncated_fraction"] > max(0.5, sft["truncated_fraction"]):
        found.append(
            f"{write_share(ppo['truncated_fraction'])} of the responses are cut off. Allow longer ones "
            "(ppo.response_length), or set or raise ppo.missing_eos_penalty."
        )
    return found


def _about_the_training(history: pd.DataFrame, reward_model_accuracy: float | None) -> list[str]:
    found = []
    skipped = column(history, "optimiser/skipped_steps")
    if np.nanmax(skipped, initial=0.0) > 0:
        found.append(f"{int(np.nanmax(skipped))} optimiser steps were skipped for a non-finite gradient.")
    clipped = column(history, "policy/clipfrac_avg")
    if np.isfinite(clipped).any() and np.nanmean(clipped) > MAX_CLIP_FRACTION:
        found.append(
            f"On average {write_share(float(np.nanmean(clipped)))} of the tokens were clipped: lower ppo.learning_rate."
        )
    explained = column(history, "val/explained_variance")[-max(1, len(history) // 4) :]
    if np.isfinite(explained).any() and np.nanmean(explained) < 0.0:
        found.append("At the end the critic still explains less than a constant would: raise ppo.value_learning_rate.")
    if reward_model_accuracy is not None and reward_model_accuracy < MIN_REWARD_ACCURACY:
        found.append(
            f"The reward model is right on only {write_share(reward_model_accuracy)} of its held-out pairs: PPO can "
            "raise such a reward without the text becoming better."
        )
    return found
