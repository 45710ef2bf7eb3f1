"""The form of a judge's answer: what a request asks for, and what is read as a score or verdict.

An answer in another form says nothing (None): a misread score would train the policy.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ppo_rlhf.judge.settings import LLMJudgeConfig

VERDICTS = {"A": 1.0, "B": 0.0, "tie": 0.5}
"""The worth of each verdict for the response that the judge sees first."""

_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
_SCORE_LINE = re.compile(rf"Score: ({_NUMBER})(?:/({_NUMBER}))?")
_VERDICT_LINE = re.compile(r"Verdict: (A|B|tie)")
_FENCED = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)
_FINAL = re.compile(r"<\|channel\|>final[^<\n]*<\|message\|>|assistantfinal")
"""The begin of the final part in OpenAI's harmony format, with its marks, and as it reads without them."""
_HAS_CHANNELS = re.compile(r"\s*(?:<\||analysis|commentary|assistantfinal)")
"""The begin of an answer in harmony's format. Elsewhere the begin of a final part is only quoted."""
_OTHER_CHANNEL = re.compile(r"<\|channel\|>|\A\s*(?:analysis|commentary|thought)")
"""A channel of harmony (or of Gemma) that is no answer, with and without its marks."""
_MARK = re.compile(r"[<\[◁]([^\s<>\[\]◁▷]+)(?:\s[^<>\[\]◁▷=]*=[^<>\[\]◁▷]*)?[>\]▷]")
_OF_THOUGHT = re.compile(r"think|thought|reason|analysis|scratchpad|reflection")
_FENCE = re.compile(r"`{3,}|~{3,}")


def response_format(*, is_pairwise: bool) -> dict[str, Any]:
    """Return the field `response_format` of a request: a JSON schema of a reason and a score or verdict."""
    worth = {"verdict": {"type": "string", "enum": list(VERDICTS)}} if is_pairwise else {"score": {"type": "number"}}
    properties = {"reason": {"type": "string"}, **worth}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "judgement", "strict": True, "schema": schema}}


def read_answer(answer: str, config: LLMJudgeConfig) -> float | None:
    """Return the score that an answer says, or the worth of its verdict for the response that the judge saw first.

    With `llm.pattern` the last match outside of thoughts is read. Without it one JSON object is read, else the last
    line. An answer in another form, a number off the scale, and an answer of which another line says something else,
    return None.
    """
    final = _final_part(answer)
    if config.pattern is not None:
        matches = re.findall(config.pattern, final or "")
        return _worth_of_text(matches[-1].strip(), config) if matches else None
    for part in (answer, final or ""):  # a JSON object may quote the marks of a thought
        if (fields := _object(part)) is not None:
            return _worth(fields.get("verdict" if config.is_pairwise else "score"), config)
    fences = _FENCE.findall(final or "")
    if final is None or len(set(fences)) > 1 or len(fences) % 2 == 1:  # the last line may be within a code block
        return None
    said = [_worth_of_line(line.rstrip(), config) for line in final.split("\n")]
    is_plain = all(worth in (None, said[-1]) for worth in said)
    return said[-1] if is_plain else None


def _final_part(answer: str) -> str | None:
    """Return what follows the model's thoughts; None if a thought is not closed, or its marks may only be quoted."""
    text = _FINAL.split(answer)[-1] if _HAS_CHANNELS.match(answer) else answer
    if _OTHER_CHANNEL.search(text):
        return None
    first = _MARK.match(text.lstrip())
    if first and first[0][0] != "[" and f"/{first[1]}" not in text:  # models think first, also between unusual marks
        return None
    depth = begin = end = 0
    for mark in _MARK.finditer(text):
        if _OF_THOUGHT.search(mark[1].lower()):
            begin, end = begin if depth else mark.start(), mark.end()
            depth = max(0, depth - 1) if "/" in mark[1] else depth + 1
    before, after = text[:begin].rpartition("\n")[2], text[end:].partition("\n")[0]
    is_within_a_line = bool(before.strip() and after.strip())
    return None if depth or is_within_a_line else text[end:].strip()


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, perhaps in a code block; None if it is none or names a field twice."""
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    try:
        value = json.loads(fenced[1] if fenced else text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field stands twice")
    return fields


def _worth_of_line(line: str, config: LLMJudgeConfig) -> float | None:
    said = (_VERDICT_LINE if config.is_pairwise else _SCORE_LINE).fullmatch(line)
    if said is None or (not config.is_pairwise and said[2] and float(said[2]) != config.scale[1]):
        return None
    return _worth_of_text(said[1], config)


def _worth_of_text(text: str, config: LLMJudgeConfig) -> float | None:
    if config.is_pairwise:
        return _worth(text, config)
    return _worth(float(text), config) if re.fullmatch(_NUMBER, text) else None


def _worth(value: Any, config: LLMJudgeConfig) -> float | None:
    """Return the score or the verdict's worth that a value says; None for another type and off the scale."""
    if config.is_pairwise:
        return VERDICTS.get(value) if isinstance(value, str) else None
    lowest, highest = config.scale
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and lowest <= value <= highest else None
