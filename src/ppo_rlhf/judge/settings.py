"""Settings of a language model as judge: the server, the request, and the meaning of the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Annotated, Any, Literal, assert_never
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, JsonValue

from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.judge.request_text import PAIRWISE_TEMPLATE, SCORE_TEMPLATE
from ppo_rlhf.runtime.user_functions import split_reference

CACHE = "data/07_model_output/judge_answers.sqlite"
_KEY = "a key is read from the environment only: set api_key_variable to the name of the variable that holds it"


@parameter_group("llm", lives_elsewhere={"api_key": _KEY, "key": _KEY, "type": "leave it out here"})
class LLMJudgeConfig:
    """A language model as judge, called over OpenAI's chat API. The judge's settings stand under `llm` of a reward
    component, in `evaluation.judge` or in `evaluation.judges`.
    """

    model: str
    """Name of the judging model on the server."""
    base_url: str
    """Address of the server's API, such as `http://localhost:8000/v1`. OpenAI's is `https://api.openai.com/v1`."""
    api_key_variable: str | None = None
    """Environment variable that holds the server's key; None: no key is sent."""
    answer: Literal["score", "pairwise"] = "score"
    """`score`: a number for each response. `pairwise`: the better of two responses, asked in both orders. With
    `pairwise` a response gets 1 if both of the judge's answers prefer the response, 0 if both answers prefer the
    response that it is compared with, and 0.5 (a tie) otherwise."""
    criteria: str | None = None
    """Description of a good response; None: one sentence on correctness and relevance. The template names it
    `criteria`."""
    template: str | None = None
    """Jinja template of the text that the judge gets; None: this package's. The template can use `prompt`, `criteria`,
    `messages` and the columns of the prompts; with scores also `response`, `lowest` and `highest`; with pairwise
    answers also `first` and `second`."""
    lowest: float | None = None
    """Lowest score of `answer: score`; None: 1. A lower number is unparsable."""
    highest: float | None = None
    """Highest score of `answer: score`; None: 10. A higher number is unparsable."""
    against: str | None = None
    """Column of the prompts with the texts to compare with; None: SFT's responses, which only evaluations have. Only
    for `answer: pairwise`."""
    pattern: str | None = None
    """Regular expression with one group, which matches the number, or A, B or tie. The last match in a judge's answer
    counts, and the judge is not asked for JSON. None: JSON is asked for (docs/rewards.md). An answer that is not JSON
    is then read by its last line, `Score: 8` or `Verdict: A`."""
    unparsable: Literal["error"] | float = "error"
    """Score of a response if the judge's answer cannot be read. It is cut off or in another form, the server refuses
    the text (codes 400, 413 and 422), or answers with something else than a chat completion. With `error` such an
    answer ends the run and is not cached. Metrics count these responses."""
    max_tokens: Annotated[int, Field(ge=1)] | None = 1024
    """Largest number of tokens of an answer; None: the request names none. Models of OpenAI that refuse `max_tokens`
    take `extra_body: {max_completion_tokens: 1024}` instead."""
    extra_body: dict[str, JsonValue] = field(default_factory=dict)
    """Further fields of each request, such as `seed`. Others are vLLM's `chat_template_kwargs` and OpenAI's
    `max_completion_tokens`. The temperature is 0 unless `extra_body` names another; a field with the value null is not
    sent."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """Largest number of simultaneous requests."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 120.0
    """Timeout of a request in seconds. It counts up to the answer's last byte."""
    max_retries: Annotated[int, Field(ge=0)] = 6
    """Retries of a request that the server fails to answer. It cannot be reached, times out, answers 408, 409, 429 or
    5xx, or its answer with status 200 has an error or no choices. The pauses between retries double from 0.5 to 8
    seconds, or are as long as the server asks, up to ten minutes. If the last retry fails, the run ends."""
    cache: str | None = CACHE
    """File below the project that keeps the answers; None: none does. A request with a cached answer is not sent
    again."""

    def __post_init__(self) -> None:
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or address.query or "@" in address.netloc:
            raise ConfigError(
                "llm.base_url must have the form http://host:port/v1, without a key. Correct the address."
            )
        variable = self.api_key_variable
        # Do not show the value of api_key_variable in the error, because the user may have entered the key itself
        if variable is not None and not re.fullmatch(r"[A-Za-z_]\w*", variable):
            raise ConfigError(
                "llm.api_key_variable is not the name of an environment variable, such as OPENAI_API_KEY."
            )
        for name in ("lowest", "highest") if self.is_pairwise else ("against",):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"llm.{name}={getattr(self, name)} is not for llm.answer={self.answer}; leave it out."
                )
        if not self.is_pairwise and not self.scale[0] < self.scale[1]:
            raise ConfigError("llm.lowest={:g} must be less than llm.highest={:g}.".format(*self.scale))
        if self.is_pairwise and self.unparsable != "error" and not 0.0 <= self.unparsable <= 1.0:
            raise ConfigError(f"llm.unparsable={self.unparsable:g}: a pairwise answer is from 0 to 1; 0.5 is a tie.")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ConfigError(f"llm.pattern={self.pattern!r} is not a regular expression: {error}.") from error
            if groups != 1:
                raise ConfigError(
                    f"llm.pattern={self.pattern!r} has {groups} groups. Write exactly one group, around the score or "
                    "verdict."
                )
        own = {"model", "messages", "stream", "n"} | ({"response_format"} if self.pattern is None else set())
        reserved = sorted(own & self.extra_body.keys())
        if reserved:
            raise ConfigError(f"llm.extra_body: {', '.join(reserved)} cannot be set here.")

    def __str__(self) -> str:
        return f"{self.model} (language model, {self.answer})"

    def __hash__(self) -> int:
        return hash(json.dumps(asdict(self), sort_keys=True, default=str))

    @property
    def is_pairwise(self) -> bool:
        """Whether each answer of the judge compares two responses."""
        match self.answer:
            case "score":
                return False
            case "pairwise":
                return True
            case unknown:
                assert_never(unknown)

    @property
    def scale(self) -> tuple[float, float]:
        """The lowest and the highest score that the judge may give."""
        return 1.0 if self.lowest is None else self.lowest, 10.0 if self.highest is None else self.highest

    @property
    def question(self) -> str:
        """The template of the request's text: the user's or the default."""
        return self.template or (PAIRWISE_TEMPLATE if self.is_pairwise else SCORE_TEMPLATE)

    @property
    def opinion(self) -> str:
        """The settings that affect the judge's answers, as JSON: judges with equal `opinion` give the same scores."""
        left_out = {"api_key_variable", "concurrency", "timeout_s", "max_retries", "cache"}
        return json.dumps({k: v for k, v in asdict(self).items() if k not in left_out}, sort_keys=True, default=str)


def read_judge(value: Any) -> Any:
    """Return the checked `module:name` of a function or settings of a language model; return other values unchanged."""
    if isinstance(value, Mapping):
        return LLMJudgeConfig(**value)
    return ":".join(split_reference(value)) if isinstance(value, str) else value


Judge = Annotated[str | LLMJudgeConfig, BeforeValidator(read_judge)]
"""A judge: a function, as `module:name`, or a language model, as the settings of `llm`."""


def same_opinion(first: str | LLMJudgeConfig | None, second: str | LLMJudgeConfig | None) -> bool:
    """Return whether two judges are the same function, or language models with equal `opinion`."""
    if isinstance(first, LLMJudgeConfig) and isinstance(second, LLMJudgeConfig):
        return first.opinion == second.opinion
    return first == second
