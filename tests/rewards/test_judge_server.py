"""A language model as judge whose server does something unusual: what is read, retried, kept, masked, and what ends."""

from __future__ import annotations

import email.utils
import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.core.errors import ConfigError, RewardError
from ppo_rlhf.rewards import chat_requests
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.llm_judge import LLMJudge
from ppo_rlhf.rewards.llm_settings import LLMJudgeConfig
from tests.chat_stand_in import KEY, ChatServer, running_chat

EMPTY = [
    {"choices": [], "prompt_filter": "blocked"},
    {"choices": [{"message": None, "finish_reason": "blocked"}]},
    {"choices": [{"message": {"content": None, "note": "blocked"}}]},
    {"choices": [{"message": {"content": [], "note": "blocked"}}]},
    {"choices": [None], "note": "blocked"},
]
FOREIGN = [b"<html>blocked by the proxy</html>", b"null", b'"blocked"', b"[]", b"{}", b"", b"[" * 100_000]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with running_chat(lambda text: "Score: 4") as server:
        yield server


@pytest.fixture
def judge(server: ChatServer, tmp_path: Path) -> Callable[..., LLMJudge]:
    """Return a function that creates a judge for the server with the given settings and the test's cache."""
    return lambda **settings: LLMJudge(
        LLMJudgeConfig(**{"model": "m", "base_url": server.url, "max_retries": 2, **settings}), "judge", tmp_path
    )


def scores(judge: LLMJudge, *completions: str) -> list[float]:
    return call_reward_function(judge, "judge", ["the prompt"] * len(completions), list(completions), {})


def completion(content: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": "stop", **choice}]}


def rows(tmp_path: Path, table: str) -> int:
    (count,) = sqlite3.connect(next(tmp_path.rglob("*.sqlite"))).execute(f"SELECT count(*) FROM {table}").fetchone()
    return count


@pytest.mark.parametrize("body", EMPTY)
def test_a_completion_without_a_text_is_unparsable_and_is_asked_for_again(judge, server, body, tmp_path):
    server.answer = lambda text: body if "bad" in text else "Score: 4"
    with pytest.raises(RewardError, match=r"^judge: .* it is empty, the server sent .*blocked"):
        scores(judge(), "bad")
    asked = judge(unparsable=2)
    assert scores(asked, "good", "bad") == [4.0, 2.0]
    assert (asked.counts.requests, asked.counts.unparsable, asked.counts.failed) == (2, 1, 0)
    server.answer = lambda text: "Score: 9"
    assert scores(judge(unparsable=2), "good", "bad") == [4.0, 9.0]


@pytest.mark.parametrize("body", FOREIGN)
def test_a_body_that_is_no_completion_is_retried_and_then_unparsable(judge, server, body):
    server.answer = lambda text: body if "bad" in text else "Score: 4"
    server.content_type = "text/html"
    asked = judge(unparsable=2)
    assert scores(asked, "good", "bad") == [4.0, 2.0]
    assert (asked.counts.requests, asked.counts.failed, len(server.bodies)) == (1, 1, 4)
    with pytest.raises(RewardError, match=r"did not answer with a chat completion, but with '.*/v1\."):
        scores(judge(), "bad")


def test_a_server_that_never_sends_a_completion_ends_the_run_whatever_unparsable_is(judge, server):
    server.answer = lambda text: FOREIGN[0]
    with pytest.raises(RewardError, match=r"chat completion, but with '<html>blocked by the proxy</html>'"):
        scores(judge(unparsable=2, max_retries=0), "one", "two")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "Good.\nSco"}, {"type": "text", "text": "re: 8"}],
        [
            {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]},
            {"type": "text", "text": "Score: 8"},
        ],
        "Half a pair \ud83d of an emoji.\nScore: 8",
        "Score: 8 \ud83d",
        "\x00\nScore: 8",
    ],
)
def test_parts_of_text_are_joined_and_half_a_surrogate_pair_is_kept(judge, server, content):
    server.answer = lambda text: completion(content)
    assert scores(judge(), "one") == [8.0]
    assert scores(judge(), "one") == [8.0]
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": 429, "message": "slow down"}},
        {"error": {"code": "rate_limit_exceeded", "message": "slow down"}},
        {"error": "Rate limit: slow down"},
        {"code": 503, "message": "slow down"},
        completion("", error={"code": 502, "message": "slow down"}),
        completion("slow down. Score: 1", finish_reason="error"),
    ],
)
def test_an_error_in_a_200_is_retried_and_ends_the_run_in_the_servers_words(judge, server, body):
    answers = iter([body, body, "Score: 6"])
    server.answer = lambda text: next(answers)
    asked = judge(unparsable=2)
    assert scores(asked, "one") == [6.0]
    assert (asked.counts.requests, asked.counts.retries) == (1, 2)
    server.answer = lambda text: body
    with pytest.raises(RewardError, match="slow down"):
        scores(judge(), "two")
    assert len(server.bodies) == 6


@pytest.mark.parametrize("error", [{"code": 400, "message": "too long"}, {"code": "context_length_exceeded"}])
def test_an_error_in_a_200_that_names_a_refusal_is_a_refused_text(judge, server, error):
    server.answer = lambda text: {"error": error} if "bad" in text else "Score: 4"
    assert scores(judge(unparsable=2), "good", "bad") == [4.0, 2.0]
    assert len(server.bodies) == 2


@pytest.mark.parametrize("bad", [(401, "no"), {"error": {"code": 401}}, EMPTY[1], "no number"])
def test_answers_under_way_are_kept_whatever_ends_the_run(judge, server, bad, tmp_path):
    def answer(text: str) -> Any:
        if "bad" in text:
            return bad
        time.sleep(0.3)
        return "Score: 4"

    server.answer = answer
    with pytest.raises(RewardError):
        scores(judge(concurrency=8), "bad", *(f"response {number}" for number in range(7)))
    assert rows(tmp_path, "answers") == 7


def test_an_unparsable_answer_is_asked_for_again_if_it_ended_the_run(judge, server, tmp_path):
    server.answer = lambda text: "No number."
    for _ in range(2):
        with pytest.raises(RewardError, match="No number"):
            scores(judge(), "one")
    assert len(server.bodies) == 2
    assert rows(tmp_path, "answers") == 0


def test_an_unparsable_answer_with_a_score_of_its_own_is_kept_and_marked(judge, server, tmp_path):
    server.answer = lambda text: "No number."
    for _ in range(2):
        assert scores(judge(unparsable=2), "one") == [2.0]
    assert (len(server.bodies), rows(tmp_path, "answers"), rows(tmp_path, "unusable")) == (1, 1, 1)
    server.answer = lambda text: "Score: 7"
    assert scores(judge(), "one") == [7.0]
    assert scores(judge(unparsable=2), "one") == [7.0]
    assert (len(server.bodies), rows(tmp_path, "answers"), rows(tmp_path, "unusable")) == (2, 1, 0)


@pytest.mark.parametrize("reason", ["length", "content_filter", "abort", "insufficient_system_resource"])
def test_an_answer_that_was_cut_off_is_no_score_from_the_cache_either(judge, server, reason):
    server.finish_reason = reason
    server.answer = lambda text: "Score: 1"
    for _ in range(2):
        assert scores(judge(unparsable=2), "one") == [2.0]
    assert len(server.bodies) == 1


def test_an_answer_of_another_server_is_another_answer(judge, server):
    with running_chat(lambda text: "Score: 9") as other:
        assert scores(judge(), "one") == [4.0]
        assert scores(judge(base_url=other.url), "one") == [9.0]
        assert len(other.bodies) == 1


def test_keys_and_opinions_of_answers_from_before_structured_output_stay_valid():
    """The expected digests were computed at 6ea7081e, before the settings response_format and max_pause_s."""
    config = LLMJudgeConfig(model="m", base_url="http://localhost:1/v1", extra_body={"top_k": 2})
    judge = LLMJudge(config, "judge", Path("unused"))
    assert judge._key(judge._body("Hello")) == "2f3a53a7fa6d7754435fae83d877842ac0c2062aac581f970fafc56a86c2635f"
    assert (
        hashlib.sha256(config.opinion.encode()).hexdigest()
        == "6efa0b2df20e206c0b2a8f2ce90df45cba759c0c2b0891fb1ee5d43be3d9df90"
    )


def test_structured_output_is_asked_for_and_is_another_question(judge, server):
    form = {"type": "json_object"}
    server.answer = lambda text: '{"reason": "a score: 3", "score": 6}'
    scores(judge(), "one")
    assert scores(judge(response_format=form), "one") == [6.0]
    assert [body.get("response_format") for body in server.bodies] == [None, form]
    with pytest.raises(ConfigError, match=r"llm\.response_format has no type"):
        judge(response_format={"json_schema": {}})
    with pytest.raises(ConfigError, match=r"llm\.extra_body: response_format"):
        judge(response_format=form, extra_body={"response_format": form})


def test_a_file_that_cannot_hold_answers_is_never_to_be_removed(judge, tmp_path):
    (tmp_path / "paid.sqlite").write_text("damaged " * 1000)
    with pytest.raises(RewardError, match=r"paid\.sqlite: .*llm\.cache") as refused:
        scores(judge(cache="paid.sqlite"), "one")
    assert "emove" not in str(refused.value)


def in_seconds(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "300"}, 300.0),
        ({"retry-after-ms": "1500", "retry-after": "300"}, 1.5),
        ({"retry-after": 7200.0}, 7200.0),
        ({"retry-after": -10.0}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_the_pause_that_a_server_asks_for_is_read_in_each_form(headers, seconds):
    """A number stands for a date so many seconds from now."""
    dated = {key: in_seconds(value) if isinstance(value, float) else value for key, value in headers.items()}
    asked = chat_requests.asked_pause_s(dated)
    assert asked == (None if seconds is None else pytest.approx(seconds, abs=60.0 if seconds == 7200.0 else 0.0))


def test_a_long_pause_is_kept_up_to_the_setting(judge, server, monkeypatch, caplog):
    pauses: list[float] = []

    async def at_once(wait: Any, seconds: float) -> None:
        wait.close()
        pauses.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(chat_requests.asyncio, "wait_for", at_once)
    answers = iter([(429, "slow down"), "Score: 6"])
    server.answer = lambda text: next(answers)
    server.headers = {"retry-after": "500"}
    assert scores(judge(), "one") == [6.0]
    assert pauses == [500.0]
    assert "asks for a pause of 500 seconds" in caplog.text


def test_a_pause_over_the_setting_ends_the_run_at_once(judge, server):
    server.answer = lambda text: (429, "slow down")
    server.headers = {"retry-after": "3600"}
    with pytest.raises(RewardError, match=r"slow down.*pause of 3,600 seconds.*max_pause_s=600\. Raise llm\.max_pau"):
        scores(judge(), "one")
    assert len(server.bodies) == 1


def test_a_pause_ends_if_another_request_has_failed(judge, server):
    server.answer = lambda text: (401, "no key") if "bad" in text else (429, "slow down")
    server.headers = {"retry-after": "30"}
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"no key|slow down"):
        scores(judge(), "good", "bad")
    assert time.monotonic() - started < 10.0


def test_a_server_that_drips_is_late(judge, server):
    server.drip_s = 0.02
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"APITimeoutError: no whole answer within 0\.3 seconds.*llm\.timeout_s"):
        scores(judge(timeout_s=0.3, max_retries=0), "one")
    assert time.monotonic() - started < 3.0


def test_an_answer_of_twenty_megabytes_has_no_score_and_a_long_one_has(judge, server):
    server.answer = lambda text: (
        "x" * 20_000_000 + "\nScore: 8" if "bad" in text else "Score x " * 20_000 + "\nScore: 8"
    )
    started = time.monotonic()
    assert scores(judge(unparsable=2), "bad", "long") == [2.0, 8.0]
    assert time.monotonic() - started < 20.0


@pytest.mark.parametrize(
    ("encoding", "content_type"),
    [
        ("latin-1", "application/json; charset=latin-1"),
        ("cp1252", "text/plain; charset=windows-1252"),
        ("utf-16", "application/json"),
        ("utf-8-sig", "application/json; charset=ascii"),
        ("utf-8", "application/json; charset=no-such-set"),
    ],
)
def test_an_answer_in_another_character_set_is_read(judge, server, encoding, content_type):
    body = json.dumps(completion("Très bien: «ü».\nScore: 8"), ensure_ascii=False)
    server.answer = lambda text: body.encode(encoding)
    server.content_type = content_type
    assert scores(judge(), "one") == [8.0]


def test_bytes_that_are_no_text_are_no_answer(judge, server):
    server.answer = lambda text: b"\xff\xfe\xff Score: 8" if "bad" in text else "Score: 4"
    assert scores(judge(unparsable=2), "good", "bad") == [4.0, 2.0]


@pytest.mark.parametrize(
    "answer",
    [
        lambda said: f"Your key is {said}.\nScore: 8",
        lambda said: f"{'x' * 30}{said} is your key, no number.",
        lambda said: completion(None, note=f"{'x' * 395}{said}"),
        lambda said: {"error": {"code": 400, "message": f"bad key {said}"}},
        lambda said: (400, f"{'x' * 370}{said}"),
        lambda said: f"<p>bad key {said}</p>".encode(),
    ],
)
def test_a_key_that_the_server_sends_back_is_masked_in_messages_log_and_cache(
    judge, server, answer, monkeypatch, caplog, tmp_path
):
    key = f"{KEY}&/+'\"x"
    monkeypatch.setenv("STAND_IN_KEY", key)
    server.headers["x-echo"] = key
    server.answer = lambda text: answer(key) if "bad" in text else "Score: 4"
    said = ""
    with caplog.at_level(logging.DEBUG):
        for unparsable in ("error", 2):
            asked = judge(api_key_variable="STAND_IN_KEY", unparsable=unparsable, max_retries=0)
            try:
                scores(asked, "good", "bad")
            except RewardError as error:
                said += str(error)
    assert KEY[:10] not in said
    assert KEY[:10] not in caplog.text
    assert all(KEY[:10].encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_what_failed_is_said_in_a_line_that_is_not_long(judge, server):
    server.answer = lambda text: (401, "page " * 10_000)
    with pytest.raises(RewardError, match=r"Set llm\.api_key_variable") as refused:
        scores(judge(), "one")
    assert len(str(refused.value)) < 800
