"""`scripts/same_numbers.py` names what differs between two records, and nothing else."""

from __future__ import annotations

import copy
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

SCRIPT = Path(__file__).parents[2] / "scripts" / "same_numbers.py"


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def a_record() -> dict[str, Any]:
    numbers = {
        "mlflow": {"eval/kl": [[2, "0.25"]], "val/loss": [[1, "nan"]]},
        "history": {"objective/kl": [[1, "0.0"], [2, "0.1"]]},
        "weights": {"policy/model.safetensors": "ab"},
    }
    return {"tree": "1234", "machine": "one", "configurations": {"ppo": numbers, "lora": copy.deepcopy(numbers)}}


def compared(script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **records: Any) -> int:
    for name, record in records.items():
        (tmp_path / name).write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["same_numbers.py", "compare", *(str(tmp_path / name) for name in records)])
    status: int = script["main"]()
    return status


def test_equal_records_with_nan_are_the_same_and_the_command_succeeds(script, tmp_path, monkeypatch, capsys):
    assert compared(script, tmp_path, monkeypatch, first=a_record(), second=a_record()) == 0
    assert capsys.readouterr().out == "ppo: the same\nlora: the same\n"


def test_a_last_bit_a_hash_and_a_missing_metric_are_named_and_the_command_fails(script, tmp_path, monkeypatch, capsys):
    second = a_record()
    lora = second["configurations"]["lora"]
    lora["history"]["objective/kl"][1][1] = "0.10000000000000002"
    lora["weights"]["policy/model.safetensors"] = "ac"
    del lora["mlflow"]["eval/kl"]
    assert compared(script, tmp_path, monkeypatch, first=a_record(), second=second) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ppo: the same",
        "lora: 3 differences",
        "    mlflow eval/kl: only in the first",
        "    history objective/kl: 0.1 at step 2, 0.10000000000000002 at step 2",
        "    weights policy/model.safetensors: other weights",
    ]


def test_numbers_and_sums_of_weights_within_the_given_difference_are_the_same(script):
    first, second = a_record(), a_record()
    for record, total in ((first, "0.3"), (second, "0.30000000001")):
        record["configurations"]["ppo"]["weights"]["policy/model.safetensors"] = [["head", "1.0"], ["body", total]]
    second["configurations"]["lora"]["history"]["objective/kl"][1][1] = "0.1002"
    assert script["compare"](first, second, close=1e-10) == {
        "ppo": [],
        "lora": ["history objective/kl: 0.1 at step 2, 0.1002 at step 2"],
    }
    assert script["compare"](first, second)["ppo"] == [
        "weights policy/model.safetensors: 0.3 at step body, 0.30000000001 at step body"
    ]


def test_a_record_in_float64_rounds_no_norm_to_float32(script, monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", LlamaRMSNorm.forward)  # restored after the test
    norm = LlamaRMSNorm(2, eps=0.0).double()
    given, expected = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([0.6, 0.8], dtype=torch.float64)
    expected = expected * 2**0.5  # by the root of the mean square, 5 / sqrt(2)
    assert (norm(given) - expected).abs().max() > 1e-10
    script["compute_norms_in_float64"]()
    assert (norm(given) - expected).abs().max() < 1e-15


def test_a_configuration_that_one_tree_could_not_run_is_a_difference(script):
    second = a_record()
    second["configurations"]["lora"] = {"not run": "Error: no such setting"}
    del second["configurations"]["ppo"]
    assert script["compare"](a_record(), second) == {
        "ppo": ["not run in the second: not recorded"],
        "lora": ["not run in the second: Error: no such setting"],
    }


def test_the_reason_of_a_failed_run_is_its_last_line_about_an_error(script):
    said = "Error: ppo has no setting colour\ntorch.distributed.elastic.ChildFailedError:\n  rank: 1\n"
    assert script["_reason"](said) == "Error: ppo has no setting colour"


def test_the_recipe_on_a_real_model_is_refused_without_that_model(script, tmp_path, monkeypatch, capsys):
    tree = SCRIPT.parents[1]
    monkeypatch.setattr(sys, "argv", ["same_numbers.py", "record", str(tree), str(tmp_path / "a.json"), "obedience"])
    with pytest.raises(SystemExit):
        script["main"]()
    assert "obedience runs with --model MODEL" in capsys.readouterr().err
