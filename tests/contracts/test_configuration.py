"""The project's own configuration keeps the rules, and each rule refuses a case that breaks it."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from kedro.config import OmegaConfigLoader
from kedro.framework.project import configure_project, pipelines
from kedro.io import DataCatalog

from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.contracts import checkers

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = [
    "base",
    *sorted(p.name for p in (ROOT / "conf").iterdir() if p.is_dir() and p.name not in ("base", "local")),
]
# one folder on purpose: evaluations lie beside the checkpoints that they choose among
SHARED_ON_PURPOSE = [frozenset({"checkpoint", "evaluation_metrics", "resume_checkpoint"})]


def config(environment: str) -> OmegaConfigLoader:
    return OmegaConfigLoader(str(ROOT / "conf"), env=environment, **CONFIG_LOADER_ARGS)


def catalog_of(environment: str) -> dict[str, dict[str, Any]]:
    return {name: entry for name, entry in config(environment)["catalog"].items() if not name.startswith("_")}


@pytest.fixture(scope="module", autouse=True)
def registry() -> None:
    configure_project("ppo_rlhf")


def used_datasets() -> set[str]:
    return {name for name in pipelines["__default__"].datasets() if not name.startswith("params:")}


def parameter_groups() -> dict[str, type]:
    """The validated class of each `params:` input, by group."""
    groups = {}
    for node in pipelines["__default__"].nodes:
        hints = get_type_hints(node.func)
        for argument, name in node._inputs.items() if isinstance(node._inputs, dict) else ():
            if name.startswith("params:"):
                groups[name.removeprefix("params:")] = hints[argument]
    return groups


def test_every_dataset_of_the_pipelines_is_in_the_catalog() -> None:
    assert checkers.undeclared_datasets(used_datasets(), catalog_of("base")) == []


def test_every_catalog_entry_is_used_by_a_pipeline() -> None:
    assert checkers.unused_entries(used_datasets(), catalog_of("base")) == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_catalog_entry_makes_a_dataset(environment: str) -> None:
    catalog = DataCatalog.from_config(catalog_of(environment))
    for name in catalog_of(environment):
        assert catalog.get(name) is not None


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_layer_of_every_entry_is_its_folder(environment: str) -> None:
    assert checkers.layer_problems(catalog_of(environment)) == []


def test_every_persisted_entry_has_a_description() -> None:
    assert checkers.undescribed_entries(catalog_of("base")) == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_no_two_entries_share_a_path(environment: str) -> None:
    assert checkers.shared_paths(catalog_of(environment), SHARED_ON_PURPOSE) == []


def test_the_test_environment_writes_only_below_data_test() -> None:
    written = pipelines["__default__"].all_outputs()
    for name, entry in catalog_of("test").items():
        for path in checkers.file_paths(entry) if name in written else ():
            assert path.startswith("data/test/"), name


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_parameter_belongs_to_a_group_and_is_a_field_of_it(environment: str) -> None:
    known = {name: [f.name for f in fields(group)] for name, group in parameter_groups().items() if is_dataclass(group)}
    assert checkers.unknown_parameters(known, config(environment)["parameters"], known) == []


def test_every_parameter_group_is_validated() -> None:
    assert [name for name, group in parameter_groups().items() if not is_dataclass(group)] == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_parameters_of_every_environment_pass_validation(environment: str) -> None:
    parameters = config(environment)["parameters"]
    for name, group in parameter_groups().items():
        group(**parameters[name])


def test_every_node_has_the_name_and_a_docstring_of_its_function() -> None:
    for node in pipelines["__default__"].nodes:
        assert node.name.rpartition(".")[2] == node.func.__name__
        assert inspect.getdoc(node.func)


def test_every_pipeline_of_the_design_is_registered() -> None:
    chain = ["data_preparation", "supervised_finetuning", "reward_modelling", "ppo", "evaluation", "reporting"]
    assert sorted(pipelines.keys()) == sorted([*chain, "align", "__default__"])
    for name in chain:
        assert {node.namespace for node in pipelines[name].nodes} == {name}
    assert set(pipelines["align"].nodes) == {n for p in chain[3:] for n in pipelines[p].nodes}
    assert set(pipelines["__default__"].nodes) == {n for p in chain for n in pipelines[p].nodes}


# Each checker refuses a case that breaks its rule.


def test_a_misspelt_dataset_is_noticed() -> None:
    assert checkers.undeclared_datasets({"rollout", "params:ppo"}, {"rollouts"}) == ["rollout"]


def test_an_entry_that_nothing_uses_is_noticed() -> None:
    assert checkers.unused_entries({"a"}, {"a", "b"}) == ["b"]


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "x", "filepath": "data/06_models/m"},
        {"type": "x", "filepath": "data/06_models/m", "metadata": {"kedro-viz": {"layer": "models"}}},
        {"type": "x", "filepath": "data/06_models/m", "metadata": {"kedro-viz": {"layer": "05_model_input"}}},
        {
            "type": "wrapper",
            "dataset": {"filepath": "data/06_models/m"},
            "metadata": {"kedro-viz": {"layer": "05_model_input"}},
        },
    ],
)
def test_a_layer_that_is_not_the_folder_is_noticed(entry: dict[str, Any]) -> None:
    assert len(checkers.layer_problems({"entry": entry})) == 1


def test_a_missing_description_is_noticed() -> None:
    assert checkers.undescribed_entries({"entry": {"type": "x"}}) == ["entry"]


def test_a_shared_path_is_noticed() -> None:
    entries = {"a": {"filepath": "f"}, "b": {"dataset": {"filepath": "f"}}}
    assert checkers.shared_paths(entries) == [["a", "b"]]


def test_a_parameter_that_nothing_reads_is_noticed() -> None:
    problems = checkers.unknown_parameters({"ppo": {}}, {"ppo": {"kl_coeff": 1}, "pppo": {}}, {"ppo": ["kl_coef"]})
    assert problems == ["pppo", "ppo.kl_coeff"]


def test_undocumented_and_never_logged_metrics_are_noticed() -> None:
    documented = checkers.documented_metrics("| `a/b` | x |\n| `reward/<component>` | y |\n| `gone` | z |")
    assert checkers.metric_problems({"a/b", "reward/model", "new"}, documented) == [
        "not documented: new",
        "never logged: gone",
    ]
