"""The pipelines by name, and the stages that each of them has."""

from __future__ import annotations

from ppo_rlhf.pipeline_registry import ALIGN, register_pipelines

STAGES = {"data_preparation", "supervised_finetuning", "reward_modelling", "ppo", "evaluation", "reporting"}
BESIDE_THE_CHAIN = {"audit_reward", "critic_pretraining", "kl_study"}


def test_each_stage_has_a_name_and_the_chain_has_them_all():
    pipelines = register_pipelines()
    assert set(pipelines) == {*STAGES, *BESIDE_THE_CHAIN, "align", "__default__"}
    for name, stages in {**{stage: {stage} for stage in STAGES}, "align": set(ALIGN), "__default__": STAGES}.items():
        assert {node.name.partition(".")[0] for node in pipelines[name].nodes} == stages
