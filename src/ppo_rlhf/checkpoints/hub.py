"""Models on the Hugging Face hub: a model directory becomes one commit of a repository."""

from __future__ import annotations

import json
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from ppo_rlhf.core.errors import ConfigError, in_one_line
from ppo_rlhf.models.directories import ADAPTER_CONFIG, HUB_ID, check_model_directory, is_adapter, is_local
from ppo_rlhf.models.loading import CARD, RECORD

STALE = ("*.safetensors", "*.safetensors.index.json", "*config.json", "*.jinja", f"*{RECORD}")
"""Files of an earlier push that would be read beside those of another model."""


def check_name(repo_id: str) -> None:
    """Raise `ConfigError` if a name cannot be that of a repository."""
    if not HUB_ID.fullmatch(repo_id) or repo_id.count("/") != 1 or "@" in repo_id:
        raise ConfigError(f"push: {repo_id} is no repository of the hub; give organisation/name or user/name.")


def check_push(repo_id: str, token: str | None = None) -> None:
    """Raise `ConfigError` if nothing can be pushed: the name is none of the hub's, or there is no token or network."""
    check_name(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("push: HF_HUB_OFFLINE is set, so nothing can be sent to the hub; unset it.")
    if not token and get_token() is None:
        raise ConfigError("push: there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN.")


def files_to_push(folder: Path) -> dict[str, Path]:
    """Return the files of a model directory by their names in the repository; hidden ones are left out.

    Raises:
        ConfigError: The model is an adapter on a model that only this machine has.
        ModelError: Weights or configuration are missing or damaged.
    """
    check_model_directory(folder)
    base = json.loads((folder / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"] if is_adapter(folder) else None
    if base is not None and is_local(base):
        raise ConfigError(
            f"push: {folder} is an adapter on {base}, which nobody else has; export a whole model (ppo.export=merged)."
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

    The repository is made, `private` or public, if it is not there. Weights and configurations of an earlier push that
    this model does not have are deleted; other files stay. Without a `license` the card keeps its own, or gets that of
    its base model on the hub; without a `token` that of `hf auth login` or HF_TOKEN counts.

    Raises:
        ConfigError: As `check_push` and `files_to_push`, or the hub refused something.
    """
    check_push(repo_id, token)
    files, api = files_to_push(folder), HfApi(token=token)
    try:
        card = _card(api, files.pop(CARD, None), repo_id, license)
        api.create_repo(repo_id, private=private, exist_ok=True)
        there = api.list_repo_files(repo_id)
        stale = [name for name in there if name not in files and any(fnmatch(name, each) for each in STALE)]
        added = [CommitOperationAdd(name, str(file)) for name, file in files.items()]
        described, deleted = CommitOperationAdd(CARD, str(card).encode()), map(CommitOperationDelete, stale)
        return api.create_commit(repo_id, (described, *added, *deleted), commit_message=message).commit_url
    except Exception as error:  # huggingface_hub, its HTTP client and its storage raise errors of many kinds
        raise ConfigError(f"push: the hub did not take {repo_id}: {in_one_line(error)}") from error


def _card(api: HfApi, file: Path | None, repo_id: str, given: str | None) -> ModelCard:
    """Return the card with the repository's name and a licence, as far as one is known."""
    card = ModelCard("" if file is None else file.read_text(encoding="utf-8"))
    data: Any = card.data
    data.license = given or data.license
    if data.license is None and isinstance(data.base_model, str):
        with suppress(RepositoryNotFoundError):
            data.license = (api.model_info(data.base_model).card_data or data).license
    if data.eval_results:
        data.model_name = repo_id.partition("/")[2]
    return card
