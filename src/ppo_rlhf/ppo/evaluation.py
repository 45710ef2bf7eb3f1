"""Evaluation of a policy: responses to held-out prompts under fixed noise, scored, judged, measured for drift."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.data.prompts import PromptDataset
from ppo_rlhf.models.offloading import on_device
from ppo_rlhf.ppo.rollout import compute_logprobs, sample_responses
from ppo_rlhf.ppo.sampling import SamplingSettings
from ppo_rlhf.rewards.functions import RewardFunction, call_reward_function, load_function
from ppo_rlhf.rewards.scorers import LONGEST_METRIC_NAME, ResponseBatch, RewardScorer

DEMO_PROMPTS_PATH = "data/01_raw/prompts.jsonl"
DEMO_JUDGE = "ppo_rlhf.demo.judge:gold_score"
DEMO_RATES = {"grammatical_rate": "ppo_rlhf.demo.judge:is_grammatical"}

NOISE_STREAM = "evaluation"
"""Every evaluation draws the same uniforms, so two policies that are equal give equal responses."""

_FIXED_COLUMNS = ("prompt", "response", "reward", "judge_score", "kl", "length", "terminated")
_TAKEN_RATE_NAMES = {
    *_FIXED_COLUMNS,
    *("win_rate", "win_rate_low", "win_rate_high", "response_length", "truncated_fraction", "distinct_1", "distinct_2"),
}


def _check_rate_names(rates: dict[str, str]) -> dict[str, str]:
    for name in rates:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _TAKEN_RATE_NAMES or name.endswith("_sft"):
            raise ValueError(
                f"{name!r} cannot name a rate: it becomes the metric eval/{name}, so it must be lower-case letters, "
                "digits and underscores, not end in _sft, and not be a metric that exists"
            )
        key = f"eval/{name}_sft"  # the longer one of its two metrics
        if len(key) > LONGEST_METRIC_NAME:
            raise ValueError(
                f"{name!r} cannot name a rate: it becomes the metric eval/<name>_sft, which has {len(key)} characters "
                f"and may have {LONGEST_METRIC_NAME}"
            )
    return rates


@settings_group("evaluation")
class EvaluationConfig:
    """What policies are evaluated with; the same for SFT and PPO, during training and at its end."""

    judge: str | None = None
    """`module:name` of a function `judge(prompts, completions, **columns) -> list[float]` that decides the win rate.
    None: the demo's gold judge on the demo's prompts, otherwise the reward decides."""
    rates: Annotated[dict[str, str], AfterValidator(_check_rate_names)] = field(default_factory=dict)
    """Further functions of the same signature, by the name of their metric; each gives 0 or 1 (or a share) a
    response, and `eval/<name>` is the mean."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Of the responses that are evaluated; 0 takes the most probable token each time (greedy). None: ppo.temperature.
    """
    bootstrap_samples: Annotated[int, Field(ge=100)] = 10_000
    """Resamples of the prompts behind the win rate's 95 % interval."""
    iteration_prompts: Annotated[int, Field(ge=1)] = 64
    """Held-out prompts of an evaluation during training, at most; the final one uses all of them. With fewer, the last
    point of each curve is of another sample, and distinct-n, which falls as responses are added, jumps there."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Responses generated, and scored, at a time."""
    sample_pairs: Annotated[int, Field(ge=1)] = 8
    """Prompts whose two responses are shown side by side, drawn at random; the widest wins and losses come on top."""
    prompts_path: str | None = DEMO_PROMPTS_PATH
    """Where the prompts come from; only whether they are the demo's matters here."""
    seed: Seed = 42
    """Fixes the sampling noise, the bootstrap and the choice of samples."""

    def sampling(self, trained: SamplingSettings) -> SamplingSettings:
        """Return how responses are drawn, given how training draws them; greedy ones keep the KL's temperature."""
        if self.temperature is None:
            return trained
        if self.temperature == 0.0:
            return replace(trained, top_k=1, top_p=1.0)
        return replace(trained, temperature=self.temperature)


@dataclass(frozen=True)
class ResolvedJudge:
    """The functions that judge responses, found and imported."""

    judge: RewardFunction | None
    """None: the reward decides the win rate."""
    rates: Mapping[str, RewardFunction]
    description: str
    """Who decides the win rate, as it reads in a sentence."""


def resolve_judge(config: EvaluationConfig, project_path: Path | None = None) -> ResolvedJudge:
    """Find who judges: the judge that is set, else the demo's on the demo's prompts, else the reward.

    Args:
        config: The group `evaluation`.
        project_path: Where relative paths and the person's own modules start; None is the current directory.

    Raises:
        RewardError: If a named function cannot be imported.
    """
    judge, rates, description = config.judge, dict(config.rates), f"the judge {config.judge}"
    if judge is None and is_demo_prompts(config.prompts_path, project_path):
        judge, rates, description = DEMO_JUDGE, DEMO_RATES | rates, "the demo's gold judge"
    elif judge is None:
        description = "the reward, as evaluation.judge is not set"
    return ResolvedJudge(
        judge=None if judge is None else load_function(judge, project_path),
        rates={name: load_function(reference, project_path) for name, reference in rates.items()},
        description=description,
    )


@dataclass
class PolicyEvaluation:
    """One policy's responses to N prompts and everything measured on them; arrays are [N], in the order of prompts."""

    prompts: list[str]
    completions: list[str]
    rewards: NDArray[np.float64]
    """Weighted sum of the reward's components, before any shaping or penalty."""
    judge_scores: NDArray[np.float64] | None
    rates: dict[str, NDArray[np.float64]]
    kl: NDArray[np.float64]
    """k1 against the reference, summed over the response: sum of log pi - log pi_ref at the sampled tokens, nats."""
    lengths: NDArray[np.int64]
    """Tokens, the stop token included."""
    terminated: NDArray[np.bool_]
    """True where the response ended in a stop token."""

    @property
    def deciding_scores(self) -> NDArray[np.float64]:
        """Scores [N] that decide the win rate: the judge's if there is one, else the reward."""
        return self.rewards if self.judge_scores is None else self.judge_scores

    def to_frame(self) -> pd.DataFrame:
        """Return one row a response; a rate's column has its name, `judge_score` is there only if judged."""
        columns: dict[str, object] = {"prompt": self.prompts, "response": self.completions, "reward": self.rewards}
        if self.judge_scores is not None:
            columns["judge_score"] = self.judge_scores
        return pd.DataFrame(
            columns | self.rates | {"kl": self.kl, "length": self.lengths, "terminated": self.terminated}
        )

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> PolicyEvaluation:
        """Return the evaluation that `to_frame` made the table of."""

        def numbers(name: str) -> NDArray[np.float64]:
            return frame[name].to_numpy(dtype=np.float64)

        return cls(
            prompts=frame["prompt"].tolist(),
            completions=frame["response"].tolist(),
            rewards=numbers("reward"),
            judge_scores=numbers("judge_score") if "judge_score" in frame else None,
            rates={str(name): numbers(name) for name in frame.columns if name not in _FIXED_COLUMNS},
            kl=numbers("kl"),
            lengths=frame["length"].to_numpy(dtype=np.int64),
            terminated=frame["terminated"].to_numpy(dtype=np.bool_),
        )


def evaluate_policy(
    policy: PreTrainedModel,
    reference_policy: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    reward_scorer: RewardScorer,
    judge: ResolvedJudge,
    config: PPOConfig,
    sampling: SamplingSettings,
    *,
    seed: int,
    batch_size: int = 64,
    device: torch.device | None = None,
) -> PolicyEvaluation:
    """Let a policy answer prompts under fixed noise and measure the responses; processes share the work.

    Args:
        policy: The policy to evaluate.
        reference_policy: What KL is measured against; None if the policy is its own reference (KL is then 0).
        tokenizer: Turns responses into the text that functions see.
        prompts: Held-out prompts, tokenised.
        reward_scorer: The reward that PPO maximises.
        judge: Who else judges.
        config: The rollout engine and the precision are taken from it.
        sampling: Length, temperature, truncation and stop tokens of the responses.
        seed: Fixes the noise; two policies evaluated with one seed get the same.
        batch_size: Responses handled at a time.
        device: Where the models compute; None is where the policy lies.

    Raises:
        DataError: If there are no prompts.
        RewardError: If a function does not return one finite number a response.
    """
    if len(prompts) == 0:
        raise DataError("evaluation: there are no held-out prompts; raise prompts.held_out_share or name a file")
    uniforms_NT = episode_uniforms(seed, NOISE_STREAM, 0, len(prompts), sampling.response_length)
    device = device or policy.device
    with on_device(policy, device):
        responses = sample_responses(policy, prompts.prompt_ids, uniforms_NT, sampling, config, batch_size=batch_size)
        kl = np.zeros(len(prompts))
        if reference_policy is not None:
            of_policy, of_reference = (
                compute_logprobs(
                    model,
                    prompts.prompt_ids,
                    responses,
                    config,
                    temperature=sampling.temperature,
                    device=device,
                    batch_size=batch_size,
                    pad_token_id=sampling.pad_token_id,
                )
                for model in (policy, reference_policy)
            )
            kl = (of_policy.double() - of_reference.double()).sum(dim=1).numpy()  # both are 0 in padding
    completions = tokenizer.batch_decode(responses.token_lists(), skip_special_tokens=True)
    scored = reward_scorer.score(
        ResponseBatch(
            prompts=prompts.texts,
            completions=completions,
            columns=prompts.columns,
            prompt_ids=prompts.prompt_ids,
            response_ids=responses.token_lists(),
            terminated=responses.terminated.tolist(),
        )
    )

    def judged(name: str, function: RewardFunction) -> NDArray[np.float64]:
        scores = call_reward_function(function, name, prompts.texts, completions, prompts.columns)
        return np.asarray(scores, dtype=np.float64)

    return PolicyEvaluation(
        prompts=list(prompts.texts),
        completions=completions,
        rewards=scored.total.double().numpy(),
        judge_scores=None if judge.judge is None else judged("evaluation.judge", judge.judge),
        rates={name: judged(f"evaluation.rates.{name}", function) for name, function in judge.rates.items()},
        kl=kl,
        lengths=responses.lengths.numpy(),
        terminated=responses.terminated.numpy(),
    )


def is_demo_prompts(prompts_path: str | None, project_path: Path | None) -> bool:
    """Return whether a path, relative to the project, is that of the shipped prompts."""
    root = project_path or Path.cwd()
    return prompts_path is not None and (root / prompts_path).resolve() == (root / DEMO_PROMPTS_PATH).resolve()
