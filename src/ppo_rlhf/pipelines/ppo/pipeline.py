"""The PPO pipeline."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines.ppo import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Wire PPO. The nodes with the tag `iteration` form one iteration, which the LoopRunner repeats.

    ```
    configure_ppo, prepare_prompts, load_sft_policy, load_reward_model,
    initialise_training_state, read_audit, evaluate_reference_policy                              run once
      ┌ generate_rollouts → score_responses → shape_rewards → estimate_advantages
      │        → show_tokens, list_completions
      │        → optimise_policy → evaluate_iteration ┐                                           tag: iteration
      └── training_state  ◄──  next_training_state ◄──┘
    export_policy, export_critic, summarise_training                                              run once
    ```
    """
    evaluated = ["evaluation_prompt_dataset", "reward_scorer"]
    sampled = ["training_state", "reference_policy", "prompt_dataset"]
    models = ["policy", "reference_policy", "reward_scorer"]
    exported = ["next_training_state", "reward_model", "params:reward", "params:evaluation"]
    before = ["reference_evaluation", "earlier_evaluations", "reward_holes"]
    once_before = [
        named(nodes.configure_ppo, "params:ppo", "ppo_config"),
        named(
            nodes.prepare_prompts,
            ["raw_prompts", "raw_evaluation_prompts", "sft_policy", "ppo_config", "params:prompts"],
            {
                "prompt_dataset": "prompt_dataset",
                "evaluation_prompt_dataset": "evaluation_prompt_dataset",
                "training_prompts": "training_prompts",
                "evaluation_prompts": "evaluation_prompts",
            },
        ),
        named(nodes.load_sft_policy, ["sft_policy", "ppo_config"], ["policy", "reference_policy"]),
        named(nodes.load_reward_model, ["reward_model", "sft_policy", "params:reward", "ppo_config"], "reward_scorer"),
        named(
            nodes.initialise_training_state,
            [*models, "prompt_dataset", "ppo_config", "pretrained_critic", "resume_checkpoint"],
            "training_state",
        ),
        named(nodes.read_audit, ["audited_holes", "reward_model", "params:reward"], "reward_holes"),
        named(
            nodes.evaluate_reference_policy,
            ["policy", "reference_policy", *evaluated, "ppo_config", "params:evaluation"],
            "reference_evaluation",
        ),
    ]
    iteration = [
        named(nodes.generate_rollouts, [*sampled, "reward_scorer"], "rollouts"),
        named(nodes.score_responses, ["rollouts", "reward_scorer", "training_state"], "scores"),
        named(nodes.shape_rewards, ["rollouts", "scores", "training_state"], "shaped_rewards"),
        named(nodes.estimate_advantages, ["rollouts", "scores", "shaped_rewards", "training_state"], "experience"),
        named(nodes.show_tokens, ["training_state", "experience"], "token_samples"),
        named(nodes.list_completions, ["training_state", "experience"], "completions"),
        named(
            nodes.optimise_policy,
            ["training_state", "experience", "reference_policy"],
            {"next_training_state": "next_training_state", "ppo_metrics": "ppo_metrics", "checkpoint": "checkpoint"},
        ),
        named(
            nodes.evaluate_iteration,
            ["next_training_state", "reference_policy", *before, *evaluated, "params:reward", "params:evaluation"],
            "evaluation_metrics",
        ),
    ]
    once_after = [
        named(nodes.export_policy, exported, "ppo_policy"),
        named(nodes.export_critic, exported, "ppo_critic"),
        named(nodes.summarise_training, ["next_training_state", "evaluation_metrics"], "training_history"),
    ]
    return stage("ppo", *once_before, *Pipeline(iteration, tags="iteration").nodes, *once_after)


def create_preparation() -> Pipeline:
    """Return the nodes that check PPO's settings and load prompts and reward, for audits, sweeps and critic
    pretraining.
    """
    return create_pipeline().only_nodes("ppo.configure_ppo", "ppo.prepare_prompts", "ppo.load_reward_model")
