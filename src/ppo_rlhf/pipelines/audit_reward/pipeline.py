"""Wiring of the audit of the reward."""

from kedro.pipeline import Pipeline

from ppo_rlhf.pipelines import ppo
from ppo_rlhf.pipelines.audit_reward import nodes
from ppo_rlhf.pipelines.wiring import named


def create_pipeline() -> Pipeline:
    """Wire the audit: PPO's own first nodes, then samples of the SFT policy and what the reward makes of them.

    ```
    ppo.configure_ppo, ppo.prepare_prompts, ppo.load_reward_model
    sft_policy, held-out prompts, reward → sample_responses → best_of_n_samples → probe_reward → reward_probes
    raw_preferences (if there are any), reward → order_held_out_pairs → pair_agreement
    best_of_n_samples, reward_probes, pair_agreement → conclude_audit → reward_audit;  plot_audit → reward_audit_plot
    ```
    """
    scored = ["sft_policy", "evaluation_prompt_dataset", "reward_scorer", "ppo_config"]
    preferences = ["raw_preferences", "reward_model", "sft_policy", "reward_scorer"]
    found = ["best_of_n_samples", "reward_probes"]
    own = [
        named(nodes.sample_responses, [*scored, "params:evaluation", "params:best_of_n"], "best_of_n_samples"),
        named(nodes.probe_reward, ["best_of_n_samples", *scored, "params:audit"], "reward_probes"),
        named(nodes.order_held_out_pairs, [*preferences, "params:reward", "params:reward_modelling"], "pair_agreement"),
        named(nodes.conclude_audit, [*found, "pair_agreement", "params:reward", "params:evaluation"], "reward_audit"),
        named(nodes.plot_audit, found, "reward_audit_plot"),
    ]
    audit = Pipeline(own, namespace="audit_reward", prefix_datasets_with_namespace=False)
    return Pipeline([ppo.create_preparation(), audit])
