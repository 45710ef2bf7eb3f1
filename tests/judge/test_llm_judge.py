"""A language model as judge, against a fake server with OpenAI's chat API."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.core.errors import ConfigError, RewardError
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.judge.answer_cache import AnswerCache
from ppo_rlhf.judge.llm_judge import Counts, LLMJudge, judge_counts, load_judge
from ppo_rlhf.judge.settings import LLMJudgeConfig, same_opinion
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.scoring import AGAINST
from ppo_rlhf.runtime.stop_exceptions import TerminationSignal
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tests.chat_stand_in import KEY, ChatServer, between, running_chat
from tests.launch import launch
from tests.tiny_models import save, tiny_model

WORDS = ["one", "one two", "one two three"]


def words(text: str) -> str:
    """Return the fake server's answer: the score is the response's number of words."""
    return f"It could be worse, a score of sorts.\nScore: {len(between(text, 'response').split())}"


def longer(text: str) -> str:
    """Return the fake verdict for the response with more words; a difference of at most one word is a tie."""
    first, second = (len(between(text, f"response_{name}").split()) for name in "ab")
    return f"Verdict: {'tie' if abs(first - second) < 2 else 'A' if first > second else 'B'}"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with running_chat(words) as server:
        yield server


@pytest.fixture
def judge(server: ChatServer, tmp_path: Path) -> Callable[..., LLMJudge]:
    """Return a function that creates a judge for the server with the given settings and the test's cache."""
    return lambda **settings: LLMJudge(LLMJudgeConfig(model="m", base_url=server.url, **settings), "judge", tmp_path)


def scores(judge: LLMJudge, completions: list[str], **columns: list[Any]) -> list[float]:
    return call_reward_function(judge, "judge", ["the prompt"] * len(completions), completions, columns)


@pytest.mark.parametrize("form", ["ignored", "obeyed", "refused"])
def test_each_response_gets_the_number_of_the_models_answer_whatever_the_server_makes_of_the_form(judge, server, form):
    server.form = form
    asked = judge(concurrency=1, extra_body={"seed": 7})
    assert scores(asked, WORDS) == [1.0, 2.0, 3.0]
    texts = [body["messages"][0]["content"] for body in server.bodies if form != "refused" or len(body) == 5]
    assert [between(text, "request") for text in texts] == ["the prompt"] * 3
    assert sorted(between(text, "response") for text in texts) == WORDS
    assert all(text.endswith("the line\nScore: <a number from 1 (worst) to 10 (best)>") for text in texts)
    assert {(body["model"], body["temperature"], body["seed"], body["max_tokens"]) for body in server.bodies} == {
        ("m", 0.0, 7, 1024)
    }
    tokens = sum(len(text.split()) for text in texts)
    assert asked.counts == Counts(requests=3, tokens_in=tokens, tokens_out=9)


def test_the_form_is_a_schema_of_a_reason_and_a_score_or_a_verdict(judge, server):
    scores(judge(), ["one"])
    server.answer = lambda text: "Verdict: tie"
    scores(judge(answer="pairwise"), ["x"], **{AGAINST: ["y"]})
    schemas = [body["response_format"]["json_schema"]["schema"] for body in server.bodies[:2]]
    assert [body["response_format"]["type"] for body in server.bodies] == ["json_schema"] * 3
    assert [list(schema["properties"]) for schema in schemas] == [["reason", "score"], ["reason", "verdict"]]
    assert schemas[0]["properties"]["score"] == {"type": "number"}
    assert schemas[1]["properties"]["verdict"] == {"type": "string", "enum": ["A", "B", "tie"]}


@pytest.mark.parametrize("code", [400, 404, 422])
def test_a_server_that_refuses_the_form_is_asked_without_it_from_then_on_and_that_is_said_once(
    judge, server, code, caplog
):
    refusal = code, "This response_format type is unavailable now"
    server.answer = lambda text: refusal if "response_format" in server.bodies[-1] else words(text)
    asked = judge(concurrency=1)
    assert scores(asked, WORDS) == [1.0, 2.0, 3.0]
    assert scores(asked, ["one two three four"]) == [4.0]
    assert ["response_format" in body for body in server.bodies] == [True, False, False, False, False]
    assert [record.getMessage().count("refuses response_format") for record in caplog.records] == [1]


def test_another_refusal_is_no_refusal_of_the_form(judge, server):
    server.answer = lambda text: (400, "the text is too long")
    with pytest.raises(RewardError, match="too long"):
        scores(judge(), ["one"])
    assert ["response_format" in body for body in server.bodies] == [True]


def test_an_answer_is_paid_once_with_and_without_the_form(judge, server):
    server.form = "refused"
    asked = judge()
    assert scores(asked, WORDS) == [1.0, 2.0, 3.0]
    server.form = "obeyed"
    server.bodies.clear()
    assert scores(judge(), WORDS) == [1.0, 2.0, 3.0]
    assert server.bodies == []


def test_with_a_pattern_no_form_is_sent_and_only_the_last_match_is_read(judge, server):
    server.answer = lambda text: '{"score": 2}' if "two" in text else "<think>[[9]]</think>[[3]] or [[4]]\nScore: 5"
    asked = judge(pattern=r"\[\[(.*?)\]\]", unparsable=1)
    assert scores(asked, ["one", "two"]) == [4.0, 1.0]
    assert all("response_format" not in body for body in server.bodies)
    assert asked.counts.unparsable == 1


def test_a_field_of_the_body_that_is_null_is_not_sent_and_others_are(judge, server):
    scores(judge(max_tokens=None, extra_body={"top_k": 1, "temperature": None}), ["one"])
    assert server.bodies[0].keys() == {"model", "messages", "top_k", "response_format"}


def test_an_unparsable_answer_ends_the_run_unless_a_score_is_set_for_it(judge, server, caplog):
    server.answer = lambda text: "No idea." if "two" in text else words(text)
    with pytest.raises(RewardError, match=r"response 1 .* 1 to 10 .*'No idea\.'.*llm\.template.*unparsable"):
        scores(judge(), WORDS[:2])
    asked = judge(unparsable=5)
    with caplog.at_level(logging.WARNING):
        assert scores(asked, WORDS) == [1.0, 5.0, 5.0]
    assert asked.counts.unparsable == 2
    assert ["response gets the score 5." in record.getMessage() for record in caplog.records] == [True]


def test_a_template_of_the_users_sees_columns_scale_and_criteria(judge, server):
    template = "{{ prompt }}|{{ response }}|{{ answer }}|{{ criteria }}|{{ lowest }}..{{ highest }}"
    server.answer = lambda text: "[[0.5]]"
    settings = {"criteria": "Short.", "lowest": 0, "highest": 1, "pattern": r"\[\[(.*)\]\]"}
    assert scores(judge(template=template, **settings), ["{{ one }}"], answer=["1 {x}"]) == [0.5]
    assert server.texts == ["the prompt|{{ one }}|1 {x}|Short.|0..1"]


def test_a_template_that_names_what_is_not_there_is_refused_with_what_it_can_name(judge):
    with pytest.raises(RewardError, match=r"'answr' is undefined\..*answer, .*response"):
        scores(judge(template="{{ response }} {{ answr }}"), ["one"], answer=["1"])


def test_a_chat_is_shown_as_its_messages_and_an_episode_as_its_text(judge, server):
    template = "{{ prompt }}|{{ response }}"
    chat = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
    system = {"role": "system", "content": "Be brief."}
    columns = {
        "messages": [chat, [system, *chat], [*chat, {"role": "user", "content": "More"}, chat[1]], None],
        "turns": [["So."], ["So."], ["So.", "More", "So."], ["So."]],
    }
    server.answer = lambda text: "Score: 1"
    call_reward_function(judge(template=template), "judge", ["<u>How?<a>"] * 4, [" So."] * 4, columns)
    assert set(server.texts) == {"How?|So.", "system: Be brief.\n\nuser: How?|So.", "<u>How?<a>|So."}


PAIRS = ["a b c", "d", "a b", "same", "a b c d"], ["a", "d b c", "a", "same", "a b c d e f"]


def test_a_pair_is_asked_in_both_orders_and_equal_texts_are_a_tie_for_nothing(judge, server):
    server.answer = longer
    asked = judge(answer="pairwise")
    assert scores(asked, PAIRS[0], **{AGAINST: PAIRS[1]}) == [1.0, 0.0, 0.5, 0.5, 0.0]
    shown = sorted((between(text, "response_a"), between(text, "response_b")) for text in server.texts)
    differ = [pair for pair in zip(*PAIRS, strict=True) if pair[0] != pair[1]]
    assert shown == sorted([*differ, *((second, first) for first, second in differ)])
    assert asked.counts.contradictions == 0


@pytest.mark.parametrize("verdict", ["A", "B", "tie"])
def test_a_judge_that_goes_by_the_place_decides_nothing(judge, server, verdict):
    server.answer = lambda text: f"Verdict: {verdict}"
    asked = judge(answer="pairwise")
    assert scores(asked, ["x", "y"], **{AGAINST: ["y", "x"]}) == [0.5, 0.5]
    assert asked.counts.contradictions == (0 if "tie" in verdict else 2)


def test_a_win_in_one_order_and_a_tie_in_the_other_is_a_tie(judge, server):
    server.answer = lambda text: "Verdict: " + ("A" if between(text, "response_a") == "x" else "tie")
    asked = judge(answer="pairwise")
    assert scores(asked, ["x"], **{AGAINST: ["y"]}) == [0.5]
    assert asked.counts.contradictions == 0


@pytest.mark.parametrize("key", [f"{KEY} {KEY}", f"{KEY}ü", f"{KEY}\n{KEY}"])
def test_a_key_with_other_signs_is_refused_and_not_shown(judge, server, monkeypatch, key):
    monkeypatch.setenv("STAND_IN_KEY", key)
    with pytest.raises(RewardError, match="STAND_IN_KEY") as refused:
        scores(judge(api_key_variable="STAND_IN_KEY"), ["one"])
    assert KEY not in str(refused.value)
    assert server.bodies == []


def test_a_signal_ends_the_wait_at_once_and_leaves_what_was_answered(judge, server, monkeypatch):
    """As in `kedro run`, the signal handler raises in the main thread; the other answer is kept by then."""
    kept, over, write = threading.Event(), threading.Event(), AnswerCache.write

    def note(*arguments: Any) -> None:
        write(*arguments)
        kept.set()

    def stop(signum: int, frame: object) -> None:
        raise TerminationSignal(signum)

    def answer(text: str) -> str:
        if between(text, "response") != "one":
            assert kept.wait(60.0)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            over.wait(120.0)
        return words(text)

    server.answer = answer
    monkeypatch.setattr(AnswerCache, "write", note)
    before = signal.signal(signal.SIGALRM, stop)
    started = time.monotonic()
    try:
        with pytest.raises(TerminationSignal):
            scores(judge(), ["one", "one two"])
    finally:
        over.set()
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 60.0
    scores(judge(), ["one"])
    assert len(server.bodies) == 2


def test_a_pair_with_one_unparsable_answer_gets_what_the_setting_says(judge, server):
    server.answer = lambda text: "Verdict: A" if between(text, "response_a") == "x" else "Verdict: neither"
    assert scores(judge(answer="pairwise", unparsable=0.25), ["x"], **{AGAINST: ["y"]}) == [0.25]


def test_responses_are_compared_with_a_column_that_the_settings_name(judge, server):
    server.answer = longer
    asked = judge(answer="pairwise", against="summary")
    assert scores(asked, ["a b c", "a"], summary=["a", "a b c"], **{AGAINST: ["", ""]}) == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"llm\.against=summary"):
        scores(asked, ["a"])
    with pytest.raises(RewardError, match=r"llm\.against .*llm\.answer"):
        scores(judge(answer="pairwise"), ["a"])


def test_an_answer_is_paid_once_also_by_a_judge_of_another_process_or_another_run(judge, server):
    first, second = judge(), judge(concurrency=1, timeout_s=9.0, unparsable=3)
    assert scores(first, [*WORDS, "one"]) == [1.0, 2.0, 3.0, 1.0]
    assert scores(second, [*WORDS, "four words are here"]) == [1.0, 2.0, 3.0, 4.0]
    assert len(server.bodies) == 4
    assert (first.counts.requests, first.counts.cached) == (3, 1)
    assert (second.counts.requests, second.counts.cached) == (1, 3)


@pytest.mark.parametrize(
    "changed", [{"max_tokens": 9}, {"criteria": "Long."}, {"highest": 5}, {"extra_body": {"top_k": 2}}]
)
def test_an_answer_to_another_question_is_paid_anew(judge, server, changed):
    scores(judge(), ["one"])
    scores(judge(**changed), ["one"])
    assert len(server.bodies) == 2


def test_without_a_cache_nothing_is_kept(judge, server, tmp_path):
    scores(judge(cache=None), ["one"])
    scores(judge(cache=None), ["one"])
    assert len(server.bodies) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_cache_is_named(judge, tmp_path):
    (tmp_path / "notes.txt").write_text("mine " * 1000)
    with pytest.raises(RewardError, match=r"notes\.txt: .* llm\.cache") as refused:
        scores(judge(cache="notes.txt"), ["one"])
    assert "emove" not in str(refused.value), "answers that were paid for may be in the file"
    assert (tmp_path / "notes.txt").read_text() == "mine " * 1000


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_request_that_fails_for_a_while_is_repeated(judge, server, code):
    answers = iter([(code, "busy"), (code, "busy"), "Score: 6"])
    server.answer = lambda text: next(answers)
    asked = judge()
    assert scores(asked, ["one"]) == [6.0]
    assert (asked.counts.requests, len(server.bodies)) == (1, 3)


def test_a_server_that_keeps_failing_ends_the_run_and_what_was_answered_is_kept(judge, server):
    server.answer = lambda text: (500, "out of memory") if "two" in text else words(text)
    asked = judge(max_retries=1, concurrency=1, unparsable=5)
    with pytest.raises(
        RewardError, match=r"judge: m at http.*500 Internal Server Error: .*out of memory.*kept in .*sqlite"
    ):
        scores(asked, [*WORDS, "never asked"])
    assert (len(server.bodies), asked.counts.requests, asked.counts.unparsable) == (3, 1, 0)
    server.answer = words
    assert scores(asked, WORDS) == [1.0, 2.0, 3.0]
    assert len(server.bodies) == 5


def test_answers_under_way_when_another_fails_are_kept(judge, server):
    def answer(text: str) -> str | tuple[int, str]:
        if "two" in text:
            return 401, "no"
        time.sleep(0.3)
        return words(text)

    server.answer = answer
    asked = judge()
    with pytest.raises(RewardError, match="401"):
        scores(asked, ["one", "two"])
    scores(asked, ["one"])
    assert len(server.bodies) == 2


def test_a_late_server_is_a_timeout(judge, server):
    server.pause_s = 0.5
    with pytest.raises(RewardError, match=r"no whole answer within 0\.1 seconds.*Raise llm\.timeout_s"):
        scores(judge(timeout_s=0.1, max_retries=0), ["one"])


def test_a_server_that_is_not_there_is_named(tmp_path):
    with running_chat(words) as server:
        url = server.url
    asked = LLMJudge(LLMJudgeConfig(model="m", base_url=url, max_retries=0), "evaluation.judge", tmp_path)
    with pytest.raises(RewardError, match=rf"^evaluation.judge: m at {url}: ConnectError.*Check llm\.base_url"):
        scores(asked, ["one"])


def test_an_address_without_the_api_is_named(judge, server, tmp_path):
    elsewhere = LLMJudge(LLMJudgeConfig(model="m", base_url=server.url.removesuffix("/v1")), "judge", tmp_path)
    with pytest.raises(RewardError, match=r"404 Not Found.*llm\.model.*llm\.base_url"):
        scores(elsewhere, ["one"])


@pytest.mark.parametrize("code", [400, 413, 422])
def test_a_text_that_the_server_refuses_gets_what_the_setting_says_and_is_not_kept(judge, server, code, caplog):
    server.answer = lambda text: (code, "too long") if "two" in text else words(text)
    with pytest.raises(RewardError, match=r"too long.*llm\.unparsable"):
        scores(judge(), WORDS)
    asked = judge(unparsable=2)
    assert scores(asked, WORDS) == [1.0, 2.0, 2.0]
    assert (asked.counts.cached, asked.counts.requests, asked.counts.unparsable) == (1, 0, 2)
    assert sum("too long" in record.getMessage() for record in caplog.records) == 1
    server.answer = words
    assert scores(asked, WORDS) == [1.0, 2.0, 3.0]


def test_no_more_requests_are_under_way_than_the_setting_allows_and_as_many(judge, server):
    server.pause_s = 0.05
    scores(judge(concurrency=3), [f"response {number}" for number in range(12)])
    assert server.most_under_way == 3


def test_the_key_comes_from_the_environment_and_is_in_no_error_and_no_log(judge, server, monkeypatch, caplog, tmp_path):
    with pytest.raises(RewardError, match="STAND_IN_KEY is not set"):
        scores(judge(api_key_variable="STAND_IN_KEY"), ["one"])
    monkeypatch.setenv("STAND_IN_KEY", KEY)
    with caplog.at_level(logging.DEBUG):
        scores(judge(api_key_variable="STAND_IN_KEY"), ["one"])
        server.answer = lambda text: (401, f"Incorrect API key provided: {KEY}")
        with pytest.raises(RewardError, match=r"API key provided: \*\*\*.*llm\.api_key_variable") as said:
            scores(judge(api_key_variable="STAND_IN_KEY"), ["two"])
    assert server.keys == {f"Bearer {KEY}"}
    assert said.value.__suppress_context__
    assert said.value.__cause__ is None
    assert KEY not in caplog.text
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_nothing_of_the_environment_is_sent_but_the_key_that_the_settings_name(judge, server, monkeypatch):
    names = ["OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_CUSTOM_HEADERS"]
    for name in names:
        monkeypatch.setenv(name, f"x: {KEY}")
    scores(judge(), ["one"])
    assert server.keys == {None}
    assert KEY not in str(server.sent)


URL = "http://localhost:1/v1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": URL}, "llm.model is missing"),
        ({"model": "m", "base_url": URL, "api_key": KEY}, "llm.api_key is not a parameter .* environment only"),
        ({"model": "m", "base_url": URL, "api_key_variable": KEY}, "llm.api_key_variable is not the name"),
        ({"model": "m", "base_url": f"http://me:{KEY}@localhost/v1"}, "llm.base_url .*http://host:port/v1"),
        ({"model": "m", "base_url": f"{URL}?key={KEY}"}, "llm.base_url .*http://host:port/v1"),
        ({"model": "m", "base_url": "localhost:8000"}, "llm.base_url .*http://host:port/v1"),
        ({"model": "m", "base_url": URL, "against": "summary"}, "llm.against=summary is not for llm.answer=score"),
        ({"model": "m", "base_url": URL, "answer": "pairwise", "highest": 5}, "llm.highest=5.0 is not for"),
        ({"model": "m", "base_url": URL, "lowest": 10}, "llm.lowest=10 .*llm.highest=10"),
        ({"model": "m", "base_url": URL, "answer": "pairwise", "unparsable": 5}, "llm.unparsable=5: .* 0.5 is a tie"),
        ({"model": "m", "base_url": URL, "unparsable": "zero"}, "llm.unparsable"),
        ({"model": "m", "base_url": URL, "pattern": "(a)(b)"}, "has 2 groups"),
        ({"model": "m", "base_url": URL, "pattern": "("}, r"pattern='\('"),
        ({"model": "m", "base_url": URL, "extra_body": {"stream": True}}, "llm.extra_body: stream"),
        ({"model": "m", "base_url": URL, "extra_body": {"response_format": {}}}, "llm.extra_body: response_format"),
        ({"model": "m", "base_url": URL, "extra_body": {"day": date(2026, 1, 1)}}, "llm.extra_body"),
        ({"model": "m", "base_url": URL, "max_retry": 9}, "llm.max_retry is not a parameter"),
        ({"model": "m", "base_url": URL, "concurrency": 0}, "llm.concurrency=0"),
    ],
)
def test_unacceptable_settings_are_refused_wherever_they_stand_and_no_key_is_shown(settings, message):
    for make in (
        lambda: LLMJudgeConfig(**settings),
        lambda: EvaluationConfig(judge=settings),
        lambda: EvaluationConfig(judges={"other": settings}),
        lambda: RewardConfig(components=[{"type": "llm", "llm": settings}]),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            make()
        assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"type": "llm"}, r"type llm needs llm: \{…\}"),
        ({"type": "model", "llm": {"model": "m", "base_url": URL}}, "type model has no llm"),
        (
            {"type": "llm", "function": "a:b", "llm": {"model": "m", "base_url": URL}},
            "belongs to type function, not llm",
        ),
        ({"type": "llm", "llm": {"model": "m", "base_url": URL, "answer": "pairwise"}}, "needs llm.against"),
    ],
)
def test_a_component_whose_settings_do_not_go_together_is_refused(component, message):
    with pytest.raises(ConfigError, match=message):
        RewardConfig(components=[component])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{{ response"}, "llm.template"),
        ({"template": "{{ response }}", "criteria": "x"}, "criteria"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(judge, settings, message):
    with pytest.raises(ConfigError, match=message):
        judge(**settings)


def test_a_judge_is_the_reward_if_it_is_asked_the_same():
    settings = {"model": "m", "base_url": URL}
    component = RewardComponentConfig(type="llm", llm=settings)
    reward = RewardConfig(components=[component])
    assert component.title == "llm"
    assert reward.is_judge(LLMJudgeConfig(**settings, concurrency=2, cache=None))
    assert not reward.is_judge(LLMJudgeConfig(**settings, criteria="Another."))
    assert not reward.is_judge("a:b")
    assert not same_opinion(LLMJudgeConfig(**settings), None)


def test_counts_go_on_over_calls_and_are_metrics_by_the_place_in_the_settings(server, tmp_path):
    config = EvaluationConfig(judge={"model": "m", "base_url": server.url}).judge
    for completions in (["one"], ["one two"]):
        call_reward_function(load_judge(config, "evaluation.judge", tmp_path), "judge", ["p"], completions, {})
    counts = judge_counts()
    assert counts["judge/evaluation.judge/requests"] == 2
    assert counts.keys() == {f"judge/evaluation.judge/{name}" for name in Counts.__dataclass_fields__}


@pytest.mark.slow
def test_of_two_processes_one_asks_and_both_get_the_scores(server, tmp_path):
    launch("tests.judge.llm_judge_process_case", server.url, str(tmp_path), processes=2, folder=tmp_path)
    main, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (main, other) == ([[1.0, 2.0, 3.0], 3.0], [[1.0, 2.0, 3.0], 0.0])
    assert len(server.bodies) == 3


def test_a_policy_is_compared_with_sfts_responses_and_sft_with_itself_for_nothing(server, tmp_path, monkeypatch):
    """In PPOTrainer's evaluation a pairwise judge gets both responses; SFT's responses tie with themselves."""
    monkeypatch.chdir(tmp_path)
    server.answer = lambda text: f"Verdict: {'A' if between(text, 'response_a') > between(text, 'response_b') else 'B'}"
    judge = LLMJudge(LLMJudgeConfig(model="m", base_url=server.url, answer="pairwise"), project_path=tmp_path)
    save(tmp_path / "policy", tiny_model())
    config = PPOConfig(
        sft_model_path=str(tmp_path / "policy"),
        response_length=3,
        per_device_train_batch_size=4,
        total_episodes=8,
        learning_rate=0.05,
        missing_eos_penalty=None,
    )
    held_out = ["a b c", "b c d", "c d e"]
    reward = lambda prompts, completions: [float(text.count("a")) for text in completions]  # noqa: E731
    trainer = PPOTrainer(config, reward=reward, prompts=["d e f"] * 8, evaluation_prompts=held_out, judge=judge)
    trainer.train()
    metrics, table = trainer.evaluate()
    ours, theirs = ([text.strip() for text in table[name]] for name in ("response", "sft_response"))
    expected = [0.5 if our == their else float(our > their) for our, their in zip(ours, theirs, strict=True)]
    assert set(expected) != {0.5}, "the policy has changed"
    assert table["judge_score"].tolist() == expected
    assert table["sft_score"].tolist() == [0.5] * 3
    assert metrics["eval/win_rate"] == sum(expected) / 3
