"""The notebooks run from top to bottom."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_without_an_error(path: Path, make_project: Callable[[], Path]) -> None:
    project = make_project()
    (project / "notebooks").mkdir()
    shutil.copy(path, project / "notebooks")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(project / "notebooks")}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.get("execution_count") for cell in code)
    shown = [output for cell in code for output in cell.outputs if output.output_type != "stream"]
    assert len(shown) < 15, "text goes to one stream, which a notebook shows as one block"
