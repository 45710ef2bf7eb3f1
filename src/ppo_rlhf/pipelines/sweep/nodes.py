"""Nodes of a sweep. The KL study uses the same nodes."""

import logging
from typing import Any

import mlflow
import pandas as pd
from plotly import graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from ppo_rlhf.core.errors import TrainingError, project_error
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.best_of_n import best_of_n_curve
from ppo_rlhf.evaluation.comparison import compare_evaluations
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, resolve_judge
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.ppo.nodes import initialise_training_state, load_reward_model, load_sft_policy
from ppo_rlhf.pipelines.sweep import grid
from ppo_rlhf.pipelines.sweep.child_run import Log, child_runs, finished_trainings
from ppo_rlhf.pipelines.sweep.grid import MEASURES, Setting
from ppo_rlhf.ppo.loop import train
from ppo_rlhf.reporting.charts import GREY, style
from ppo_rlhf.runtime.processes import from_main, process_count
from ppo_rlhf.runtime.progress_display import reporting
from ppo_rlhf.runtime.signals import RunInterruptedError

_WITHOUT_EFFECT: dict[str, Any] = {"temperature": None, "samples_per_prompt": 1, "pass_at": []}
"""Settings of `evaluation` that these trainings do not use, with their defaults."""

log = logging.getLogger(__name__)


def train_settings(
    sweep_settings: list[Setting],
    sft_policy: PretrainedHandle,
    prompt_dataset: PromptDataset,
    evaluation_prompt_dataset: PromptDataset,
    reward_model: PretrainedHandle | None,
    pretrained_critic: PretrainedHandle | None,
    evaluation: EvaluationConfig,
) -> list[dict[str, Any]]:
    """Train and evaluate the policy once for each setting, each as a separate MLflow run below the sweep's run.

    If a training fails, the remaining trainings continue. A resumed sweep does not repeat trainings that it finished
    before.

    Returns:
        One row for each training: `setting`, `error` (empty if the training finished), and the eval/* metrics (without
        the prefix) of its last policy on all held-out prompts. The evaluation samples responses as training does, so
        the KL in the table is the KL that the KL penalty acts on.

    Raises:
        TrainingError: All trainings of the sweep failed.
    """
    for name, default in _WITHOUT_EFFECT.items():
        if (given := getattr(evaluation, name)) != default:
            log.warning("evaluation.%s=%s has no effect: each training samples one response a prompt.", name, given)
    child_run, earlier, rows = child_runs(), from_main(finished_trainings()), []
    for number, each in enumerate(sweep_settings, 1):
        error, metrics = "", next((metrics for params, metrics in earlier if params == each.params), {})
        state = "was finished before" if metrics else "starts"
        log.info("Training %d of %d (%s) %s.", number, len(sweep_settings), each.name, state)
        try:
            if not metrics:
                with child_run(each.name, each.params) as track:
                    metrics = _train(
                        each,
                        sft_policy=sft_policy,
                        reward_model=reward_model,
                        pretrained_critic=pretrained_critic,
                        prompts=prompt_dataset,
                        held_out=evaluation_prompt_dataset,
                        evaluation=evaluation,
                        track=track,
                    )
        except Exception as failure:
            # With several processes a failed training ends the sweep, because the other processes may wait for the
            # failed process
            if isinstance(failure, RunInterruptedError) or process_count() > 1:
                raise
            error = f"{each.name}: {type(failure).__name__}: {failure}"
            log.error("Training %s", error, exc_info=project_error(failure) is None)
        results = {name.removeprefix("eval/"): x for name, x in metrics.items() if name.startswith("eval/")}
        rows.append({"setting": each.setting, "error": error, **results})
    if errors := [row["error"] for row in rows if row["error"]]:
        if len(errors) == len(rows):
            raise TrainingError(f"all {len(rows)} trainings failed; {errors[0]}")
        run = mlflow.active_run()
        again = "" if run is None else f" `--params resume={run.info.run_id}` repeats the failed trainings."
        log.warning("%d of %d trainings failed.%s", len(errors), len(rows), again)
    return rows


def compare_settings(
    sweep_trainings: list[dict[str, Any]], best_of_n_samples: pd.DataFrame | None = None
) -> tuple[pd.DataFrame, go.Figure]:
    """Return a table and a figure of judge score, win rate, reward and KL of each setting, with the spread over
    seeds.
    """
    table = grid.compare_settings(sweep_trainings)
    log.info("Mean ± standard deviation over seeds of each setting:")
    for row in table.to_dict("records"):
        means = [f"{text} {row[name]:.3g} ± {row[f'{name}_sd']:.2g}" for name, text in MEASURES.items() if name in row]
        failed = [f"failed: {row['failed']}"] if row["failed"] else []
        log.info(
            "  %s: %s", row["setting"], ", ".join((means if row["trainings"] else []) + failed).replace(" ± nan", "")
        )
    return table, _frontier_figure(table, None if best_of_n_samples is None else best_of_n_curve(best_of_n_samples))


def _train(
    setting: Setting,
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    pretrained_critic: PretrainedHandle | None,
    prompts: PromptDataset,
    held_out: PromptDataset,
    evaluation: EvaluationConfig,
    track: Log,
) -> dict[str, float]:
    config = setting.ppo
    policy, reference = load_sft_policy(sft_policy, config)
    scorer = load_reward_model(reward_model, sft_policy, setting.reward, config)
    state = initialise_training_state(
        policy, reference, scorer, prompts, config, pretrained_critic=pretrained_critic, resume_checkpoint=None
    )
    with reporting(0, config.num_total_batches, setting.name) as show:

        def report(metrics: dict[str, float]) -> None:
            track(state.progress.iteration, metrics)
            show(state.progress.iteration, metrics)

        train(state, reference, prompts, scorer, report)
    evaluator = Evaluator(
        tokenizer=state.sampler.tokenizer,
        prompts=held_out,
        scorer=scorer,
        judge=resolve_judge(evaluation),
        config=config,
        sampling=state.sampler.settings,
        seed=evaluation.seed,
        batch_size=evaluation.batch_size,
    )
    sft = evaluator.evaluate(reference, None, device=state.learner.device)
    last = compare_evaluations(
        evaluator.evaluate(state.learner.policy, reference, device=state.learner.device, against=sft), sft
    )
    track(state.progress.iteration, last)
    return last


def _frontier_figure(table: pd.DataFrame, best_of_n: pd.DataFrame | None) -> go.Figure:
    """Return plots of judge score, win rate and reward over KL: a point for each setting of the sweep, and the curve of
    best-of-n.

    The error bars of the plots are standard deviations over seeds.
    """
    shown = {name: title.capitalize() for name, title in MEASURES.items() if name in table and name != "kl"}
    figure = make_subplots(1, len(shown), subplot_titles=list(shown.values()), horizontal_spacing=0.08)
    table = table.dropna(subset="kl").fillna(0.0)
    colours = sample_colorscale("Turbo", [(i + 0.5) / len(table) for i in range(len(table))])
    for place, name in enumerate(shown, 1):
        where = {"row": 1, "col": place, "showlegend": place == 1}
        if best_of_n is not None and name in best_of_n:
            curve = {"x": best_of_n["kl"].tolist(), "y": best_of_n[name].tolist(), "text": best_of_n["n"].tolist()}
            figure.add_scatter(**curve, name="best-of-n", legendgroup="best-of-n", line_color=GREY, **where)
        for row, colour in zip(table.to_dict("records"), colours, strict=True):
            figure.add_scatter(
                x=[row["kl"]],
                y=[row[name]],
                error_x={"array": [row["kl_sd"]]},
                error_y={"array": [row[f"{name}_sd"]]},
                mode="markers",
                marker={"size": 9, "color": colour},
                name=row["setting"],
                legendgroup=row["setting"],
                **where,
            )
    style(figure, height=380 + 8 * len(table), showlegend=True)
    figure.update_layout(margin={"t": 40, "b": 40}, legend={"y": -0.25, "yanchor": "top"})
    figure.update_annotations(font_size=12)
    figure.update_xaxes(title_text="KL from SFT (nats a response)", rangemode="tozero")
    return figure
