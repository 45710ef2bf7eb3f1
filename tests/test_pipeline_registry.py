"""The pipelines by name, and the stages that each of them has."""

from __future__ import annotations

from ppo_rlhf.pipeline_registry import ALIGN, register_pipelines

STAGES = {"data_preparation", "supervised_finetuning", "reward_modelling", "ppo", "evaluation", "reporting"}
BESIDE_THE_CHAIN = {"audit_reward", "critic_pretraining", "kl_study", "sweep", "collect_feedback", "human_evaluation"}


def test_each_stage_has_a_name_and_the_chain_has_them_all():
    pipelines = register_pipelines()
    assert set(pipelines) == {*STAGES, *BESIDE_THE_CHAIN, "align", "__default__"}
    evaluated = {"evaluation": {"evaluation", "reporting"}}  # the table is printed, and the report is written
    alone = {stage: {stage} for stage in STAGES}
    for name, stages in {**alone, **evaluated, "align": set(ALIGN), "__default__": STAGES}.items():
        assert {node.name.partition(".")[0] for node in pipelines[name].nodes} == stages


def test_no_two_nodes_of_a_pipeline_have_the_same_name_without_namespace():
    for pipeline in register_pipelines().values():
        names = [node.name.rpartition(".")[2] for node in pipeline.nodes]
        assert len(names) == len(set(names))


def test_an_iteration_takes_its_settings_from_the_state_so_kedro_viz_draws_its_phases_in_a_line():
    ppo = register_pipelines()["ppo"]
    taken = ppo.only_nodes_with_tags("iteration").inputs() & ppo.all_outputs()
    assert taken == {
        *("training_state", "reference_policy", "reward_scorer", "prompt_dataset"),
        *("evaluation_prompt_dataset", "reference_evaluation", "reward_holes"),
    }
    assert "params:ppo" not in ppo.only_nodes_with_tags("iteration").inputs()
