"""Wiring of the audit of the reward."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines import ppo
from ppo_rlhf.pipelines.audit_reward import nodes
from ppo_rlhf.pipelines.stages import named, stage


def create_pipeline() -> Pipeline:
    """Wire the audit: PPO's first nodes, then sampling from the SFT policy, attacks on the reward, and the verdict."""
    scored = ["sft_policy", "evaluation_prompt_dataset", "reward_scorer", "ppo_config"]
    preferences = ["raw_preferences", "reward_model", "sft_policy", "reward_scorer"]
    found = ["best_of_n_samples", "reward_attacks"]
    settings = ["reward_model", "params:reward", "params:evaluation"]
    audit = stage(
        "audit_reward",
        named(nodes.sample_responses, [*scored, "params:evaluation", "params:best_of_n"], "best_of_n_samples"),
        named(nodes.attack_reward, ["best_of_n_samples", *scored, "params:audit"], "reward_attacks"),
        named(nodes.order_held_out_pairs, [*preferences, "params:reward", "params:reward_modelling"], "pair_agreement"),
        named(nodes.conclude_audit, [*found, "pair_agreement", *settings], ["reward_audit", "audited_holes"]),
        named(nodes.plot_audit, found, "reward_audit_plot"),
    )
    return Pipeline([ppo.create_preparation(), audit])
