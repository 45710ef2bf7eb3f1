"""Nodes of the KL study."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pandas as pd
from plotly import graph_objects as go
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.best_of_n import best_of_n_curve
from ppo_rlhf.evaluation.comparison import compare_evaluations
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, PolicyEvaluation, resolve_judge
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.kl_study.charts import frontier_figure, kl_figure
from ppo_rlhf.pipelines.kl_study.child_run import Log, child_runs
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.progress import reporting
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.studies.kl_study import KLStudyConfig, findings, settings_of, train_setting

log = logging.getLogger(__name__)


def train_settings(
    sft_policy: PretrainedHandle,
    prompt_dataset: PromptDataset,
    evaluation_prompt_dataset: PromptDataset,
    reward_scorer: RewardScorer,
    pretrained_critic: PretrainedHandle | None,
    ppo_config: PPOConfig,
    evaluation: EvaluationConfig,
    kl_study: KLStudyConfig,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train and evaluate the policy once for each KL penalty, each as a separate MLflow run below the study's.

    Returns:
        `kl_study_history`: the metrics of every iteration, with its `setting`.
        `kl_study_results`: one row a training, with the eval/* metrics of its last policy on all held-out prompts.
        Responses are drawn as in training: their KL is the one that the penalty acts on.
    """
    sft: PolicyEvaluation | None = None
    histories, results, child_run = [], [], child_runs()
    settings = settings_of(kl_study, ppo_config)
    for number, (name, config) in enumerate(((s.name, s.config) for s in settings), 1):
        log.info("Training %d of %d: %s.", number, len(settings), name)
        with child_run(name, config) as track, reporting(0, config.num_total_batches, name) as show:
            state, reference = train_setting(
                config, sft_policy, prompt_dataset, reward_scorer, pretrained_critic, _each_iteration(track, show)
            )
            rest = (state, evaluation_prompt_dataset, reward_scorer, evaluation)
            sft = sft or _evaluate(reference, None, *rest)
            last = compare_evaluations(_evaluate(state.policy, reference, *rest), sft)
            track(state.iteration, last)
        histories.append(pd.DataFrame(state.history).assign(setting=name))
        results.append(
            {
                "setting": name,
                "kl_controller": config.kl_controller,
                "kl_coef": config.kl_coef,
                "last_kl_coef": state.kl_controller.kl_coef,
                "kl_target": config.kl_target if config.kl_controller == "adaptive" else None,
                **{key.removeprefix("eval/"): value for key, value in last.items()},
            }
        )
        del state, reference, rest  # before the next ones are loaded
    return pd.concat(histories, ignore_index=True), pd.DataFrame(results)


def plot_kl(kl_study_history: pd.DataFrame, kl_study_results: pd.DataFrame) -> go.Figure:
    """Plot the KL over iterations, a line for each training, with the adaptive controller's target."""
    return kl_figure(kl_study_history, kl_study_results)


def plot_frontier(kl_study_results: pd.DataFrame, best_of_n_samples: pd.DataFrame) -> go.Figure:
    """Plot reward and judge score over the KL from SFT that they cost, for each training and for best-of-n."""
    return frontier_figure(kl_study_results, best_of_n_curve(best_of_n_samples))


def conclude_study(kl_study_results: pd.DataFrame, best_of_n_samples: pd.DataFrame) -> dict[str, Any]:
    """Say what was found: the KL by beta, whether the adaptive controller met its target, PPO against best-of-n."""
    metrics, lines = findings(kl_study_results, best_of_n_curve(best_of_n_samples))
    log.info("The KL study found:")
    for line in lines:
        log.info("  %s", line)
    return {"findings": lines, "metrics": metrics}


def _each_iteration(*listeners: Log) -> Callable[[dict[str, float]], None]:
    """Return a function that tells each listener an iteration's metrics, with its number."""
    numbers = itertools.count(1)

    def tell(metrics: dict[str, float]) -> None:
        iteration = next(numbers)
        for listener in listeners:
            listener(iteration, metrics)

    return tell


def _evaluate(
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    state: TrainingState,
    prompts: PromptDataset,
    scorer: RewardScorer,
    evaluation: EvaluationConfig,
) -> PolicyEvaluation:
    given = prompts, scorer, resolve_judge(evaluation), state.config, state.sampling
    evaluator = Evaluator(state.tokenizer, *given, evaluation.seed, evaluation.batch_size)
    return evaluator.evaluate(policy, reference, device=state.device)
