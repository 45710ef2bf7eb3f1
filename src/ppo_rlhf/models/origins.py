"""What a model was made from: its start model, reward models and tables, with their digests and their own origins.

`TrainedModel.save` writes the origins of a model into `made_from.json`, and `PretrainedHandle.origin` reads them when
the next stage starts from the model. So the chain of models and tables reaches each model that the stages write. A
model without the file, such as a model from elsewhere, is named by its source alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

MADE_FROM = "made_from.json"
"""The file of a model directory with the origins of the model."""
START, REWARD, CRITIC = "start model", "reward model", "critic at the start"
"""Roles of models. Training starts from the weights of the start model."""


@dataclass(frozen=True)
class Origin:
    """A model or a table from which a model was made.

    Attributes:
        kind: What it is.
        role: What the training used it for, such as `start model` or `prompts`.
        source: Its path, without the names of this machine's folders, or its name on the hub; of pairs that the
            stage itself sampled, the function that labelled them.
        digest: Of a table, the SHA-256 of its files, or its commit on the hub; of a model, its fingerprint. MLflow's
            tags `data.*.fingerprint` have the same digests, except commits. None: the digest is not known.
        on_hub: Whether `source` is a name on the hub.
        license: The license, as a GGUF file names it.
        made_from: The origins of the model; empty if they are not known.
    """

    kind: Literal["model", "table"]
    role: str
    source: str
    digest: str | None = None
    on_hub: bool = False
    license: str | None = None
    made_from: tuple[Origin, ...] = ()

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Origin:
        """Return the origin of a dictionary that `dataclasses.asdict` made.

        Raises:
            TypeError, KeyError, AttributeError: The dictionary has other keys, or values of other types.
        """
        origin = cls(**{**fields, "made_from": tuple(map(cls.from_dict, fields["made_from"]))})
        for name in ("kind", "role", "source", "digest", "license"):
            if not isinstance(value := getattr(origin, name), str) and not (value is None and name in _OPTIONAL):
                raise TypeError(f"{name} is {value!r:.60}")
        return origin


_OPTIONAL = ("digest", "license")


def as_json(made_from: Iterable[Origin]) -> str:
    """Return origins as the text of `made_from.json`."""
    return json.dumps([asdict(origin) for origin in made_from], indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> tuple[Origin, ...]:
    """Return the origins of the text of `made_from.json`.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: The text is damaged.
    """
    return tuple(map(Origin.from_dict, json.loads(text)))


def write_origins(folder: Path, made_from: tuple[Origin, ...]) -> None:
    """Write `made_from.json` into a model directory, or delete an earlier model's file if no origins are known."""
    if made_from:
        (folder / MADE_FROM).write_text(as_json(made_from), encoding="utf-8")
    else:
        (folder / MADE_FROM).unlink(missing_ok=True)


def start_on_hub(made_from: Iterable[Origin]) -> str | None:
    """Return the name of the nearest start model on the hub, from which the weights come; None without one."""
    for origin in made_from:
        if origin.role == START:
            return origin.source if origin.on_hub else start_on_hub(origin.made_from)
    return None


def tables_on_hub(made_from: Iterable[Origin]) -> Iterator[str]:
    """Yield the names of all tables on the hub in a chain of origins; a table may occur more than once."""
    for origin in made_from:
        if origin.kind == "table" and origin.on_hub:
            yield origin.source
        yield from tables_on_hub(origin.made_from)


def in_words(made_from: Iterable[Origin]) -> str:
    """Return origins as a nested list in Markdown. The origins of a model that occurs twice are listed once."""
    return "\n".join(_lines(made_from, "", set()))


def _lines(made_from: Iterable[Origin], indent: str, shown: set[tuple[str, str | None]]) -> Iterator[str]:
    for origin in made_from:
        known = [f"digest `{origin.digest}`"] if origin.digest else []
        known += [f"license, as the file names it: {origin.license!r:.60}"] if origin.license else []
        key = origin.source, origin.digest
        known += ["made from what is listed above"] if origin.made_from and key in shown else []
        yield f"{indent}- {origin.role} `{origin.source}`" + (f" ({'; '.join(known)})" if known else "")
        if key not in shown:
            shown.add(key)
            yield from _lines(origin.made_from, f"{indent}  ", shown)
