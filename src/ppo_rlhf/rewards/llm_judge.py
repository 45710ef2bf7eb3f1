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
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppo_rlhf.core.errors import ConfigError, RewardError, kind_and_text
from ppo_rlhf.data.chats import Chat
from ppo_rlhf.rewards.answer_cache import Answer, AnswerCache
from ppo_rlhf.rewards.functions import RewardFunction, load_function, project_above
from ppo_rlhf.rewards.llm_settings import CRITERIA, SCORE_PATTERN, VERDICT_PATTERN, LLMJudgeConfig

if TYPE_CHECKING:  # only type checkers import openai here: it is an optional package
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

WORTH = {"A": 1.0, "B": 0.0, "TIE": 0.5}
REFUSED = (400, 413, 422)
"""HTTP codes by which servers refuse a text that is too long or breaks the server's rules. A retry would fail again."""
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
        self.config, self.name, self.counts = config, name, Counts()
        self._path = None if config.cache is None else (project_path or project_above(Path.cwd())) / config.cache
        try:
            self._template = _ENVIRONMENT.from_string(config.question)
        except TemplateError as error:
            raise ConfigError(f"{name}: llm.template is not a valid Jinja template: {error}.") from error
        if config.criteria is not None and "criteria" not in config.question:
            raise ConfigError(
                f"{name}: llm.template does not use llm.criteria; add {{{{ criteria }}}} to the template."
            )
        self._pattern = re.compile(config.pattern or (VERDICT_PATTERN if config.is_pairwise else SCORE_PATTERN))

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

    def _worth(self, answer: Answer | None, row: int) -> float:
        score = self._parsed(answer, row)
        return float(self.config.unparsable) if score is None else score

    def _parsed(self, answer: Answer | None, row: int) -> float | None:
        """Return the score of a judge's answer, or with pairwise answers the score of the response that the judge saw
        first.

        If the judge's answer has no score or verdict, return None, and count the answer as unparsable.

        Raises:
            RewardError: The answer has no score or verdict, and `unparsable` is "error".
        """
        if answer is None:  # the judge's server refused the text; `_ask` has counted the refusal
            return None
        matches = self._pattern.findall(answer.text) if answer.is_whole else []
        score: float | None = None
        if matches and self.config.is_pairwise:
            score = WORTH.get(matches[-1].upper())
        elif matches:
            lowest, highest = self.config.scale
            try:
                score = float(matches[-1])
            except ValueError:  # a user's pattern may match a text that is not a number
                score = None
            score = score if score is not None and lowest <= score <= highest else None
        if score is not None:
            return score
        self.counts.unparsable += 1
        lowest, highest = self.config.scale
        expected = "verdict A, B or tie" if self.config.is_pairwise else f"score from {lowest:g} to {highest:g}"
        what = f"has no {expected} that llm.pattern matches" if answer.is_whole else "was cut off at its maximum length"
        problem = f"{self.name}: the answer of {self.config.model} on response {row} {what}: {answer.text[-80:]!r}."
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

    def _text(self, values: Mapping[str, Any]) -> str:
        try:
            return self._template.render(values)
        except Exception as error:  # a chat template is a program, so rendering can raise any exception
            names = ", ".join(sorted(values))
            raise RewardError(
                f"{self.name}: llm.template fails: {kind_and_text(error)}. The template can use {names}."
            ) from error

    async def _answers(self, texts: Sequence[str]) -> list[Answer | None]:
        """Return the judge's answer to each text; None for a text that the judge's server refused."""
        bodies = {text: self._body(text) for text in texts}
        keys = {text: self._key(body) for text, body in bodies.items()}
        with AnswerCache(self._path) as cache:
            known = cache.read(keys.values())
            missing = [text for text in bodies if keys[text] not in known]
            self.counts.cached += len(texts) - len(missing)
            answers: dict[str, Answer | None] = {text: known.get(key) for text, key in keys.items()}
            if missing:
                await self._ask({text: bodies[text] for text in missing}, keys, cache, answers)
        return [answers[text] for text in texts]

    async def _ask(
        self,
        bodies: dict[str, dict[str, Any]],
        keys: dict[str, str],
        cache: AnswerCache,
        answers: dict[str, Answer | None],
    ) -> None:
        """Send requests to the judge's server, and put each answer into `answers` and the answer cache when it arrives.

        After a failed request no new request starts, but requests that are already open are awaited.
        """
        import openai

        failures: list[RewardError] = []
        free = asyncio.Semaphore(self.config.concurrency)
        key = self._api_key()
        settings = {"timeout": self.config.timeout_s, "max_retries": self.config.max_retries}
        async with openai.AsyncOpenAI(api_key=key or "none", base_url=self.config.base_url, **settings) as client:  # type: ignore[arg-type]

            async def ask(text: str) -> None:
                async with free:
                    if failures:
                        return
                    try:
                        answers[text] = answer = await self._answer(client, bodies[text])
                    except RewardError as error:
                        failures.append(error)
                    except (openai.OpenAIError, ValueError) as error:
                        self.counts.failed += 1
                        is_refused = isinstance(error, openai.APIStatusError) and error.status_code in REFUSED
                        if not is_refused or self.config.unparsable == "error":
                            failures.append(RewardError(self._complaint(error, key, is_refused=is_refused)))
                        elif self.counts.failed == 1:
                            log.warning("%s", self._complaint(error, key, is_refused=True))
                    else:
                        cache.write(keys[text], answer)

            await asyncio.gather(*map(ask, bodies))
        if failures:
            # Raise `from None`, because the text of the original error may contain the server's key
            raise failures[0] from None

    async def _answer(self, client: AsyncOpenAI, body: dict[str, Any]) -> Answer:
        raw = await client.chat.completions.with_raw_response.create(**body, extra_body=self.config.extra_body or None)
        self.counts.retries += raw.retries_taken
        completion: Any = raw.parse()
        choices = getattr(completion, "choices", None)
        if not choices:
            raise RewardError(
                f"{self.name}: {self.config.base_url} did not answer with a chat completion. Check llm.base_url: the "
                "address of most servers ends in /v1."
            )
        usage = getattr(completion, "usage", None)
        self.counts.requests += 1
        self.counts.tokens_in += getattr(usage, "prompt_tokens", None) or 0
        self.counts.tokens_out += getattr(usage, "completion_tokens", None) or 0
        return Answer(choices[0].message.content or "", choices[0].finish_reason != "length")

    def _body(self, text: str) -> dict[str, Any]:
        settings = {name: getattr(self.config, name) for name in ("temperature", "seed", "max_tokens")}
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

    def _complaint(self, error: Exception, key: str | None, *, is_refused: bool) -> str:
        """Return a request's problem and the fix in one line, without the server's key."""
        import openai

        cause = (
            f" ({kind_and_text(error.__cause__)})"
            if isinstance(error, openai.APIConnectionError) and error.__cause__
            else ""
        )
        fix = "Check llm.base_url and whether the server runs."
        if is_refused:
            fix = f"A response that the server refuses gets llm.unparsable={self.config.unparsable}."
            if self.config.unparsable == "error":
                fix = "If the server refuses only some texts, set llm.unparsable to the score for these responses."
        elif isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            fix = f"Check the key in {self.config.api_key_variable}."
            if self.config.api_key_variable is None:
                fix = "Set llm.api_key_variable to the environment variable that holds the key."
        elif isinstance(error, openai.RateLimitError):
            fix = "Lower llm.concurrency, or raise llm.max_retries."
        elif isinstance(error, openai.APITimeoutError):
            fix = "Raise llm.timeout_s, or lower llm.concurrency."
        elif isinstance(error, openai.NotFoundError):
            fix = "Check llm.model and llm.base_url."
        kept = "" if self._path is None or is_refused else f" Answers so far are kept in {self._path}."
        problem = f"{self.name}: {self.config.model} at {self.config.base_url}: {kind_and_text(error)}{cause}"
        line = f"{problem.rstrip('.')}. {fix}{kept}"
        return line if key is None else line.replace(key, "***")


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
