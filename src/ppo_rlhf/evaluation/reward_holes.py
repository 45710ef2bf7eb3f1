"""Holes of a reward: attacks that score above the SFT policy's answers by more than noise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.fingerprints import fingerprint
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.attacks import asked, attacks_named, attacks_seen
from ppo_rlhf.evaluation.since_best import CHANCE
from ppo_rlhf.evaluation.win_rate import sign_test
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import handles_of
from ppo_rlhf.runtime.user_functions import load_function

ATTACK_SHARE, ATTACK_SHARE_OF_SFT, ATTACK_P = "eval/attack_share", "eval/attack_share_sft", "eval/attack_share_p"
FALSE_HOLES = 0.01
"""At most this share of rewards without a hole is reported to have one."""


def margins(attacked: dict[str, NDArray[np.float64]], sft: NDArray[np.float64]) -> pd.DataFrame:
    """Compare the rewards of attacks with those of the SFT policy's answers to the same prompts.

    `attacked` has rewards [P] of each attack on P prompts, and `sft` the rewards [P, n] of n answers to each prompt. If
    an attack is no better than an answer, its mean margin has the standard error s / √P. s² is the larger one of the
    variance of the margins between prompts and of the variance within prompts: where a 0/1 reward pays nearly each
    answer, the margins of few prompts may all be equal by chance. Student's t with P − 1 degrees of freedom gives a
    one-sided p-value, which Holm's method corrects for the number of attacks.

    Returns:
        One row for each attack: `attack`; `share`, of prompts on which it scores above the mean of SFT's answers;
        `margin`, the mean over prompts in units of the reward; `p`, corrected; `hole`.

    Raises:
        DataError: There is only one prompt.
    """
    prompts, answers = sft.shape
    if prompts < 2:
        raise DataError("An audit compares rewards over held-out prompts, and there is only one. Give two or more.")
    means_P = sft.mean(axis=1)
    rows: list[dict[str, object]] = []
    for name, rewards_P in attacked.items():
        margins_P = rewards_P - means_P
        pools = np.concatenate([sft, rewards_P[:, None]], axis=1)
        within = float(pools.var(axis=1, ddof=1).mean()) * (1.0 + 1.0 / answers)
        error = math.sqrt(max(float(margins_P.var(ddof=1)), within) / prompts)
        margin = float(margins_P.mean())
        # Rounding alone gives equal rewards a margin, so it must exceed the rounding of the rewards
        is_above = margin > 1e-9 * float(np.abs(pools).max())
        p = float(stdtr(prompts - 1, -margin / error)) if is_above and error > 0.0 else float(not is_above)
        rows.append({"attack": name, "share": float((margins_P > 0.0).mean()), "margin": margin, "p": p})
    table = pd.DataFrame(rows, columns=["attack", "share", "margin", "p"])
    table["p"] = holm(table["p"].to_numpy())
    return table.assign(hole=table["p"] < FALSE_HOLES)


def holm(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return p-values that Holm's method (1979) corrects for their number, at most 1."""
    order = np.argsort(p_values)
    steps = p_values[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty_like(p_values)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected


def say_hole(hole: Mapping[str, Any]) -> str:
    """Return a hole of the audit's table, with its text and what to do, in words."""
    text = " ".join(str(hole["text"]).split())
    stopped = f" {hole['stopped_by']} scores it below SFT's answers: give it more weight." if hole["stopped_by"] else ""
    return (
        f"Hole: {hole['attack']} ({text[:60]!r}{' …' if len(text) > 60 else ''}) scores {hole['margin']:.2f} standard "
        f"deviations above SFT's answers, on {hole['share']:.0%} of the prompts. Such a response is right "
        f"{hole['right']}. Add a component that {hole['fix']}.{stopped}"
    ).replace("is right never", "is never right")


def reward_digest(reward: RewardConfig, reward_model: PretrainedHandle | None, project_path: Path | None = None) -> str:
    """Return a digest of a reward's settings, the code of the modules of its functions, and its reward models."""
    functions = [load_function(part.function, project_path) for part in reward.components if part.function]
    modules = [inspect.getmodule(inspect.unwrap(function)) for function in functions]
    code = [None if module is None else inspect.getsource(module) for module in modules]
    return fingerprint(
        [asdict(reward), code, [model.fingerprint() for model in handles_of(reward, reward_model).values()]]
    )


def holes_of(
    audit: Mapping[str, Any], reward: RewardConfig, model: PretrainedHandle | None, project_path: Path | None = None
) -> list[str]:
    """Return the names of the attacks that an audit found to be holes; empty if it is of another reward or missing."""
    if not audit.get("holes") or audit["reward"] != reward_digest(reward, model, project_path):
        return []
    return [hole["attack"] for hole in audit["holes"]]


def attack_share(
    holes: Sequence[str], prompts: PromptDataset, ours: Sequence[str], theirs: Sequence[str]
) -> tuple[dict[str, float], str | None]:
    """Return the share of the policy's and of SFT's answers that do what an audit found to be a hole, as metrics.

    `ours` and `theirs` [N] answer the same N prompts. The p-value is that of the sign test over prompts. The text warns
    if the policy does it more often than SFT by more than noise; it is None otherwise. Without holes that an answer
    shows there are no metrics.
    """
    shown = [attack for attack in attacks_named(holes) if attack.seen is not None]
    if not shown:
        return {}, None
    questions = asked(prompts.texts, prompts.messages)
    seen, of_sft = (attacks_seen(shown, questions, answers) for answers in (ours, theirs))
    any_ours, any_theirs = (np.array([*found.values()]).any(axis=0) for found in (seen, of_sft))
    wins, losses = int((any_ours & ~any_theirs).sum()), int((any_theirs & ~any_ours).sum())
    share, base, p = float(any_ours.mean()), float(any_theirs.mean()), sign_test(wins, losses)
    metrics = {ATTACK_SHARE: share, ATTACK_SHARE_OF_SFT: base, ATTACK_P: p}
    if share <= base or p >= CHANCE:
        return metrics, None
    shares = {name: sum(found) / len(found) for name, found in seen.items()}
    named = ", ".join(f"{name} {part:.0%}" for name, part in sorted(shares.items(), key=lambda each: -each[1]) if part)
    return metrics, (
        f"{share:.0%} of the answers do what the audit of the reward found to be a hole ({named}); of SFT's answers "
        f"{base:.0%} do. The difference is chance with probability {p:.2g}."
    )
