"""Filters of MLflow's searches."""

from ppo_rlhf.core.errors import ConfigError


def equals(field: str, value: str) -> str:
    """Return the condition of a filter that a field equals a value, whatever characters the value has.

    Raises:
        ConfigError: No filter can have the value, because it has quotes of both kinds, which MLflow cannot escape.
    """
    if '"' not in value:
        return f'{field} = "{value}"'
    if "'" in value or value.endswith("\\"):  # before this quote a backslash escapes, and before the other it does not
        raise ConfigError(f"{value}: MLflow cannot search for a name with such quotes. Give it another name.")
    return f"{field} = '{value}'"
