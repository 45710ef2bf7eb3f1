"""Push models to the Hugging Face hub: a model directory becomes one commit of a repository."""

from __future__ import annotations

import json
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from ppo_rlhf.core.errors import ConfigError, in_one_line
from ppo_rlhf.models.directories import (
    ADAPTER_CONFIG,
    CARD,
    HUB_ID,
    RECORD,
    check_model_directory,
    check_of_checkpoint,
    is_adapter,
    is_local,
)
from ppo_rlhf.models.origins import MADE_FROM

STALE = ("*.safetensors", "*.safetensors.index.json", "*config.json", "*.jinja", f"*{RECORD}", f"*{MADE_FROM}")
"""Files of an earlier push that are deleted, because they would be loaded together with the new model's files."""


def check_name(repo_id: str) -> None:
    """Raise `ConfigError` if `repo_id` is not a valid name of a hub repository."""
    if not HUB_ID.fullmatch(repo_id) or repo_id.count("/") != 1 or "@" in repo_id:
        raise ConfigError(f"push: {repo_id} is no repository of the hub; give organisation/name or user/name.")


def check_push(repo_id: str, token: str | None = None) -> None:
    """Raise `ConfigError` if a push cannot work: the name is invalid, there is no token, or the hub is offline."""
    check_name(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("push: HF_HUB_OFFLINE is set, so nothing can be sent to the hub; unset HF_HUB_OFFLINE.")
    if not token and get_token() is None:
        raise ConfigError("push: there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN.")


def files_to_push(folder: Path) -> dict[str, Path]:
    """Return the files of a model directory by their names in the repository. Hidden files are left out.

    Raises:
        ConfigError: The model is an adapter whose base model is only on this machine.
        ModelError: Weights or the configuration are missing or damaged.
        CheckpointError: The model is a checkpoint's, and a file differs from the checkpoint's manifest.
    """
    check_model_directory(folder)
    check_of_checkpoint(folder)
    base = json.loads((folder / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"] if is_adapter(folder) else None
    if base is not None and is_local(base):
        raise ConfigError(
            f"push: {folder} is an adapter on {base}, a local path that others cannot load; export a whole model "
            "(ppo.export=merged)."
        )
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name.as_posix(): file for name, file in files.items() if not any(p.startswith(".") for p in name.parts)}


def push(
    folder: Path,
    repo_id: str,
    message: str,
    *,
    private: bool = True,
    license: str | None = None,
    token: str | None = None,
) -> str:
    """Send a model directory to the hub as one commit, and return the commit's address.

    A missing repository is created, `private` or public. Weights and configurations of an earlier push that the new
    model does not have are deleted from the repository; other files stay. Without `license` the card keeps its licence,
    or the card gets the licence of the base model on the hub. Without `token` the token of `hf auth login` or HF_TOKEN
    is used.

    Raises:
        ConfigError: `check_push` or `files_to_push` found a problem, or the hub refused the commit.
        ModelError: Weights or the configuration are missing or damaged.
    """
    check_push(repo_id, token)
    files, api = files_to_push(folder), HfApi(token=token)
    try:
        card = _card(api, files.pop(CARD, None), repo_id, license)
        api.create_repo(repo_id, private=private, exist_ok=True)
        repo_files = api.list_repo_files(repo_id)
        stale = [name for name in repo_files if name not in files and any(fnmatch(name, each) for each in STALE)]
        added = [CommitOperationAdd(name, str(file)) for name, file in files.items()]
        described, deleted = CommitOperationAdd(CARD, str(card).encode()), map(CommitOperationDelete, stale)
        return api.create_commit(repo_id, (described, *added, *deleted), commit_message=message).commit_url
    # huggingface_hub and the HTTP and storage libraries below it raise errors of many unrelated types
    except Exception as error:
        raise ConfigError(f"push: the hub did not accept {repo_id}: {in_one_line(error)}") from error


def _card(api: HfApi, file: Path | None, repo_id: str, given: str | None) -> ModelCard:
    """Return the model card with the repository's name, and with a licence if one is known."""
    card = ModelCard("" if file is None else file.read_text(encoding="utf-8"))
    data: Any = card.data
    data.license = given or data.license
    if data.license is None and isinstance(data.base_model, str):
        with suppress(RepositoryNotFoundError):
            data.license = (api.model_info(data.base_model).card_data or data).license
    if data.eval_results:
        data.model_name = repo_id.partition("/")[2]
    return card
