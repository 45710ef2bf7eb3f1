"""sft, ppo, evaluation, all of them, and a sweep."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.runner import ITERATION_TAG
from toy_ppo import nodes


def register_pipelines() -> dict[str, Pipeline]:
    sft = Pipeline([Node(nodes.train_sft, "params:prompts", ["sft_policy", "sft_metrics"], name="train_sft")])
    once = [
        Node(nodes.configure_ppo, "params:ppo", "ppo_config", name="configure_ppo"),
        Node(
            nodes.read_prompts, ["raw_prompts", "params:prompts", "params:reward"], "prompt_texts", name="read_prompts"
        ),
        Node(
            nodes.initialise_training_state,
            ["ppo_config", "prompt_texts"],
            "training_state",
            name="initialise_training_state",
        ),
        Node(nodes.export_policy, "next_training_state", "ppo_policy", name="export_policy"),
    ]
    iteration = [
        Node(nodes.generate_rollouts, ["training_state", "prompt_texts"], "rollouts", name="generate_rollouts"),
        Node(
            nodes.score_responses,
            ["rollouts", "training_state"],
            {"scores": "scores", "kl": "shaped_rewards"},
            name="score_responses",
        ),
        Node(
            nodes.estimate_advantages,
            ["rollouts", "scores", "shaped_rewards", "ppo_config"],
            "experience",
            name="estimate_advantages",
        ),
        Node(
            nodes.list_completions,
            ["rollouts", "scores", "shaped_rewards", "ppo_config"],
            "completions",
            name="list_completions",
        ),
        Node(
            nodes.optimise_policy,
            ["training_state", "experience"],
            {"state": "next_training_state", "metrics": "ppo_metrics", "checkpoint": "checkpoint"},
            name="optimise_policy",
        ),
        Node(nodes.evaluate_iteration, "next_training_state", "evaluation_metrics", name="evaluate_iteration"),
    ]
    ppo = [*once, *Pipeline(iteration, tags=ITERATION_TAG).nodes]
    evaluation = Pipeline([Node(nodes.compare_policies, "ppo_policy", "evaluation_summary", name="compare_policies")])
    stages = {
        "supervised_finetuning": _boxed(sft, "supervised_finetuning"),
        "ppo": _boxed(Pipeline(ppo), "ppo"),
        "evaluation": _boxed(evaluation, "evaluation"),
    }
    align = stages["ppo"] + stages["evaluation"]
    sweep = Pipeline([Node(nodes.train_settings, "params:ppo", "sweep_trainings", name="train_settings")])
    return {**stages, "align": align, "sweep": sweep, "__default__": stages["supervised_finetuning"] + align}


def _boxed(pipeline: Pipeline, namespace: str) -> Pipeline:
    return Pipeline(pipeline.nodes, namespace=namespace, prefix_datasets_with_namespace=False)
