"""The work that both sides do, as data. Both Python environments read it, so only the standard library is used."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

LENGTHS = ("full", "mixed")
SAMPLED = "sampled"
"""The lengths of a real model's responses, which end where the model ends them."""
PRECISIONS = ("float32", "bfloat16")
STOP_TOKEN = 0
"""Ends responses of mixed lengths; with full lengths it is a token like any other."""


@dataclass(frozen=True)
class Preset:
    """A GPT-2 shape, and the sizes of one iteration in responses and tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    minibatch: int
    prompt_length: int
    response_length: int
    epochs: int = 4
    chats: bool = False
    """True if the model is real (`--model`), with the recipe obedience's prompts, reward and learning rate. Responses
    end where the model ends them."""
    system_words: int = 0
    """Words of the chats' system turn; with 0 they have that of the template."""
    trl_rows: int | None = None
    """Rows of TRL's passes, whose gradients it accumulates; None for whole batches and minibatches. Only for one
    minibatch a batch: with more TRL 1.12 takes one step an epoch all the same."""

    @property
    def steps(self) -> int:
        """Number of optimiser steps in an iteration."""
        return self.epochs * (self.batch // self.minibatch)


PRESETS = {
    "toy": Preset(2, 64, 4, 500, batch=16, minibatch=8, prompt_length=8, response_length=12, epochs=2),
    "tiny": Preset(4, 256, 4, 2000, batch=32, minibatch=8, prompt_length=16, response_length=32),
    "small": Preset(6, 512, 8, 8192, batch=32, minibatch=8, prompt_length=32, response_length=64),
    "gpt2": Preset(12, 768, 12, 50257, batch=256, minibatch=32, prompt_length=64, response_length=128),
    "smollm2": Preset(
        30, 576, 9, 49152, batch=16, minibatch=8, prompt_length=64, response_length=40, epochs=2, chats=True
    ),
}
PRESETS["smollm2_400"] = replace(PRESETS["smollm2"], minibatch=16, prompt_length=512, system_words=320, trl_rows=4)
"""toy tries the scripts; gpt2 is GPT-2 124M, for a GPU; smollm2 is SmolLM2-135M-Instruct, whose prompts begin with the
same 24 tokens, in smollm2_400 with the same 398, where passes of 8 rows take TRL more than 18.5 GiB.
"""
QUIET_PEER = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Environment variables for any process of TRL."""


@dataclass(frozen=True)
class Job:
    """Job of one process."""

    preset: Preset
    lengths: str
    precision: str
    device: str
    iterations: int
    policy: str
    """Model directory. The critic starts as its backbone with a head of zeros."""
    reward: str | None
    """Directory of a sequence classifier with one label; None for the reward of the recipe obedience."""
    prompt_ids: list[list[int]] = field(repr=False)
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of this project's PPOConfig."""
    learning_rate: float = 1e-7
    """So small that the planted probability of a stop stays what it is."""
    kl_coef: float = 0.05
    temperature: float = 1.0
    missing_eos_penalty: float | None = None
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The chats that `prompt_ids` were made from, with the columns that the reward reads."""

    @property
    def stop_token_id(self) -> int | None:
        """The token that ends a response; None if none does, or if the real model's end of text does."""
        return STOP_TOKEN if self.lengths == "mixed" else None

    @property
    def expected_tokens(self) -> float:
        """Mean number of response tokens in an iteration."""
        return self.preset.batch * self.preset.response_length * (0.5 if self.lengths == "mixed" else 1.0)

    @property
    def peer_environment(self) -> dict[str, str]:
        """Variables for TRL's process. Its trainer takes a precision from accelerate's variable alone."""
        return {**QUIET_PEER, "ACCELERATE_MIXED_PRECISION": "bf16" if self.precision == "bfloat16" else "no"}

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Read a job that `write` wrote."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**fields, "preset": Preset(**fields["preset"])})


def peak_memory_mib(device: str) -> float:
    """Return the peak of CUDA's allocations, or of the process's resident memory."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def response_length_of(row: list[int], stop_token_id: int | None) -> int:
    """Return the number of tokens up to the stop token, which counts."""
    if stop_token_id is None or stop_token_id not in row:
        return len(row)
    return row.index(stop_token_id) + 1
