"""Requests to a server that speaks OpenAI's chat API: retries, pauses, limits, and what a failure means."""

from __future__ import annotations

import asyncio
import email.utils
import html
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx2

from ppo_rlhf.core.errors import kind_and_text
from ppo_rlhf.judge.answer_cache import JudgeAnswer
from ppo_rlhf.judge.settings import LLMJudgeConfig

log = logging.getLogger(__name__)

REFUSED = (400, 413, 422)
"""HTTP codes by which servers refuse a text that is too long or breaks the server's rules. A retry would fail again."""
RETRIED = (408, 409, 429)
"""HTTP codes of failures that may pass, beside 5xx."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""The first and the longest pause in seconds before a retry if the server asks for no pause."""
LONG_PAUSE_S = 10.0
"""A line in the log names pauses of at least `LONG_PAUSE_S` seconds."""
LONGEST_ASKED_S = 600.0
"""The longest pause in seconds that a server may ask for. A longer one is a quota of hours: the run ends, and can be
resumed."""
MOST_BYTES = 10_000_000
"""Maximum size in bytes of a server's answer. The longest answers of models, 128,000 tokens, have about 1 MB."""
MOST_TOKENS = 10**9
"""The largest count of tokens that is believed."""
MOST_WORDS = 400
"""Maximum length in characters of a server's words in a message."""
SHORTEST_SECRET = 4
"""Keys with fewer characters are not masked: they are no secrets, and may be part of any word."""
ENDS = ("stop", "eos", "eos_token", "stop_sequence", "end_turn")
"""Values of `finish_reason` of an answer that the model ended; with any other value the answer was cut off."""
_HINTS = {
    **dict.fromkeys(REFUSED, "If the server refuses only some texts, set llm.unparsable to the score for these texts"),
    **dict.fromkeys((401, 403), "Check the key, which llm.api_key_variable names"),
    404: "Check llm.model and llm.base_url",
    429: "Lower llm.concurrency, or raise llm.max_retries",
}


class RequestError(Exception):
    """A request without an answer.

    Attributes:
        words: What happened, in the server's own words if it sent any.
        status: The HTTP code, or the code that the body of an answer with status 200 names; None without a code.
        hint: What the user can do.
        is_foreign: Whether the server answered, but not with a chat completion.
        may_pass: Whether a retry may succeed.
        pause_s: The pause in seconds that the server asks for; None if it asks for none.
    """

    def __init__(
        self,
        words: str,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        hint: str | None = None,
        is_foreign: bool = False,
    ) -> None:
        super().__init__(words)
        self.words, self.status, self.is_foreign = words, status, is_foreign
        self.hint = hint or _HINTS.get(status or 0, "Check llm.base_url and whether the server runs")
        self.may_pass = status is None or status in RETRIED or status >= 500
        self.pause_s = asked_pause_s((headers or {}).get("retry-after", ""))


def open_client(key: str | None) -> httpx2.AsyncClient:
    """Return a client whose requests carry the server's `key`.

    Raises:
        RequestError: The environment's proxies or certificates cannot be used.
    """
    # No compression: MOST_BYTES bounds what is read
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    try:  # `ask` limits the time of requests, the judge their number
        return httpx2.AsyncClient(headers=headers, timeout=None, limits=httpx2.Limits())
    except Exception as error:  # of any type: the client reads proxies and certificates from the environment
        hint = "Correct or unset ALL_PROXY, HTTP_PROXY, HTTPS_PROXY and SSL_CERT_FILE"
        raise RequestError(kind_and_text(error), hint=hint) from None


async def ask(
    client: httpx2.AsyncClient, body: dict[str, Any], config: LLMJudgeConfig, ended: asyncio.Event
) -> tuple[JudgeAnswer, dict[str, int]]:
    """Return the answer to a request and the counts of its tokens.

    Failures that may pass are tried again. Once `ended` is set, no retry begins.

    Raises:
        RequestError: There is no answer.
    """
    for retries in range(config.max_retries + 1):
        try:
            return await _ask_once(client, body, config)
        except RequestError as failure:
            pause_s = failure.pause_s or min(FIRST_PAUSE_S * 2.0 ** min(retries, 10), LONGEST_PAUSE_S)
            if failure.may_pass and pause_s > LONGEST_ASKED_S:
                failure.hint = f"The server asks for a pause of {pause_s:,.0f} seconds: resume the run later"
                raise
            if retries == config.max_retries or not failure.may_pass:
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
    client: httpx2.AsyncClient, body: dict[str, Any], config: LLMJudgeConfig
) -> tuple[JudgeAnswer, dict[str, int]]:
    address, sent = f"{config.base_url.rstrip('/')}/chat/completions", json.dumps(body).encode()
    content = bytearray()
    try:
        # The client's own time limit is one for each read: a server that sends a byte a second would never be late
        async with asyncio.timeout(config.timeout_s), client.stream("POST", address, content=sent) as response:
            async for part in response.aiter_raw():
                content += part
                if len(content) > MOST_BYTES:
                    break
    except TimeoutError:
        raise RequestError(
            f"no whole answer within {config.timeout_s:g} seconds",
            hint="Raise llm.timeout_s, or lower llm.concurrency",
        ) from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RequestError(kind_and_text(error)) from None
    text = content.decode("utf-8-sig", "replace")  # JSON is UTF-8, whatever the headers say
    if not response.is_success:
        status = f"{response.status_code} {response.reason_phrase}".strip()
        raise RequestError(f"the server answers {status}: {text}", response.status_code, response.headers)
    if len(content) > MOST_BYTES:
        return JudgeAnswer("", is_whole=False, note=f"has more than {MOST_BYTES:,} bytes"), _tokens({})
    return _read_completion(text, response.headers)


def _read_completion(text: str, headers: Mapping[str, str]) -> tuple[JudgeAnswer, dict[str, int]]:
    """Return the answer in the body of a response with status 200, and the counts of its tokens.

    Raises:
        RequestError: The body is an error, or has no choices.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    fields = body if isinstance(body, dict) else {}
    choices = fields.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    error, reason = fields.get("error") or choice.get("error"), str(choice.get("finish_reason") or "stop").lower()
    if error or reason == "error":
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else None
        raise RequestError(f"the server answers 200 with an error: {text}", status, headers)
    if not choice:
        hint = "Check llm.base_url: the address of most servers ends in /v1"
        words = f"the server did not send a chat completion, but: {text or 'nothing'}"
        raise RequestError(words, None, headers, hint=hint, is_foreign=True)
    message, usage = choice.get("message"), fields.get("usage")
    message, usage = (part if isinstance(part, dict) else {} for part in (message, usage))
    answer = _text_of(message.get("content")) or _text_of(message.get("refusal"))
    note = "" if answer.strip() else f"is empty, the server sent {text}"
    if reason not in ENDS:
        note = f"was cut off (finish_reason {reason})"
    return JudgeAnswer(answer, reason in ENDS, note), _tokens(usage)


def _tokens(usage: dict[str, Any]) -> dict[str, int]:
    """Return the counts of tokens that a server sent; 0 where it sent no number, or one that is too large."""
    counts = {"tokens_in": usage.get("prompt_tokens"), "tokens_out": usage.get("completion_tokens")}
    return {name: n if isinstance(n, int) and 0 <= n <= MOST_TOKENS else 0 for name, n in counts.items()}


def _text_of(content: Any) -> str:
    """Return the text of a message's content, a text or a list of parts; half a surrogate pair becomes U+FFFD."""
    if isinstance(content, list):  # parts of another type, such as `thinking`, are no part of the answer
        of_text = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(part["text"] for part in of_text if isinstance(part.get("text"), str))
    return re.sub(r"[\ud800-\udfff]", "\ufffd", content) if isinstance(content, str) else ""


def asked_pause_s(value: str) -> float | None:
    """Return the pause in seconds that a header `retry-after` asks for, as a number or a date; None without one."""
    if re.fullmatch(r"[0-9]+(?:\.[0-9]*)?", value.strip()):
        return float(value) or None
    try:
        seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if seconds > 0.0 else None


def in_words(text: str, key: str | None) -> str:
    """Return a server's words for a message: in one line, not long, without the server's key."""
    words = masked(" ".join(text.split()), key)
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]} …"


def masked(text: str, key: str | None) -> str:
    """Return a text with *** in place of the server's key, also where the key is escaped."""
    if key is not None and len(key) >= SHORTEST_SECRET:
        forms = {key, html.escape(key), quote(key), quote(key, safe=""), json.dumps(key)[1:-1], repr(key)[1:-1]}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "***")
    return text


@contextmanager
def key_kept_from_logs(key: str | None) -> Iterator[None]:
    """Drop records of the HTTP client that contain the server's key: at level DEBUG it logs headers of responses."""
    logger = logging.getLogger("httpcore2.http11")

    def has_no_key(record: logging.LogRecord) -> bool:
        return masked(record.getMessage(), key) == record.getMessage()

    logger.addFilter(has_no_key)
    try:
        yield
    finally:
        logger.removeFilter(has_no_key)
