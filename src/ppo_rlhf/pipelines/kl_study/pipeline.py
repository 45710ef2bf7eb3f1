"""Wiring of the KL study."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines import audit_reward, ppo, sweep
from ppo_rlhf.pipelines.wiring import named
from ppo_rlhf.studies.kl_study import plan_study


def create_pipeline() -> Pipeline:
    """Wire the study, a sweep of its own trainings: its figure shows best-of-n of the SFT policy, too.

    ```
    ppo.configure_ppo, ppo.prepare_prompts, ppo.load_reward_model, audit_reward.sample_responses
    ppo_config, reward, kl_study → plan_study → sweep_settings → train_settings → sweep_trainings
    sweep_trainings, best_of_n_samples → compare_settings → kl_study_results, kl_study_frontier_plot
    ```
    """
    plan = named(plan_study, ["ppo_config", "params:reward", "params:kl_study"], "sweep_settings")
    trained = sweep.create_comparison(["kl_study_results", "kl_study_frontier_plot"], "best_of_n_samples")
    best_of_n = audit_reward.create_pipeline().only_nodes("audit_reward.sample_responses")
    study = Pipeline([plan, *trained], namespace="kl_study", prefix_datasets_with_namespace=False)
    return Pipeline([ppo.create_preparation(), best_of_n, study])
