"""Evaluation of one policy: responses to held-out prompts with fixed noise, their rewards, judge scores and KL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import Seed, parameter_group
from ppo_rlhf.core.errors import ConfigError, DataError, ModelError
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.judge.llm_judge import load_judge
from ppo_rlhf.judge.settings import Judge, LLMJudgeConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.tokenizers import same_vocabulary
from ppo_rlhf.passes.halvings import Halving, of_evaluations
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.passes.transfers import on_device
from ppo_rlhf.ppo.batch_sampling import response_batch, sample_responses
from ppo_rlhf.ppo.precision import frozen_dtype
from ppo_rlhf.ppo.rollouts import compute_logprobs
from ppo_rlhf.rewards.config import Reference, check_metric_name
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.scoring import AGAINST, RewardScorer, Scores
from ppo_rlhf.runtime.processes import on_main
from ppo_rlhf.runtime.user_functions import RewardFunction, load_function

NOISE_STREAM = "evaluation"
"""Name of the random stream of evaluations. Every evaluation uses the same random numbers, so equal policies give
equal responses."""

JUDGE = "evaluation.judge"
JUDGE_COLUMN = "judge_score"
"""Column with the scores of the judge that decides the win rate. The column `judge_score_<name>` has the scores of the
further judge `<name>`."""
_FIXED_COLUMNS = ("prompt", "sample", "response", "response_ids", "reward", JUDGE_COLUMN, "kl", "length", "terminated")
_TAKEN_RATE_NAMES = {*_FIXED_COLUMNS, "response_length", "truncated_fraction", "distinct_1", "distinct_2"}
_TAKEN_BEGINNINGS = (
    *(f"{JUDGE_COLUMN}_", "judge_gap", "win_rate", "pass_at_", "since_best_", "verdict", "greedy_kl", "reference_"),
)
_TAKEN_ENDINGS = ("_sft", "_se")


def _check_rate_names(rates: dict[str, str]) -> dict[str, str]:
    for name in rates:
        taken = name in _TAKEN_RATE_NAMES or name.startswith(_TAKEN_BEGINNINGS) or name.endswith(_TAKEN_ENDINGS)
        check_metric_name(name, "a rate", f"eval/{name}_sft_se", taken=taken, snake_case=True)
    return rates


def _check_judge_names(judges: dict[str, Judge]) -> dict[str, Judge]:
    for name in judges:
        # Refuse a judge's name that collides with an existing metric's key, such as eval/judge_score_sft
        taken = f"_{name}".endswith((*_TAKEN_ENDINGS, "_low", "_high"))
        check_metric_name(name, "a judge", f"eval/{JUDGE_COLUMN}_{name}_sft_se", taken=taken, snake_case=True)
    return judges


OnExploitation = Annotated[
    Literal["off", "warn", "stop"], BeforeValidator(lambda given: "off" if given is False else given)
]
"""What a run does if its policy exploits its reward. YAML reads `off` as false."""


@parameter_group("evaluation")
class EvaluationConfig:
    """How policies are evaluated. SFT and PPO are evaluated with the same settings, during training and afterwards."""

    judge: Judge | None = None
    """What decides the win rate: `module:name` of a function `judge(prompts, completions, **columns) -> list[float]`,
    or a language model, with the settings of `llm`; None: the reward."""
    judges: Annotated[dict[str, Judge], AfterValidator(_check_judge_names)] = field(default_factory=dict)
    """Further judges, functions or language models, by name. Each judge has a mean score `eval/judge_score_<name>` and
    a win rate `eval/win_rate_<name>` with an interval. The best checkpoint and the champion depend only on `judge`."""
    rates: Annotated[dict[str, Reference], AfterValidator(_check_rate_names)] = field(default_factory=dict)
    """Further functions like `judge`, by the name of their metric. Each function returns 0, 1 or a share for each
    response, and `eval/<name>` is the mean."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Sampling temperature; 0: greedy decoding; None: ppo.temperature."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Responses to each held-out prompt in the final evaluation. PPO's i-th response is compared with SFT's i-th
    response. Standard errors and intervals are over prompts. Evaluations during training sample one response."""
    pass_at: list[Annotated[int, Field(ge=1)]] = field(default_factory=list)
    """Values of k for pass@k (Chen et al. 2021, arXiv:2107.03374, equation 1), each at most samples_per_prompt. With
    pass_at, the function that decides the win rate must return 1 (right) or 0 (wrong)."""
    iteration_prompts: Annotated[int, Field(ge=1)] = 64
    """Largest number of held-out prompts in an evaluation during training. The final evaluation uses all held-out
    prompts. If there are more held-out prompts than iteration_prompts, the last point of each curve comes from another
    sample of prompts, and distinct-n, which falls with the number of responses, jumps at the last point."""
    on_exploitation: OnExploitation = "off"
    """What a run does if the policy exploits its reward (docs/tuning.md). `warn` says so. `stop` also ends training,
    and exports the best evaluation's policy. The policy exploits its reward if `judge`'s score fell from the best
    evaluation by more than noise, and the reward that PPO trains on did not fall. At most 2 % of the runs in which
    nothing falls are warned or stopped. With `stop` the evaluations during training use at most half of the held-out
    prompts, and the verdict on the best evaluation's policy uses the other half."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Responses generated or scored, or reference texts read, at a time."""
    prompts_path: str | None = None
    """Source of the held-out prompts, for the model card."""
    reference_texts: str | None = None
    """Source of the texts whose perplexity under SFT and PPO the final evaluation measures, or
    `held_out_demonstrations` for the demonstrations that SFT held out; None measures no perplexity. Follows
    reference_texts_path."""
    seed: Seed = 42
    """Seed of the sampling noise and of the choice of samples."""

    def __post_init__(self) -> None:
        if self.on_exploitation != "off" and self.judge is None:
            raise ConfigError(
                f"evaluation.on_exploitation={self.on_exploitation} compares the reward with a judge; there is none. "
                "Set evaluation.judge to another function than the reward, or on_exploitation to off."
            )
        if self.samples_per_prompt > 1 and self.temperature == 0.0:
            raise ConfigError(
                f"evaluation.samples_per_prompt={self.samples_per_prompt} with evaluation.temperature=0 would repeat "
                "one greedy response. Set evaluation.temperature above 0, or evaluation.samples_per_prompt to 1."
            )
        if self.pass_at and max(self.pass_at) > self.samples_per_prompt:
            raise ConfigError(
                f"evaluation.pass_at={self.pass_at}: pass@k needs at least k responses to a prompt, but "
                f"evaluation.samples_per_prompt is {self.samples_per_prompt}. Set evaluation.samples_per_prompt to "
                f"{max(self.pass_at)} or more."
            )
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ConfigError(f"evaluation.pass_at={self.pass_at}: a value is repeated. Give each value once.")

    def sampling(self, trained: SamplingSettings) -> SamplingSettings:
        """Return the sampling settings of an evaluation, given the sampling settings of training.

        The KL of greedy responses is computed at the temperature of training.
        """
        if self.temperature is None:
            return trained
        if self.temperature == 0.0:
            return replace(trained, top_k=1, top_p=1.0)
        return replace(trained, temperature=self.temperature)


@dataclass(frozen=True)
class ResolvedJudge:
    """The imported functions that judge responses."""

    judge: RewardFunction | None  # the judge that decides the win rate; None: the reward decides the win rate
    rates: Mapping[str, RewardFunction]
    description: str  # a phrase that says who decides the win rate
    # Further judges by name; each further judge has its own win rate
    judges: Mapping[str, RewardFunction] = field(default_factory=dict)
    # The judge's function as `module:name`, or the settings of a language model that judges
    reference: str | LLMJudgeConfig | None = None


def resolve_judge(config: EvaluationConfig, project_path: Path | None = None) -> ResolvedJudge:
    """Import the functions that judge responses. Without a judge the reward decides the win rate.

    Python looks for the user's modules in `project_path`; None is the current directory.

    Raises:
        RewardError: A function cannot be imported.
    """
    judge = config.judge
    description = "the reward, as evaluation.judge is not set" if judge is None else f"the judge {judge}"
    return ResolvedJudge(
        judge=None if judge is None else load_judge(judge, JUDGE, project_path),
        rates={name: load_function(reference, project_path) for name, reference in config.rates.items()},
        description=description,
        judges={name: load_judge(of, f"{JUDGE}s.{name}", project_path) for name, of in config.judges.items()},
        reference=judge,
    )


@dataclass
class PolicyEvaluation:
    """One policy's n responses to each of N prompts, with all measurements.

    The arrays of an evaluation have shape [N x n], in the order of prompts. Responses to one prompt are adjacent.
    """

    prompts: list[str]  # N · n prompts: a prompt with n responses is listed n times
    completions: list[str]
    response_ids: list[list[int]]  # token ids of each response, including a stop token that ended the response
    # Total score of each response: weighted sum of the reward's components, before shaping and penalties
    rewards: NDArray[np.float64]
    # Scores of each judge, by column name; `JUDGE_COLUMN` is missing if the reward decides the win rate
    judges: dict[str, NDArray[np.float64]]
    rates: dict[str, NDArray[np.float64]]
    # KL estimate k1 against the reference policy: log pi - log pi_ref summed over the response's tokens, in nats
    kl: NDArray[np.float64]
    lengths: NDArray[np.int64]  # number of tokens of each response that the policy wrote, including stop tokens
    terminated: NDArray[np.bool_]  # True where a stop token ended the response
    samples_per_prompt: int = 1  # n, the number of responses sampled for each prompt
    # The scores by component that `rewards` are the totals of; None if the evaluation was read from a table
    scores: Scores | None = None

    @property
    def deciding_scores(self) -> NDArray[np.float64]:
        """Scores [N x n] that decide the win rate: the judge's scores if there is a judge, else the rewards."""
        return self.judges.get(JUDGE_COLUMN, self.rewards)

    def by_prompt(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values [N x n] as [N, n], with one row for each prompt."""
        return values.reshape(-1, self.samples_per_prompt)

    def of_prompts(self, is_chosen_N: NDArray[np.bool_]) -> PolicyEvaluation:
        """Return the evaluation of some of the N prompts, without `scores`; `is_chosen_N` [N] says of which."""
        rows = np.flatnonzero(np.repeat(is_chosen_N, self.samples_per_prompt))
        return replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            response_ids=[self.response_ids[row] for row in rows],
            rewards=self.rewards[rows],
            judges={name: values[rows] for name, values in self.judges.items()},
            rates={name: values[rows] for name, values in self.rates.items()},
            kl=self.kl[rows],
            lengths=self.lengths[rows],
            terminated=self.terminated[rows],
            scores=None,
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each response.

        The column of a rate has the rate's name. The column `judge_score` exists only with a judge, and the column
        `sample` (from 0 for each prompt) only if prompts have several responses.
        """
        columns: dict[str, object] = {"prompt": self.prompts}
        if self.samples_per_prompt > 1:
            columns["sample"] = np.arange(len(self.prompts)) % self.samples_per_prompt
        columns |= {"response": self.completions, "response_ids": self.response_ids, "reward": self.rewards}
        measured = {"kl": self.kl, "length": self.lengths, "terminated": self.terminated}
        return pd.DataFrame(columns | self.judges | self.rates | measured)

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> PolicyEvaluation:
        """Return the `PolicyEvaluation` of a table that `to_frame` made."""

        def numbers(name: str) -> NDArray[np.float64]:
            return frame[name].to_numpy(dtype=np.float64)

        judges = [str(name) for name in frame.columns if f"{name}_".startswith(f"{JUDGE_COLUMN}_")]
        return cls(
            prompts=frame["prompt"].tolist(),
            completions=frame["response"].tolist(),
            response_ids=[[int(i) for i in ids] for ids in frame["response_ids"]],
            rewards=numbers("reward"),
            judges={name: numbers(name) for name in judges},
            rates={str(name): numbers(name) for name in frame.columns if name not in (*_FIXED_COLUMNS, *judges)},
            kl=numbers("kl"),
            lengths=frame["length"].to_numpy(dtype=np.int64),
            terminated=frame["terminated"].to_numpy(dtype=np.bool_),
            samples_per_prompt=int(frame["sample"].max()) + 1 if "sample" in frame else 1,
        )


@dataclass(frozen=True)
class Evaluator:
    """Samples policies' responses with fixed noise, and measures the responses. All processes share the work."""

    tokenizer: PreTrainedTokenizerBase  # tokenizer that decodes responses into text for the reward functions and judges
    prompts: PromptDataset
    scorer: RewardScorer
    judge: ResolvedJudge
    config: PPOConfig  # the evaluation uses only the rollout engine and the precision of this PPOConfig
    sampling: SamplingSettings  # maximum length, temperature, top-k, top-p and stop tokens of the responses
    seed: int  # seed of the sampling noise: two policies evaluated with the same seed get the same noise
    batch_size: int = 64
    samples_per_prompt: int = 1  # number of responses to each prompt; each response is sampled with its own noise
    halving: Halving = field(default_factory=of_evaluations)

    def evaluate(
        self,
        policy: PreTrainedModel,
        reference_policy: PreTrainedModel | None,
        *,
        device: torch.device | None = None,
        against: PolicyEvaluation | None = None,
        meet: Callable[[], object] = lambda: None,
    ) -> PolicyEvaluation:
        """Return the evaluation of a policy. Without a reference policy the KL is 0, as for SFT itself.

        The models compute on `device`; None uses the policy's device. `against` is the evaluation of the reference
        policy, for judges that compare two responses. All processes call `meet` after sampling, after the
        log-probabilities and after scoring; it may raise an exception to end the evaluation.

        Raises:
            DataError: There are no prompts.
            RewardError: A function does not return one finite number for each response.
        """
        if len(self.prompts) == 0:
            raise DataError(
                "evaluation: there are no held-out prompts; raise prompts.held_out_share or set evaluation_prompts_path"
            )
        prompts = self.prompts.select([row for row in range(len(self.prompts)) for _ in range(self.samples_per_prompt)])
        uniforms_NT = episode_uniforms(self.seed, NOISE_STREAM, 0, len(prompts), self.sampling.response_length)
        device = device or policy.device
        with on_device(policy, device):
            how: dict[str, Any] = {"batch_size": self.batch_size, "halving": self.halving}
            responses = sample_responses(policy, prompts, uniforms_NT, self.sampling, self.config, **how)
            meet()
            kl = np.zeros(len(prompts))
            if reference_policy is not None:
                how |= {"temperature": self.sampling.temperature, "pad_token_id": self.sampling.pad_token_id}
                given = (prompts.prompt_ids, responses, self.config)
                of_reference = compute_logprobs(reference_policy, *given, device=device, **how)
                of_policy = responses.sampler_logprobs
                # In 16 bits a step of decoding rounds unlike a whole pass, and an engine computes in its own way
                if of_policy is None or self.sampling.engine or frozen_dtype(self.config).itemsize == 2:
                    of_policy = compute_logprobs(policy, *given, device=device, **how)
                # the log-probabilities of padding are 0, so the sum over positions counts only response tokens
                kl = (of_policy.double() - of_reference.double()).sum(dim=1).numpy()
                meet()
        judge, batch = self.judge, response_batch(prompts, responses, self.tokenizer)
        scored, completions = self.scorer.score(batch), list(batch.completions)
        meet()

        others: dict[str, list[Any]] = {} if against is None else {AGAINST: against.completions}
        others = {AGAINST: completions} if reference_policy is None else others

        def judged(name: str, function: RewardFunction) -> NDArray[np.float64]:
            given = (prompts.texts, completions, batch.all_columns | others)
            scores = on_main(lambda: call_reward_function(function, name, *given))
            return np.asarray(scores, dtype=np.float64)

        judges = {} if judge.judge is None else {JUDGE_COLUMN: judged("evaluation.judge", judge.judge)}
        for name, function in judge.judges.items():
            judges[f"{JUDGE_COLUMN}_{name}"] = judged(f"evaluation.judges.{name}", function)
        return PolicyEvaluation(
            prompts=list(prompts.texts),
            completions=completions,
            response_ids=batch.response_ids,
            rewards=scored.total.double().numpy(),
            judges=judges,
            rates={name: judged(f"evaluation.rates.{name}", function) for name, function in judge.rates.items()},
            kl=kl,
            lengths=responses.mask.sum(dim=1).numpy(),
            terminated=responses.terminated.numpy(),
            samples_per_prompt=self.samples_per_prompt,
            scores=scored,
        )


def check_vocabularies(policy: PretrainedHandle, sft_policy: PretrainedHandle) -> None:
    """Raise `ModelError` if the policies' vocabularies differ, so that the same token ids would be different
    prompts.
    """
    if not same_vocabulary(policy.tokenizer(), sft_policy.tokenizer()):
        raise ModelError(
            f"policy_path: {policy.source} and the SFT policy {sft_policy.source} have different vocabularies, so they "
            f"cannot answer the same prompts. Set sft_model_path to the model that {policy.source} was trained from."
        )
