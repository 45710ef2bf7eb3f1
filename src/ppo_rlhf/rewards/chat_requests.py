"""Requests to a server that speaks OpenAI's chat API: retries, pauses, time limits, and what a failure means."""

from __future__ import annotations

import asyncio
import email.utils
import html
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ppo_rlhf.core.errors import kind_and_text
from ppo_rlhf.rewards.answer_cache import JudgeAnswer
from ppo_rlhf.rewards.llm_settings import LLMJudgeConfig

if TYPE_CHECKING:  # only type checkers import openai here: it is an optional package
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

REFUSED = (400, 413, 422)
"""HTTP codes by which servers refuse a text that is too long or breaks the server's rules. A retry would fail again."""
RETRIED = (408, 409, 429)
"""HTTP codes of failures that may pass, beside 5xx."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""The first and the longest pause in seconds before a retry if the server asks for no pause."""
LONG_PAUSE_S = 10.0
"""A line in the log names pauses of at least `LONG_PAUSE_S` seconds."""
MOST_WORDS = 400
"""Maximum length in characters of a server's words in a message."""
_CUT = re.compile(r"length|max_tokens|filter|safety|abort|cancel|resource|timeout")
"""Values of `finish_reason`, of OpenAI's API, SGLang, DeepSeek and others, of an answer that was cut off."""
SHORTEST_SECRET = 4
"""Keys with fewer characters are not masked in answers: they are no secrets, and may be part of any word."""
_STATUS_BY_WORD = {
    "rate_limit|too_many|quota|throttl": 429,
    "overloaded|unavailable|timeout": 503,
    "authentication|api_key|unauthorized": 401,
    "permission|forbidden": 403,
    "not_found": 404,
    "invalid_request|bad_request|context_length|content_filter|content_policy": 400,
}
"""The HTTP code that stands for an error's name in the body of an answer with status 200."""


class RequestError(Exception):
    """A request without an answer.

    Attributes:
        words: What happened, in the server's own words if it sent any.
        status: The HTTP code, or the code that the body of an answer with status 200 names; None without a code.
        pause_s: The pause in seconds that the server asks for; None if it asks for none.
        is_late: Whether the time limit of the request was over.
        is_foreign: Whether the server answered, but not with a chat completion.
        is_over_pause: Whether the server asks for a pause that is longer than `llm.max_pause_s`.
        may_pass: Whether a retry may succeed.
    """

    def __init__(
        self,
        words: str,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        is_late: bool = False,
        is_foreign: bool = False,
        is_over_pause: bool = False,
        may_pass: bool | None = None,
    ) -> None:
        super().__init__(words)
        self.words, self.status = words, status
        self.is_late, self.is_foreign, self.is_over_pause = is_late, is_foreign, is_over_pause
        advice = {"true": True, "false": False}.get((headers or {}).get("x-should-retry", ""))
        by_status = status is None or status in RETRIED or status >= 500
        self.may_pass = next(choice for choice in (may_pass, advice, by_status) if choice is not None)
        self.pause_s = asked_pause_s(headers or {})


async def ask(
    client: AsyncOpenAI, body: dict[str, Any], config: LLMJudgeConfig, key: str | None, ended: asyncio.Event
) -> tuple[JudgeAnswer, dict[str, int]]:
    """Return the answer to a request, without the server's `key`, and the counts of its retries and tokens.

    Failures that may pass are tried again. Once `ended` is set, no retry begins.

    Raises:
        RequestError: There is no answer.
    """
    for retries in range(config.max_retries + 1):
        try:
            answer, tokens = await _ask_once(client, body, config, key)
            return answer, {"retries": retries, **tokens}
        except RequestError as failure:
            pause_s = failure.pause_s or min(FIRST_PAUSE_S * 2.0 ** min(retries, 10), LONGEST_PAUSE_S)
            is_last = retries == config.max_retries or not failure.may_pass or ended.is_set()
            if failure.may_pass and failure.pause_s is not None and pause_s > config.max_pause_s:
                raise RequestError(
                    f"{failure.words.rstrip('.')}. The server asks for a pause of {pause_s:,.0f} seconds, but "
                    f"llm.max_pause_s={config.max_pause_s:g}",
                    failure.status,
                    is_over_pause=True,
                ) from None
            if is_last:
                raise
            if pause_s >= LONG_PAUSE_S:
                log.warning("%s asks for a pause of %.0f seconds; the request waits.", config.base_url, pause_s)
            try:
                await asyncio.wait_for(ended.wait(), pause_s)
            except TimeoutError:
                continue
            raise
    raise AssertionError("unreachable")


async def _ask_once(
    client: AsyncOpenAI, body: dict[str, Any], config: LLMJudgeConfig, key: str | None
) -> tuple[JudgeAnswer, dict[str, int]]:
    import openai

    try:
        # The client's own time limit is one for each read: a server that sends a byte a second would never be late
        async with asyncio.timeout(config.timeout_s):
            raw = await client.chat.completions.with_raw_response.create(**body, extra_body=config.extra_body or None)
            response = raw.http_response
    except (TimeoutError, openai.APITimeoutError):
        raise RequestError(
            f"APITimeoutError: no whole answer within {config.timeout_s:g} seconds", is_late=True
        ) from None
    except openai.APIStatusError as error:
        raise RequestError(kind_and_text(error), error.status_code, error.response.headers) from None
    except openai.APIConnectionError as error:
        cause = f" ({kind_and_text(error.__cause__)})" if error.__cause__ else ""
        raise RequestError(f"{kind_and_text(error)}{cause}") from None
    except (openai.OpenAIError, ValueError) as error:
        raise RequestError(kind_and_text(error), may_pass=False) from None
    return _read_completion(response.content, response.text, response.headers, key)


def _read_completion(
    content: bytes, text: str, headers: Mapping[str, str], key: str | None
) -> tuple[JudgeAnswer, dict[str, int]]:
    """Return the answer in the body of a response with status 200, and the counts of its tokens.

    `text` is `content` in the character set that the headers name. The server's `key` is masked in the answer.

    Raises:
        RequestError: The body is an error, or is no chat completion.
    """
    try:
        try:
            body = json.loads(content)
        except UnicodeDecodeError:
            body = json.loads(text)
    except (ValueError, RecursionError):
        body = None

    def said() -> str:
        return repr(masked(" ".join(text.split()), key, 1)[:MOST_WORDS])

    fields = body if isinstance(body, dict) else {}
    choices = fields.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    error = fields.get("error") or choice.get("error")
    reason = str(choice.get("finish_reason")).lower()
    if error or reason == "error":
        status = _named_status(error)
        code = "" if status is None else f" {status}"
        raise RequestError(f"the server answers 200 with the error{code}: {said()}", status, headers)
    if not isinstance(choices, list):
        status = _named_status(fields)
        raise RequestError(
            f"the server did not answer with a chat completion, but with {said()}", status, headers, is_foreign=True
        )
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    answer = masked(_text_of(message.get("content")) or _text_of(message.get("refusal")), key)
    usage = fields.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    tokens = {
        name: counted[key] if isinstance(counted.get(key), int) else 0
        for name, key in (("tokens_in", "prompt_tokens"), ("tokens_out", "completion_tokens"))
    }
    return JudgeAnswer(answer, _CUT.search(reason) is None, "" if answer.strip() else said()), tokens


def asked_pause_s(headers: Mapping[str, str]) -> float | None:
    """Return the pause in seconds that a server asks for by `retry-after-ms` or `retry-after` (seconds or a date); None
    if it asks for none.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if re.fullmatch(r"\d+(?:\.\d*)?", value):
            return float(value) * unit or None
    try:
        seconds = email.utils.parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0.0 else None


def masked(text: str, key: str | None, shortest: int = SHORTEST_SECRET) -> str:
    """Return a text with *** in place of the server's key, also where the key is escaped."""
    if key is not None and len(key) >= shortest:
        forms = {key, html.escape(key), quote(key), quote(key, safe=""), json.dumps(key)[1:-1], repr(key)[1:-1]}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "***")
    return text


@contextmanager
def key_kept_from_logs(key: str | None) -> Iterator[None]:
    """Drop records of the HTTP client that contain the server's key: at level DEBUG it logs headers of responses."""
    clients = [
        logging.getLogger(f"{name}.{part}") for name in ("httpcore", "httpcore2") for part in ("http11", "http2")
    ]

    def has_no_key(record: logging.LogRecord) -> bool:
        return masked(record.getMessage(), key) == record.getMessage()

    for client in clients:
        client.addFilter(has_no_key)
    try:
        yield
    finally:
        for client in clients:
            client.removeFilter(has_no_key)


def _named_status(error: Any) -> int | None:
    """Return the HTTP code that an error in a body names, as a number or by a usual name."""
    fields = error if isinstance(error, dict) else {}
    named = [str(fields.get(name)) for name in ("code", "status", "status_code", "type")]
    for value in named:
        if re.fullmatch(r"[45]\d\d", value):
            return int(value)
    names = " ".join([*named, error if isinstance(error, str) else ""]).lower().replace(" ", "_")
    return next((status for words, status in _STATUS_BY_WORD.items() if re.search(words, names)), None)


def _text_of(content: Any) -> str:
    """Return the text of a message's content, a text or a list of parts; half a surrogate pair becomes U+FFFD."""
    if isinstance(content, list):  # parts of another type, such as `thinking`, are no part of the answer
        of_text = [part for part in content if isinstance(part, dict) and part.get("type") in ("text", "output_text")]
        content = "".join(part["text"] for part in of_text if isinstance(part.get("text"), str))
    return re.sub(r"[\ud800-\udfff]", "\ufffd", content) if isinstance(content, str) else ""
