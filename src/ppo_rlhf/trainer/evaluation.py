"""PPOTrainer's evaluation on held-out prompts, by the pipeline's own functions."""

from __future__ import annotations

import logging
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from torch import nn
from transformers import PreTrainedModel

from ppo_rlhf.checkpoints.evaluations import add_evaluation, read_evaluations
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.during_training import evaluate_iteration, evaluator_of
from ppo_rlhf.evaluation.policy import EvaluationConfig, PolicyEvaluation, ResolvedJudge
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.rewards.functions import RewardFunction, call_reward_function, load_function
from ppo_rlhf.rewards.scoring import AGAINST, RewardScorer
from ppo_rlhf.runtime.processes import is_main_process, on_main
from ppo_rlhf.trainer.inputs import few_answered

log = logging.getLogger(__name__)


class Evaluated(NamedTuple):
    """What `PPOTrainer.evaluate` returns."""

    metrics: dict[str, float]
    """The `eval/*` metrics of docs/metrics.md."""
    completions: pd.DataFrame
    """A row a prompt: prompt, response, response_ids, reward, judge_score (with a judge), kl (nats), length (tokens),
    terminated, sft_response, sft_score (what decides the win rate)."""


def take_held_out(
    prompts: PromptDataset | None,
    judge: RewardFunction | str | None,
    scorer: RewardScorer | None,
    trained: PromptDataset | None,
) -> RewardFunction | None:
    """Check what PPOTrainer is given for its evaluation, and return the judge as a function; None: there is none.

    A judge is `judge(prompts, completions, **columns) -> list[float]`, or its `module:name`. Held-out prompts that are
    trained on, too, are counted in a warning.

    Raises:
        ConfigError: The judge is no function, or there is a judge without prompts, or prompts without a reward.
        DataError, RewardError: The judge cannot read the prompts, or fails on two of them.
    """
    if prompts is None:
        if judge is not None:
            raise ConfigError("PPOTrainer: judge decides between answers to evaluation_prompts; give these, too")
        return None
    if scorer is None:
        raise ConfigError("PPOTrainer: evaluation_prompts are answered and scored by the reward; give a reward, too")
    known = set() if trained is None else {*trained.texts}
    if (shared := sum(text in known for text in prompts.texts)) and is_main_process():
        log.warning("PPO trains on %d of the %d evaluation_prompts.", shared, len(prompts))
    if isinstance(judge, nn.Module) or not (judge is None or isinstance(judge, str) or callable(judge)):
        raise ConfigError(f"PPOTrainer: judge is a {type(judge).__name__}; give a function, or its module:name")
    function = load_function(judge) if isinstance(judge, str) else judge
    if function is not None:
        batch = few_answered(prompts)
        columns = batch.all_columns | {AGAINST: [""] * len(batch)}
        on_main(partial(call_reward_function, function, "judge", batch.prompts, batch.completions, columns))
    return function


class HeldOut:
    """Evaluates a trainer's policy on held-out prompts, all of them, with one response to each.

    Attributes:
        rows: One for each evaluated iteration, oldest first, as in the pipeline's log: `iteration`, the `eval/*`
            metrics, and `scores` of those that were the best so far.
    """

    def __init__(
        self,
        state: TrainingState,
        reference_policy: PreTrainedModel,
        prompts: PromptDataset,
        scorer: RewardScorer,
        judge: RewardFunction | None,
        *,
        by_reward: bool,
    ) -> None:
        """Take the held-out prompts and the judge (`take_held_out`); without one the reward decides the win rate.

        `by_reward` says that the reward that trains decides it, also as the judge.
        """
        described = "the reward" if judge is None else "the judge"
        self._evaluator = evaluator_of(
            state.tokenizer,
            prompts,
            scorer,
            state.config,
            trained=state.sampling,
            evaluation=EvaluationConfig(iteration_prompts=len(prompts)),
            judge=ResolvedJudge(judge=judge, rates={}, description=described),
        )
        self._state, self._reference, self._by_reward = state, reference_policy, by_reward
        self.rows: list[dict[str, Any]] = []

    @cached_property
    def _sft(self) -> PolicyEvaluation:
        return self._evaluator.evaluate(self._reference, None, device=self._state.device)

    def evaluate(self, directory: Path | None = None) -> Evaluated:
        """Evaluate the policy as it is now, note it in `rows`, and in the log of a directory if one is given."""
        row, evaluated = evaluate_iteration(
            self._state, self._reference, self._evaluator, self._sft, self.rows, by_trained_reward=self._by_reward
        )
        self.rows = [*(each for each in self.rows if each["iteration"] != row["iteration"]), row]
        if directory is not None and is_main_process():
            add_evaluation(directory, row)
        of_sft = {"sft_response": self._sft.completions, "sft_score": self._sft.deciding_scores}
        return Evaluated(_metrics(row), evaluated.to_frame().assign(**of_sft))

    def resume(self, directory: Path, iteration: int) -> None:
        """Take the evaluations before an iteration from a directory's log."""
        self.rows = [row for row in read_evaluations(directory) if row["iteration"] < iteration]

    def with_evaluations(self, history: list[dict[str, float]]) -> list[dict[str, float]]:
        """Return the history of a run, each row with the metrics of its evaluation, if there was one."""
        of_iteration = {row["iteration"]: row for row in self.rows}
        return [row | _metrics(of_iteration.get(row["iteration"], {})) for row in history]


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/")}
