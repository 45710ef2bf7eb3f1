"""The user's columns beside texts and chats: which of them models are shown, and a line about those that are not.

TRL, LLaMA-Factory, OpenRLHF and ms-swift document columns that mean something there. `docs/your_model.md` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppo_rlhf.data.chats import SHOWN_IN_CHATS
from ppo_rlhf.models.quiet import say_once

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
"""Columns of prompts that other libraries show the policy. Reward functions get them, as all columns of prompts."""


def name_unused(name: str, given: Iterable[object], used: Iterable[object], *, of_chats: bool) -> None:
    """Say in one line which columns of a table of demonstrations or preferences are not used."""
    known = {*used, *(SHOWN_IN_CHATS if of_chats else ())}
    if unused := [f"`{column}`" for column in given if column not in known]:
        say_once(f"{name}: not used: {', '.join(unused)}. docs/your_model.md lists the columns that are.")


def name_unshown(given: Iterable[str], used: str, *, of_chats: bool) -> None:
    """Say in one line which columns of a table of prompts would be shown to the policy elsewhere, and are not here."""
    unshown = [f"`{column}`" for column in given if column in _SHOWN_ELSEWHERE and column != used]
    of_others = [f"`{column}`" for column in given if column in SHOWN_IN_CHATS and column != used and not of_chats]
    parts = [", ".join(unshown), f"{', '.join(of_others)}, which only chats can show" if of_others else ""]
    if said := "; nor ".join(filter(None, parts)):
        say_once(f"prompts: the policy is not shown {said}. Reward functions get them.")
