"""Prompts of the recipes (docs/recipes.md), made from tables on the Hugging Face hub."""

import numpy as np
from datasets import Dataset

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""The instruction is copied from verl's examples/data_preprocess/gsm8k.py. verl's published run counts only answers
after `####`."""

_SHORTEST_REVIEW = 200  # TRL's example leaves out reviews of at most 200 characters
_FEWEST_WORDS, _MOST_WORDS = 2, 7


def gsm8k_chats(table: Dataset) -> Dataset:
    """Return the columns `prompt`, a chat of one message with `question` and the instruction, and GSM8K's `answer`."""
    return table.map(_as_chat, input_columns=["question"], remove_columns=["question"])


def review_openings(table: Dataset) -> Dataset:
    """Return `prompt`, the first 2 to 7 words of each IMDb review (`text`) of more than 200 characters.

    The number of words is drawn for each review. TRL's example takes 2 to 7 tokens, which may end within a word.
    """
    reviews = [text for text in table["text"] if len(text) > _SHORTEST_REVIEW]
    lengths = np.random.default_rng(0).integers(_FEWEST_WORDS, _MOST_WORDS + 1, size=len(reviews))
    return Dataset.from_dict({"prompt": [" ".join(r.split()[:n]) for r, n in zip(reviews, lengths, strict=True)]})


def _as_chat(question: str) -> dict[str, list[dict[str, str]]]:
    return {"prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}]}
