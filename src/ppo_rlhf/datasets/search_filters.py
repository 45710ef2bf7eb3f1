"""Filters of MLflow's searches."""

from ppo_rlhf.core.errors import ConfigError


def equals(field: str, value: str) -> str:
    """Return the condition of a filter that a field equals a value, whatever characters the value has.

    Raises:
        ConfigError: No filter can have the value, because it has quotes of both kinds, which MLflow cannot escape.
    """
    # Single quotes first: a search of logged models finds nothing by a value in double quotes. In single quotes a
    # backslash escapes, in double quotes it does not
    if "'" not in value and not value.endswith("\\"):
        return f"{field} = '{value}'"
    if '"' in value:
        raise ConfigError(f"{value}: MLflow cannot search for a name with such quotes. Give it another name.")
    return f'{field} = "{value}"'
