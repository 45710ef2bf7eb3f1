"""What the result says in words: the headline, and what looks off in it."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ppo_rlhf.pipelines.reporting.measures import measure, write_share
from ppo_rlhf.ppo.comparison import CONFIDENCE, Decided

MIN_REWARD_ACCURACY = 0.65


def verdict(summary: Mapping[str, float], decided: Decided) -> str:
    """Return who won in a few words.

    A win is claimed only if the whole interval is on one side of one half, and if chance alone would hardly give it:
    the interval of a few prompts is too narrow.
    """
    if summary["eval/win_rate_low"] <= 0.5 <= summary["eval/win_rate_high"]:
        return "No clear difference between PPO and SFT"
    if _too_few(decided):
        return "Too few held-out prompts to tell PPO and SFT apart"
    return "PPO beats SFT" if summary["eval/win_rate_low"] > 0.5 else "PPO loses to SFT"


def _too_few(decided: Decided) -> bool:
    return decided.by_chance > 1.0 - CONFIDENCE


def headline(summary: Mapping[str, float], prompts: int, decided_by: str) -> str:
    """Return the result in one sentence."""
    low, high = write_share(summary["eval/win_rate_low"]), write_share(summary["eval/win_rate_high"])
    return (
        f"PPO's response is the better one on {write_share(summary['eval/win_rate'])} of {prompts:,} held-out prompts "
        f"(95% interval {low} to {high}; ties count half), decided by {decided_by}."
    )


def remarks(
    summary: Mapping[str, float],
    decided: Decided,
    before_after: pd.DataFrame,
    reward_model_accuracy: float | None = None,
) -> list[str]:
    """Return one sentence for each thing that looks off in the result; an empty list if nothing does.

    Which setting to change is the tuning advice's to say: it sees the curves and the settings (docs/tuning.md). What it
    judges (KL, clipping, the critic, stock phrases, lengths) is not judged a second time here.

    Args:
        summary: The eval/* metrics.
        decided: Held-out prompts that were won and lost.
        before_after: Columns `measure`, `sft`, `ppo`.
        reward_model_accuracy: On held-out preference pairs, if a reward model was trained here.
    """
    sft = dict(zip(before_after["measure"], before_after["sft"], strict=True))
    ppo = dict(zip(before_after["measure"], before_after["ppo"], strict=True))
    return [*_about_the_result(summary, decided, sft, ppo), *_about_the_reward_model(reward_model_accuracy)]


def _about_the_result(
    summary: Mapping[str, float], decided: Decided, sft: Mapping[str, float], ppo: Mapping[str, float]
) -> list[str]:
    found = []
    exploited = "judge_score" in ppo and ppo["reward"] > sft["reward"] and ppo["judge_score"] < sft["judge_score"]
    if summary["eval/win_rate_low"] <= 0.5 <= summary["eval/win_rate_high"]:
        found.append(
            "The win rate's interval contains 50%, so these prompts cannot tell the two policies apart. More held-out "
            "prompts (prompts.max_held_out) narrow it."
        )
    elif _too_few(decided):
        found.append(
            f"{decided.wins} held-out prompts were won and {decided.losses} lost: equal policies would differ by that "
            f"much with probability {decided.by_chance:.2g}, and the interval of so few prompts is too narrow. More of "
            "them (prompts.held_out_share, evaluation_prompts_path) can tell the two policies apart."
        )
    elif summary["eval/win_rate_high"] < 0.5 and not exploited:
        found.append("PPO lost to SFT. Look at the KL curve and the samples first.")
    if exploited:
        found.append("The reward rose while the judge's score fell: the policy exploits its reward.")
    if "grammatical_rate" in ppo and ppo["grammatical_rate"] < 0.95 * sft["grammatical_rate"]:
        found.append(f"{measure('grammatical_rate').label} responses fell below 95% of SFT's rate.")
    return found


def _about_the_reward_model(accuracy: float | None) -> list[str]:
    if accuracy is None or accuracy >= MIN_REWARD_ACCURACY:
        return []
    return [
        f"The reward model is right on only {write_share(accuracy)} of its held-out pairs: PPO can raise such a reward "
        "without the text becoming better."
    ]
