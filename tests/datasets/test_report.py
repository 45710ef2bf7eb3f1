"""The report's catalog entry: the newest page under one name, and every run's own."""

from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from ppo_rlhf.datasets import ReportDataset


def test_runs_do_not_overwrite_each_others_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report = ReportDataset(str(tmp_path / "report.html"))
    assert not report.exists()
    for run in ("first", "second"):
        monkeypatch.setattr(mlflow, "active_run", lambda run=run: SimpleNamespace(info=SimpleNamespace(run_id=run)))
        report.save(f"<p>{run} – ü</p>")
    assert report.load() == "<p>second – ü</p>"
    pages = {path.parent.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("runs/*/report.html")}
    assert pages == {"first": "<p>first – ü</p>", "second": "<p>second – ü</p>"}
