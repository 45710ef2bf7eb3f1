"""Arithmetic questions with a calculator: a worked example of an environment that answers between a policy's turns.

Of the demonstrations in `data/01_raw/calculator_demonstrations.jsonl` half call the calculator, half guess. A policy
that has learnt them calls it for half of the questions. PPO with the reward `is_right` teaches it to call it always.
"""

import re

_CALL = re.compile(r"call (\d+) plus (\d+)")
_ANSWER = re.compile(r"answer (\d+)")


def reply(prompts: list[str], completions: list[str], turns: list[list[str]]) -> list[str | None]:
    """Answer each turn that calls the calculator; None ends the episode. An environment of `ppo.environment`.

    Args:
        prompts: The questions.
        completions: Each episode so far, as one text.
        turns: The turns of each episode: the policy's, a reply, the policy's, ...
    """
    calls = [_CALL.fullmatch(texts[-1].strip()) for texts in turns]
    return [None if call is None else f"result {int(call[1]) + int(call[2])}" for call in calls]


def is_right(prompts: list[str], completions: list[str], turns: list[list[str]], answer: list[int]) -> list[float]:
    """Return 1 where the last turn is the right answer, else 0. A reward function.

    It reads the policy's own last turn: a result that stands in a reply, or that the policy made up, earns nothing.
    """
    said = [_ANSWER.fullmatch(texts[-1].strip()) for texts in turns]
    return [float(match is not None and int(match[1]) == right) for match, right in zip(said, answer, strict=True)]


def calls_calculator(prompts: list[str], completions: list[str], turns: list[list[str]]) -> list[float]:
    """Return 1 where the policy called the calculator, else 0. A function of `evaluation.rates`."""
    return [float(_CALL.fullmatch(texts[0].strip()) is not None) for texts in turns]
