"""The checks before a run: settings that nothing reads, unusual values, the runner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import Result
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog, MemoryDataset, Version
from kedro.pipeline import Node, Pipeline
from kedro.runner import ThreadRunner
from kedro_datasets.pandas import CSVDataset
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.datasets import PretrainedModelDataset, TrainingHistoryDataset, TrainingPromptsDataset
from ppo_rlhf.hooks.before_run import check_load_versions, check_runner, forget_other_training
from ppo_rlhf.hooks.own_settings import OwnSettings
from ppo_rlhf.preflight import RunRequest
from ppo_rlhf.runner import LoopRunner
from tests.tiny_models import save, tiny_model

GLOBALS = "{base_model_path: null, sft_model_path: data/06_models/sft_policy, data_root: data, resume: null, seed: 1}"
PARAMETERS = """
ppo:
  seed: ${runtime_params:seed, ${globals:seed}}
  learning_rate: 4.0e-4
  response_length: 36
  value_learning_rate: null
prompts: {column: prompt}
"""
PIPELINE = Pipeline([Node(lambda ppo: ppo, {"ppo": "params:ppo"}, "out", name="n")])


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    for folder in ("base", "local"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base/globals.yml").write_text(GLOBALS)
    (tmp_path / "base/mlflow.yml").write_text("ui: {host: 127.0.0.1}")
    (tmp_path / "base/parameters_ppo.yml").write_text(PARAMETERS)
    (tmp_path / "base/catalog.yml").write_text(
        'x: {type: pickle.PickleDataset, filepath: "${runtime_params:my_file, a}"}'
    )
    return tmp_path


def settings(conf: Path, environment: str | None = None, **given: Any) -> OwnSettings:
    loader = OmegaConfigLoader(
        str(conf),
        environment,
        base_env="base",
        default_run_env="local",
        runtime_params=given,
        config_patterns={"mlflow": ["mlflow*"]},
        merge_strategy={"parameters": "soft"},
    )
    return OwnSettings(loader)


def test_names_that_something_reads_are_welcome(conf: Path):
    (conf / "local/parameters.yml").write_text("ppo: {gamma: 0.9}\nshared: 3\nother: '${shared}'\nmine: 1\n_own: 2\n")
    reads_more = Pipeline([Node(lambda a, b: a, ["params:mine", "params:other"], "y", name="m")])
    given = settings(conf, my_file="x", ppo={"gamma": 1.0}, seed=1)
    assert given.unread({"x", "params:ppo"}, {"more": reads_more}) == []


@pytest.mark.parametrize(
    ("given", "where", "hint"),
    [
        ({"kl_coef": 1}, "--params kl_coef", "Did you mean `ppo.kl_coef`?"),
        ({"promts": 1}, "--params promts", "Did you mean `prompts`?"),
        # accepted, it would be ignored: the catalog's paths are made of the globals
        ({"data_root": "x"}, "--params data_root", "Set it in conf/local/globals.yml."),
    ],
)
def test_an_unknown_name_of_params_is_named_with_the_nearest(conf: Path, given: dict, where: str, hint: str):
    (line,) = settings(conf, **given).unread({"params:ppo"}, {})
    assert re.match(rf"{where}: .*\. {re.escape(hint)}", line)


@pytest.mark.parametrize(
    ("file", "text", "name", "hint"),
    [
        ("parameters.yml", "learning_rate: 1.0", "learning_rate", "Did you mean `ppo.learning_rate`?"),
        ("parameters.yml", "sft_model_path: a", "sft_model_path", "Set it in conf/local/globals.yml."),
        ("globals.yml", "ppo: {gamma: 1}", "ppo", "Set it in conf/local/parameters.yml."),
        ("parameters.yml", "kl_coef(: 1.0", "kl_coef(", "Did you mean `ppo.kl_coef`?"),  # no pattern either
    ],
)
def test_a_name_in_a_file_that_nothing_reads_is_named(conf: Path, file: str, text: str, name: str, hint: str):
    (conf / "local" / file).write_text(text)
    (line,) = settings(conf).unread({"params:ppo"}, {})
    kind = file.removesuffix(".yml")
    assert line.startswith(f"conf/local: {name} ({kind}): ")
    assert line.endswith(hint)


def test_a_hint_names_the_folder_of_the_environment_which_replaces_conf_local(conf: Path):
    (conf / "mine").mkdir()
    (line,) = settings(conf, "mine", data_root="x").unread({"params:ppo"}, {})
    assert line.endswith(" conf/mine/globals.yml.")


TWO_STAGES = {
    "align": Pipeline([Node(lambda x, ppo: x, ["x", "params:ppo"], "y", name="align")]),
    "split": Pipeline([Node(lambda prompts: prompts, "params:prompts.column", "z", name="split")]),
    "__default__": Pipeline([]),
}


@pytest.mark.parametrize(
    ("given", "typed", "readers"),
    [
        ({"my_file": "a"}, "my_file", ["align"]),  # a is what the catalog has without it
        ({"seed": 1}, "seed", ["align"]),
        ({"ppo": {"gamma": 1.0, "lam": 1.0}}, "ppo.gamma, ppo.lam", ["align"]),
        ({"prompts": {"column": "text"}}, "prompts.column", ["split"]),
    ],
)
def test_what_is_typed_and_this_run_does_not_read_is_refused_with_the_pipelines_that_do(
    conf: Path, given: dict, typed: str, readers: list[str]
):
    for name, pipeline in TWO_STAGES.items():
        lines = settings(conf, **given).unread(pipeline.datasets(), TWO_STAGES)
        if name in readers:
            assert lines == []
        else:
            (line,) = lines
            assert line.startswith(f"--params {typed}: nothing in this command reads it; {readers[0]} would.")


def test_a_setting_that_is_filled_from_the_globals_is_refused_with_the_names_to_set(conf: Path):
    name = "evaluation: {prompts_path: '${runtime_params:prompts_path, ${globals:prompts_path}}'}"
    (conf / "base/parameters_evaluation.yml").write_text(name)
    (conf / "base/globals.yml").write_text(f"{GLOBALS[:-1]}, prompts_path: shipped.jsonl}}")
    (conf / "local/globals.yml").write_text("prompts_path: mine.jsonl")
    (conf / "local/catalog.yml").write_text("raw_prompts: {type: a.B, filepath: '${runtime_params:prompts_path, a}'}")
    reads = {"params:evaluation"}
    assert settings(conf).unread(reads, {}) == []
    assert settings(conf, prompts_path="other.jsonl").unread({*reads, "raw_prompts"}, {}) == []
    (typed,) = settings(conf, evaluation={"prompts_path": "other.jsonl"}).unread(reads, {})
    (conf / "local/parameters.yml").write_text("evaluation: {prompts_path: other.jsonl}")
    (in_a_file,) = settings(conf).unread(reads, {})
    assert typed == in_a_file
    assert typed.startswith("evaluation.prompts_path=other.jsonl: ")
    assert "evaluation_prompts_path" in typed


def test_reference_texts_are_named_in_the_globals_and_only_a_run_that_measures_them_takes_them(conf: Path):
    entry = "{type: a.B, filepath: '${runtime_params:reference_texts_path, ${globals:reference_texts_path}}'}"
    name = "evaluation: {reference_texts: '${runtime_params:reference_texts_path, ${globals:reference_texts_path}}'}"
    (conf / "base/parameters_evaluation.yml").write_text(name)
    (conf / "base/globals.yml").write_text(f"{GLOBALS[:-1]}, reference_texts_path: null}}")
    (conf / "base/catalog.yml").write_text(f"raw_reference_texts: {entry}")
    reads = {"params:evaluation", "raw_reference_texts"}
    assert settings(conf, reference_texts_path="a.txt").unread(reads, {}) == []
    (unmeasured,) = settings(conf, reference_texts_path="a.txt").unread({"params:evaluation"}, {})
    assert unmeasured.startswith("--params reference_texts_path: nothing reads this name")
    (line,) = settings(conf, evaluation={"reference_texts": "a.txt"}).unread(reads, {})
    assert line == (
        "evaluation.reference_texts=a.txt: this setting only follows reference_texts_path. Set reference_texts_path in "
        "conf/local/globals.yml or with --params."
    )


def test_a_group_without_a_line_is_an_empty_one(conf: Path):
    (conf / "base/parameters_evaluation.yml").write_text("evaluation: {iteration_prompts: 4}")
    (conf / "local/parameters.yml").write_text("evaluation:\n  # iteration_prompts: 8\n")
    assert settings(conf).unread(set(), {}) == []


def test_prompts_that_an_evaluation_does_not_answer_are_refused_with_the_setting_for_others(conf: Path):
    entry = "{type: a.B, filepath: '${runtime_params:%s, a}'}"
    names = {"raw_prompts": "prompts_path", "raw_evaluation_prompts": "evaluation_prompts_path"}
    text = "".join(f"{name}: {entry % path}\n" for name, path in names.items())
    (conf / "base/catalog.yml").write_text(text)
    (conf / "base/globals.yml").write_text(f"{GLOBALS[:-1]}, prompts_path: a, evaluation_prompts_path: null}}")
    (conf / "base/parameters_evaluation.yml").write_text(
        "evaluation: {prompts_path: '${runtime_params:prompts_path, a}'}"
    )
    reads = ("params:evaluation", "raw_evaluation_prompts")
    evaluation = Pipeline([Node(lambda *_: 0, [*reads], "y", name="evaluate")])
    align = Pipeline([Node(lambda *_: 0, [*reads, "raw_prompts"], "z", name="align")])
    pipelines = {"evaluation": evaluation, "align": align}
    given = settings(conf, prompts_path="x.jsonl")
    assert given.unread(align.datasets(), pipelines) == []
    (line,) = given.unread(evaluation.datasets(), pipelines)
    assert re.match(
        r"--params prompts_path: .* align would\. .* evaluation_prompts_path in conf/local/globals\.yml .*--params\.$",
        line,
    )
    both = settings(conf, prompts_path="x.jsonl", evaluation_prompts_path="y.jsonl")
    assert both.unread(evaluation.datasets(), pipelines) == [line]


def test_what_the_settings_leave_unused_is_refused_with_those_settings(conf: Path):
    given = settings(conf, my_file="b")  # of the entry x
    assert given.unread({"x"}, TWO_STAGES) == []
    (line,) = given.unread({"x"}, TWO_STAGES, frozenset({"x"}))
    assert line == "--params my_file: reward.components and ppo.value_model of this run leave it unused; leave it out."


def test_learning_rates_are_held_against_no_range_of_large_models_if_the_policy_is_small(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = save(tmp_path / "data/06_models/policy", tiny_model())
    entries = {
        "params:ppo": MemoryDataset(PPOConfig(learning_rate=3e-3, response_length=36)),
        "sft_policy": PretrainedModelDataset(filepath=str(policy)),
    }
    pipeline = Pipeline([Node(lambda ppo, model: ppo, ["params:ppo", "sft_policy"], "out", name="n")])
    run = RunRequest(pipeline, DataCatalog(entries), tmp_path)
    assert settings(conf).unusual_values(run) == []
    monkeypatch.setattr(PreTrainedModel, "num_parameters", lambda *_: 10**9)
    (line,) = settings(conf).unusual_values(run)
    assert line.startswith("ppo.learning_rate=0.003 is outside its typical range 1e-06 to 5e-05")
    # What conf/base sets for a whole critic is too slow for a head
    entries["params:ppo"] = MemoryDataset(
        PPOConfig(value_model="shared", value_learning_rate=3e-5, learning_rate=1e-5, response_length=36)
    )
    (line,) = settings(conf).unusual_values(RunRequest(pipeline, DataCatalog(entries), tmp_path))
    assert line.startswith("ppo.value_learning_rate=3e-05 is outside its typical range 0.0001 to 0.001 (for the head")


def test_a_path_that_begins_with_a_dot_is_no_name_on_the_hub(
    kedro: Callable[..., Result], toy_project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **options: pytest.fail("the hub was asked"))
    result = kedro(toy_project, "run", "--pipelines", "ppo", "--params", "prompts_path=./typo/prompts")
    assert re.match(r"Error: \./typo/prompts: .*prompts_path.* \./ ", result.stderr.splitlines()[-1])
    assert result.exit_code == 1


def test_another_runner_is_refused_for_the_loop_and_welcome_elsewhere():
    first = Node(lambda: 1, None, "training_state", name="first")
    step = Node(lambda state: state, "training_state", "next_training_state", name="step", tags="iteration")
    threads = {"runner": str(ThreadRunner()), "only_missing_outputs": True}
    check_runner(threads, Pipeline([first]))
    with pytest.raises(ConfigError, match="only-missing-outputs"):
        check_runner(threads, Pipeline([first, step]))
    with pytest.raises(ConfigError, match=r'--runner.* "runner": "ppo_rlhf\.runner\.LoopRunner"'):
        check_runner({**threads, "only_missing_outputs": False}, Pipeline([first, step]))
    with pytest.raises(ConfigError, match=r"session.run\(runner=LoopRunner\(\)\)"):
        check_runner({"runner": "None", "only_missing_outputs": False}, Pipeline([first, step]))
    check_runner({"runner": str(LoopRunner()), "only_missing_outputs": False}, Pipeline([first, step]))


def test_parallel_runner_which_cannot_run_our_catalog_is_refused_before_a_run(kedro, project: Path):
    asked = ("--env", "test", "--pipelines", "data_preparation", "--runner", "ParallelRunner")
    result = kedro(project, "run", *asked)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.match("Error: ParallelRunner .*ThreadRunner", line)
    assert not (project / "data/test").exists()


def test_a_version_of_an_entry_that_is_not_read_or_has_no_versions_is_refused(tmp_path: Path):
    datasets = {
        "kept": CSVDataset(filepath=str(tmp_path / "kept.csv"), version=Version("then", None)),
        "plain": CSVDataset(filepath=str(tmp_path / "plain.csv")),
        "made": CSVDataset(filepath=str(tmp_path / "made.csv"), version=Version("then", None)),
    }
    pipeline, entries = Pipeline([Node(max, ["kept", "plain"], "made", name="n")]), DataCatalog(datasets)
    check_load_versions({"load_versions": None}, pipeline, entries)
    check_load_versions({"load_versions": {"kept": "then"}}, pipeline, entries)
    for name in ("plain", "made", "unknown"):
        with pytest.raises(ConfigError, match=f"^--load-versions {name}: .* kept$"):
            check_load_versions({"load_versions": {"kept": "then", name: "then"}}, pipeline, entries)


def test_an_older_policy_has_no_history_and_no_training_prompts(tmp_path: Path):
    """Only those of the newest run are kept."""
    for name in ("1", "2"):
        save(tmp_path / "policies" / name, tiny_model())
    pd.DataFrame({"prompt": ["a"]}).to_parquet(tmp_path / "prompts.parquet")
    pd.DataFrame({"iteration": [1]}).to_csv(tmp_path / "history.csv")
    inputs = ["ppo_policy", "training_history", "training_prompts"]
    pipeline = Pipeline([Node(lambda *_: 1, inputs, "made", name="n")])
    for version, count in (("2", 1), ("1", 0)):
        entries = DataCatalog(
            {
                "ppo_policy": PretrainedModelDataset(str(tmp_path / "policies"), version=Version(version, None)),
                "training_history": TrainingHistoryDataset(filepath=str(tmp_path / "history.csv")),
                "training_prompts": TrainingPromptsDataset(filepath=str(tmp_path / "prompts.parquet")),
            }
        )
        forget_other_training({"load_versions": {"ppo_policy": version}}, pipeline, entries)
        assert len(entries.load("training_history")) == count
        assert (entries.load("training_prompts") is not None) == bool(count)
