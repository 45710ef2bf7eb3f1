"""Reads tables of LLaMA-Factory's dataset_info.json as chats in this project's columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.sources import load_table

Row = Mapping[str, Any]
Chat = list[dict[str, Any]]
STAGES = {"ppo": "prompts_path", "sft": "demonstrations_path", "rm": "preferences_path"}
"""The supported stages, each with the global that names its data."""
AFTER_FIRST = "after the first ones (the source draws rows at random)"
INFO = "dataset_info.json"

ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
SHAREGPT = {"messages": "conversations"}
"""Names of columns if an entry of dataset_info.json has no `columns`. An entry with `columns` must name all columns
that are read."""
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "system_tag": "system",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
}
"""Keys and roles of a chat's messages if an entry of dataset_info.json has no `tags`."""
_FORMS = {"alpaca": ALPACA, "sharegpt": SHAREGPT, "openai": SHAREGPT}
_ROLES = {"user": "user", "assistant": "assistant", "observation": "tool", "function": "function_call"}
_KEYS = {
    *("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name"),
    *("formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags"),
}
_UNREAD = ("images", "videos", "audios")


@dataclass(frozen=True)
class Table:
    """An entry of dataset_info.json: the place of a table, and the names of its columns and of the keys in its
    chats.
    """

    name: str
    source: str  # source of a table as `load_table` takes it: a file, or a dataset's name on the hub
    info: Mapping[str, Any]

    @property
    def is_ranking(self) -> bool:
        """Whether each row has a chosen and a rejected answer."""
        return bool(self.info.get("ranking"))

    def add_to(self, c: Conversion, stage: str, *, maximum: int | None = None, system: str | None = None) -> None:
        """Add the rows for a stage to a conversion: `ppo` (prompts), `sft` (demonstrations) or `rm` (preferences).

        Rows that are no chat with turns that alternate are left out and counted. A prompt for PPO needs no answer.
        `system` is the system message of rows without a system message.

        Raises:
            ConfigError: The entry of dataset_info.json cannot be read, or the entry's table is for another stage.
            DataError: The table cannot be loaded.
        """
        form = self.info.get("formatting", "alpaca")
        if form not in _FORMS or (unknown := self.info.keys() - _KEYS):
            what = f"formatting={form!r}" if form not in _FORMS else f"the key {min(unknown)!r}"
            raise ConfigError(f"{INFO}: {self.name}: LLaMA-Factory does not know {what}.")
        if self.is_ranking != (stage == "rm"):
            needs = "needs a ranking table" if stage == "rm" else "does not accept a ranking table"
            raise ConfigError(f"{INFO}: {self.name}: stage {stage} {needs} (ranking={self.is_ranking}).")
        columns = {key: name for key, name in self.info.get("columns", _FORMS[form]).items() if name}
        if media := [key for key in _UNREAD if key in columns]:
            raise ConfigError(f"{INFO}: {self.name} has {media[0]}, but only text is supported. Leave this table out.")
        table = load_table(self.source)
        if missing := sorted(set(columns.values()) - set(table.column_names)):
            raise ConfigError(f"{INFO}: {self.name}: {self.source} has no column {missing[0]}.")
        limits = [number for number in (self.info.get("num_samples"), maximum) if number is not None]
        limit = min([len(table), *limits])
        left = Counter({AFTER_FIRST: len(table) - limit})
        convert, rows = self._alpaca if form == "alpaca" else self._chat, []
        for row in table.select(range(limit)):
            cells = {key: row[name] for key, name in columns.items()}
            try:
                first, turns, answers = convert(cells)
            except (KeyError, TypeError, ValueError, AttributeError):
                left["that cannot be read as a chat"] += 1
                continue
            if why := _reason(turns, answers, stage):
                left[why] += 1
                continue
            text = first or cells.get("system") or system
            head = [{"role": "system", "content": text}] if text else []
            tools = {"tools": cells["tools"]} if cells.get("tools") else {}
            rows.append(_for_stage(stage, head + turns, answers) | tools)
        c.add_table(STAGES[stage], self.name, rows, len(table), +left)

    def _alpaca(self, cells: Row) -> tuple[str | None, Chat, Chat]:
        """Return None (no system message), the prompt and the answers of a row in Alpaca's format."""
        prompt = [
            {"role": role, "content": text}
            for pair in cells.get("history") or []
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        asked = "\n".join(text for key in ("prompt", "query") if (text := cells.get(key)))
        names = ("chosen", "rejected") if self.is_ranking else ("response",)
        answers = [{"role": "assistant", "content": cells[key]} for key in names if isinstance(cells.get(key), str)]
        return None, [*prompt, {"role": "user", "content": asked}], answers

    def _chat(self, cells: Row) -> tuple[str | None, Chat, Chat]:
        """Return the chat's system message, the prompt and the answers."""
        tags = self.info.get("tags", TAGS)
        roles = {tags[f"{role}_tag"]: ours for role, ours in _ROLES.items() if tags.get(f"{role}_tag")}

        def message(given: Row) -> dict[str, Any]:
            return {"role": roles.get(given[tags["role_tag"]]), "content": given[tags["content_tag"]]}

        given = cells["messages"]
        given, system = json.loads(given) if isinstance(given, str) else list(given), None
        if given and given[0][tags["role_tag"]] == tags.get("system_tag"):
            system = given.pop(0)[tags["content_tag"]]
        turns = [message(each) for each in given]
        if self.is_ranking:
            return system, turns, [message(cells["chosen"]), message(cells["rejected"])]
        answered = len(turns) % 2 == 0
        return system, turns[:-1] if answered else turns, turns[-1:] if answered else []


def _reason(prompt: Chat, answers: Chat, stage: str) -> str:
    """Return why a row cannot be used; an empty text if it can. Users and assistants take turns, a user first."""
    expected = [("user", "tool"), ("assistant", "function_call")]
    turns = prompt if stage == "rm" else prompt + answers
    alternate = all(turn["role"] in expected[number % 2] for number, turn in enumerate(turns))
    if not prompt or not alternate or len(prompt) % 2 == 0:
        return "whose roles do not alternate"
    if not all(isinstance(turn["content"], str) for turn in [*prompt, *answers]):
        return "without a text"
    return "" if stage == "ppo" or len(answers) == (2 if stage == "rm" else 1) else "without an answer"


def _for_stage(stage: str, prompt: Chat, answers: Chat) -> dict[str, Any]:
    if stage == "ppo":
        return {"prompt": prompt} | ({"response": answers[0]["content"]} if answers else {})
    if stage == "sft":
        return {"messages": prompt + answers}
    return {"prompt": prompt, "chosen": answers[:1], "rejected": answers[1:]}
