"""A sentiment classifier as a reward: how positive a review reads, as in TRL's legacy example on IMDb."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import pipeline

from ppo_rlhf.models.quiet import errors_only

MODEL = "lvwerra/distilbert-imdb"
"""A classifier whose class 1 is positive."""
_BATCH_SIZE = 64


def positive_logit(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the logit of the class positive for each prompt with its completion."""
    classifier = _classifier(MODEL)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    positive = classifier.model.config.id2label[1]
    with errors_only("transformers"):  # on a GPU it advises a data set after ten calls
        found = classifier(texts, batch_size=_BATCH_SIZE, truncation=True, top_k=None, function_to_apply="none")
    return [label["score"] for labels in found for label in labels if label["label"] == positive]


@functools.cache
def _classifier(name: str) -> Any:
    return pipeline("text-classification", model=name, device="cuda" if torch.cuda.is_available() else "cpu")
