"""Reward functions, good and bad ones."""

import math


def brevity(prompts, completions, **columns):
    return [-float(len(completion.split())) for completion in completions]


def one_too_few(prompts, completions, **columns):
    return [0.0] * (len(completions) - 1)


def undefined(prompts, completions, **columns):
    return [math.nan] * len(completions)
