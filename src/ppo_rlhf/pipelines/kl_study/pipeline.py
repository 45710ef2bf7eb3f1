"""Wiring of the KL study."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines import audit_reward, ppo, sweep
from ppo_rlhf.pipelines.kl_study import nodes
from ppo_rlhf.pipelines.sweep.nodes import tabulate_trainings
from ppo_rlhf.pipelines.wiring import named


def create_pipeline() -> Pipeline:
    """Wire the study, a sweep of its own: PPO's first nodes, best-of-n of the SFT policy, the trainings, the findings.

    ```
    ppo.configure_ppo, ppo.prepare_prompts, ppo.load_reward_model, audit_reward.sample_responses
    ppo_config, reward, kl_study → plan_study → sweep_settings → train_settings → sweep_trainings
    sweep_trainings → tabulate_trainings → kl_study_history, kl_study_results
    history → plot_kl;  results, best_of_n_samples → plot_frontier, conclude_study
    ```
    """
    tables, found = ["kl_study_history", "kl_study_results"], ["kl_study_results", "best_of_n_samples"]
    own = [
        named(nodes.plan_study, ["ppo_config", "params:reward", "params:kl_study"], "sweep_settings"),
        sweep.create_training(),
        named(tabulate_trainings, ["sweep_trainings", "sweep_settings"], tables),
        named(nodes.plot_kl, tables, "kl_study_kl_plot"),
        named(nodes.plot_frontier, found, "kl_study_frontier_plot"),
        named(nodes.conclude_study, found, "kl_study_summary"),
    ]
    best_of_n = audit_reward.create_pipeline().only_nodes("audit_reward.sample_responses")
    study = Pipeline(own, namespace="kl_study", prefix_datasets_with_namespace=False)
    return Pipeline([ppo.create_preparation(), best_of_n, study])
