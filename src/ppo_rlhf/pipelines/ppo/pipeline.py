"""The PPO pipeline."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines.ppo import nodes


def create_pipeline() -> Pipeline:
    """Wire PPO. The nodes tagged `iteration` are one iteration; the LoopRunner repeats them.

    ```
    configure_ppo, prepare_prompts, load_sft_policy, load_reward_model,
    initialise_training_state, evaluate_reference_policy                                          run once
      ┌ generate_rollouts → score_responses → shape_rewards → estimate_advantages
      │        → show_tokens
      │        → optimise_policy → evaluate_iteration ┐                                           tag: iteration
      └── training_state  ◄──  next_training_state ◄──┘
    export_policy, summarise_training                                                             run once
    ```
    """
    before = [
        Node(nodes.configure_ppo, {"ppo": "params:ppo"}, "ppo_config", name="configure_ppo"),
        Node(
            nodes.prepare_prompts,
            {
                **_same("raw_prompts", "raw_evaluation_prompts", "sft_policy", "ppo_config"),
                "prompts": "params:prompts",
            },
            _same("prompt_dataset", "evaluation_prompt_dataset", "training_prompts", "evaluation_prompts"),
            name="prepare_prompts",
        ),
        Node(
            nodes.load_sft_policy,
            _same("sft_policy", "ppo_config"),
            _same("policy", "reference_policy"),
            name="load_sft_policy",
        ),
        Node(
            nodes.load_reward_model,
            {**_same("reward_model", "sft_policy", "ppo_config"), "reward": "params:reward"},
            "reward_scorer",
            name="load_reward_model",
        ),
        Node(
            nodes.initialise_training_state,
            _same("policy", "reward_scorer", "prompt_dataset", "ppo_config", "pretrained_critic", "resume_checkpoint"),
            "training_state",
            name="initialise_training_state",
        ),
        Node(
            nodes.evaluate_reference_policy,
            {
                **_same("policy", "reference_policy", "evaluation_prompt_dataset", "reward_scorer", "ppo_config"),
                "evaluation": "params:evaluation",
            },
            "reference_evaluation",
            name="evaluate_reference_policy",
        ),
    ]
    iteration = [
        Node(
            nodes.generate_rollouts,
            _same("training_state", "reference_policy", "prompt_dataset"),
            "rollouts",
            name="generate_rollouts",
        ),
        Node(
            nodes.score_responses,
            _same("rollouts", "reward_scorer", "training_state"),
            "scores",
            name="score_responses",
        ),
        Node(
            nodes.shape_rewards,
            _same("rollouts", "scores", "training_state"),
            "shaped_rewards",
            name="shape_rewards",
        ),
        Node(
            nodes.estimate_advantages,
            {**_same("rollouts", "scores", "shaped_rewards"), "ppo": "params:ppo"},
            "experience",
            name="estimate_advantages",
        ),
        Node(
            nodes.show_tokens,
            _same("training_state", "experience"),
            "token_samples",
            name="show_tokens",
        ),
        Node(
            nodes.optimise_policy,
            _same("training_state", "experience"),
            _same("next_training_state", "ppo_metrics", "checkpoint"),
            name="optimise_policy",
        ),
        Node(
            nodes.evaluate_iteration,
            {
                **_same(
                    "next_training_state",
                    "reference_policy",
                    "reference_evaluation",
                    "earlier_evaluations",
                    "evaluation_prompt_dataset",
                    "reward_scorer",
                ),
                "reward": "params:reward",
                "evaluation": "params:evaluation",
            },
            "evaluation_metrics",
            name="evaluate_iteration",
        ),
    ]
    after = [
        Node(
            nodes.export_policy,
            {
                **_same("next_training_state", "reward_model"),
                "reward": "params:reward",
                "evaluation": "params:evaluation",
            },
            "ppo_policy",
            name="export_policy",
        ),
        Node(
            nodes.summarise_training,
            _same("next_training_state", "evaluation_metrics"),
            "training_history",
            name="summarise_training",
        ),
    ]
    return Pipeline(
        [*before, *Pipeline(iteration, tags="iteration").nodes, *after],
        namespace="ppo",
        prefix_datasets_with_namespace=False,
    )


def create_preparation() -> Pipeline:
    """Return the nodes that check PPO's settings and load prompts and reward: the studies begin with them, too."""
    return create_pipeline().only_nodes("ppo.configure_ppo", "ppo.prepare_prompts", "ppo.load_reward_model")


def _same(*names: str) -> dict[str, str]:
    """Return a mapping of each argument to the dataset of its own name."""
    return {name: name for name in names}
