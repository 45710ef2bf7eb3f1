"""How a run that resumes another one differs from it: what must not, and what may."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflow.entities import Run
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

from ppo_rlhf.checkpoints.resume import MAY_CHANGE, config_changes
from ppo_rlhf.checkpoints.resume_tags import PPO, as_last_resumed
from ppo_rlhf.hooks.run_description import RunDescription

REPORTING = "reporting"
_FINGERPRINT = re.compile(r"data\.(.+)\.fingerprint")

Change = tuple[str, str]
"""(before, now)"""


@dataclass(frozen=True)
class Comparison:
    """What differs between a run and the one that resumes it.

    Attributes:
        refused: One line for each difference that must not be.
        changes: Settings that may differ, by the name that they have in a tag: PPO's bare, others with their group.
        returned: The same of settings that are the checkpoint's again, after a resume that left no checkpoint.
        versions: Versions of packages and of the code, by tag.
    """

    refused: list[str] = field(default_factory=list)
    changes: dict[str, Change] = field(default_factory=dict)
    returned: dict[str, Change] = field(default_factory=dict)
    versions: dict[str, Change] = field(default_factory=dict)


def compare_runs(this: RunDescription, run: Run, saved: Mapping[str, Any] | None) -> Comparison:
    """Compare this run with one that it resumes.

    Args:
        this: The run that starts.
        run: The MLflow run that it goes on with.
        saved: PPO's settings in the checkpoint; None without one: then those in MLflow count.
    """
    earlier = as_last_resumed(run.data.tags)
    comparison = Comparison()
    for name in ("pipeline", "environment"):
        if run.data.tags.get(name) != this.tags[name]:
            comparison.refused.append(f"{name}: {run.data.tags.get(name)} in the run, {this.tags[name]} now")
    if saved is not None and PPO in this.groups:
        _compare_ppo(comparison, saved, this.groups[PPO])
        _compare_with_lost_resume(comparison, earlier, this.params)
    _compare_params(comparison, {**run.data.params, **earlier}, this, is_ppo_known=saved is not None)
    _compare_data(comparison, run.data.tags, this.tags)
    for name, now in this.tags.items():
        before = earlier.get(name, run.data.tags.get(name, now))
        if name.startswith("version.") and before != now:
            comparison.versions[name] = (before, now)
    return comparison


def _compare_ppo(comparison: Comparison, saved: Mapping[str, Any], now: Any) -> None:
    for name, (before, after) in sorted(config_changes(saved, now).items()):
        if name in MAY_CHANGE:
            comparison.changes[name] = (str(before), str(after))
        else:
            comparison.refused.append(f"{PPO}.{name}: {before} in the checkpoint, {after} now")


def _compare_with_lost_resume(comparison: Comparison, earlier: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Find what is as in the checkpoint, and was not in the last resume: its tags would keep the other value."""
    for name, before in earlier.items():
        group, _, setting = name.partition(".")
        is_change = setting in MAY_CHANGE and setting not in comparison.changes
        if group == PPO and is_change and not _is_same(before, now[name]):
            comparison.returned[setting] = (before, now[name])


def _compare_params(
    comparison: Comparison, before: Mapping[str, str], this: RunDescription, *, is_ppo_known: bool
) -> None:
    """Compare settings as MLflow has them: as texts. One that is only now there is new, and compared with nothing."""
    names = {name for name in before if name.split(".")[0] in this.groups}
    for name in sorted(names):
        group, _, setting = name.partition(".")
        now = this.params.get(name, "not set")
        if _is_same(before[name], now) or (group == PPO and is_ppo_known):
            continue
        if group == REPORTING:
            comparison.changes[name] = (before[name], now)
        elif setting in MAY_CHANGE:
            comparison.changes[setting if group == PPO else name] = (before[name], now)
        else:
            comparison.refused.append(f"{name}: {before[name]} in the run, {now} now")


def _compare_data(comparison: Comparison, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    names = sorted({match[1] for name in (*before, *now) if (match := _FINGERPRINT.fullmatch(name))})
    for name in names:
        tag = f"data.{name}.fingerprint"
        if before.get(tag) != now.get(tag):
            comparison.refused.append(
                f"{name}: other data than in the run, {_short(before.get(tag))} by its fingerprint then, "
                f"{_short(now.get(tag))} now ({now.get(f'data.{name}.path', before.get(f'data.{name}.path'))})"
            )


def _is_same(before: str, now: str) -> bool:
    return before == now or (len(before) == MAX_PARAM_VAL_LENGTH and now.startswith(before))  # MLflow cuts longer ones


def _short(fingerprint: str | None) -> str:
    return "none" if fingerprint is None else fingerprint[:12]
