"""Nodes of the pipeline `reporting`: what a run did, as plots, as a page and in the terminal."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from plotly import graph_objects as go
from rich.console import Console

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import settings_group
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.reporting.figures import score_distribution, training_curves
from ppo_rlhf.pipelines.reporting.page import Report, render_page
from ppo_rlhf.pipelines.reporting.remarks import headline, remarks
from ppo_rlhf.pipelines.reporting.terminal import print_result
from ppo_rlhf.ppo.comparison import Decided
from ppo_rlhf.ppo.evaluation import EvaluationConfig, PolicyEvaluation
from ppo_rlhf.rewards.scorers import RewardConfig
from ppo_rlhf.training.tuning import advise, in_words

_DECIDED_ELSEWHERE = ("seed", "prompts_path")  # of the evaluation group: filled from globals


@settings_group("reporting")
class ReportingConfig:
    """How the report is titled and where it lies."""

    title: str = "PPO-RLHF report"
    """Heading of the page."""
    report_path: str = "data/08_reporting/report.html"
    """Where the catalog writes the page; only printed."""


def plot_training(training_history: pd.DataFrame) -> go.Figure:
    """Plot the curves of training: reward, KL, entropy, clip fractions, explained variance, losses and more."""
    return training_curves(training_history)


def plot_scores(sft_evaluation: pd.DataFrame, ppo_evaluation: pd.DataFrame) -> go.Figure:
    """Plot how the held-out scores of SFT and PPO are distributed."""
    sft, policy = PolicyEvaluation.from_frame(sft_evaluation), PolicyEvaluation.from_frame(ppo_evaluation)
    return score_distribution(sft.deciding_scores.tolist(), policy.deciding_scores.tolist(), _score_label(policy))


def write_report(
    training_history: pd.DataFrame,
    evaluation_summary: dict[str, Any],
    before_after: pd.DataFrame,
    sample_pairs: pd.DataFrame,
    sft_evaluation: pd.DataFrame,
    ppo_evaluation: pd.DataFrame,
    ppo_policy: PretrainedHandle,
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    ppo: PPOConfig,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
    reporting: ReportingConfig,
) -> str:
    """Write the report: result, table before and after, curves, advice, samples, settings, where to look next.

    Returns:
        One HTML page that needs nothing else: no script, no network.
    """
    sft, policy = PolicyEvaluation.from_frame(sft_evaluation), PolicyEvaluation.from_frame(ppo_evaluation)
    curves = training_history.to_dict("records")
    models = [("SFT policy", _shortened(sft_policy.source))]
    if reward.needs_model and reward_model is not None:
        models.append(("Reward model", _shortened(reward_model.source)))
    return render_page(
        Report(
            title=reporting.title,
            summary=evaluation_summary,
            prompts=evaluation_summary["prompts"],
            decided_by=evaluation_summary["decided_by"],
            before_after=before_after,
            history=training_history,
            sample_pairs=sample_pairs,
            sft_scores=sft.deciding_scores.tolist(),
            ppo_scores=policy.deciding_scores.tolist(),
            score_label=_score_label(policy),
            settings=_settings(ppo, reward, evaluation),
            next_steps=[("This page", reporting.report_path), *_next_steps(ppo_policy, reporting), *models],
            reward_model_accuracy=_reward_model_accuracy(reward_model, reward),
            advice=in_words(ppo, advise(ppo, curves), curves),
        )
    )


def print_summary(
    report: str,
    evaluation_summary: dict[str, Any],
    before_after: pd.DataFrame,
    sft_evaluation: pd.DataFrame,
    ppo_evaluation: pd.DataFrame,
    ppo_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    reward: RewardConfig,
    reporting: ReportingConfig,
) -> None:
    """Print the table before and after, what looks off, and where to look next.

    The report is an input so that the page is written before its path is printed.
    """
    sft, policy = PolicyEvaluation.from_frame(sft_evaluation), PolicyEvaluation.from_frame(ppo_evaluation)
    decided = Decided.of(policy.deciding_scores.tolist(), sft.deciding_scores.tolist())
    print_result(
        Console(),
        headline(evaluation_summary, evaluation_summary["prompts"], evaluation_summary["decided_by"]),
        before_after,
        remarks(evaluation_summary, decided, before_after, _reward_model_accuracy(reward_model, reward)),
        [("Report", reporting.report_path), *_next_steps(ppo_policy, reporting)],
    )


def _score_label(evaluation: PolicyEvaluation) -> str:
    return "Reward" if evaluation.judge_scores is None else "Judge score"


def _reward_model_accuracy(reward_model: PretrainedHandle | None, reward: RewardConfig) -> float | None:
    """Return the accuracy on held-out pairs that reward training left in the model's configuration.

    It lies with the model, not in a file of the last training run: so it is never that of another model.
    """
    if reward_model is None or not reward.needs_model:
        return None
    accuracy = getattr(reward_model.config(), "held_out_accuracy", None)
    return None if accuracy is None else float(accuracy)


def _settings(ppo: PPOConfig, reward: RewardConfig, evaluation: EvaluationConfig) -> list[tuple[str, str, str]]:
    """Return (name, value, default) of what is not at its default, and the reward's components."""
    rows = [(f"ppo.{name}", str(value), str(_defaults(PPOConfig)[name])) for name, value in ppo.not_default().items()]
    for component in reward.components:
        what = component.function or "the reward model"
        rows.append((f"reward.components: {component.title}", f"{what}, weight {component.weight:g}", "–"))
    rows += [
        (f"evaluation.{name}", str(getattr(evaluation, name)), str(default))
        for name, default in _defaults(EvaluationConfig).items()
        if name not in _DECIDED_ELSEWHERE and getattr(evaluation, name) != default
    ]
    return rows


def _defaults(group: type[Any]) -> Mapping[str, Any]:
    plain = group()
    return {field.name: getattr(plain, field.name) for field in fields(plain)}


def _next_steps(ppo_policy: PretrainedHandle, reporting: ReportingConfig) -> list[tuple[str, str]]:
    run = mlflow.active_run()
    return [
        ("Aligned policy", _shortened(ppo_policy.source)),
        ("Metrics, plots, models", "kedro mlflow ui" + (f", run {run.info.run_id}" if run else "")),
        ("The flow with its data", "kedro viz run"),
        ("Tables", f"{Path(reporting.report_path).parent.as_posix()}/"),
    ]


def _shortened(path: str) -> str:
    """Return a path below the working directory relative to it; any other, and a hub id, as it is."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
