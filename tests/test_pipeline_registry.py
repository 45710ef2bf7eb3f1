"""The pipelines by name: which stages each has, and that one put together late is a pipeline like any other."""

from __future__ import annotations

import pickle

import pytest
from kedro.pipeline import Node, Pipeline
from kedro.pipeline.pipeline import OutputNotUniqueError

from ppo_rlhf.pipeline_registry import ALIGN, STAGES, DeferredPipeline, register_pipelines
from ppo_rlhf.pipelines import evaluation, reporting


def node_names(pipeline: Pipeline) -> set[str]:
    return {node.name for node in pipeline.nodes}


def test_each_stage_has_a_name_and_the_chain_has_them_all():
    pipelines = register_pipelines()
    assert set(pipelines) == {*STAGES, "align", "__default__"}
    for name, stages in {**{stage: [stage] for stage in STAGES}, "align": ALIGN, "__default__": STAGES}.items():
        assert {node.partition(".")[0] for node in node_names(pipelines[name])} == set(stages)


def test_pipelines_can_be_added_filtered_and_pickled_before_and_after_they_are_put_together():
    def fresh() -> Pipeline:
        return register_pipelines()["data_preparation"]

    pipeline = fresh()
    names = node_names(pipeline)
    assert names
    assert node_names(fresh() + fresh()) == node_names(sum([fresh(), fresh()])) == names
    assert node_names(fresh() - pipeline) == set()
    first = pipeline.nodes[0].name
    assert node_names(fresh().filter(node_names=[first])) == node_names(pipeline.only_nodes(first)) == {first}
    for copied in (pickle.loads(pickle.dumps(fresh())), pickle.loads(pickle.dumps(pipeline))):
        assert node_names(copied) == names
        assert copied.inputs() == pipeline.inputs()


def test_what_no_pipeline_has_is_an_attribute_error():
    pipeline = register_pipelines()["ppo"]
    for _ in range(2):  # before and after it is put together
        with pytest.raises(AttributeError, match="'DeferredPipeline' object has no attribute 'nods'"):
            _ = pipeline.nods
        assert pipeline.nodes


def test_a_stage_that_is_not_there_is_told_whenever_nodes_are_asked_for():
    pipeline = DeferredPipeline("no_such_stage")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match=r"ppo_rlhf\.pipelines\.no_such_stage"):
            getattr(pipeline, "nodes", [])


def test_stages_that_do_not_fit_together_never_look_like_a_pipeline_without_nodes(monkeypatch: pytest.MonkeyPatch):
    """Kedro asks so where it looks for the types of parameters."""
    for stage in (evaluation, reporting):
        node = Node(len, "rows", "count", name=stage.__name__)
        monkeypatch.setattr(stage, "create_pipeline", lambda node=node: Pipeline([node]))
    pipeline = DeferredPipeline("evaluation", "reporting")
    for _ in range(2):
        with pytest.raises(OutputNotUniqueError):
            getattr(pipeline, "nodes", [])


def test_a_stage_without_an_attribute_is_told_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "create_pipeline", lambda: evaluation.missing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"The stages ppo, evaluation cannot be put together: .* 'missing'"):
            getattr(DeferredPipeline("ppo", "evaluation"), "nodes", [])
