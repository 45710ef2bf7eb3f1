"""PPOTrainer's evaluation on held-out prompts, by the same functions as the pipeline's evaluation."""

from __future__ import annotations

import inspect
import logging
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pandas as pd
from torch import nn
from transformers import PreTrainedModel

from ppo_rlhf.checkpoints.evaluations import read_evaluations
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.during_training import evaluate_iteration, evaluator_of
from ppo_rlhf.evaluation.exploitation import check_evaluated_prompts, evaluated_prompts
from ppo_rlhf.evaluation.policy import (
    EvaluationConfig,
    Evaluator,
    OnExploitation,
    PolicyEvaluation,
    ResolvedJudge,
)
from ppo_rlhf.evaluation.since_best import REWARDED, SCORES
from ppo_rlhf.judge.llm_judge import LLMJudge
from ppo_rlhf.judge.settings import same_opinion
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.experience import Shaping
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.scoring import AGAINST, RewardScorer
from ppo_rlhf.runtime.metrics_file import metrics_of
from ppo_rlhf.runtime.processes import is_main_process, on_main
from ppo_rlhf.runtime.user_functions import RewardFunction, load_function
from ppo_rlhf.trainer.inputs import probe_batch

log = logging.getLogger(__name__)


def is_reward(judge: RewardFunction, reward: Any) -> bool:
    """Return whether the judge is the reward, or a component of the reward with a positive weight.

    The judge is the same function, or a language model that is asked the same (`same_opinion`).
    """
    parts: list[Any] = [reward] if callable(reward) else []
    if isinstance(reward, RewardConfig):
        counted = [part for part in reward.components if part.weight > 0.0]
        parts = [load_function(part.function) if part.function else part.llm for part in counted]
    return any(same_opinion(_asked(judge), _asked(part)) for part in parts if part is not None)


def _asked(judge: Any) -> Any:
    return judge.config if isinstance(judge, LLMJudge) else inspect.unwrap(judge)


class Evaluated(NamedTuple):
    """The result of `PPOTrainer.evaluate`."""

    metrics: dict[str, float]
    """The `eval/*` metrics of docs/metrics.md."""
    completions: pd.DataFrame
    """One row per prompt, with the columns prompt, response, response_ids, reward, judge_score (with a judge), kl
    (nats), length (tokens), terminated, sft_response, and sft_score (the score of sft_response that the win rate
    compares)."""


def take_held_out(
    prompts: PromptDataset | None,
    judge: RewardFunction | str | None,
    scorer: RewardScorer | None,
    trained: PromptDataset | None,
    on_exploitation: OnExploitation = "off",
) -> RewardFunction | None:
    """Check PPOTrainer's arguments for evaluation, and return the judge as a function, or None without a judge.

    Args:
        prompts: The held-out prompts.
        judge: A function `judge(prompts, completions, **columns) -> list[float]`, or its `module:name`.
        scorer: The reward.
        trained: The training prompts. A warning gives the number of held-out prompts that are also training prompts.
        on_exploitation: As `evaluation.on_exploitation`.

    Raises:
        ConfigError: The judge is not a function, or there is a judge without prompts, prompts without a reward, or
            `on_exploitation` without a judge.
        DataError, RewardError: The judge cannot read the prompts, or fails on the first two prompts.
    """
    if on_exploitation not in (known := get_args(get_args(OnExploitation)[0])):
        raise ConfigError(f"PPOTrainer: on_exploitation={on_exploitation!r}; give one of {', '.join(known)}")
    if on_exploitation != "off" and judge is None:
        raise ConfigError(
            f"PPOTrainer: on_exploitation={on_exploitation} compares the reward with a judge; give judge and "
            "evaluation_prompts, too"
        )
    if prompts is None:
        if judge is not None:
            raise ConfigError(
                "PPOTrainer: judge compares responses to evaluation_prompts; give evaluation_prompts, too"
            )
        return None
    if scorer is None:
        raise ConfigError("PPOTrainer: responses to evaluation_prompts are scored by the reward; give a reward, too")
    training_texts = set() if trained is None else {*trained.texts}
    if (shared := sum(text in training_texts for text in prompts.texts)) and is_main_process():
        log.warning("%d of the %d evaluation_prompts are also training prompts.", shared, len(prompts))
    if isinstance(judge, nn.Module) or not (judge is None or isinstance(judge, str) or callable(judge)):
        raise ConfigError(f"PPOTrainer: judge is a {type(judge).__name__}; give a function, or its module:name")
    function = load_function(judge) if isinstance(judge, str) else judge
    if function is not None:
        batch = probe_batch(prompts)
        columns = batch.all_columns | {AGAINST: [""] * len(batch)}
        on_main(partial(call_reward_function, function, "judge", batch.prompts, batch.completions, columns))
    return function


class HeldOut:
    """Evaluates a trainer's policy on all held-out prompts, with one response per prompt.

    With `on_exploitation=stop` the first half of the prompts is evaluated while training. If the policy of the best
    evaluation was loaded, it is evaluated on the other half, which took no part in the choice.

    Attributes:
        rows: One row per evaluated iteration, oldest first, as in the pipeline's log: `iteration`, the `eval/*`
            metrics, and `scores` if the iteration was the best so far.
    """

    def __init__(
        self,
        learner: Learner,
        sampler: Sampler,
        shaping: Shaping,
        progress: Progress,
        reference_policy: PreTrainedModel,
        prompts: PromptDataset,
        scorer: RewardScorer,
        judge: RewardFunction | None,
        *,
        by_reward: bool,
        on_exploitation: OnExploitation = "off",
    ) -> None:
        """Prepare the evaluation; without a judge (`take_held_out`) the reward decides the win rate.

        `by_reward` is True if the training reward decides the win rate, even if the reward function was also given as
        the judge.

        Raises:
            ConfigError: `on_exploitation` with too few prompts, or with the reward as the judge.
        """
        if on_exploitation != "off" and by_reward:
            raise ConfigError(
                f"PPOTrainer: on_exploitation={on_exploitation}, but the judge is the reward, which cannot show that "
                "the policy exploits it; give another function as judge"
            )
        check_evaluated_prompts(len(prompts), len(prompts), learner.config, on_exploitation)
        description = "the reward" if judge is None else "the judge"
        used = evaluated_prompts(len(prompts), len(prompts), on_exploitation)
        chosen_by = {*prompts.texts[:used]}
        others = [row for row, text in enumerate(prompts.texts) if text not in chosen_by]
        self._evaluator, self._unchosen = (
            evaluator_of(
                sampler.tokenizer,
                part,
                scorer,
                learner.config,
                trained=sampler.settings,
                evaluation=EvaluationConfig(iteration_prompts=max(1, len(part))),
                judge=ResolvedJudge(judge=judge, rates={}, description=description),
                halving=sampler.evaluation_halving,
            )
            for part in (prompts.select(range(used)), prompts.select(others))
        )
        self._learner, self._shaping, self._progress = learner, shaping, progress
        self._reference, self._by_reward = reference_policy, by_reward
        self.on_exploitation = on_exploitation
        self.rows: list[dict[str, Any]] = []

    @cached_property
    def _sft(self) -> PolicyEvaluation:
        return self._evaluator.evaluate(self._reference, None, device=self._learner.device)

    def evaluate(self, directory: Path | None = None) -> Evaluated:
        """Evaluate the current policy; add the metrics to `rows`, and to the evaluation log in `directory` unless it is
        None. The evaluation of a policy that was chosen by `rows` is not added to them.

        Raises:
            DataError: The policy was chosen, and no other prompts than those that chose it are left.
        """
        if self._progress.loaded_iteration is not None:
            sft = self._unchosen.evaluate(self._reference, None, device=self._learner.device)
            return _evaluated(*self._evaluate(self._unchosen, sft, [], "off"), sft)
        row, evaluated = self._evaluate(self._evaluator, self._sft, self.rows, self.on_exploitation)
        self.rows = [*(earlier for earlier in self.rows if earlier["iteration"] != row["iteration"]), row]
        if directory is not None and is_main_process():
            metrics_of(directory).add_evaluation(row)
        return _evaluated(row, evaluated, self._sft)

    def resume(self, directory: Path, iteration: int) -> None:
        """Read the evaluations up to `iteration` from the evaluation log in `directory` into `rows`.

        Scores that another number of prompts got, as in a run of the pipeline, are not compared.
        """
        rows = [row for row in read_evaluations(directory) if row["iteration"] <= iteration]
        for row in rows:
            if len(row.get(SCORES, ())) != len(self._evaluator.prompts):
                row.pop(SCORES, None)
                row.pop(REWARDED, None)
        self.rows = rows

    def with_evaluations(self, history: list[dict[str, float]]) -> list[dict[str, float]]:
        """Return a run's history; rows of evaluated iterations also have the `eval/*` metrics."""
        evaluations = {row["iteration"]: row for row in self.rows}
        return [row | _metrics(evaluations.get(row["iteration"], {})) for row in history]

    def _evaluate(
        self, evaluator: Evaluator, sft: PolicyEvaluation, earlier: list[dict[str, Any]], action: OnExploitation
    ) -> tuple[dict[str, Any], PolicyEvaluation]:
        return evaluate_iteration(
            self._learner,
            self._shaping,
            self._progress,
            self._reference,
            evaluator,
            sft,
            earlier,
            by_trained_reward=self._by_reward,
            on_exploitation=action,
        )


def _evaluated(row: dict[str, Any], evaluated: PolicyEvaluation, sft: PolicyEvaluation) -> Evaluated:
    sft_columns = {"sft_response": sft.completions, "sft_score": sft.deciding_scores}
    return Evaluated(_metrics(row), evaluated.to_frame().assign(**sft_columns))


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/")}
