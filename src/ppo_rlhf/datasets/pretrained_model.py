"""A catalog entry for a Hugging Face model: loaded lazily, saved atomically as a new version."""

import errno
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError, Version
from kedro.io.core import generate_timestamp

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.directories import ADAPTER_CONFIG, CONFIG, gguf_file
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.runtime.paths import expand_home, restore_hub_name
from ppo_rlhf.runtime.whole_files import drafted, publish


class PretrainedModelDataset(AbstractDataset[TrainedModel | dict[str, object], PretrainedHandle | None]):
    """A model directory (configuration, safetensors, tokenizer), a hub id, or a GGUF file.

    Loading returns a handle; weights are read only when a node needs them. If the directory `filepath` has a
    config.json, the model in `filepath` itself is loaded; otherwise the newest version below `filepath`, or the version
    that `--load-versions` names. Saving writes a new version below `filepath` atomically. Example:

    ```yaml
    sft_policy:
      type: ppo_rlhf.datasets.PretrainedModelDataset
      filepath: data/06_models/sft_policy
    ```

    Attributes:
        pinned: The version to load, even if another run writes a newer version meanwhile. `pinned` is the version that
            this session wrote, or the version that `--load-versions` names. None loads the newest version.
        chat_template_kwargs: Values for names that the model's chat template reads.
        gguf_cache: The folder below which GGUF files are unpacked, or None.
    """

    versioned = True  # a versioned dataset gets its version of `kedro run --load-versions` from Kedro

    def __init__(
        self,
        filepath: str | None,
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        gguf_cache: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
        version: Version | None = None,
    ) -> None:
        """Store where the model is, without reading weights.

        A catalog entry without a `filepath` is an optional input that was not given, and loads as None.
        `chat_template_kwargs` are values for names that the model's chat template reads. `version.load` is the version
        to load; `version.save` is ignored. `gguf_cache["path"]` is the folder below which a GGUF file is unpacked;
        without `gguf_cache` each process unpacks the file to a temporary folder.

        Raises:
            ConfigError: `trust_remote_code` is neither true nor false, `chat_template_kwargs` is not a mapping, or the
                model version to load does not exist. Kedro raises a `DatasetError` with this error as the cause.
        """
        # Refuse a text for trust_remote_code, because Python would treat even the text "false" as true
        if not isinstance(trust_remote_code, bool):
            raise ConfigError(f"trust_remote_code must be true or false, without quotes; got {trust_remote_code!r}")
        if not isinstance(chat_template_kwargs or {}, dict):
            raise ConfigError(f"chat_template_kwargs: expected names with values, got {chat_template_kwargs!r}")
        self.chat_template_kwargs = chat_template_kwargs or {}
        path = (gguf_cache or {}).get("path")
        self.gguf_cache = None if path is None else Path(path)
        self._source = None if filepath is None else restore_hub_name(expand_home(str(filepath)))
        self._trust_remote_code = trust_remote_code
        self.pinned: Path | None = None
        self._version = version
        self.metadata = metadata
        if version is not None and version.load is not None:
            self.pinned = Path(str(self._source)) / version.load
            if not self._exists():
                raise ConfigError(
                    f"--load-versions: {self.pinned} does not exist; leave the option out to load the newest version"
                )

    def load(self) -> PretrainedHandle | None:
        """Return a handle on the model. The model is checked only when a node uses the model, because a run may never
        use it.
        """
        if self._source is None:
            return None
        place = str(self.pinned or newest_version(self._source))
        return PretrainedHandle(place, self._trust_remote_code, self.chat_template_kwargs, self.gguf_cache)

    def save(self, data: TrainedModel | dict[str, object]) -> None:
        """Write the model and its tokenizer as a new version. A node that has no model to save saves `{}`, which writes
        nothing.

        Raises:
            DatasetError: The catalog entry has no path, or the path itself is a model directory, which belongs to the
                user.
        """
        if isinstance(data, dict):
            return
        if self._source is None:
            raise DatasetError("A model cannot be saved: the catalog entry has no filepath.")
        folder = Path(self._source)
        if _is_model(folder):
            raise DatasetError(f"{folder} is itself a model directory, which is never overwritten. Save elsewhere.")
        version = folder / _next_version(folder)
        with drafted(version) as draft:
            data.save(draft)
            while not _was_published(draft, version):
                version = folder / _name_after(max(version.name, _newest_name(folder)))
        self.pinned = version

    @property
    def is_newest(self) -> bool:
        """Whether the newest version is loaded."""
        return self.pinned is None or str(self.pinned) == newest_version(str(self._source))

    def _exists(self) -> bool:
        handle = self.load()
        return handle is not None and _is_model(Path(handle.source))

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._source, "trust_remote_code": self._trust_remote_code}


def newest_version(source: str) -> str:
    """Return the newest version folder below `source`; `source` itself if it is a model or has no versions."""
    folder = Path(source)
    if not folder.is_dir() or _is_model(folder):
        return source
    return str(max(_versions(folder), key=lambda path: path.name, default=folder))


def _versions(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if not path.name.startswith(".") and _is_model(path)]


def _is_model(folder: Path) -> bool:
    file = gguf_file(folder)
    return (folder / CONFIG).is_file() or (folder / ADAPTER_CONFIG).is_file() or (file is not None and file.is_file())


def _next_version(folder: Path) -> str:
    """Return a version name that sorts after the newest version: the current time in milliseconds.

    If the time does not sort after the newest version's name, because a clock was set back or a user's folder has
    another name, the time is appended to the newest version's name. Modification times cannot order versions, because
    copying a folder changes its modification time.
    """
    return _name_after(_newest_name(folder))


def _newest_name(folder: Path) -> str:
    return max((path.name for path in _versions(folder)), default="")


def _name_after(newest: str) -> str:
    now = generate_timestamp()
    names = (now, f"{newest.partition('+')[0]}+{now}", f"{newest}+")
    return next(name for name in names if name > newest)


def _was_published(draft: Path, version: Path) -> bool:
    """Rename a draft to a version; return False if another run has written a version of this name meanwhile."""
    try:
        publish(draft, version)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
