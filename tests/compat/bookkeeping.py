"""Rules of every conversion: each setting of the source is carried over or left out, and both claims are true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppo_rlhf.compat import Conversion


def check_claims(
    convert: Callable[[Mapping[str, Any]], Conversion], settings: Mapping[str, Any], others: Mapping[str, Any]
) -> None:
    """Change one setting at a time: the parameters change unless it is listed before and after, and only then.

    A null setting is not given, so it is not listed before. `others` has a value of another effect for
    settings where adding 1 will not do.
    """
    conversion = convert(settings)
    assert all(setting in settings and reason for setting, reason in conversion.not_carried)
    untrue = []
    for setting, value in settings.items():
        changed = convert({**settings, setting: others.get(setting, _another(value))})
        listed_before = setting in dict(conversion.not_carried) or setting not in conversion.given
        carried = not (listed_before and setting in dict(changed.not_carried))
        if (changed.parameters != conversion.parameters) != carried:
            untrue.append(setting)
    assert not untrue, untrue
    assert set(others) <= set(settings)


def _another(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else {"other": 1}
