"""A catalog entry for a table that a user gives, loaded by `datasets` from files or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.io import AbstractDataset, DatasetError
from kedro_datasets._typing import TablePreview

from ppo_rlhf.core.errors import DataError, kind_and_text
from ppo_rlhf.data.prompt_dataset import as_json
from ppo_rlhf.data.sources import HUB, files_of, is_hub_name, load_table
from ppo_rlhf.datasets.answers import SCHEME, load_answers
from ppo_rlhf.datasets.tables import table_preview
from ppo_rlhf.rewards.functions import load_function
from ppo_rlhf.runtime.own_process import guarded
from ppo_rlhf.runtime.paths import expand_home, restore_hub_name
from ppo_rlhf.runtime.signals import TerminationSignal

if TYPE_CHECKING:
    from datasets import Dataset

_PREVIEW_ROWS = 5


class RecordsDataset(AbstractDataset["Dataset", "Dataset | None"]):
    """A table of a user's, memory-mapped; None where nothing was named (an optional input).

    `mlflow:<queue>` is what people answered in a review queue of MLflow (`answers.load_answers`), read once a run.

    It is a file, a glob or a folder of .jsonl, .json, .csv, .parquet, .arrow or .txt (one row a line), plain or
    compressed; a folder that `save_to_disk` wrote; a data set on the hub by its name, with `@<revision>`,
    `#<configuration>` and `:<split>` if need be; or one file of it (`hf://datasets/<owner>/<name>/<file>`). In CSV,
    only an empty cell is missing; a column of nothing but numbers, or but true and false, is read as these (007 as 7),
    unless it is called prompt, completion, text, chosen, rejected, or as `text_column` says. Example:

    ```yaml
    raw_prompts:
      type: ppo_rlhf.datasets.RecordsDataset
      filepath: openai/gsm8k#main:train[:10%]
    ```
    """

    def __init__(
        self,
        filepath: str | None,
        text_column: str = "text",
        prepare: str | None = None,
        cache: dict[str, str] | None = None,
        load_args: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Describe where the table is; nothing is read. `load_table` says what most arguments mean.

        `prepare` is the `module:name` of a function that makes the table that is wanted of the one given, a
        `datasets.Dataset` of a `datasets.Dataset`; the module is found as a reward function's is. The `path` of `cache`
        is the folder for the Arrow files that are made of the table.
        """
        place = None if filepath is None else expand_home(str(filepath))
        name = None if place is None else restore_hub_name(place)
        self._source = name if name is not None and is_hub_name(name) else place
        self._text_column, self._prepare = text_column, prepare
        self._answers: Dataset | None = None
        self.cache, self._load_args = (cache or {}).get("path"), load_args
        self.metadata = metadata

    def load(self) -> Dataset | None:
        """Return the table, None without a name.

        Raises:
            DataError: As `load_table`, or `prepare` failed (seen by Kedro's callers as the cause of a `DatasetError`).
        """
        if self._source is None:
            return None
        if self._source.startswith(SCHEME):
            if self._answers is None:  # in one run the same ones
                self._answers = load_answers(self._source)
            table = self._answers
        else:
            table = load_table(self._source, text_column=self._text_column, cache=self.cache, load_args=self._load_args)
        return table if self._prepare is None else _prepared(table, self._prepare, self._source)

    def save(self, data: Dataset) -> None:
        raise DatasetError(f"{self._source} is the user's own input, which is never written.")

    def preview(self) -> TablePreview:
        """Show Kedro-Viz the first rows; nothing is downloaded for it."""
        table = self.load() if self._exists() else None
        if table is None:
            return TablePreview({"index": [], "columns": [], "data": []})
        return table_preview(table.select(range(min(_PREVIEW_ROWS, len(table)))).to_pandas())

    def fingerprint(self) -> str | None:
        """Return the SHA-256 of the files on this machine, or of a queue's answers; None for a name on the hub."""
        if self._source is not None and self._source.startswith(SCHEME):
            self.load()
            assert self._answers is not None
            return hashlib.sha256(as_json(self._answers.to_list()).encode("utf-8", "surrogatepass")).hexdigest()
        files = files_of(str(self._source)) if self._exists() else None
        if files is None:
            return None
        names = sorted(files.rglob("*.arrow")) if isinstance(files, Path) else files
        digests = []
        for file in names:
            with file.open("rb") as opened:
                digests.append(hashlib.file_digest(opened, "sha256"))
        whole = digests[0] if len(names) == 1 else hashlib.sha256(b"".join(each.digest() for each in digests))
        return whole.hexdigest()

    def _exists(self) -> bool:
        try:
            is_elsewhere = self._source is None or self._source.startswith((HUB, SCHEME))
            return not is_elsewhere and bool(files_of(str(self._source)))
        except DataError:
            return False

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._source}


def _prepared(table: Dataset, prepare: str, source: str) -> Dataset:
    from datasets import Dataset

    function: Any = load_function(prepare)
    try:
        with guarded():
            made = function(table)
    except (TerminationSignal, KeyboardInterrupt):  # the function is not the cause
        raise
    except BaseException as error:  # a user's function can raise anything, and end itself
        raise DataError(f"{source}: {prepare} raised {kind_and_text(error)}") from error
    if not isinstance(made, Dataset) or not len(made):
        what = "no rows" if isinstance(made, Dataset) else f"a value of type {type(made).__name__}"
        raise DataError(f"{source}: {prepare} returned {what}. Return a datasets.Dataset with rows.")
    return made
