"""A filter finds what has the value, and nothing else, whatever the value's characters."""

import re
from pathlib import Path

import mlflow
import pytest

import ppo_rlhf
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.datasets.search_filters import equals
from tests.datasets.test_mlflow_queue import store

__all__ = ["store"]

VALUES = ["o'brien", 'o"brien', "x' or 'y", "back\\", "a'\\", "100%", "a_c", "abc", "a; --", "tick`", "Ünal"]


def test_a_value_of_any_characters_is_found_in_runs_and_registered_models(store: str) -> None:
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("filters")
    for value in VALUES:
        client.create_run(experiment, tags={"tag": value})
        client.create_registered_model(value)
    for value in VALUES:
        runs = client.search_runs([experiment], f"{equals('tags.tag', value)} and attributes.status != 'FINISHED'")
        assert [run.data.tags["tag"] for run in runs] == [value]
        assert [model.name for model in client.search_registered_models(equals("name", value))] == [value]
        assert client.search_model_versions(equals("name", value)) == []
        assert client.search_traces(locations=[experiment], filter_string=equals("tags.`tag`", value)) == []


@pytest.mark.parametrize("value", ["a\"b'c", 'a"b\\'])
def test_a_value_that_no_filter_can_have_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(value)):
        equals("name", value)


def test_no_module_puts_a_value_into_a_filter_by_hand() -> None:
    package = Path(ppo_rlhf.__path__[0])
    by_hand = re.compile(
        r"""(?:(?:tags|attributes|params|metrics)\.\S+|\bname|run_id) (?:!?=|i?like) ['"]\{""", re.IGNORECASE
    )
    assert by_hand.search("f\"tags.{name} = '{value}'\"")
    assert [file.name for file in package.rglob("*.py") if by_hand.search(file.read_text(encoding="utf-8"))] == []
