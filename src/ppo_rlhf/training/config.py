"""PPOConfig: every hyperparameter of PPO in one flat, validated dataclass, with TRL's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.training.settings_group import settings_group

_GLOBALS = "set it in conf/local/globals.yml or with --params"
_LIVES_ELSEWHERE = {
    "sft_model_path": f"{_GLOBALS} sft_model_path=…",
    "reward_model_path": f"{_GLOBALS} reward_model_path=…",
    "model_name": f"{_GLOBALS} sft_model_path=…",
    "model_name_or_path": f"{_GLOBALS} sft_model_path=…",
    "output_dir": "outputs are catalog entries, conf/base/catalog_ppo.yml",
    "save_steps": "it is ppo.save_interval, counted in iterations",
    "eval_steps": "it is ppo.eval_interval, counted in iterations",
    "logging_steps": "every iteration is logged; ppo.sample_interval sets how often samples are",
    "report_to": "tracking is configured in conf/base/mlflow.yml",
    "run_name": "name the run in conf/base/mlflow.yml (tracking.run.name)",
    "bf16": "precision is ppo.dtype",
    "fp16": "precision is ppo.dtype",
    "num_train_epochs": "the length of training is ppo.total_episodes",
    "max_steps": "the length of training is ppo.total_episodes",
    "batch_size": "it is per_device_train_batch_size x gradient_accumulation_steps",
    "mini_batch_size": "it is batch_size / ppo.num_mini_batches",
    "ppo_epochs": "it is ppo.num_ppo_epochs",
    "init_kl_coef": "it is ppo.kl_coef",
}


@dataclass(frozen=True)
class Typical:
    """The range in which a setting is usually found; a value outside it gives advice, not an error."""

    low: float
    high: float
    source: str


_TUNING_GUIDE = "common practice in RLHF tuning guides"
_INSTRUCT_GPT = "InstructGPT (arXiv:2203.02155)"

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@settings_group("ppo", lives_elsewhere=_LIVES_ELSEWHERE)
class PPOConfig:
    """Hyperparameters of PPO on a language model (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022).

    Episodes are responses. Token counts leave out prompts and padding. Raises `ConfigError` with one line a problem.
    """

    num_ppo_epochs: Annotated[int, Field(ge=1), Typical(1, 10, _TUNING_GUIDE)] = 4
    """Passes over each batch of rollouts."""
    cliprange: Annotated[float, Field(gt=0.0), Typical(0.1, 0.3, "arXiv:1707.06347, table 3")] = 0.2
    """Policy clipping range epsilon: ratios outside [1 - epsilon, 1 + epsilon] get no gradient that widens them."""
    cliprange_value: Annotated[float, Field(gt=0.0), Typical(0.1, 0.5, _TUNING_GUIDE)] = 0.2
    """Value clipping range, in units of the return: new values are clipped to this distance from the rollout's."""
    vf_coef: Annotated[float, Field(gt=0.0), Typical(0.05, 1.0, _TUNING_GUIDE)] = 0.1
    """Factor of the value loss. With a separate critic it scales that critic's gradient before clipping; Adam's step
    is nearly unchanged by it."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0), Typical(0.95, 1.0, _INSTRUCT_GPT)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0), Typical(0.9, 1.0, "arXiv:1506.02438")] = 0.95
    """Lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo."""
    whiten_rewards: bool = False
    """Divide shaped rewards by their standard deviation over the batch; their mean stays (as in TRL)."""
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over the response tokens of the batch."""

    kl_coef: Annotated[float, Field(ge=0.0), Typical(0.01, 0.2, _TUNING_GUIDE)] = 0.05
    """Beta: the reward loses beta x KL estimate at each token, in score units per nat."""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """Per-token estimator of KL(policy || reference) (Schulman 2020, "Approximating KL Divergence")."""
    kl_alarm: Annotated[float, Field(gt=0.0), Typical(5, 50, _TUNING_GUIDE)] = 20.0
    """Nats per response. Checkpoints evaluated above it are never kept as the best."""
    kl_stop: Annotated[float, Field(gt=0.0), Typical(10, 200, _TUNING_GUIDE)] | None = None
    """Nats per response. Training stops where the rollouts' KL exceeds it; None never stops for it."""

    reward_clip: Annotated[float, Field(gt=0.0)] | None = None
    """Clip each response's score to [-reward_clip, reward_clip] before the KL penalty (DeepSpeed-Chat: 5)."""
    missing_eos_penalty: Annotated[float, Field(ge=0.0)] | None = None
    """Subtracted from the score of a response that was cut off before a stop token."""

    learning_rate: Annotated[float, Field(gt=0.0), Typical(1e-6, 5e-5, _TUNING_GUIDE)] = 3e-6
    """Peak learning rate of the policy's AdamW."""
    value_learning_rate: Annotated[float, Field(gt=0.0), Typical(1e-6, 1e-4, _TUNING_GUIDE)] | None = None
    """Peak learning rate of the critic's AdamW; None takes the policy's."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of both learning rates over iterations, after the warm-up."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.0, 0.2, _TUNING_GUIDE)] = 0.0
    """Share of the iterations over which the learning rates rise to their peak. The first is never 0."""
    max_grad_norm: Annotated[float, Field(gt=0.0), Typical(0.1, 10.0, _TUNING_GUIDE)] = 1.0
    """Gradients of policy and critic are each clipped to this 2-norm at every optimiser step."""

    total_episodes: Count = 10_000
    """Responses to train on; rounded up to full batches."""
    per_device_train_batch_size: Count = 8
    """Responses in one forward and backward pass on one device, at most."""
    gradient_accumulation_steps: Count = 1
    """Multiplies the rollout batch: batch_size = per_device_train_batch_size x this x world size."""
    num_mini_batches: Count = 1
    """Optimiser steps an epoch: the batch is cut into this many minibatches."""
    local_rollout_forward_batch_size: Count = 64
    """Responses generated, and scored, at a time on one device. It need not divide the batch."""

    response_length: Annotated[int, Field(ge=1), Typical(8, 2048, _TUNING_GUIDE)] = 53
    """Most tokens in a response, its stop token included."""
    temperature: Annotated[float, Field(gt=0.0), Typical(0.5, 1.2, _TUNING_GUIDE)] = 0.7
    """Sampling temperature; log-probabilities, KL and entropy are those of the tempered policy and reference."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most probable tokens; 0 is off. The loss uses the whole distribution."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample among the most probable tokens that hold this share; 1 is off. The loss uses the whole distribution."""
    stop_token: Literal["eos", "period", "none"] = "eos"
    """What ends a response. eos: any end id of the generation config, the tokenizer or the chat template."""
    stop_token_id: Annotated[int, Field(ge=0)] | None = None
    """An explicit token id that ends a response; it replaces `stop_token`."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with prompts that leave no room for response_length tokens in the model's context."""

    value_model: Literal["separate", "reward_init"] = "separate"
    """Where the critic's own backbone is copied from: the policy, or the reward model (with its score head)."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of weights, losses and log-probabilities."""
    rollout_engine: Literal["static", "hf"] = "static"
    """static: one cached decoding loop; hf: transformers' generate, slower, the oracle of the first."""
    device: str = "auto"
    """auto takes CUDA if there is one, else the CPU; or a torch device such as cuda:1."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Everything random is a function of it, the iteration and the episode's index."""

    eval_interval: Count = 10
    """Iterations between evaluations on the held-out prompts."""
    save_interval: Count = 10
    """Iterations between checkpoints; the last iteration is always saved."""
    save_total_limit: Count = 2
    """Newest checkpoints kept of one run; the best is kept beside them."""
    sample_interval: Count = 5
    """Iterations between tables of samples in MLflow."""
    shutdown_grace_s: Annotated[float, Field(ge=0.0)] = 25.0
    """Seconds. Asked to stop by SIGTERM or SIGINT, a run finishes and saves its iteration if that is expected to take
    no longer (Kubernetes kills after 30); 0 stops at once, and the last checkpoint stands."""
    max_skipped_steps: Count = 5
    """Optimiser steps in a row that may be skipped for a non-finite gradient before the run stops."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("batch_size", "local_batch_size"):
            size = getattr(self, name)
            if size % self.num_mini_batches:
                problems.append(_indivisible(self, name, size))
                break
        if self.stop_token_id is not None and self.stop_token != "eos":
            problems.append(
                f"ppo.stop_token={self.stop_token} and ppo.stop_token_id={self.stop_token_id} exclude each other: "
                "leave one out"
            )
        if self.stop_token == "none" and self.missing_eos_penalty is not None:
            problems.append(
                f"ppo.stop_token=none and ppo.missing_eos_penalty={self.missing_eos_penalty} exclude each other: "
                "without a stop token every response would pay the penalty; leave one out"
            )
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def world_size(self) -> int:
        """Processes that share one batch. One: a single process trains."""
        return 1

    @property
    def micro_batch_size(self) -> int:
        """Responses in one forward pass over all devices (TRL's formula)."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def local_batch_size(self) -> int:
        """Responses of one iteration on one device."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def batch_size(self) -> int:
        """Responses of one iteration over all devices."""
        return self.local_batch_size * self.world_size

    @property
    def mini_batch_size(self) -> int:
        """Responses of one optimiser step over all devices."""
        return self.batch_size // self.num_mini_batches

    @property
    def local_mini_batch_size(self) -> int:
        """Responses of one optimiser step on one device."""
        return self.local_batch_size // self.num_mini_batches

    @property
    def local_micro_batch_size(self) -> int:
        """Responses of one forward and backward pass on one device."""
        return min(self.per_device_train_batch_size, self.local_mini_batch_size)

    @property
    def num_total_batches(self) -> int:
        """Iterations of training: ceil(total_episodes / batch_size), every batch full."""
        return math.ceil(self.total_episodes / self.batch_size)

    @property
    def warmup_iterations(self) -> int:
        """Iterations over which the learning rates rise."""
        return math.ceil(self.warmup_ratio * self.num_total_batches)

    def not_default(self) -> dict[str, Any]:
        """Return the settings whose value differs from the default, in order of declaration."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def advice(self, names: Container[str] | None = None) -> list[str]:
        """Return one line for each changed setting, among `names` if given, that lies outside its typical range."""
        ranges = _typical_ranges()
        return [
            f"ppo.{name}={value} is outside its typical range {typical.low:g} to {typical.high:g} ({typical.source})"
            for name, value in self.not_default().items()
            if (typical := ranges.get(name)) is not None
            and value is not None
            and (names is None or name in names)
            and not typical.low <= value <= typical.high
        ]


def _typical_ranges() -> dict[str, Typical]:
    ranges = {}
    for name, hint in get_type_hints(PPOConfig, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) is not Annotated else (hint,)
        for option in options:
            found = [extra for extra in getattr(option, "__metadata__", ()) if isinstance(extra, Typical)]
            if found:
                ranges[name] = found[0]
    return ranges


def _indivisible(config: PPOConfig, name: str, size: int) -> str:
    n = config.num_mini_batches
    lower, upper = size - size % n, size - size % n + n
    near = sorted({value for value in (lower, upper) if value > 0})
    return (
        f"ppo.{name}={size} (per_device_train_batch_size {config.per_device_train_batch_size} x "
        f"gradient_accumulation_steps {config.gradient_accumulation_steps}) is not a multiple of "
        f"ppo.num_mini_batches={n}; nearest sizes that are: {', '.join(map(str, near))}"
    )
