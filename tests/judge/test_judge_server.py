"""A language model as judge whose server does something unusual: what is read, retried, kept, masked, and what ends."""

from __future__ import annotations

import email.utils
import json
import logging
import re
import sqlite3
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.core.errors import RewardError
from ppo_rlhf.judge import chat_transport
from ppo_rlhf.judge.llm_judge import LLMJudge
from ppo_rlhf.judge.settings import LLMJudgeConfig
from ppo_rlhf.rewards.functions import call_reward_function
from tests.chat_stand_in import KEY, ChatServer, Flood, running_chat
from tests.judge.test_answer_form import READ, UNREADABLE, each

EMPTY = [
    {"choices": [{"message": None, "finish_reason": "stop"}], "note": "blocked"},
    {"choices": [{"message": {"content": None, "note": "blocked"}}]},
    {"choices": [{"message": {"content": [], "note": "blocked"}}]},
]
FOREIGN = [
    *(b"<html>blocked by the proxy</html>", b"null", b'"blocked"', b"[]", b"{}", b"", b"[" * 100_000),
    *(b"\xff\xfe\xff Score: 8", b'{"choices": []}', b'{"choices": [null]}'),
]


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


def number_in(text: str) -> int:
    return int(re.findall(r"bad ([0-9]+)", text)[0])


def rows(tmp_path: Path) -> int:
    (count,) = sqlite3.connect(next(tmp_path.rglob("*.sqlite"))).execute("SELECT count(*) FROM answers").fetchone()
    return count


def test_answers_as_models_write_them_have_the_right_score_or_none(judge, server):
    table = [*READ, *((text, None) for text in each(UNREADABLE))]
    server.answer = lambda text: table[number_in(text)][0]
    asked = judge(unparsable=-99)
    found = scores(asked, *(f"bad {number}" for number in range(len(table))))
    assert found == [-99.0 if score is None else score for _, score in table]
    assert asked.counts.unparsable == found.count(-99.0)


def test_a_completion_without_a_text_is_unparsable_and_is_asked_for_again(judge, server):
    server.answer = lambda text: EMPTY[number_in(text)] if "bad" in text else "Score: 4"
    with pytest.raises(RewardError, match=r"^judge: .* is empty, the server sent .*blocked"):
        scores(judge(), "bad 0")
    bad = [f"bad {number}" for number in range(len(EMPTY))]
    asked = judge(unparsable=2)
    assert scores(asked, "good", *bad) == [4.0, *[2.0] * len(bad)]
    assert (asked.counts.requests, asked.counts.unparsable) == (1 + len(bad), len(bad))
    server.answer = lambda text: "Score: 9"
    assert scores(judge(unparsable=2), "good", *bad) == [4.0, *[9.0] * len(bad)]


def test_an_answer_without_choices_is_asked_for_again_and_then_unparsable(judge, server):
    server.answer = lambda text: FOREIGN[number_in(text)] if "bad" in text else "Score: 4"
    server.content_type = "text/html"
    bad = [f"bad {number}" for number in range(len(FOREIGN))]
    asked = judge(unparsable=2)
    assert scores(asked, "good") + scores(asked, *bad) == [4.0, *[2.0] * len(bad)]
    assert (asked.counts.requests, asked.counts.unparsable, len(server.bodies)) == (1, len(bad), 1 + 3 * len(bad))
    assert scores(judge(unparsable=2), "good", "bad 0") == [4.0, 2.0], "the answer from the cache is the server's"
    with pytest.raises(RewardError, match=r"did not send a chat completion, but: <html>.*/v1\."):
        scores(judge(), "bad 0")


def test_a_server_that_never_sends_a_completion_ends_the_run_whatever_unparsable_is(judge, server):
    server.answer = lambda text: FOREIGN[0]
    with pytest.raises(RewardError, match=r"chat completion, but: <html>blocked by the proxy</html>"):
        scores(judge(unparsable=2, max_retries=0), "one", "one", "two")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "Good.\nSco"}, {"type": "text", "text": "re: 8"}],
        [
            {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]},
            {"type": "text", "text": "Score: 8"},
        ],
        "Half a pair \ud83d of an emoji.\nScore: 8",
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
        {"error": "Rate limit: slow down", "choices": []},
        completion("", error={"code": 502, "message": "slow down"}),
        completion("slow down. Score: 1", finish_reason="error"),
    ],
)
def test_an_error_in_a_200_is_retried_and_ends_the_run_in_the_servers_words(judge, server, body):
    answers = iter([body, body, "Score: 6"])
    server.answer = lambda text: next(answers)
    asked = judge(unparsable=2)
    assert scores(asked, "one") == [6.0]
    assert asked.counts.requests == 1
    server.answer = lambda text: body
    with pytest.raises(RewardError, match="slow down"):
        scores(judge(), "two")
    assert len(server.bodies) == 6


def test_an_error_in_a_200_that_names_a_refusal_is_a_refused_text(judge, server):
    server.answer = lambda text: {"error": {"code": 400, "message": "too long"}} if "bad" in text else "Score: 4"
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
    assert rows(tmp_path) == 7


def test_an_unparsable_answer_is_asked_for_again_if_it_ended_the_run(judge, server, tmp_path):
    server.answer = lambda text: "No number."
    for _ in range(2):
        with pytest.raises(RewardError, match="No number"):
            scores(judge(), "one")
    assert len(server.bodies) == 2
    assert rows(tmp_path) == 0


def test_an_unparsable_answer_with_a_score_of_its_own_is_kept_until_a_run_asks_anew(judge, server, tmp_path):
    server.answer = lambda text: "No number."
    for _ in range(2):
        assert scores(judge(unparsable=2), "one") == [2.0]
    assert (len(server.bodies), rows(tmp_path)) == (1, 1)
    server.answer = lambda text: "Score: 7"
    assert scores(judge(), "one") == [7.0]
    assert scores(judge(unparsable=2), "one") == [7.0]
    assert (len(server.bodies), rows(tmp_path)) == (2, 1)


@pytest.mark.parametrize("reason", ["length", "no such reason"])
def test_an_answer_that_was_cut_off_is_no_score_from_the_cache_either(judge, server, reason):
    server.finish_reason = reason
    server.answer = lambda text: "Score: 1"
    for _ in range(2):
        assert scores(judge(unparsable=2), "one") == [2.0]
    assert len(server.bodies) == 1
    with pytest.raises(
        RewardError, match=rf"was cut off \(finish_reason {reason}\): 'Score: 1'\. Change llm\.max_tokens"
    ):
        scores(judge(), "one")


def test_an_answer_of_another_server_is_another_answer(judge, server):
    with running_chat(lambda text: "Score: 9") as other:
        assert scores(judge(), "one") == [4.0]
        assert scores(judge(base_url=other.url), "one") == [9.0]
        assert len(other.bodies) == 1


@pytest.mark.parametrize("kept", [b"Score: 9", None, 9])
def test_an_answer_that_something_else_put_into_the_cache_is_asked_for_anew(judge, server, tmp_path, kept):
    assert scores(judge(), "one") == [4.0]
    with sqlite3.connect(next(tmp_path.rglob("*.sqlite"))) as database:
        (key,) = database.execute("SELECT key FROM answers").fetchone()
        database.execute("DROP TABLE answers")
        database.execute("CREATE TABLE answers (key PRIMARY KEY, text, is_whole)")
        database.execute("INSERT INTO answers VALUES (?, ?, 1)", (key, kept))
    assert scores(judge(), "one") == [4.0]
    assert len(server.bodies) == 2


def in_seconds(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("300", 300.0), ("0.5", 0.5), (7200, 7200.0), (-10, None), ("0", None), ("soon", None)],
)
def test_the_pause_that_a_server_asks_for_is_a_number_or_a_date(value, seconds):
    """A number stands for a date so many seconds from now."""
    asked = chat_transport.asked_pause_s(value if isinstance(value, str) else in_seconds(value))
    assert asked == (None if seconds is None else pytest.approx(seconds, abs=60.0 if value == 7200 else 0.0))


def test_a_long_pause_that_the_server_asks_for_is_kept(judge, server, monkeypatch, caplog):
    pauses: list[float] = []

    async def at_once(wait: Any, seconds: float) -> None:
        wait.close()
        pauses.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(chat_transport.asyncio, "wait_for", at_once)
    answers = iter([(429, "slow down"), "Score: 6"])
    server.answer = lambda text: next(answers)
    server.headers = {"retry-after": "500"}
    assert scores(judge(), "one") == [6.0]
    assert pauses == [500.0]
    assert "asks for a pause of 500 seconds" in caplog.text


def test_a_pause_of_more_than_ten_minutes_ends_the_run_at_once(judge, server):
    server.answer = lambda text: (429, "slow down")
    server.headers = {"retry-after": "3600"}
    with pytest.raises(RewardError, match=r"slow down.*pause of 3,600 seconds: resume the run later"):
        scores(judge(), "one")
    assert len(server.bodies) == 1


def test_a_pause_ends_if_another_request_has_failed(judge, server):
    server.answer = lambda text: (401, "no key") if "bad" in text else (429, "slow down")
    server.headers = {"retry-after": "120"}
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"no key|slow down"):
        scores(judge(), "good", "bad")
    assert time.monotonic() - started < 60.0


def test_a_server_that_drips_is_late(judge, server):
    server.answer, server.drip_s = lambda text: "Score: 4 " * 100, 0.2
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"no whole answer within 0\.3 seconds.*llm\.timeout_s"):
        scores(judge(timeout_s=0.3, max_retries=0), "one")
    assert time.monotonic() - started < 60.0  # the whole answer would take longer


def test_of_an_answer_of_300_megabytes_only_the_first_are_read(judge, server):
    server.answer = lambda text: Flood(200) if "bad" in text else "Score x " * 20_000 + "\nScore: 8"
    tracemalloc.start()
    started = time.monotonic()
    try:
        assert scores(judge(unparsable=2), "bad", "long") == [2.0, 8.0]
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 60.0
    with pytest.raises(RewardError, match=r"has more than 10,000,000 bytes"):
        scores(judge(), "bad")


def test_an_error_of_300_megabytes_is_a_line(judge, server):
    server.answer = lambda text: Flood(401)
    with pytest.raises(RewardError, match=r"401 Unauthorized: .*page page.* Check the key") as refused:
        scores(judge(), "one")
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=latin-1", "text/plain; charset=idna", 'x; charset=""']
)
def test_an_answer_is_utf_8_whatever_character_set_the_headers_name(judge, server, content_type):
    server.content_type = content_type
    body = json.dumps(completion("Très bien: «ü».\nScore: 8"), ensure_ascii=False)
    for encoding, text in (("utf-8", "one"), ("utf-8-sig", "two"), ("latin-1", "three")):
        server.answer = lambda _, encoding=encoding: body.encode(encoding)
        assert scores(judge(), text) == [8.0]
    server.answer = lambda text: (400, "trop élevé")
    with pytest.raises(RewardError, match="400"):
        scores(judge(), "four")


def test_counts_of_tokens_that_cannot_be_are_left_out(judge, server):
    usage = iter(
        [{"prompt_tokens": 10**320, "completion_tokens": -1}, {"prompt_tokens": "9"}, [], {"prompt_tokens": 7}]
    )
    server.answer = lambda text: completion("Score: 8") | {"usage": next(usage)}
    asked = judge(concurrency=1)
    assert scores(asked, *"abcd") == [8.0] * 4
    assert (asked.counts.tokens_in, asked.counts.tokens_out) == (7, 0)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://localhost:1"),
        ("ALL_PROXY", f"ftp://me:{KEY}@localhost:1"),
        ("HTTP_PROXY", "http://localhost:port"),
        ("SSL_CERT_FILE", "/no/such/file.pem"),
        ("SSL_CERT_FILE", __file__),
    ],
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_said_in_a_line(judge, server, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        RewardError, match=r"^judge: m at .*Error|InvalidURL.*Correct or unset ALL_PROXY.*SSL_CERT_FILE\.$"
    ) as said:
        scores(judge(), "one")
    assert "\n" not in str(said.value)
    assert KEY not in str(said.value)


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
