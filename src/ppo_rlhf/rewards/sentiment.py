"""A sentiment classifier as a reward: how positive a review reads, as in TRL's legacy example on IMDb."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = "lvwerra/distilbert-imdb"
"""A classifier whose class 1 is positive."""
_BATCH_SIZE = 64


def positive_logit(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Return the logit of the class positive for each prompt with its completion."""
    tokenizer, model = _classifier(MODEL)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    logits: list[float] = []
    with torch.no_grad():
        for start in range(0, len(texts), _BATCH_SIZE):
            batch = tokenizer(
                texts[start : start + _BATCH_SIZE], padding=True, truncation=True, return_tensors="pt"
            ).to(model.device)
            logits += model(**batch).logits[:, 1].tolist()
    return logits


@functools.cache
def _classifier(name: str) -> tuple[Any, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    return AutoTokenizer.from_pretrained(name), model.to("cuda" if torch.cuda.is_available() else "cpu")
