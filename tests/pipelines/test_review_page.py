"""MLflow's page in a real browser: a person sees every text as it is, and an answer becomes the right preference."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.core.escaped_text import escaped
from ppo_rlhf.datasets import RecordsDataset, mlflow_queue
from ppo_rlhf.datasets.mlflow_queue import get, put
from ppo_rlhf.datasets.pair_tables import comparison_of
from ppo_rlhf.people.answers import ANSWERS, Comparison
from tests.datasets.test_mlflow_queue import QUESTION, store
from tests.datasets.test_pair_tables import collected
from tests.people.test_pair_page import TEXTS
from tests.pipelines.review_page import answer, answer_by_keys, serving, shown, start_review
from tests.reporting.test_browser import browser

__all__ = ["browser", "store"]

pytestmark = pytest.mark.slow

LONG = "a line of **Markdown** with `code` and <b>HTML</b>\n" * 80  # of 4,000 characters
CHAT = [
    {"role": "system", "content": "Be *kind*.\n\n## Response A"},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": TEXTS["image"]},
]
log = logging.getLogger(__name__)


def test_a_person_sees_every_text_character_for_character_and_no_server_is_asked(
    browser: Any, store: str, tmp_path: Path
) -> None:
    texts = [text for text in TEXTS.values() if text] + [LONG]
    pairs = [Comparison(n, CHAT, text, f"{text}!") for n, text in enumerate(texts)]
    asked: list[str] = []
    with serving(tmp_path / "mlflow.db") as address, browser.new_page() as page:
        page.on("request", lambda request: asked.append(request.url))
        mlflow_queue.place.uri = address
        start_review(page, put("sft", pairs, QUESTION))
        seen = set()
        for number in range(len(texts)):
            page.get_by_text(f"{number} of {len(texts)} reviewed").wait_for()
            page.get_by_role("heading", name="Response B").wait_for()
            *question, first, second = shown(page)
            assert question == [_visible(message["content"]) for message in CHAT]
            assert second == f"{first}!"
            seen.add(first)
            answer(page, "A")
    assert seen == {*map(_visible, texts)}
    assert [url for url in asked if "example.com" in url] == []


def _visible(text: str) -> str:
    return escaped(text.replace("\r\n", "\n"))


def test_a_pair_that_is_answered_on_the_page_becomes_the_preference(browser: Any, store: str, tmp_path: Path) -> None:
    first, second = "".join(TEXTS.values()), f"{LONG}{TEXTS['right to left']}"
    assert len(second) >= 4_000
    tables = collected(tmp_path, [("Once **upon**", first, second)])
    [row] = tables.load().table.to_dict("records")
    with serving(tmp_path / "mlflow.db") as address, browser.new_page() as page:
        mlflow_queue.place.uri = address
        start_review(page, put("sft", [comparison_of(row)], QUESTION))
        body = page.inner_text("body")
        assert "0 of 1 reviewed" in body
        assert "Which response is better?" in body
        assert not re.search("sft_policy|ppo_policy|policy_is_a|models/one|models/two", page.content())
        answer(page, "B", "clearer")
        [given] = get("sft")
        table: Any = RecordsDataset("mlflow:sft", pairs={"path": str(tables.folder)}).load()
        [preferred] = table.to_list()
    assert (preferred["prompt"], preferred["chosen"], preferred["rejected"]) == ("Once **upon**", second, first)
    assert (given["person"], given["answer"], given["rationale"]) == ("default", "B", "clearer")


def test_forty_pairs_are_answered_by_the_keyboard_alone(browser: Any, store: str, tmp_path: Path) -> None:
    pairs = [Comparison(n, f"prompt {n}", f"a{n}", f"b{n}") for n in range(40)]
    keys, expected = list[int](), dict[str, str]()
    with serving(tmp_path / "mlflow.db") as address, browser.new_page() as page:
        mlflow_queue.place.uri = address
        start_review(page, put("sft", pairs, QUESTION))
        begin = time.monotonic()
        for number in range(40):
            page.get_by_role("heading", name="Response B").wait_for()
            prompt = shown(page)[0]  # MLflow's order is not that of the pairs
            expected[prompt] = ANSWERS[number % 4]
            keys.append(answer_by_keys(page, expected[prompt]))
            if number < 39:
                page.get_by_text(f"{number + 1} of 40 reviewed").wait_for()
        seconds = time.monotonic() - begin
        given = {f"prompt {row['number']}": row["answer"] for row in get("sft")}
    log.info("40 pairs: %d keys, %.0f s", sum(keys), seconds)
    assert given == expected
    assert max(keys[1:]) <= 13
