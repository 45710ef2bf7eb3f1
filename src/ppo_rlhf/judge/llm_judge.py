"""A language model as judge, called over OpenAI's chat API; the judge is callable like a reward function."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from ppo_rlhf.core.errors import ConfigError, RewardError
from ppo_rlhf.data.chats import Chat
from ppo_rlhf.judge import chat_transport
from ppo_rlhf.judge.answer_cache import AnswerCache, JudgeAnswer
from ppo_rlhf.judge.answer_form import read_answer, response_format
from ppo_rlhf.judge.chat_transport import RequestError, in_words
from ppo_rlhf.judge.request_text import CRITERIA, rendered, template_of
from ppo_rlhf.judge.settings import LLMJudgeConfig
from ppo_rlhf.runtime.paths import in_project
from ppo_rlhf.runtime.user_functions import RewardFunction, load_function

log = logging.getLogger(__name__)

_FORM = re.compile(r"response.?format|json.?schema|structured.?output", re.IGNORECASE)
"""Names of `response_format` in the words of a server that refuses it."""


@dataclass
class Counts:
    """Counts of a judge's requests and their results since the start of the run."""

    requests: int = 0
    """Number of answered requests to the judge."""
    cached: int = 0
    """Number of answers from the answer cache, or from an equal request in the same batch."""
    tokens_in: int = 0
    tokens_out: int = 0
    unparsable: int = 0
    """Number of answers without a score or verdict, including cached answers, and of requests that the server refused.
    """
    contradictions: int = 0
    """Number of pairs of responses for which the judge names different winners in the two orders. Such a judge prefers
    a position, not a response."""


class LLMJudge:
    """Scores responses by a language model. An `LLMJudge` can be `PPOTrainer`'s reward or judge, like a Python
    function.

    Attributes:
        config: The settings of the judge.
        counts: The counts of the judge's requests so far.
    """

    def __init__(self, config: LLMJudgeConfig, name: str = "judge", project_path: Path | None = None) -> None:
        """Take the judge's settings; `name` begins the text of errors.

        The answer cache is below `project_path`, which defaults to the project that runs, or the nearest at or above
        the working directory.

        Raises:
            ConfigError: The judge's template is invalid.
        """
        self.config, self.name, self.counts, self._has_warned = config, name, Counts(), False
        self._has_answered = False
        self._path = None if config.cache is None else in_project(config.cache, project_path)
        self._template = template_of(config.question, name)
        if config.criteria is not None and "criteria" not in config.question:
            raise ConfigError(
                f"{name}: llm.template does not use llm.criteria; add {{{{ criteria }}}} to the template."
            )
        form = {"response_format": response_format(is_pairwise=config.is_pairwise)}
        self._form: dict[str, Any] = form if config.pattern is None else {}  # emptied if the server refuses it

    @property
    def opinion(self) -> str:
        """The settings that affect the answers, which a resumed run compares: see `LLMJudgeConfig.opinion`."""
        return self.config.opinion

    async def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        messages: Sequence[Chat | None] | None = None,
        turns: Sequence[Sequence[str]] | None = None,
        against_completions: Sequence[str] | None = None,
        **columns: Sequence[Any],
    ) -> list[float]:
        """Return one score per response; for pairwise answers the score is 1 for a win, 0 for a loss and 0.5 for a tie.

        The judge reads the messages of a single-turn chat without the marks of a chat template. Two equal responses are
        a tie, and the judge is not asked about the pair.

        Raises:
            RewardError: The key is not set, the server fails or refuses the key, an answer has no score while
                `unparsable` is "error", the template uses an unknown name, or a pairwise judge has no texts to compare
                with.
        """
        chats, parts = messages or [None] * len(prompts), turns or [[text] for text in completions]
        rows: list[dict[str, Any]] = [
            {
                **{name: values[row] for name, values in columns.items()},
                "prompt": _before(chats[row], prompts[row], len(parts[row])),
                "messages": chats[row],
                "criteria": self.config.criteria or CRITERIA,
            }
            for row in range(len(prompts))
        ]
        responses = [text.strip() for text in completions]
        if self.config.is_pairwise:
            return await self._compared(
                rows, responses, [str(o).strip() for o in self._others(columns, against_completions)]
            )
        lowest, highest = self.config.scale
        bounds = {"lowest": f"{lowest:g}", "highest": f"{highest:g}"}
        answers = await self._answers(
            [self._text({**row, **bounds, "response": text}) for row, text in zip(rows, responses, strict=True)]
        )
        return [self._worth(answer, row) for row, answer in enumerate(answers)]

    def _others(self, columns: Mapping[str, Sequence[Any]], responses: Sequence[str] | None) -> Sequence[Any]:
        """Return the texts that a pairwise judge compares the responses with."""
        column = self.config.against
        if column is None and responses is not None:
            return responses
        if column is None:
            raise RewardError(
                f"{self.name}: a pairwise judge without llm.against compares responses with SFT's responses, which "
                "only an evaluation has. Set llm.against to a column of the prompts, or llm.answer to score."
            )
        if column not in columns:
            raise RewardError(f"{self.name}: llm.against={column}, but the prompts have no such column.")
        return columns[column]

    async def _compared(self, rows: list[dict[str, Any]], ours: list[str], theirs: list[str]) -> list[float]:
        """Return 1, 0 or 0.5 for each response in `ours`; 1 only if the judge prefers it to its pair in `theirs` in
        both orders.
        """
        differ = [row for row in range(len(rows)) if ours[row] != theirs[row]]
        orders = [[(ours[row], theirs[row]), (theirs[row], ours[row])] for row in differ]
        texts = [
            self._text({**rows[row], "first": first, "second": second})
            for row, both in zip(differ, orders, strict=True)
            for first, second in both
        ]
        answers = await self._answers(texts)
        worths = [0.5] * len(rows)
        for place, row in enumerate(differ):
            first, second = (self._parsed(answer, row) for answer in answers[2 * place : 2 * place + 2])
            if first is None or second is None:
                worths[row] = float(self.config.unparsable)
            elif first == 1.0 - second:
                worths[row] = first
            else:
                self.counts.contradictions += {first, second} <= {0.0, 1.0}
        return worths

    def _worth(self, answer: JudgeAnswer | None, row: int) -> float:
        score = self._parsed(answer, row)
        return float(self.config.unparsable) if score is None else score

    def _parsed(self, answer: JudgeAnswer | None, row: int) -> float | None:
        """Return the score of a judge's answer, or with pairwise answers the score of the response that the judge saw
        first.

        If the judge's answer has no score or verdict, return None, and count the answer as unparsable.

        Raises:
            RewardError: The answer has no score or verdict, and `unparsable` is "error".
        """
        if answer is None:  # there is no answer; `_ask` has counted the refusal
            return None
        score = self._read(answer)
        if score is not None:
            return score
        self.counts.unparsable += 1
        lowest, highest = self.config.scale
        expected = "the verdict A, B or tie" if self.config.is_pairwise else f"a score from {lowest:g} to {highest:g}"
        form = "that llm.pattern matches" if self.config.pattern else "as JSON or in its last line"
        what = answer.note or (f"does not say {expected} {form}" if answer.is_whole else "was cut off")
        problem = f"{self.name}: the answer of {self.config.model} on response {row} {what}: {answer.text[-80:]!r}."
        if self.config.unparsable == "error":
            fix = "Change llm.template or llm.pattern" if answer.is_whole else "Change llm.max_tokens"
            raise RewardError(f"{problem} {fix}, or set llm.unparsable to the score for such a response.")
        self._warn_once(f"{problem} The response gets the score {self.config.unparsable:g}.")
        return None

    def _read(self, answer: JudgeAnswer) -> float | None:
        return read_answer(answer.text, self.config) if answer.is_whole else None

    def _text(self, values: Mapping[str, Any]) -> str:
        return rendered(self._template, values, self.name)

    async def _answers(self, texts: Sequence[str]) -> list[JudgeAnswer | None]:
        """Return the judge's answer to each text; None for a text without an answer."""
        bodies = [self._body(text) for text in texts]
        keys = [json.dumps([self.config.base_url, body], sort_keys=True).encode() for body in bodies]
        digests = [hashlib.sha256(key).hexdigest() for key in keys]
        with AnswerCache(self._path) as cache:
            known = cache.read(digests)
            if self.config.unparsable == "error":  # the cached answer would end the run again: ask anew
                known = {digest: answer for digest, answer in known.items() if self._read(answer) is not None}
            self._has_answered |= bool(known)
            missing = {digest: body for digest, body in zip(digests, bodies, strict=True) if digest not in known}
            self.counts.cached += len(texts) - len(missing)
            answers = known | (await self._ask(missing, cache) if missing else {})
        return [answers.get(digest) for digest in digests]

    async def _ask(self, bodies: dict[str, dict[str, Any]], cache: AnswerCache) -> dict[str, JudgeAnswer]:
        """Send requests to the judge's server, and put each answer into the answer cache when it arrives.

        After a failed request no new request starts, but requests that are already open are awaited.
        """
        answers: dict[str, JudgeAnswer] = {}
        failures: list[RewardError] = []
        free, ended, key = asyncio.Semaphore(self.config.concurrency), asyncio.Event(), self._api_key()

        async def ask_for(digest: str) -> None:
            async with free:
                if ended.is_set():
                    return
                try:
                    answer, tokens = await self._answer_to(client, bodies[digest], ended)
                    text, note = chat_transport.masked(answer.text, key), in_words(answer.note, key)
                    answers[digest] = JudgeAnswer(text, answer.is_whole, note)
                    self._has_answered = True
                    self.counts.requests += 1
                    self.counts.tokens_in += tokens["tokens_in"]
                    self.counts.tokens_out += tokens["tokens_out"]
                    self._keep(cache, digest, answers[digest])
                except RewardError as error:
                    failures.append(error)
                except RequestError as failure:
                    if self.config.unparsable == "error" or not self._is_of_text(failure):
                        kept = "" if self._path is None else f" Answers so far are kept in {self._path}."
                        failures.append(RewardError(self._complaint(failure, key, f"{failure.hint}.{kept}")))
                    else:
                        self.counts.unparsable += 1
                        scored = f"The response gets the score {self.config.unparsable:g}."
                        self._warn_once(self._complaint(failure, key, scored))
            if failures:
                ended.set()

        try:
            client = chat_transport.open_client(key)
        except RequestError as failure:
            raise RewardError(self._complaint(failure, key, f"{failure.hint}.")) from None
        with chat_transport.key_kept_from_logs(key):
            async with client:
                await asyncio.gather(*map(ask_for, bodies))
        if failures:
            # Raise `from None`, because the text of the original error may contain the server's key
            raise failures[0] from None
        return answers

    def _is_of_text(self, failure: RequestError) -> bool:
        """Return whether the server may answer other texts. If it never sent a completion, the address is wrong."""
        return failure.status in chat_transport.REFUSED or (failure.is_foreign and self._has_answered)

    async def _answer_to(
        self, client: httpx2.AsyncClient, body: dict[str, Any], ended: asyncio.Event
    ) -> tuple[JudgeAnswer, dict[str, int]]:
        """Ask for the answer to a request as JSON; a server that refuses the JSON schema is asked without it."""
        form = self._form
        try:
            return await chat_transport.ask(client, {**body, **form}, self.config, ended)
        except RequestError as failure:
            if not form or failure.status not in (400, 404, 422) or not _FORM.search(failure.words):
                raise
        if self._form:
            self._form = {}
            words = "%s: %s refuses response_format: its answers are read by their last line, unless they are JSON."
            log.warning(words, self.name, self.config.base_url)
        return await chat_transport.ask(client, body, self.config, ended)

    def _keep(self, cache: AnswerCache, key: str, answer: JudgeAnswer) -> None:
        """Put an answer into the cache, except an empty answer or one that ends the run: the next run asks anew."""
        if self._read(answer) is not None or (answer.text.strip() and self.config.unparsable != "error"):
            cache.write(key, answer)

    def _warn_once(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s Further such answers are counted but not logged.", line)

    def _body(self, text: str) -> dict[str, Any]:
        """Return a request's body without the form, so that the key of the cache is the same with and without it."""
        sampling = {"temperature": 0.0, "max_tokens": self.config.max_tokens, **self.config.extra_body}
        sent = {name: value for name, value in sampling.items() if value is not None}
        return {"model": self.config.model, "messages": [{"role": "user", "content": text}], **sent}

    def _api_key(self) -> str | None:
        variable = self.config.api_key_variable
        if variable is None:
            return None
        key = os.environ.get(variable, "").strip()
        if not key:
            raise RewardError(
                f"{self.name}: the environment variable {variable} is not set. Set the variable to the key, or leave "
                "out llm.api_key_variable if the server needs no key."
            )
        # Refuse a key with unusual characters: a server may show such a key in a form that `masked` does not know
        if not re.fullmatch("[!-~]+", key):
            raise RewardError(
                f"{self.name}: the key in {variable} contains spaces or characters that are not printable ASCII. "
                "Correct the key."
            )
        return key

    def _complaint(self, failure: RequestError, key: str | None, outcome: str) -> str:
        """Return a request's problem and its outcome in one line, without the server's key."""
        words = in_words(failure.words, key).rstrip(".")
        return f"{self.name}: {self.config.model} at {self.config.base_url}: {words}. {outcome}"


in_use: dict[tuple[str, LLMJudgeConfig], LLMJudge] = {}
"""The judges of this run by their place in the settings. A judge is created once per run, so that its counts
continue."""


def load_judge(judge: str | LLMJudgeConfig, place: str, project_path: Path | None = None) -> RewardFunction:
    """Return the function of a judge: an imported Python function or an `LLMJudge`.

    `place` is the judge's place in the settings. `load_judge` raises the errors of `load_function` and `LLMJudge`.
    """
    if isinstance(judge, str):
        return load_function(judge, project_path)
    if (place, judge) not in in_use:
        in_use[place, judge] = LLMJudge(judge, place, project_path)
    return in_use[place, judge]  # type: ignore[return-value]  # callers await the coroutine


def judge_counts() -> dict[str, float]:
    """Return the counts of this run's judges as metrics `judge/<place>/<count>`."""
    counts: dict[str, float] = {}
    for (place, _), judge in in_use.items():
        for name, value in asdict(judge.counts).items():
            counts[f"judge/{place}/{name}"] = counts.get(f"judge/{place}/{name}", 0.0) + value
    return counts


def judges_in_words() -> list[str]:
    """Return one line with the counts of each of this run's judges."""
    lines = []
    for (place, config), judge in in_use.items():
        counts = {name: f"{count:,}" for name, count in asdict(judge.counts).items()}
        words = (
            "{requests} requests, {tokens_in} tokens in and {tokens_out} out, {cached} cached answers, "
            "{unparsable} without a score or verdict, {contradictions} contradictory pairs."
        )
        lines.append(f"{place}, {config}: {words.format(**counts)}")
    return lines


def _before(chat: Chat | None, prompt: str, turns: int) -> str:
    """Return the text that a response answers: a single-turn chat's messages before the response, else the prompt."""
    if chat is None or turns != 1:
        return prompt
    texts = [(message["role"], message.get("content") or "") for message in chat[:-1]]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)
