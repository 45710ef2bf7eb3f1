"""The work that both sides do, as data. Read under two Python environments, so only the standard library is used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMS = ("full", "mixed")
PRECISIONS = ("float32", "bf16")
STOP_TOKEN = 0  # ends responses in the form `mixed`; in `full` a token like any other


@dataclass(frozen=True)
class Shape:
    """Architecture of policy, reference, critic and reward model, head and embedding tied."""

    architecture: str  # gpt2 or llama
    layers: int
    width: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None  # None: as many as heads
    feed_forward: int | None = None  # None: 4 x width

    @property
    def kv_width(self) -> int:
        """Width of a layer's keys, and of its values."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear layers of one block."""
        d, hidden = self.width, self.feed_forward or 4 * self.width
        if self.architecture == "gpt2":
            return [(d, 3 * d), (d, d), (d, hidden), (hidden, d)]
        return [(d, d), (d, self.kv_width), (d, self.kv_width), (d, d), (d, hidden), (d, hidden), (hidden, d)]


@dataclass(frozen=True)
class Preset:
    """A shape with the sizes of one iteration; lengths are in tokens."""

    shape: Shape
    batch: int  # responses an iteration
    minibatch: int  # responses an optimiser step
    prompt_length: int  # in `full` of every prompt, in `mixed` the longest
    response_length: int  # the longest
    epochs: int = 4


PRESETS = {
    "tiny": Preset(Shape("gpt2", 4, 256, 4, 2000), 32, 8, 16, 32),
    "small": Preset(Shape("gpt2", 6, 512, 8, 8192), 32, 8, 32, 64),
    "gpt2": Preset(Shape("gpt2", 12, 768, 12, 50257), 256, 32, 64, 128),
    "llama1b": Preset(Shape("llama", 16, 2048, 32, 128256, kv_heads=8, feed_forward=8192), 64, 16, 128, 256),
}
"""gpt2: GPT-2 124M. llama1b: Llama 3.2 1B."""


@dataclass(frozen=True)
class Job:
    """What one worker does."""

    preset: Preset
    form: str
    precision: str
    device: str
    iterations: int  # of the whole run, warm-up included: the learning rate falls linearly to 0 over them
    policy: str  # model directory; the critic starts as its backbone with a head of zeros
    reward: str  # model directory, a sequence classifier
    prompt_ids: list[list[int]] = field(repr=False)
    setting: str = "best"  # of the peer: best or defaults; of ours always best
    learning_rate: float = 1e-5
    kl_coef: float = 0.05
    seed: int = 0  # of the peer
    noise_seed: int = 0  # of our side: prompt order and sampling
    overrides: dict[str, Any] = field(default_factory=dict)  # fields of this project's PPOConfig
    peer_bf16: str = "autocast"

    @property
    def stop_token_id(self) -> int | None:
        """The id that ends a response, if one does."""
        return STOP_TOKEN if self.form == "mixed" else None

    @property
    def expected_tokens(self) -> float:
        """Response tokens of an iteration."""
        return self.preset.batch * self.preset.response_length * (0.5 if self.form == "mixed" else 1.0)

    @property
    def peer_environment(self) -> dict[str, str]:
        """Return what the peer reads before its imports.

        Its trainer makes its Accelerator without arguments, so this variable is the only way to a precision.
        """
        is_cast = self.precision == "bf16" and self.setting == "best" and self.peer_bf16 != "weights"
        return {"ACCELERATE_MIXED_PRECISION": "bf16" if is_cast else "no"}

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Read a job that `write` wrote."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        preset = fields.pop("preset")
        return cls(preset=Preset(**{**preset, "shape": Shape(**preset["shape"])}), **fields)


def response_length_of(row: list[int], stop_token_id: int | None) -> int:
    """Return how many tokens a response has, its stop token included."""
    if stop_token_id is None or stop_token_id not in row:
        return len(row)
    return row.index(stop_token_id) + 1


def stop_probability(response_length: int) -> float:
    """Return the probability of a stop at each token that makes the mean length half of the maximum.

    The mean of min(geometric, R) is (1 - (1 - p)^R) / p, which falls with p.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (1 - (1 - middle) ** response_length) / middle
        low, high = (middle, high) if mean > response_length / 2 else (low, middle)
    return (low + high) / 2
