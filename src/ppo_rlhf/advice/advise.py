"""Apply the tuning rules to a run, and write the advice as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppo_rlhf.advice.curves import Run
from ppo_rlhf.advice.rules import RULES, TuningRule
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.rules import Change
from ppo_rlhf.evaluation.equal_reward import CERTAIN
from ppo_rlhf.evaluation.reward_holes import ATTACK_P, ATTACK_SHARE, ATTACK_SHARE_OF_SFT
from ppo_rlhf.ppo.kl_alarms import allowed

ENOUGH_ITERATIONS = 10
"""Number of iterations that most rules need before they judge a curve."""
SHOWN = 3
"""Number of settings that the advice names at a time, because few settings should be changed at once."""

History = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Advice:
    """The advice of a tuning rule that applies to a run.

    `seen` has the measured numbers in words. `change` is the setting to change first, or None if no setting helps.
    """

    rule: TuningRule
    seen: str
    change: Change | None

    def __str__(self) -> str:
        """Return the advice as one or two sentences."""
        return f"{self.seen}: {self.rule.meaning}.{f' {self.change}' if self.change else ''}"


def advise(config: PPOConfig, history: History) -> list[Advice]:
    """Return the advice for a run, in the order of the rules.

    `history` has one mapping for each iteration, with `iteration` and the metrics of docs/metrics.md by key. The eval/*
    metrics are NaN or missing in iterations without an evaluation. The history of an unfinished run, and an empty
    history, are allowed.
    """
    run = Run(config, history)
    return [
        Advice(rule, rule.seen(run), allowed(rule.change(run), config))
        for rule in RULES
        if run.iterations >= rule.iterations and rule.holds(run) and not getattr(run, rule.refuted_by, False)
    ]


def in_words(config: PPOConfig, history: History, most: int | None = SHOWN, command: str = "kedro advise") -> list[str]:
    """Return the advice for a run as numbered lines, with one number for each setting.

    The first line says if the policy does what an audit found to be a hole of its reward. If the run was too short to
    judge, or if no rule applies, a line says so. At most `most` settings are named;
    None names all settings. `command` is the command that prints the advice; the last line names the command with
    --all.
    """
    history = list(history)
    run, advice = Run(config, history), advise(config, history)
    iterations, needed = run.iterations, max(rule.iterations for rule in RULES)
    lines, share, of_sft = [], run.end(ATTACK_SHARE), run.end(ATTACK_SHARE_OF_SFT)
    if share > of_sft and run.end(ATTACK_P) < CERTAIN:
        lines.append(
            f"{share:.0%} of the answers do what the audit found to be a hole of the reward (SFT's: {of_sft:.0%}): "
            "mend the reward before you change a setting."
        )
    if iterations < ENOUGH_ITERATIONS:
        lines.append(
            f"{iterations} iteration{'' if iterations == 1 else 's'} of the policy: too early to judge the curves. "
            f"Most rules need {ENOUGH_ITERATIONS} iterations, some {needed}."
        )
    elif not advice:
        so_far = " so far" if iterations < needed else ""
        lines.append(f"Nothing to change{so_far}: no tuning rule found a problem in {iterations} iterations.")
    groups = _by_setting(advice)
    for place, (first, *others) in enumerate(groups[:most], start=1):
        lines.append(f"{place}. [{first.rule.stage.value}: {first.rule.name}] {first}")
        lines.extend(f"   [also {other.rule.name}] {other.seen}: {other.rule.meaning}." for other in others)
    if most is not None and len(groups) > most:
        lines.append(f"{len(groups) - most} more after that: {command} --all")
    return lines


def _by_setting(advice: list[Advice]) -> list[list[Advice]]:
    """Group the advice by setting.

    Advice that would move a setting in the opposite direction of earlier advice is left out.
    """
    groups: dict[str | int, tuple[bool, list[Advice]]] = {}
    for place, item in enumerate(advice):
        setting: str | int = place  # advice that changes no setting forms a separate group
        raises = False
        if item.change is not None:
            setting = item.change.setting
            raises = item.change.factor is not None and item.change.factor > 1.0
        first_raises, group = groups.setdefault(setting, (raises, []))
        if raises == first_raises:
            group.append(item)
    return [group for _, group in groups.values()]
