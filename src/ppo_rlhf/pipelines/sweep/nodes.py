"""Nodes of a sweep; the KL study has them, too."""

import logging
from collections.abc import Iterator
from typing import Any

import mlflow
import pandas as pd
from plotly import graph_objects as go

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import project_error
from ppo_rlhf.core.fingerprints import fingerprint
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.comparison import compare_evaluations
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, resolve_judge
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.ppo.nodes import initialise_training_state, load_reward_model, load_sft_policy
from ppo_rlhf.pipelines.sweep.charts import sweep_figure
from ppo_rlhf.pipelines.sweep.child_run import Log, child_runs
from ppo_rlhf.ppo.loop import train
from ppo_rlhf.processes import process_count
from ppo_rlhf.progress import reporting
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.signals import RunInterruptedError
from ppo_rlhf.studies.sweep import MEASURES, Setting, SweepConfig, settings_of, spread_over_seeds, tabulate

log = logging.getLogger(__name__)


def plan_sweep(ppo_config: PPOConfig, reward: RewardConfig, sweep: SweepConfig) -> list[Setting]:
    """List the trainings: each combination of the grid with each seed."""
    return settings_of(sweep, ppo_config, reward)


def train_settings(
    sweep_settings: list[Setting],
    sft_policy: PretrainedHandle,
    prompt_dataset: PromptDataset,
    evaluation_prompt_dataset: PromptDataset,
    reward_model: PretrainedHandle | None,
    pretrained_critic: PretrainedHandle | None,
    evaluation: EvaluationConfig,
    earlier_trainings: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Train and evaluate the policy once for each setting, each as a separate MLflow run below the sweep's.

    A training that fails leaves the others; one that this sweep has finished before it was resumed is left out.

    Yields:
        A row a training: `name`, `setting`, `fingerprint` of its settings, `error` (None if it ended), its `history`
        by iteration, and `results`, the eval/* metrics of its last policy on all held-out prompts. Responses are drawn
        as in training: their KL is the one that the penalty acts on.
    """
    child_run, finished = child_runs(), [row["fingerprint"] for row in earlier_trainings if row["error"] is None]
    for number, each in enumerate(sweep_settings, 1):
        row: dict[str, Any] = {"name": each.name, "setting": each.setting, "fingerprint": fingerprint(each.params)}
        row |= {"error": None, "history": [], "results": {}}
        if row["fingerprint"] in finished:
            log.info("Training %d of %d: %s is finished already.", number, len(sweep_settings), each.name)
            continue
        log.info("Training %d of %d: %s.", number, len(sweep_settings), each.name)
        models = sft_policy, reward_model, pretrained_critic
        try:
            with child_run(each.name, each.params) as track:
                row |= _train(each, *models, prompt_dataset, evaluation_prompt_dataset, evaluation, track)
        except Exception as error:
            if isinstance(error, RunInterruptedError) or process_count() > 1:  # the others may wait for this process
                raise
            log.error("%s failed: %s", each.name, error, exc_info=project_error(error) is None)
            row["error"] = f"{each.name}: {type(error).__name__}: {error}"
        yield row


def summarise_sweep(sweep_trainings: list[dict[str, Any]], sweep_settings: list[Setting]) -> pd.DataFrame:
    """Compare the settings: judge score, win rate, reward and KL, each with its spread over the seeds."""
    table = spread_over_seeds(tabulate_trainings(sweep_trainings, sweep_settings)[1])
    log.info("The sweep, as mean ± standard deviation over seeds:")
    for row in table.to_dict("records"):
        means = [
            f"{text} {row[name]:.3g} ± {row[f'{name}_sd']:.2g}".removesuffix(" ± nan")
            for name, text in MEASURES.items()
            if pd.notna(row.get(name))
        ]
        failed = [f"failed: {row['failed']}"] if row["failed"] else []
        log.info("  %s: %s", row["setting"], ", ".join(means + failed))
    return table


def tabulate_trainings(
    sweep_trainings: list[dict[str, Any]], sweep_settings: list[Setting]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Collect the metrics of every iteration, with its `setting`, and one row a training, which marks a failed one."""
    results = tabulate(sweep_trainings, sweep_settings)
    if failed := int(results["error"].count()):
        run = mlflow.active_run()
        again = "" if run is None else f" `--params resume={run.info.run_id}` trains them again."
        log.warning("%d of %d trainings failed.%s", failed, len(results), again)
    histories = [
        pd.DataFrame(row["history"]).assign(setting=row["setting"]) for row in sweep_trainings if row["history"]
    ]
    return pd.concat(histories, ignore_index=True), results


def plot_sweep(sweep_results: pd.DataFrame) -> go.Figure:
    """Plot judge score, win rate, reward and KL of each setting, with the spread over its seeds."""
    return sweep_figure(sweep_results)


def _train(
    setting: Setting,
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    pretrained_critic: PretrainedHandle | None,
    prompts: PromptDataset,
    held_out: PromptDataset,
    evaluation: EvaluationConfig,
    track: Log,
) -> dict[str, Any]:
    config = setting.ppo
    policy, reference = load_sft_policy(sft_policy, config)
    scorer = load_reward_model(reward_model, sft_policy, setting.reward, config)
    state = initialise_training_state(policy, scorer, prompts, config, pretrained_critic, None)
    with reporting(0, config.num_total_batches, setting.name) as show:

        def tell(metrics: dict[str, float]) -> None:
            track(state.iteration, metrics)
            show(state.iteration, metrics)

        train(state, reference, prompts, scorer, tell)
    given = held_out, scorer, resolve_judge(evaluation), config, state.sampling, evaluation.seed, evaluation.batch_size
    evaluator = Evaluator(state.tokenizer, *given)
    last = compare_evaluations(
        evaluator.evaluate(state.policy, reference, device=state.device),
        evaluator.evaluate(reference, None, device=state.device),
    )
    track(state.iteration, last)
    kl = {
        "kl_controller": config.kl_controller,
        "kl_coef": config.kl_coef,
        "last_kl_coef": state.kl_controller.kl_coef,
        "kl_target": config.kl_target if config.kl_controller == "adaptive" else None,
    }
    return {"history": state.history, "results": kl | {key.removeprefix("eval/"): x for key, x in last.items()}}
