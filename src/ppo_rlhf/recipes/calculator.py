"""Arithmetic questions with a calculator: a worked example of an environment that answers between the policy's turns.

Half of the demonstrations in `data/01_raw/calculator_demonstrations.jsonl` call the calculator; the other half guess
the result. A policy after SFT calls the calculator for half of the questions. PPO with the reward `is_right` teaches
the policy to call the calculator always.
"""

import re

_CALL = re.compile(r"call (\d+) plus (\d+)")
_ANSWER = re.compile(r"answer (\d+)")


def reply(prompts: list[str], completions: list[str], turns: list[list[str]]) -> list[str | None]:
    """Answer each turn that calls the calculator; None ends the episode. `reply` is a function for `ppo.environment`.

    Args:
        prompts: The questions.
        completions: The text of each episode so far.
        turns: The turns of each episode in order: policy, environment, policy, ...
    """
    calls = [_CALL.fullmatch(texts[-1].strip()) for texts in turns]
    return [None if call is None else f"result {int(call[1]) + int(call[2])}" for call in calls]


def is_right(prompts: list[str], completions: list[str], turns: list[list[str]], answer: list[int]) -> list[float]:
    """Return 1 where the last turn is the right answer, else 0. `is_right` is a reward function.

    Only the policy's last turn counts: a result in a reply of the environment, or a result that the policy invents,
    earns nothing.
    """
    matches = [_ANSWER.fullmatch(texts[-1].strip()) for texts in turns]
    return [float(match is not None and int(match[1]) == right) for match, right in zip(matches, answer, strict=True)]


def calls_calculator(prompts: list[str], completions: list[str], turns: list[list[str]]) -> list[float]:
    """Return 1 where the policy called the calculator, else 0. Function for `evaluation.rates`."""
    return [float(_CALL.fullmatch(texts[0].strip()) is not None) for texts in turns]
