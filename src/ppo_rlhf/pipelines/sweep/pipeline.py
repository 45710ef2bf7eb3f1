"""Wiring of a sweep."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines import ppo
from ppo_rlhf.pipelines.sweep import nodes
from ppo_rlhf.pipelines.wiring import named


def create_pipeline() -> Pipeline:
    """Wire the sweep: PPO's own first nodes, the trainings, then their table and figure.

    ```
    ppo.configure_ppo, ppo.prepare_prompts
    ppo_config, reward, sweep → plan_sweep → sweep_settings → train_settings → sweep_trainings
    sweep_trainings → summarise_sweep → sweep_results → plot_sweep → sweep_plot
    ```
    """
    plan = named(nodes.plan_sweep, ["ppo_config", "params:reward", "params:sweep"], "sweep_settings")
    shown = [
        named(nodes.summarise_sweep, ["sweep_trainings", "sweep_settings"], "sweep_results"),
        named(nodes.plot_sweep, "sweep_results", "sweep_plot"),
    ]
    own = Pipeline([plan, create_training(), *shown], namespace="sweep", prefix_datasets_with_namespace=False)
    return Pipeline([ppo.create_preparation().only_nodes("ppo.configure_ppo", "ppo.prepare_prompts"), own])


def create_training() -> Node:
    """Return the node that trains a list of settings."""
    models = ["sft_policy", "prompt_dataset", "evaluation_prompt_dataset", "reward_model", "pretrained_critic"]
    inputs = ["sweep_settings", *models, "params:evaluation", "earlier_trainings"]
    return named(nodes.train_settings, inputs, "sweep_trainings")
