"""Wiring of the KL study: no grid of `sweep`, which names no adaptive controller and samples no best of n."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines import audit_reward, ppo, sweep
from ppo_rlhf.pipelines.kl_study.grid import plan_study
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Wire the study: a sweep over KL penalties, whose figure also shows best-of-n of the SFT policy."""
    plan = named(plan_study, ["ppo_config", "params:reward", "params:kl_study"], "sweep_settings")
    trained = sweep.create_comparison(["kl_study_results", "kl_study_frontier_plot"], "best_of_n_samples")
    best_of_n = audit_reward.create_pipeline().only_nodes("audit_reward.sample_responses")
    return Pipeline([ppo.create_preparation(), best_of_n, stage("kl_study", plan, *trained)])
