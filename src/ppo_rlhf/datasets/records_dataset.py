"""A catalog entry for a user's table, which `datasets` loads from files or from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.io import AbstractDataset, DatasetError
from kedro_datasets._typing import TablePreview

from ppo_rlhf.core.errors import DataError, kind_and_text
from ppo_rlhf.data.files import HUB, Found, digest, find, is_hub_name
from ppo_rlhf.data.sources import load_table
from ppo_rlhf.data.tables import commit_of, with_source
from ppo_rlhf.datasets.mlflow_queue import SCHEME
from ppo_rlhf.datasets.pair_tables import CollectedPairs, file_of_answers
from ppo_rlhf.datasets.tables import table_preview
from ppo_rlhf.people.answers import is_answers, preferences_of
from ppo_rlhf.runtime.names import HELD_OUT_DEMONSTRATIONS
from ppo_rlhf.runtime.own_process import ending_children
from ppo_rlhf.runtime.paths import expand_home, restore_hub_name
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal
from ppo_rlhf.runtime.user_functions import load_function

if TYPE_CHECKING:
    from datasets import Dataset

_PREVIEW_ROWS = 5


class RecordsDataset(AbstractDataset["Dataset", "Dataset | None"]):
    """A user's table; None if the entry has no `filepath` (the entry is then an optional input that was not given).

    `filepath` is one of:

    - a file, a glob or a folder of .jsonl, .json, .csv, .parquet, .arrow or .txt files (one row per line), plain or
      compressed; of a folder with splits the split `train`, or the split in `<folder>:<split>`, is read;
    - a folder that `save_to_disk` wrote;
    - the name of a dataset on the hub, with `@<revision>`, `#<configuration>` and `:<split>` where needed;
    - one file of a dataset on the hub, `hf://datasets/<owner>/<name>/<file>`;
    - with `pairs`, `mlflow:<queue>`: people's answers in a review queue of MLflow, which are written to a file.

    With `pairs`, a table with the columns `number` and `answer` is people's answers (`people.answers.preferences_of`),
    read once per run.

    The table is memory-mapped, except for CSV files and answers. In CSV only an empty cell is a missing value. A CSV
    column is read as numbers or truth values if Python prints each value as its cell stands (7, 0.5, True), else as
    text (007, 1.10, true). A column called prompt, completion, text, chosen or rejected, or named by `text_column`, is
    always text. Example:

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
        pairs: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Store where the table is, without reading the table. `load_table` documents `text_column` and `load_args`.

        `prepare` is the `module:name` of a function that takes the loaded `datasets.Dataset` and returns the
        `datasets.Dataset` to use; the module is searched in the same places as the module of a reward function.
        `cache["path"]` is the folder for the Arrow files of the table. `pairs["path"]` is the folder with the tables of
        the pairs to which people's answers belong.
        """
        place = None if filepath is None else expand_home(str(filepath))
        name = None if place is None else restore_hub_name(place)
        self._source = name if name is not None and is_hub_name(name) else place
        self._file = self._source  # of a review queue, once it is read: the file of its answers
        self._text_column, self._prepare = text_column, prepare
        self._answers: Dataset | None = None
        self._pairs = Path(pairs["path"]) if pairs else None
        self.cache, self._load_args = (cache or {}).get("path"), load_args
        self.metadata = metadata

    def load(self) -> Dataset | None:
        """Return the table; None without a `filepath`.

        Raises:
            DataError: As `load_table`, or `prepare` failed. Kedro raises a `DatasetError` with this error as the cause.
        """
        if self._source is None:
            return None
        # Load people's answers only once, so that all nodes of a run use the same answers
        if self._answers is not None:
            table = self._answers
        else:
            file = self._source if self._pairs is None else file_of_answers(self._source, self._pairs)
            table = load_table(file, text_column=self._text_column, cache=self.cache, load_args=self._load_args)
            self._file = file
            if self._pairs is not None and is_answers(table.column_names):
                joined = CollectedPairs.read(self._pairs).join(table, self._source)
                table = self._answers = preferences_of([pair for pair, _ in joined], self._source)
        # A file on the hub has been downloaded by now
        found = find(self._source) if self._source.startswith(HUB) else self._found()
        identity = commit_of(table) if found is None else digest(found.files)
        table = table if self._prepare is None else _prepared(table, self._prepare, self._source)
        return with_source(table, self._source, identity)

    def save(self, data: Dataset) -> None:
        raise DatasetError(f"{self._source} is an input of the user, which is never written.")

    def preview(self) -> TablePreview:
        """Return the table's first rows for Kedro-Viz; a table on the hub is not downloaded for a preview."""
        table = self.load() if self._exists() else None
        if table is None:
            return TablePreview({"index": [], "columns": [], "data": []})
        return table_preview(table.select(range(min(_PREVIEW_ROWS, len(table)))).to_pandas())

    def fingerprint(self) -> str | None:
        """Return the SHA-256 of the table's files, of a review queue that of its answers; None for a dataset on the
        hub.
        """
        if self._source is not None and self._source.startswith(SCHEME):
            self.load()
        found = self._found()
        return None if found is None else digest(found.files)

    def _exists(self) -> bool:
        return self._found() is not None

    def _found(self) -> Found | None:
        """Return the table's files on this machine; None for other sources, and for a source that cannot be found."""
        if self._file is None or self._file.startswith((HUB, SCHEME)):
            return None
        try:
            return find(self._file, (self._load_args or {}).get("split"))
        except DataError:
            return None

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._source}


class ReferenceTextsDataset(RecordsDataset):
    """The reference texts, as `RecordsDataset` reads them; None also if `filepath` is `held_out_demonstrations`, which
    names a dataset of the project.
    """

    def __init__(self, filepath: str | None, **settings: Any) -> None:
        is_given = filepath is not None and restore_hub_name(filepath) != HELD_OUT_DEMONSTRATIONS
        super().__init__(filepath if is_given else None, **settings)


def _prepared(table: Dataset, prepare: str, source: str) -> Dataset:
    from datasets import Dataset

    function: Any = load_function(prepare)
    try:
        with ending_children():
            prepared = function(table)
    # Signals and Ctrl-C are no errors of the user's function: re-raise them unchanged
    except (TerminationSignal, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's function can raise any exception, and can call sys.exit
        raise DataError(f"{source}: {prepare} raised {kind_and_text(error)}") from error
    if not isinstance(prepared, Dataset) or not len(prepared):
        what = "no rows" if isinstance(prepared, Dataset) else f"a value of type {type(prepared).__name__}"
        raise DataError(f"{source}: {prepare} returned {what}. Return a datasets.Dataset with rows.")
    return prepared
