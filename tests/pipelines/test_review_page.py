"""MLflow's page in a real browser: a pair is answered there, and becomes the preference with the right side chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.datasets import RecordsDataset, review_queues
from ppo_rlhf.datasets.review_queues import Comparison, ReviewQueues
from tests.datasets.test_review_queues import HARD, filled, queues
from tests.pipelines.review_page import answer, serving, start_review
from tests.reporting.test_browser import browser

__all__ = ["browser", "queues"]

pytestmark = pytest.mark.slow

LONG = "a line of **Markdown** with `code` and <b>HTML</b>\n" * 80  # of 4,000 characters


def test_a_pair_that_is_answered_on_the_page_becomes_the_preference(
    browser: Any, queues: ReviewQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "".join(HARD.values()), f"{LONG}{HARD['right to left']}"
    assert len(second) >= 4_000
    filled(queues, [Comparison(0, "Once **upon**", first, second)])
    with serving(tmp_path / "mlflow.db") as address, browser.new_page() as page:
        here = ReviewQueues(address, "own")
        start_review(page, here.address("sft"))
        body = page.inner_text("body")
        assert "0 of 1 reviewed" in body
        assert "Which response is better?" in body
        assert all(heading in body for heading in ("Response A", "Response B"))
        assert "<script>alert(1)</script>" in body  # as text
        assert not {"sft_policy", "ppo_policy", "policy_is_a"} & {*page.content().split()}
        answer(page, "B", "clearer")
        monkeypatch.setattr(review_queues, "place", review_queues.Place(address, "own"))
        table: Any = RecordsDataset("mlflow:sft").load()
        [row] = table.to_list()
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("Once **upon**", second, first)
    assert (row["people"], row["rationales"]) == (["default"], ["clearer"])
