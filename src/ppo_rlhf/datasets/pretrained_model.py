"""A catalog entry for a Hugging Face model: lazy to load, versioned and whole when saved."""

import errno
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError, Version
from kedro.io.core import generate_timestamp

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.directories import ADAPTER_CONFIG, CONFIG
from ppo_rlhf.models.loading import PretrainedHandle, TrainedModel
from ppo_rlhf.runtime.paths import expand_home, restore_hub_name
from ppo_rlhf.runtime.whole_files import drafted, publish


class PretrainedModelDataset(AbstractDataset[TrainedModel | dict[str, object], PretrainedHandle | None]):
    """A model directory (configuration, safetensors, tokenizer) or a hub id.

    Loading gives a handle; weights are read only when a node asks for them. The path itself is loaded if a config.json
    is there, else the newest version below it, or the one that `--load-versions` names. Saving writes a new version
    below the path, whole or not at all. Example:

    ```yaml
    sft_policy:
      type: ppo_rlhf.datasets.PretrainedModelDataset
      filepath: data/06_models/sft_policy
    ```

    Attributes:
        pinned: The version to load, though another run may write a newer one: what this session wrote or was told to
            read. None loads the newest.
        chat_template_kwargs: Values for names that the model's chat template reads.
    """

    versioned = True  # so Kedro hands on the version of --load-versions

    def __init__(
        self,
        filepath: str | None,
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        version: Version | None = None,
    ) -> None:
        """Describe where the model is; nothing is read.

        Without a `filepath` it loads as None (an optional input that was not given). `chat_template_kwargs` are values
        for names that the model's chat template reads; of `version` only the one to load counts.

        Raises:
            ConfigError: `trust_remote_code` is neither true nor false, `chat_template_kwargs` are no mapping, or the
                version is not there (seen by Kedro's callers as the cause of a `DatasetError`).
        """
        if not isinstance(trust_remote_code, bool):  # a text such as "false" would count as true
            raise ConfigError(f"trust_remote_code is true or false, without quotes; given was {trust_remote_code!r}")
        if not isinstance(chat_template_kwargs or {}, dict):
            raise ConfigError(f"chat_template_kwargs: expected names with values, got {chat_template_kwargs!r}")
        self.chat_template_kwargs = chat_template_kwargs or {}
        self._source = None if filepath is None else restore_hub_name(expand_home(str(filepath)))
        self._trust_remote_code = trust_remote_code
        self.pinned: Path | None = None
        self._version = version
        self.metadata = metadata
        if version is not None and version.load is not None:
            self.pinned = Path(str(self._source)) / version.load
            if not self._exists():
                raise ConfigError(
                    f"--load-versions: {self.pinned} is not there; leave it out to read the newest version"
                )

    def load(self) -> PretrainedHandle | None:
        """Return a handle on the model. It is checked when it is used: a run may never need it."""
        if self._source is None:
            return None
        place = str(self.pinned or newest_version(self._source))
        return PretrainedHandle(place, self._trust_remote_code, self.chat_template_kwargs)

    def save(self, data: TrainedModel | dict[str, object]) -> None:
        """Write the model and its tokenizer as a new version; nothing if a node had no model to save, which `{}` says.

        Raises:
            DatasetError: The path is missing, or is itself a model directory: a user's, never written.
        """
        if isinstance(data, dict):
            return
        if self._source is None:
            raise DatasetError("A model cannot be saved: the catalog entry has no filepath.")
        folder = Path(self._source)
        if _is_model(folder):
            raise DatasetError(f"{folder} is a model directory of its own, which is never overwritten. Save elsewhere.")
        version = folder / _next_version(folder)
        with drafted(version) as draft:
            data.save(draft)
            while not _has_taken(draft, version):
                version = folder / _name_after(max(version.name, _newest_name(folder)))
        self.pinned = version

    def _exists(self) -> bool:
        handle = self.load()
        return handle is not None and _is_model(Path(handle.source))

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._source, "trust_remote_code": self._trust_remote_code}


def newest_version(source: str) -> str:
    """Return `source` if a model or an adapter is there, else its newest version folder, else `source` again."""
    folder = Path(source)
    if not folder.is_dir() or _is_model(folder):
        return source
    return str(max(_versions(folder), key=lambda path: path.name, default=folder))


def _versions(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if not path.name.startswith(".") and _is_model(path)]


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / ADAPTER_CONFIG).is_file()


def _next_version(folder: Path) -> str:
    """Return the time in milliseconds, after the newest version's name if the time alone would not sort after it.

    So the newest version is the one written last, even if a clock was set back or a user's folder is there.
    Times of modification would not tell: a copy of the folder has others.
    """
    return _name_after(_newest_name(folder))


def _newest_name(folder: Path) -> str:
    return max((path.name for path in _versions(folder)), default="")


def _name_after(newest: str) -> str:
    now = generate_timestamp()
    names = (now, f"{newest.partition('+')[0]}+{now}", f"{newest}+")
    return next(name for name in names if name > newest)


def _has_taken(draft: Path, version: Path) -> bool:
    """Rename a draft to a version, unless another run took the name meanwhile: it wrote in the same millisecond."""
    try:
        publish(draft, version)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
