"""Wiring of the KL study."""

from kedro.pipeline import Node, Pipeline

from ppo_rlhf.pipelines import audit_reward, ppo
from ppo_rlhf.pipelines.kl_study import nodes


def create_pipeline() -> Pipeline:
    """Wire the study: PPO's own first nodes, best-of-n of the SFT policy, then the trainings and what they show.

    ```
    ppo.configure_ppo, ppo.prepare_prompts, ppo.load_reward_model, audit_reward.sample_responses
    sft_policy, prompts, reward → train_settings → kl_study_history, kl_study_results
    history → plot_kl;  results, best_of_n_samples → plot_frontier, conclude_study
    ```
    """
    prompts = ["prompt_dataset", "evaluation_prompt_dataset"]
    trained, found = ["kl_study_history", "kl_study_results"], ["kl_study_results", "best_of_n_samples"]
    settings = ["ppo_config", "params:evaluation", "params:kl_study"]
    own = [
        Node(
            nodes.train_settings,
            ["sft_policy", *prompts, "reward_scorer", "pretrained_critic", *settings],
            trained,
            name="train_settings",
        ),
        Node(nodes.plot_kl, trained, "kl_study_kl_plot", name="plot_kl"),
        Node(nodes.plot_frontier, found, "kl_study_frontier_plot", name="plot_frontier"),
        Node(nodes.conclude_study, found, "kl_study_summary", name="conclude_study"),
    ]
    best_of_n = audit_reward.create_pipeline().only_nodes("audit_reward.sample_responses")
    study = Pipeline(own, namespace="kl_study", prefix_datasets_with_namespace=False)
    return Pipeline([ppo.create_preparation(), best_of_n, study])
