"""The changes between a run and the one that goes on with it: compared, refused or kept as tags.

MLflow's params cannot change, so each resume has tags `resume.<n>.<setting>` (PPO's settings by their bare name).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlflow.entities import Run
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

from ppo_rlhf.hooks.run_description import RunDescription

BIT_IDENTICAL = "bit_identical"
CHECKPOINT = "checkpoint"
_RESUME_TAG = re.compile(r"resume\.(\d+)\.(.+)")
_COMPARED_TAG = re.compile(r"pipeline|environment|version\..+|launch\..+|data\..+\.fingerprint")
_OF_THE_MACHINE = ("version.", "launch.")
"""Tags of the software and of the launch: they may change, but then numbers are not the same to the last bit."""

Change = tuple[str, str]
"""(before, now)"""


def as_last_resumed(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that resumes changed, by the name of the param or tag; the last resume counts."""
    return {
        (name if "." in name else f"ppo.{name}"): value
        for _, name, value in sorted(_resume_tags(tags))
        if name != CHECKPOINT
    }


def differences(this: RunDescription, run: Run) -> tuple[list[str], dict[str, Change]]:
    """Compare this run with the MLflow run that it is to go on with.

    Params that the earlier run did not have are new, and compared with nothing.

    Returns:
        The differences that are refused, in words; and the changes that may be, by their name in a tag.
    """
    from ppo_rlhf.checkpoints.resume import MAY_CHANGE

    groups = {name.split(".")[0] for name in this.params}
    before = {name: value for name, value in run.data.params.items() if name.split(".")[0] in groups}
    before |= {**_compared(run.data.tags), **as_last_resumed(run.data.tags)}
    now = {**this.params, **_compared(this.tags)}
    refused, changes = [], {}
    for name in sorted(before.keys() | {name for name in now if name.startswith("data.")}):
        was, is_now = before.get(name, "none"), now.get(name, "none")
        group, _, setting = name.partition(".")
        if was == is_now or (len(was) == MAX_PARAM_VAL_LENGTH and is_now.startswith(was)):  # MLflow cuts longer ones
            continue
        may_change = group == "reporting" or (group == "ppo" and setting in MAY_CHANGE)
        if may_change or name.startswith(_OF_THE_MACHINE):
            changes[setting if group == "ppo" else name] = (was, is_now)
        elif group == "data":
            path = this.tags.get(name.replace(".fingerprint", ".path"), "not read now")
            refused.append(f"the data {setting.removesuffix('.fingerprint')} ({path})")
        else:
            refused.append(f"{name} ({was} before, {is_now} now)")
    return refused, changes


def resume_tags(run: Run, checkpoint: str, changes: Mapping[str, Change]) -> dict[str, str]:
    """Return the tags of a run's next resume: its checkpoint, and the values that changed."""
    from ppo_rlhf.checkpoints.resume import CHANGES_NUMBERS

    number = 1 + max((n for n, name, _ in _resume_tags(run.data.tags) if name == CHECKPOINT), default=0)
    values = {CHECKPOINT: checkpoint, **{name: now for name, (_, now) in changes.items()}}
    tags = {f"resume.{number}.{name}": value for name, value in values.items()}
    if any(name in CHANGES_NUMBERS or name.startswith(_OF_THE_MACHINE) for name in changes):
        tags[BIT_IDENTICAL] = "false"
    return tags


def _compared(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in tags.items() if _COMPARED_TAG.fullmatch(name)}


def _resume_tags(tags: Mapping[str, str]) -> list[tuple[int, str, str]]:
    """Return (number of the resume, setting, value) of each tag of a resume."""
    matches = [(match, value) for name, value in tags.items() if (match := _RESUME_TAG.fullmatch(name))]
    return [(int(match[1]), match[2], value) for match, value in matches]
