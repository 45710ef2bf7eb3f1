"""Catalog, parameters and registered pipelines fit together in every environment."""

from __future__ import annotations

import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, get_type_hints

import pytest
from _pytest.logging import LogCaptureHandler
from huggingface_hub.utils.logging import get_logger
from kedro.config import OmegaConfigLoader
from kedro.framework.project import configure_project, pipelines
from kedro.io import DataCatalog
from kedro.pipeline.node import Node

from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.contracts import checkers

CONF = Path(__file__).parents[2] / "conf"
ENVIRONMENTS = ["base", *sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name not in ("base", "local"))]
SHARED_ON_PURPOSE = ["checkpoint", "completions", "earlier_evaluations", "evaluation_metrics", "resume_checkpoint"]
"""Entries that share a folder on purpose: evaluations lie beside the checkpoints that they rank."""

OF_ANOTHER_NAME = {
    (function, "evaluation_prompts"): "chosen_prompts"
    for function in ("evaluate_sft_policy", "evaluate_ppo_policy", "pair_samples")
}
"""Arguments that take a dataset of another name, by the function's name."""

each_environment = pytest.mark.parametrize("environment", ENVIRONMENTS)


@pytest.fixture(scope="module", autouse=True)
def registry() -> None:
    configure_project("ppo_rlhf")


def config(environment: str) -> OmegaConfigLoader:
    return OmegaConfigLoader(str(CONF), env=environment, **CONFIG_LOADER_ARGS)


def catalog_of(environment: str) -> dict[str, dict[str, Any]]:
    return {name: entry for name, entry in config(environment)["catalog"].items() if not name.startswith("_")}


def file_paths(entry: Mapping[str, Any]) -> list[str]:
    """Return the paths that an entry, or the dataset that it wraps, names."""
    inner = entry.get("dataset")
    own = [str(entry["filepath"])] if entry.get("filepath") else []
    return own + (file_paths(inner) if isinstance(inner, Mapping) else [])


def all_nodes() -> set[Node]:
    return {node for pipeline in pipelines.values() for node in pipeline.nodes}


def wired(node: Node) -> list[tuple[str, Any, str]]:
    """Return name and type of each argument of a node's function, with the dataset that it takes, by position."""
    hints = get_type_hints(node.func)
    arguments = enumerate(inspect.signature(node.func).parameters.values())
    taken = [each.name for place, each in arguments if place < len(node.inputs) or each.default is each.empty]
    return [(argument, hints[argument], dataset) for argument, dataset in zip(taken, node.inputs, strict=True)]


def parameter_groups() -> dict[str, Any]:
    """Return the type of each `params:` input, by group."""
    taken = [each for node in all_nodes() for each in wired(node)]
    return {name.removeprefix("params:"): hint for _, hint, name in taken if name.startswith("params:")}


@cache
def shipped_groups() -> set[str]:
    return set(config("base")["parameters"])


def misplaced(node: Node) -> list[str]:
    """Return the arguments of a node's function that get a dataset whose name or type does not match."""
    found = []
    for argument, hint, dataset in wired(node):
        is_group = argument in shipped_groups() and is_dataclass(hint)
        expected = f"params:{argument}" if is_group else argument
        if dataset not in (expected, OF_ANOTHER_NAME.get((node.func.__name__, argument))):
            found.append(f"{node.name}: {argument} takes {dataset}")
    return found


def test_each_argument_of_a_node_takes_the_dataset_or_the_parameters_of_its_name() -> None:
    """Inputs are given as lists, so no other check would notice two exchanged inputs."""
    assert [line for node in all_nodes() for line in misplaced(node)] == []
    assert parameter_groups().keys() == shipped_groups()


def test_inputs_in_another_order_than_the_arguments_are_noticed() -> None:
    def compare(sft_policy: str, reward: RewardConfig) -> None: ...

    exchanged = Node(compare, ["params:reward", "sft_policy"], "verdict", name="compare")
    assert misplaced(exchanged) == ["compare: sft_policy takes params:reward", "compare: reward takes sft_policy"]
    assert misplaced(Node(compare, ["sft_policy", "params:reward"], "verdict", name="compare")) == []


def test_the_catalog_has_the_datasets_of_the_pipelines_and_no_other() -> None:
    datasets = {name for pipeline in pipelines.values() for name in pipeline.datasets()}
    used = {name for name in datasets if not name.startswith("params:")}
    assert used == set(catalog_of("base"))


@each_environment
def test_every_entry_makes_a_dataset_and_lies_in_the_folder_of_its_layer(environment: str) -> None:
    entries = catalog_of(environment)
    catalog = DataCatalog.from_config(entries)
    for name, entry in entries.items():
        assert catalog.get(name) is not None
        if entry["type"].endswith("MemoryDataset"):
            continue
        metadata = entry["metadata"]
        assert metadata["description"], name
        folders = [part for path in file_paths(entry) for part in PurePosixPath(path).parts if part[:2].isdigit()]
        assert {*folders, metadata["kedro-viz"]["layer"]} == {metadata["kedro-viz"]["layer"]}, name


def layers_before(name: str) -> dict[str, set[str]]:
    """Return the layers that lead to each layer of a pipeline, each stage taken as one node, as Kedro-Viz has it."""
    layers = {n: e["metadata"]["kedro-viz"]["layer"] for n, e in catalog_of("base").items() if "metadata" in e}
    before: dict[str, set[str]] = defaultdict(set)
    for stage in {node.namespace for node in pipelines[name].nodes}:
        nodes = [node for node in pipelines[name].nodes if node.namespace == stage]
        read, written = ({*chain.from_iterable(map(attrgetter(side), nodes))} for side in ("inputs", "outputs"))
        for output in written & layers.keys():
            before[layers[output]] |= {layers[each] for each in (read - written) & layers.keys()} - {layers[output]}
    return before


@pytest.mark.parametrize("name", ["__default__", "align", "evaluation", "audit_reward", "critic_pretraining", "sweep"])
def test_no_layer_leads_back_to_itself(name: str) -> None:
    """Kedro-Viz draws layers only if they are acyclic."""
    order = TopologicalSorter(layers_before(name)).static_order()  # raises CycleError
    assert "08_reporting" in order


@each_environment
def test_what_is_written_lies_where_no_other_entry_does(environment: str) -> None:
    """Kedro accepts two entries with one path, and the last save wins. Inputs of a user may share a path."""
    written = {name for node in all_nodes() for name in node.outputs}
    names = defaultdict(list)
    for name, entry in catalog_of(environment).items():
        for path in file_paths(entry):
            names[path].append(name)
    shared = [sorted(sharing) for sharing in names.values() if len(sharing) > 1 and written.intersection(sharing)]
    assert shared == [SHARED_ON_PURPOSE]


def test_the_test_environment_writes_only_below_data_test() -> None:
    written = {name for node in all_nodes() for name in node.outputs}
    paths = [path for name, entry in catalog_of("test").items() if name in written for path in file_paths(entry)]
    assert paths
    assert [path for path in paths if not path.startswith("data/test/")] == []


@each_environment
def test_every_parameter_is_a_field_of_a_validated_group_and_valid(environment: str) -> None:
    groups, parameters = parameter_groups(), config(environment)["parameters"]
    assert set(parameters) == set(groups)
    for name, group in groups.items():
        assert is_dataclass(group), name
        assert set(parameters[name]) <= {field.name for field in fields(group)}
        group(**parameters[name])


def test_the_page_of_mlflow_is_served_to_this_machine_alone() -> None:
    """MLflow's server has no password, so it must listen on this machine only."""
    assert {config(environment)["mlflow"]["ui"]["host"] for environment in ENVIRONMENTS} == {"127.0.0.1"}


def test_each_environment_has_an_experiment_of_its_own_but_the_tests() -> None:
    """Registered models of another experiment are no earlier versions of a recipe's."""
    names = {each: config(each)["mlflow"]["tracking"]["experiment"]["name"] for each in ENVIRONMENTS}
    shared = dict.fromkeys(("accelerate", "base", "test"), "ppo_rlhf")
    assert names == {each: f"ppo_rlhf_{each}" for each in ENVIRONMENTS} | shared


def test_what_is_null_in_the_globals_is_the_projects_own_model() -> None:
    own = {"sft_policy": "sft_model_path", "reward_model": "reward_model_path"}
    own |= {"pretrained_critic": "critic_path", "ppo_policy": "policy_path"}
    for environment, root in {"base": "data", "gsm8k": "data/gsm8k"}.items():
        given = config(environment)["globals"]
        paths = {name: given[path] or f"{root}/06_models/{name}" for name, path in own.items()}
        assert {name: catalog_of(environment)[name]["filepath"] for name in own} == paths


def test_no_file_of_base_is_of_the_demo() -> None:
    texts = {path.name: path.read_text() for path in (CONF / "base").iterdir()}
    assert [name for name, text in texts.items() if re.search(r"(?i)\bdemo\b|\.demo\.|gold|movie", text)] == []


def test_a_warning_of_the_hubs_client_is_printed_once(kedro_logging: None) -> None:
    logger: logging.Logger | None = get_logger("huggingface_hub")
    printers: list[logging.Handler] = []
    while logger is not None:
        printers += (handler for handler in logger.handlers if not isinstance(handler, LogCaptureHandler))
        logger = logger.parent if logger.propagate else None
    assert len(printers) <= 1  # without any, Python prints it


def test_every_node_has_the_name_and_a_docstring_of_its_function() -> None:
    for node in all_nodes():
        assert node.name.rpartition(".")[2] == node.func.__name__
        assert inspect.getdoc(node.func)


def test_every_pipeline_of_the_design_is_registered() -> None:
    chain = ["data_preparation", "supervised_finetuning", "reward_modelling", "ppo", "evaluation", "reporting"]
    beside_it = ["audit_reward", "collect_feedback", "critic_pretraining", "human_evaluation", "kl_study", "sweep"]
    assert sorted(pipelines.keys()) == sorted([*chain, *beside_it, "align", "__default__"])
    for name in chain:
        with_report = {"reporting"} if name == "evaluation" else set()
        assert {node.namespace for node in pipelines[name].nodes} == {name} | with_report
    assert set(pipelines["align"].nodes) == {n for p in chain[3:] for n in pipelines[p].nodes}
    assert set(pipelines["__default__"].nodes) == {n for p in chain for n in pipelines[p].nodes}


def test_undocumented_and_never_logged_metrics_are_noticed() -> None:
    """`tests/integration/test_chain.py` compares docs/metrics.md with a run's metrics by these functions."""
    documented = checkers.documented_metrics("| `a/b` | x |\n| `reward/<component>` | y |\n| `gone` | z |")
    found = checkers.metric_problems({"a/b", "reward/model", "new"}, documented)
    assert found == ["not documented: new", "never logged: gone"]
