"""One training run as data. Both sides read it, under two Python environments, so only the standard library is used."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

GIVEN = dict(os.environ)
"""The environment before `import ppo_rlhf` adds what its own libraries are to read; the peer starts from it."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters that mean the same on both sides; everything else has one value on both (see docs/results.md)."""

    iterations: int
    response_length: int  # tokens, at most
    learning_rate: float  # peak, of policy and critic: the peer has one rate for both; linear to 0 over the iterations
    kl_coef: float  # score units per nat
    batch_size: int = 64  # responses an iteration
    num_mini_batches: int = 4
    num_ppo_epochs: int = 4
    temperature: float = 1.0
    missing_eos_penalty: float | None = None  # score units


@dataclass(frozen=True)
class Job:
    """One run of one side."""

    side: str  # "ours" or "trl"
    variant: str  # "default", a departure's name (ours), or "accumulated" (trl)
    seed: int
    settings: Settings
    sft: str  # model directory
    reward: str  # model directory or module:function
    prompt_ids: list[list[int]] = field(repr=False)
    stop_token_id: int
    save_every: int  # iterations between saved policies
    out: str  # directory for policies and history

    @property
    def reward_is_model(self) -> bool:
        """Whether the reward is a model directory; else it is `module:function`."""
        return Path(self.reward).is_dir()

    @property
    def name(self) -> str:
        """What tells this run from others of its task."""
        return f"{self.side}/{self.variant}/beta {self.settings.kl_coef:g}/seed {self.seed}"

    def saved_policy(self, iteration: int) -> Path:
        """Return where the policy of an iteration is saved."""
        return Path(self.out) / f"iteration-{iteration:04d}"

    def is_saved(self, iteration: int) -> bool:
        """Return whether the policy is saved after an iteration."""
        return iteration % self.save_every == 0 or iteration == self.settings.iterations

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def write_history(self, rows: list[dict[str, float]]) -> None:
        """Write one row an iteration: `iteration`, `score` (after the missing-EOS penalty), `kl` (nats a response)."""
        (Path(self.out) / "history.json").write_text(json.dumps(rows), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Job:
        """Read a job that `write` wrote."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**fields, "settings": Settings(**fields["settings"])})
