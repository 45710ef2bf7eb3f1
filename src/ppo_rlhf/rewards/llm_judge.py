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

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppo_rlhf.core.errors import ConfigError, RewardError, kind_and_text
from ppo_rlhf.data.chats import Chat
from ppo_rlhf.rewards.answer_cache import AnswerCache, JudgeAnswer
from ppo_rlhf.rewards.chat_requests import MOST_WORDS, REFUSED, RequestError, ask, key_kept_from_logs, masked
from ppo_rlhf.rewards.functions import RewardFunction, load_function, project_above
from ppo_rlhf.rewards.judge_answers import plain_number, plain_verdict, read_match, read_score, read_verdict
from ppo_rlhf.rewards.llm_settings import CRITERIA, LLMJudgeConfig

log = logging.getLogger(__name__)

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


@dataclass
class Counts:
    """Counts of a judge's requests and their results since the start of the run."""

    requests: int = 0
    """Number of answered requests to the judge; retries are not counted."""
    retries: int = 0
    failed: int = 0
    """Number of requests without an answer: the server refused the text, or failed after all retries."""
    cached: int = 0
    """Number of answers from the answer cache, or from an equal request in the same batch."""
    tokens_in: int = 0
    tokens_out: int = 0
    unparsable: int = 0
    """Number of judge's answers without a score or verdict, including cached answers."""
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

        The answer cache is below `project_path`, which defaults to the nearest project at or above the working
        directory.

        Raises:
            ConfigError: The package `openai` is not installed, or the judge's template is invalid.
        """
        try:
            import openai  # noqa: F401  # an optional package
        except ModuleNotFoundError as error:
            raise ConfigError(f'{name}: openai is not installed; pip install "ppo_rlhf[judge]"') from error
        self.config, self.name, self.counts, self._has_warned = config, name, Counts(), False
        self._path = None if config.cache is None else (project_path or project_above(Path.cwd())) / config.cache
        try:
            self._template = _ENVIRONMENT.from_string(config.question)
        except TemplateError as error:
            raise ConfigError(f"{name}: llm.template is not a valid Jinja template: {error}.") from error
        if config.criteria is not None and "criteria" not in config.question:
            raise ConfigError(
                f"{name}: llm.template does not use llm.criteria; add {{{{ criteria }}}} to the template."
            )
        self._pattern = None if config.pattern is None else re.compile(config.pattern)

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
        if answer is None:  # there is no answer; `_ask` has counted the failure
            return None
        score = self._read(answer)
        if score is not None:
            return score
        self.counts.unparsable += 1
        lowest, highest = self.config.scale
        expected = "verdict A, B or tie" if self.config.is_pairwise else f"score from {lowest:g} to {highest:g}"
        form = "that llm.pattern matches" if self.config.pattern else "in one of the forms of docs/rewards.md"
        cut_off = "was cut off by llm.max_tokens or the server"
        what = f"does not plainly say one {expected} {form}" if answer.is_whole else cut_off
        text = repr(answer.text[-80:]) if answer.text.strip() else f"it is empty, the server sent {answer.sent_instead}"
        problem = f"{self.name}: the answer of {self.config.model} on response {row} {what}: {text}."
        if self.config.unparsable == "error":
            fix = "Change llm.template or llm.pattern" if answer.is_whole else "Raise llm.max_tokens"
            raise RewardError(f"{problem} {fix}, or set llm.unparsable to the score for such a response.")
        if self.counts.unparsable == 1:
            log.warning(
                "%s The response gets the score %g. Further such answers are counted but not logged.",
                problem,
                self.config.unparsable,
            )
        return None

    def _read(self, answer: JudgeAnswer) -> float | None:
        """Return the score or verdict that an answer plainly says, or None."""
        lowest, highest = self.config.scale
        if not answer.is_whole:
            return None
        if self.config.is_pairwise:
            if self._pattern is not None:
                return read_match(answer.text, self._pattern, plain_verdict)
            return read_verdict(answer.text)
        if self._pattern is None:
            return read_score(answer.text, lowest, highest)
        score = read_match(answer.text, self._pattern, plain_number)
        return score if score is not None and lowest <= score <= highest else None

    def _text(self, values: Mapping[str, Any]) -> str:
        try:
            return self._template.render(values)
        except Exception as error:  # a chat template is a program, so rendering can raise any exception
            names = ", ".join(sorted(values))
            raise RewardError(
                f"{self.name}: llm.template fails: {kind_and_text(error)}. The template can use {names}."
            ) from error

    async def _answers(self, texts: Sequence[str]) -> list[JudgeAnswer | None]:
        """Return the judge's answer to each text; None for a text without an answer."""
        bodies = {text: self._body(text) for text in texts}
        keys = {text: self._key(body) for text, body in bodies.items()}
        with AnswerCache(self._path) as cache:
            known = cache.read(keys.values())
            if self.config.unparsable == "error":  # the cached answer would end the run again: ask anew
                known = {key: answer for key, answer in known.items() if self._read(answer) is not None}
            missing = [text for text in bodies if keys[text] not in known]
            self.counts.cached += len(texts) - len(missing)
            answers: dict[str, JudgeAnswer | None] = {text: known.get(key) for text, key in keys.items()}
            if missing:
                await self._ask({text: bodies[text] for text in missing}, keys, cache, answers)
        return [answers[text] for text in texts]

    async def _ask(
        self,
        bodies: dict[str, dict[str, Any]],
        keys: dict[str, str],
        cache: AnswerCache,
        answers: dict[str, JudgeAnswer | None],
    ) -> None:
        """Send requests to the judge's server, and put each answer into `answers` and the answer cache when it arrives.

        After a failed request no new request starts, but requests that are already open are awaited.
        """
        import openai

        failures: list[RewardError] = []
        foreign: list[RewardError] = []
        free, ended = asyncio.Semaphore(self.config.concurrency), asyncio.Event()
        key = self._api_key()
        settings = {"timeout": self.config.timeout_s, "max_retries": 0}
        async with openai.AsyncOpenAI(api_key=key or "none", base_url=self.config.base_url, **settings) as client:  # type: ignore[arg-type]

            async def ask_for(text: str) -> None:
                async with free:
                    if ended.is_set():
                        return
                    try:
                        answer, counts = await ask(client, bodies[text], self.config, key, ended)
                        answers[text] = answer
                        self._count(counts)
                        self._keep(cache, keys[text], answer)
                    except RewardError as error:
                        failures.append(error)
                    except RequestError as failure:
                        self.counts.failed += 1
                        complaint = RewardError(self._complaint(failure, key))
                        is_scored = self.config.unparsable != "error"
                        if is_scored and failure.is_foreign:
                            foreign.append(complaint)
                        elif is_scored and failure.status in REFUSED:
                            self._warn_of(complaint)
                        else:
                            failures.append(complaint)
                if failures:
                    ended.set()

            with key_kept_from_logs(key):
                await asyncio.gather(*map(ask_for, bodies))
        if foreign and self.counts.requests == 0:
            # No answer of this server was a chat completion, so the address is wrong
            failures.append(foreign[0])
        elif foreign:
            self._warn_of(foreign[0])
        if failures:
            # Raise `from None`, because the text of the original error may contain the server's key
            raise failures[0] from None

    def _count(self, counts: Mapping[str, int]) -> None:
        self.counts.requests += 1
        for name, count in counts.items():
            setattr(self.counts, name, getattr(self.counts, name) + count)

    def _keep(self, cache: AnswerCache, key: str, answer: JudgeAnswer) -> None:
        """Put an answer into the cache, except an empty answer or one that ends the run: the next run asks anew."""
        is_usable = self._read(answer) is not None
        if is_usable or (answer.text.strip() and self.config.unparsable != "error"):
            cache.write(key, answer, is_usable=is_usable)

    def _warn_of(self, error: RewardError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s Further such failures are counted but not logged.", error)

    def _body(self, text: str) -> dict[str, Any]:
        names = ("temperature", "seed", "max_tokens", "response_format")
        settings = {name: getattr(self.config, name) for name in names}
        sent = {
            name: value for name, value in settings.items() if value is not None and name not in self.config.extra_body
        }
        return {"model": self.config.model, "messages": [{"role": "user", "content": text}], **sent}

    def _key(self, body: dict[str, Any]) -> str:
        request = [self.config.base_url, body, self.config.extra_body]
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

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
        # Refuse a key with unusual characters: openai's errors may show such a key in escaped form, which a search for
        # the key would miss, so the message would reveal the key
        if not re.fullmatch("[!-~]+", key):
            raise RewardError(
                f"{self.name}: the key in {variable} contains spaces or characters that are not printable ASCII. "
                "Correct the key."
            )
        return key

    def _complaint(self, failure: RequestError, key: str | None) -> str:
        """Return a request's problem and the fix in one line, without the server's key."""
        fix, is_refused = "Check llm.base_url and whether the server runs.", failure.status in REFUSED
        if is_refused or (failure.is_foreign and self.config.unparsable != "error"):
            fix = f"A response whose text the server refuses gets llm.unparsable={self.config.unparsable}."
            if self.config.unparsable == "error":
                fix = "If the server refuses only some texts, set llm.unparsable to the score for these responses."
        elif failure.status in (401, 403):
            fix = f"Check the key in {self.config.api_key_variable}."
            if self.config.api_key_variable is None:
                fix = "Set llm.api_key_variable to the environment variable that holds the key."
        elif failure.is_over_pause:
            fix = "Raise llm.max_pause_s, or resume the run later."
        elif failure.status == 429:
            fix = "Lower llm.concurrency, or raise llm.max_retries."
        elif failure.is_late:
            fix = "Raise llm.timeout_s, or lower llm.concurrency."
        elif failure.status == 404:
            fix = "Check llm.model and llm.base_url."
        elif failure.is_foreign:
            fix = "Check llm.base_url: the address of most servers ends in /v1."
        kept = "" if self._path is None or is_refused else f" Answers so far are kept in {self._path}."
        words = masked(" ".join(failure.words.split()), key, 1)
        words = words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]} …"
        return f"{self.name}: {self.config.model} at {self.config.base_url}: {words.rstrip('.')}. {fix}{kept}"


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
        counts = judge.counts
        line = (
            f"{place}, {config}: {counts.requests:,} requests ({counts.retries:,} retries, {counts.failed:,} failed), "
            f"{counts.tokens_in:,} tokens in and {counts.tokens_out:,} out, {counts.cached:,} cached answers, "
            f"{counts.unparsable:,} without a {'verdict' if config.is_pairwise else 'score'}"
        )
        lines.append(line + (f", {counts.contradictions:,} contradictory pairs" if config.is_pairwise else "") + ".")
    return lines


def _before(chat: Chat | None, prompt: str, turns: int) -> str:
    """Return the text that a response answers: a single-turn chat's messages before the response, else the prompt."""
    if chat is None or turns != 1:
        return prompt
    texts = [(message["role"], message.get("content") or "") for message in chat[:-1]]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)
