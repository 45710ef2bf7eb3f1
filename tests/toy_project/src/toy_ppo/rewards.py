"""Reward functions, good and bad ones."""


def brevity(prompts, completions, **columns):
    return [-float(len(completion.split())) for completion in completions]
