"""Log lines about columns of the user's tables that models do not see.

TRL, LLaMA-Factory, OpenRLHF and ms-swift give a meaning to some columns that this project's models do not see.
`docs/your_model.md` lists the columns.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppo_rlhf.data.chats import SHOWN_IN_CHATS
from ppo_rlhf.runtime.log_lines import say_once

_SHOWN_ELSEWHERE = (
    "instruction",
    "input",
    "query",
    "history",
    "images",
    "image",
    "videos",
    "video",
    "audios",
    "audio",
    "objects",
    "chat_template_kwargs",
)
"""Columns of prompts that other libraries show to the policy. In this project only reward functions get the columns in
`_SHOWN_ELSEWHERE`."""


def name_unused(name: str, given: Iterable[object], used: Iterable[object], *, of_chats: bool) -> None:
    """Log in one line which columns of a table of demonstrations or preferences are not used."""
    known = {*used, *(SHOWN_IN_CHATS if of_chats else ())}
    if unused := [f"`{column}`" for column in given if column not in known]:
        say_once(f"{name}: not used: {', '.join(unused)}. docs/your_model.md lists the columns that are used.")


def name_unshown(given: Iterable[str], used: str, *, of_chats: bool) -> None:
    """Log in one line which columns of a table of prompts the policy does not see, although other libraries show them.

    `used` is the column of the prompts. `of_chats` is True if all prompts are chats.
    """
    unshown = [f"`{column}`" for column in given if column in _SHOWN_ELSEWHERE and column != used]
    for_chats = [f"`{column}`" for column in given if column in SHOWN_IN_CHATS and column != used and not of_chats]
    parts = [", ".join(unshown), f"{', '.join(for_chats)}, which only chats can show" if for_chats else ""]
    if columns := "; nor ".join(filter(None, parts)):
        say_once(f"prompts: the policy is not shown {columns}. Reward functions get these columns.")
