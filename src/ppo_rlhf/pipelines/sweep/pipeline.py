"""Wiring of a sweep."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines import ppo
from ppo_rlhf.pipelines.stages import named, stage
from ppo_rlhf.pipelines.sweep import nodes
from ppo_rlhf.pipelines.sweep.grid import plan_sweep
from ppo_rlhf.runtime.names import TRAININGS


def create_pipeline() -> Pipeline:
    """Wire the sweep: PPO's first nodes, then the trainings, then the table and the figure of results."""
    plan = named(plan_sweep, ["ppo_config", "params:reward", "params:sweep"], "sweep_settings")
    own = stage("sweep", plan, *create_comparison(["sweep_results", "sweep_plot"]))
    return Pipeline([ppo.create_preparation().only_nodes("ppo.configure_ppo", "ppo.prepare_prompts"), own])


def create_comparison(table_and_figure: list[str], *best_of_n: str) -> list[Node]:
    """Return the nodes that train each of `sweep_settings` and compare the results."""
    models = ["sft_policy", "prompt_dataset", "evaluation_prompt_dataset", "reward_model", "pretrained_critic"]
    return [
        named(nodes.train_settings, ["sweep_settings", *models, "params:evaluation"], TRAININGS),
        named(nodes.compare_settings, [TRAININGS, *best_of_n], table_and_figure),
    ]
