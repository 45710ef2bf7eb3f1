"""What the core tests share: NaN poison, and the conformance cases (see tests/data/conformance/PROVENANCE.md)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

NAN = float("nan")
FILES_READ: set[str] = set()
CONFORMANCE = Path(__file__).parents[1] / "data" / "conformance"
# the peers' names of our own aggregations
OUR_ESTIMATOR = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
OUR_AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "token_sum_fixed_length",
}
MASK_NAMES = {"mask", "value_mask", "attention_mask"}


def poison(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x`, detached, with NaN where `mask` is False."""
    return x.detach().masked_fill(~mask, NAN)


def prefix_mask(lengths: list[int], width: int) -> Tensor:
    """Return a mask that is True on the first `lengths[b]` columns, without calling the code under test."""
    return torch.tensor([[column < length for column in range(width)] for length in lengths], dtype=torch.bool)


@dataclass
class Case:
    """One recorded call of a peer library: `i` are inputs, `o` outputs; lists became tensors (masks: bool)."""

    name: str
    dtype: torch.dtype
    i: dict[str, Any]
    o: dict[str, Any]
    rtol: float
    atol: float

    @property
    def variant(self) -> str:
        return self.name.split("/")[-1]

    def check(self, actual: Tensor, expected: str | Tensor | float, where: Tensor | None = None) -> None:
        """Compare with an output, given by name or as a value, within the case's tolerance; `where` selects entries."""
        wanted = self.o[expected] if isinstance(expected, str) else expected
        wanted = torch.as_tensor(wanted, dtype=actual.dtype)
        if where is not None:
            actual, wanted = actual[where], wanted[where]
        torch.testing.assert_close(
            actual.detach(), wanted, rtol=self.rtol, atol=self.atol, msg=lambda m: f"{self.name}: {m}"
        )

    def poisoned(self, name: str, mask: Tensor) -> Tensor:
        return poison(self.i[name], mask)

    def leaf(self, name: str, mask: Tensor | None = None) -> Tensor:
        """Return an input as an autograd leaf, with NaN in padding if `mask` is given."""
        x: Tensor = self.i[name].clone() if mask is None else self.poisoned(name, mask)
        return x.requires_grad_()


def cases(topic: str, *sources: str, skip: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrise `case` over the files of a topic: the first case of each file is a default test, the rest are slow.

    `skip` names variants to leave out; the docstring of the test says why.
    """
    found, marks, skipped = [], [], set()
    for source in sources:
        path = CONFORMANCE / f"{topic}__{source}.json"
        FILES_READ.add(path.name)
        first = len(found)
        for raw in json.loads(path.read_text()):
            variant = raw["name"].split("/")[-1]
            if variant in skip:
                skipped.add(variant)
                continue
            dtype = getattr(torch, raw["dtype"])
            marks.append([] if len(found) == first else [pytest.mark.slow])
            found.append(
                Case(
                    name=raw["name"],
                    dtype=dtype,
                    i={key: _decode(key, value, dtype) for key, value in raw["inputs"].items()},
                    o={key: _decode(key, value, dtype) for key, value in raw["outputs"].items()},
                    **raw["tolerance"],
                )
            )
    assert found, (topic, sources)
    assert skipped == set(skip), f"no such variants: {set(skip) - skipped}"
    parameters = [pytest.param(case, id=case.name, marks=mark) for case, mark in zip(found, marks, strict=True)]
    return pytest.mark.parametrize("case", parameters)


def _decode(key: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, list):
        return float(value) if value in ("nan", "inf", "-inf") else value
    flat = list(_flatten(value))
    if any(item is None for item in flat):
        return value
    if key in MASK_NAMES:
        return torch.tensor(value, dtype=torch.bool)
    is_float = any(isinstance(item, float | str) for item in flat)
    return torch.tensor(_numbers(value), dtype=dtype if is_float else torch.int64)


def _flatten(value: Any) -> Any:
    if isinstance(value, list):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) else value
