"""What holds for every conversion: each setting of the source is carried or left, and both claims are true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppo_rlhf.compat import Conversion

Convert = Callable[[Mapping[str, Any]], Conversion]


def check_each_setting_is_entered_once(conversion: Conversion, settings: Mapping[str, Any]) -> None:
    left = [setting for setting, _ in conversion.not_carried]
    assert sorted([*conversion.carried, *left]) == sorted(settings)
    assert all(reason.strip() for _, reason in conversion.not_carried)


def check_claims(convert: Convert, settings: Mapping[str, Any], other_values: Mapping[str, Any]) -> None:
    """Change one setting at a time: the parameters change if it is carried before or after, and only then.

    `other_values` has a value of another effect for settings for which some other value will not do.
    """
    conversion = convert(settings)
    untrue = []
    for setting in settings:
        changed = convert({**settings, setting: other_values.get(setting, _another(settings[setting]))})
        carried = setting in conversion.carried or setting in changed.carried
        if (changed.parameters != conversion.parameters) != carried:
            untrue.append(setting)
    assert not untrue, untrue
    assert set(other_values) <= set(settings)


def _another(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else {"other": 1}
