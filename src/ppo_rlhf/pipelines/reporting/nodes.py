"""Nodes of the pipeline `reporting`: plots, the report page, and the result in the terminal."""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow
import pandas as pd
import rich
from plotly import graph_objects as go
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppo_rlhf.advice import in_words
from ppo_rlhf.checkpoints.training_record import settings_of_training
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.evaluation.policy import JUDGE_COLUMN, EvaluationConfig, PolicyEvaluation
from ppo_rlhf.evaluation.reward_holes import holes_of
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.people.win_rate import is_policy_of
from ppo_rlhf.reporting import charts
from ppo_rlhf.reporting.report_page import render_page, training_note
from ppo_rlhf.reporting.token_view import TokenSamples, render_view
from ppo_rlhf.reporting.wording import headline, remarks, say_holes, say_verdict, table_rows
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import handles_of, reward_model_accuracy
from ppo_rlhf.runtime.names import env_option
from ppo_rlhf.runtime.paths import readable_path, running
from ppo_rlhf.runtime.processes import is_main_process


@parameter_group("reporting")
class ReportingConfig:
    """Settings of the report page."""

    title: str = "PPO-RLHF report"
    """Heading of the report page."""
    report_path: str = "data/08_reporting/report.html"
    """Path to which the catalog writes the page. The setting only prints the path."""
    expected_curve: charts.ExpectedCurve | None = None
    """A reference curve, drawn beside the run's own. It may be that of a published run."""


def plot_training(
    training_history: pd.DataFrame, ppo_policy: PretrainedHandle, ppo: PPOConfig, reporting: ReportingConfig
) -> go.Figure:
    """Plot the training curves: reward, KL, entropy, clip fractions, explained variance, losses and others."""
    return charts.training_curves(training_history, settings_of_training(ppo_policy, ppo), reporting.expected_curve)


def plot_scores(sft_evaluation: pd.DataFrame, ppo_evaluation: pd.DataFrame) -> go.Figure:
    """Plot the distributions of SFT's and PPO's scores on held-out prompts."""
    return charts.score_distribution(*_scores(sft_evaluation, ppo_evaluation))


def write_report(
    training_history: pd.DataFrame,
    evaluation_summary: dict[str, Any],
    before_after: pd.DataFrame,
    sample_pairs: pd.DataFrame,
    token_samples: list[TokenSamples],
    sft_evaluation: pd.DataFrame,
    ppo_evaluation: pd.DataFrame,
    human_evaluation: dict[str, Any],
    audited_holes: dict[str, Any],
    ppo_policy: PretrainedHandle,
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    ppo: PPOConfig,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
    reporting: ReportingConfig,
) -> str:
    """Return the report page: result, SFT-PPO table, curves, advice, samples, token view, settings and next steps.

    The report page is one HTML file that contains plotly's script and loads nothing from the network.
    """
    sft_scores, ppo_scores, score_label = _scores(sft_evaluation, ppo_evaluation)
    accuracy = reward_model_accuracy(reward_model, reward)
    curves, ppo = training_history.to_dict("records"), settings_of_training(ppo_policy, ppo)
    panels = charts.panels_of(training_history, ppo, reporting.expected_curve)
    models = [("SFT policy", readable_path(sft_policy.source))]
    models += [("Reward model", readable_path(handle.source)) for handle in handles_of(reward, reward_model).values()]
    is_of_policy = is_policy_of(human_evaluation, ppo_policy)
    by_people = f" By people: {human_evaluation['result']}" if is_of_policy else ""
    return render_page(
        title=reporting.title,
        verdict=say_verdict(evaluation_summary["verdict"]),
        headline=f"{headline(evaluation_summary)}{by_people}",
        win_rate=[evaluation_summary[f"eval/win_rate{end}"] for end in ("", "_low", "_high")],
        remarks=[
            *remarks(evaluation_summary, before_after, accuracy),
            *say_holes(holes_of(audited_holes, reward, reward_model)),
        ],
        measures=table_rows(before_after),
        reward_model_accuracy=accuracy,
        score_label=score_label,
        distribution=charts.score_distribution(sft_scores, ppo_scores, score_label),
        training_note=training_note(training_history),
        panels=[(panel, charts.panel_figure(panel, training_history)) for panel in panels],
        advice=in_words(ppo, curves, command=f"kedro advise{env_option(running.environment)}") if curves else [],
        samples=sample_pairs.to_dict("records"),
        token_view=render_view(token_samples) if token_samples and panels else None,
        settings=_settings(ppo, reward, evaluation),
        next_steps=[("This page", reporting.report_path), *_next_steps(ppo_policy, reporting), *models],
        links=_links((ppo_policy, sft_policy, reward_model), reporting),
    )


def print_summary(
    report: str,
    evaluation_summary: dict[str, Any],
    before_after: pd.DataFrame,
    audited_holes: dict[str, Any],
    ppo_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    reward: RewardConfig,
    reporting: ReportingConfig,
) -> None:
    """Print the table of SFT and PPO, problems in the result, and where to look next.

    The report is an input of this node so that Kedro writes the report page before the node prints the page's path.
    """
    print_result(
        rich.get_console() if is_main_process() else Console(quiet=True),
        f"{say_verdict(evaluation_summary['verdict'])}. {headline(evaluation_summary)}",
        before_after,
        [
            *remarks(evaluation_summary, before_after, reward_model_accuracy(reward_model, reward)),
            *say_holes(holes_of(audited_holes, reward, reward_model)),
        ],
        [("Report", reporting.report_path), *_next_steps(ppo_policy, reporting)],
    )


def print_result(
    console: Console,
    result: str,
    before_after: pd.DataFrame,
    problems: Sequence[str],
    next_steps: Sequence[tuple[str, str]],
) -> None:
    """Print the result. rich prints square brackets as text, and does not break paths, so that they can be copied."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Held-out mean ± standard error")
    for heading in ("SFT", "PPO", "change"):
        table.add_column(heading, justify="right")
    for measure, *values in table_rows(before_after):
        table.add_row(Text(measure.heading), *values)
    console.print("", Text(result, style="bold"), "", Padding(table, (0, 0, 1, 2)), sep="\n")
    for problem in problems:
        console.print(Padding(Text(f"! {problem}", style="yellow"), (0, 0, 1, 2)))
    steps = [Text.assemble(f"  {what:<25}", (where, "cyan")) for what, where in next_steps]
    console.print(Text("Where to look next", style="bold"), *steps, "", sep="\n", soft_wrap=True)


def _scores(sft_evaluation: pd.DataFrame, ppo_evaluation: pd.DataFrame) -> tuple[list[float], list[float], str]:
    """Return SFT's and PPO's scores that decide the win rate, and the label of the scores."""
    sft, ppo = PolicyEvaluation.from_frame(sft_evaluation), PolicyEvaluation.from_frame(ppo_evaluation)
    label = "Judge score" if JUDGE_COLUMN in ppo.judges else "Reward"
    return sft.deciding_scores.tolist(), ppo.deciding_scores.tolist(), label


def _settings(ppo: PPOConfig, reward: RewardConfig, evaluation: EvaluationConfig) -> list[tuple[str, str, str]]:
    """Return (name, value, default) for each setting that is not the default, and for each component of the reward."""
    # `evaluation` takes `seed` and `prompts_path` from the globals, so the report does not list the two as changed
    usual = EvaluationConfig(seed=evaluation.seed, prompts_path=evaluation.prompts_path)
    groups: dict[str, tuple[Any, Any]] = {"ppo": (ppo, PPOConfig()), "evaluation": (evaluation, usual)}
    rows = []
    for group, (given, defaults) in groups.items():
        for field in fields(given):
            value, default = getattr(given, field.name), getattr(defaults, field.name)
            if value != default:
                rows.append((f"{group}.{field.name}", str(value), str(default)))
    for field in fields(reward):
        if field.name != "components" and (value := getattr(reward, field.name)) != field.default:
            rows.append((f"reward.{field.name}", str(value), str(field.default)))
    for component in reward.components:
        source = component.function or component.llm or component.path or "the reward model"
        weight = f", weight {component.weight:g}" if reward.combine == "sum" else ""
        rows.append((f"reward.components: {component.title}", f"{source}{weight}", "–"))
    return rows


def _next_steps(ppo_policy: PretrainedHandle, reporting: ReportingConfig) -> list[tuple[str, str]]:
    run, environment = mlflow.active_run(), env_option(running.environment)
    return [
        ("Aligned policy", readable_path(ppo_policy.source)),
        ("Metrics, plots, models", f"kedro mlflow ui{environment}" + (f", run {run.info.run_id}" if run else "")),
        ("Data flow", f"kedro viz run{environment}"),
        ("Tables", f"{Path(reporting.report_path).parent.as_posix()}/"),
    ]


def _links(models: Sequence[PretrainedHandle | None], reporting: ReportingConfig) -> dict[str, str]:
    """Return the addresses of models of the project and of the report's folder, relative to the page, by shown path."""
    folder = Path(reporting.report_path).parent
    if folder.is_absolute():
        return {}
    local = [
        readable_path(model.source)
        for model in models
        if model is not None and readable_path(model.source) != model.source
    ]
    return {path: quote(Path(os.path.relpath(path, folder)).as_posix()) for path in [*local, f"{folder.as_posix()}/"]}
