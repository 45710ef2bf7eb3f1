"""A sentiment classifier as the reward, as in TRL's legacy example on IMDb: positive reviews score high."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import pipeline

from ppo_rlhf.runtime.log_lines import errors_only

MODEL = "lvwerra/distilbert-imdb"
"""A sentiment classifier on the hub, whose class 1 is the positive class."""
_BATCH_SIZE = 64


def positive_logit(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the positive class's logit for each prompt with its completion."""
    classifier = _classifier(MODEL)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    positive = classifier.model.config.id2label[1]
    # Silence the advice to use a dataset, which transformers' pipeline logs after ten calls on a GPU
    with errors_only("transformers"):
        outputs = classifier(texts, batch_size=_BATCH_SIZE, truncation=True, top_k=None, function_to_apply="none")
    return [label["score"] for labels in outputs for label in labels if label["label"] == positive]


@functools.cache
def _classifier(name: str) -> Any:
    return pipeline("text-classification", model=name, device="cuda" if torch.cuda.is_available() else "cpu")
