"""What each resume of a run changed, as the run's tags keep it: `resume.<n>.<setting>` for its n-th resume.

Settings of PPO stand there by their bare name, others with their group, versions as `version.<package>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PPO = "ppo"
_TAG = re.compile(r"resume\.(\d+)\.(.+)")
_CHECKPOINT = "checkpoint"


def resume_tags(number: int, checkpoint: str, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a run's n-th resume.

    Args:
        number: Counted from 1.
        checkpoint: What it goes on from.
        changes: The values that it goes on with.
    """
    return {f"resume.{number}.{name}": value for name, value in {_CHECKPOINT: checkpoint, **changes}.items()}


def number_of_resumes(tags: Mapping[str, str]) -> int:
    """Return how often a run has gone on."""
    return max((number for number, name, _ in _found(tags) if name == _CHECKPOINT), default=0)


def as_last_resumed(tags: Mapping[str, str]) -> dict[str, str]:
    """Return what resumes changed, by the name of the param, or of the tag if it is a version; the last one counts."""
    return {
        (name if "." in name else f"{PPO}.{name}"): value
        for _, name, value in sorted(_found(tags))
        if name != _CHECKPOINT
    }


def _found(tags: Mapping[str, str]) -> list[tuple[int, str, str]]:
    matches = [(match, value) for name, value in tags.items() if (match := _TAG.fullmatch(name))]
    return [(int(match[1]), match[2], value) for match, value in matches]
