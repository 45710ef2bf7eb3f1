"""Refuses settings of a saved adapter by which peft would load another model than the base with the adapter.

`adapter_config.json` comes from somebody else. Its patterns are regular expressions, of which some never come to an
end; they are tried in a process that can be stopped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.directories import ADAPTER_CONFIG

INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base's weights as they are. The others, such as pissa and olora, change
the base when an adapter is made, and again whenever it is loaded."""
PATTERN_S = 10.0
"""Seconds that an adapter's patterns may take on the names of all layers."""
_WHOLE = "^(?:{})$"
"""How peft matches a target given as one text. It compares a list of targets as texts."""
_FORMS = {
    "target_modules": _WHOLE,
    "exclude_modules": _WHOLE,
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "feedforward_modules": _WHOLE,
    "n_frequency_pattern": r".*\.{}$",
    "block_size_pattern": r".*\.{}$",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
}
"""The settings whose texts are regular expressions, and how peft matches each with a layer's name."""
_NAME = re.compile(r"[\w.-]*")
_TRIAL = """
import json, re, sys
for pattern, names in json.load(sys.stdin):
    for name in names:
        re.match(pattern, name)
"""


def check_keeps_base(settings: Mapping[str, Any], source: str) -> None:
    """Raise `ModelError` if peft changes an adapter's base while it loads the adapter."""
    how = settings.get("init_lora_weights", True)
    if how not in INITIALISATIONS:
        raise ModelError(
            f"{source}: {ADAPTER_CONFIG} has init_lora_weights={how!r:.40}, so this adapter belongs to changed weights "
            "of its base, which the adapter does not hold. Save it converted (peft: save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it where it was trained and give the merged model."
        )
    if settings.get("layer_replication"):
        raise ModelError(
            f"{source}: {ADAPTER_CONFIG} has layer_replication={settings['layer_replication']!r:.40}, so this adapter "
            "belongs to a model with more layers than its base. Give that model, with the adapter merged."
        )


def check_patterns(settings: Mapping[str, Any], names: Iterable[str], source: str) -> None:
    """Raise `ModelError` if an adapter's patterns are no regular expressions, or do not come to an end.

    `names` are the names of the base's layers, with which peft would compare the patterns.
    """
    patterns = list(_patterns(settings))
    if not patterns:
        return
    for setting, pattern, form in patterns:
        try:
            re.compile(form)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(
                f"{source}: {ADAPTER_CONFIG} has {setting}={pattern!r:.60}, which is no regular expression ({error})."
            ) from error
    layers = list(names)
    trials = json.dumps([(form, layers) for _, _, form in patterns])
    try:
        # `trials` is ASCII, because json.dumps escapes all else
        subprocess.run([sys.executable, "-I", "-c", _TRIAL], input=trials.encode(), check=True, timeout=PATTERN_S)
    except subprocess.TimeoutExpired as error:
        setting, pattern, _ = patterns[0]
        more = f" or another of its {len(patterns)} patterns" if patterns[1:] else ""
        raise ModelError(
            f"{source}: {ADAPTER_CONFIG} has {setting}={pattern!r:.60}; comparing it{more} with the layers' names does "
            f"not end within {PATTERN_S:g} s. Write the names of the layers instead."
        ) from error


def _patterns(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the setting, the text, and the whole expression of each pattern that is more than a name."""
    for setting, form in _FORMS.items():
        value = settings.get(setting)
        if form == _WHOLE and not isinstance(value, str):
            continue
        for text in [value] if isinstance(value, str) else value or ():
            if isinstance(text, str) and not _NAME.fullmatch(text) and text != "all-linear":
                yield setting, text, form.format(text)
