"""Evaluation during training: compares the policy with SFT and with its best evaluation so far on held-out prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.comparison import compare_evaluations, conclude
from ppo_rlhf.evaluation.exploitation import evaluated_prompts, exploitation
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, OnExploitation, PolicyEvaluation, ResolvedJudge
from ppo_rlhf.evaluation.reward_holes import attack_share
from ppo_rlhf.evaluation.since_best import since_best
from ppo_rlhf.evaluation.trained_reward import TrainedReward
from ppo_rlhf.passes.halvings import Halving, of_evaluations
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.ppo.experience import Shaping
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.runtime.names import IS_LAST, TRAINING_KL
from ppo_rlhf.runtime.processes import is_main_process

log = logging.getLogger(__name__)


def is_due(progress: Progress) -> bool:
    """Return whether to evaluate now: every `eval_interval` iterations, after the last iteration, and when the user
    requests an evaluation.
    """
    return progress.finished or progress.requests.evaluate or progress.iteration % progress.config.eval_interval == 0


def evaluator_of(
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    scorer: RewardScorer,
    config: PPOConfig,
    trained: SamplingSettings,
    evaluation: EvaluationConfig,
    judge: ResolvedJudge,
    halving: Halving | None = None,
) -> Evaluator:
    """Return the evaluator for evaluations during training: one response to each of the first held-out prompts.

    `trained` holds the sampling settings of training. `evaluation.temperature` may differ from the temperature of
    training. `halving` lasts longer than the evaluator: a smaller batch is kept from one evaluation to the next.
    """
    used = evaluated_prompts(len(prompts), evaluation.iteration_prompts, evaluation.on_exploitation)
    first = prompts.select(range(used))
    return Evaluator(
        tokenizer,
        first,
        scorer,
        judge,
        config,
        sampling=evaluation.sampling(trained),
        seed=evaluation.seed,
        batch_size=evaluation.batch_size,
        halving=of_evaluations() if halving is None else halving,
    )


def evaluate_iteration(
    learner: Learner,
    shaping: Shaping,
    progress: Progress,
    reference_policy: PreTrainedModel,
    evaluator: Evaluator,
    sft: PolicyEvaluation,
    earlier: Sequence[Mapping[str, Any]],
    *,
    by_trained_reward: bool,
    is_greedy: bool = False,
    on_exploitation: OnExploitation = "off",
    holes: Sequence[str] = (),
) -> tuple[dict[str, Any], PolicyEvaluation]:
    """Evaluate the policy with fixed sampling noise; return the row for the run's log and the evaluation.

    `sft` is the evaluation of SFT by the same evaluator. `earlier` is the run's log of evaluations; rows of the current
    and of later iterations, which a resumed run repeats, are ignored. `is_greedy` is True if responses are decoded
    greedily. The KL of greedy responses does not estimate the policy's KL, so the row then also gets the KL of training
    (`TRAINING_KL`). With a judge the row says whether the policy exploits its reward; unless `on_exploitation` is
    `off`, a warning is logged if it newly does. `holes` are attacks that the audit of the reward found: the row says
    how many answers do them, and a warning is logged if the policy does them more often than SFT.
    """
    evaluated = evaluator.evaluate(learner.policy, reference_policy, against=sft, meet=progress.requests.meet)
    metrics = compare_evaluations(evaluated, sft)
    metrics["eval/verdict"] = conclude(evaluated, sft, by_trained_reward=by_trained_reward)["eval/verdict"]
    before = [row for row in earlier if row["iteration"] < progress.policy_iteration]
    trained = TrainedReward(evaluator.scorer, progress.config, shaping.reward_moments, shaping.component_moments)
    row = {"iteration": float(progress.policy_iteration), **metrics, **since_best(evaluated, sft, before, trained)}
    found, text = exploitation(row, before, progress.config, on_exploitation)
    row |= found
    counted, echo = attack_share(holes, evaluator.prompts, evaluated.completions, sft.completions)
    row |= counted
    for line in (text, echo):
        if line is not None and is_main_process():
            log.warning("%s", line)
    if progress.finished and not progress.requests.restore_best:
        row[IS_LAST] = True
    if is_greedy:
        row[TRAINING_KL] = progress.history[-1]["objective/kl"]
    return row, evaluated
