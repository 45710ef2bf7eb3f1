"""Check rules that hold for any PPO trainer: `python benchmarks/invariances.py ADAPTER` prints a table.

ADAPTER is a module beside this file, or on the Python path: `invariances_ours`, or `invariances_trl` with the Python of
an environment that has TRL 1.12. It has

- `observe(case: Case) -> Seen`, which runs one iteration of its trainer and steps no optimiser, and
- `FUNCTIONS`, the trainer's own functions by topic (`TOPICS`); a topic may be missing.

What the rules expect follows from the case and from what was sampled, or was recorded from a third library; no code of
the trainer computes it.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inputs import make_models, make_prompts
from tables import markdown
from workload import Preset

SHAPE = Preset(2, 32, 2, 200, batch=8, minibatch=8, prompt_length=8, response_length=12)
VECTORS = Path(__file__).resolve().parents[1] / "tests" / "data" / "conformance"
TOPICS = {
    "log-probabilities": ("logprobs", ("logits", "labels", "temperature"), "logprobs"),
    "whitening": ("whiten", ("values", "mask", "shift_mean"), "whitened"),
    "GAE": ("gae", ("rewards", "values", "mask", "gamma", "lam"), "returns"),
    "value loss": ("value_loss", ("values", "old_values", "returns", "mask", "clip_range"), "loss"),
}
"""The file of calls recorded from verl, the arguments of a function, and the output that it returns."""
CUTS = ((8, 1), (4, 2), (2, 4), (1, 8))
"""Number of responses in a micro-batch, and of micro-batches in the batch."""


@dataclass(frozen=True)
class Case:
    """One iteration on 8 responses. The critic is 0 everywhere, KL costs nothing, and gamma is 1."""

    policy: str
    """Directory of a language model; token 0 ends a response."""
    reward: str
    """Directory of a sequence classifier with one label."""
    prompts: list[list[int]]
    """Token ids of several batches; the first batch that the trainer draws is used."""
    micro_batch: int = 8
    accumulated: int = 1
    """Number of micro-batches in the batch."""
    minibatches: int = 1
    epochs: int = 1
    lam: float = 0.9
    precision: str = "float32"
    pad_is_stop: bool = False
    """Whether the tokenizer's pad token is the token that ends a response."""


@dataclass(frozen=True)
class Seen:
    """Measurements of one iteration."""

    responses: list[list[int]]
    """Responses up to and including the token that ends them, or of 12 tokens."""
    scores: Tensor
    """Raw scores `[8]` of the reward."""
    counted: Tensor
    """`[8, 12]` bool, True for tokens that count in the policy loss."""
    advantages: Tensor
    """Advantages `[8, 12]` before whitening."""
    ratios: Tensor
    """Ratios of the counted tokens in the first forward pass of the update."""
    gradient: Tensor
    """Gradients of policy and critic at the first optimiser step, before clipping, as one vector."""
    steps: int
    """Number of optimiser steps in the iteration."""


Row = tuple[str, bool | None, str]
"""A rule, whether it holds (None: nothing to check), and what was measured."""


def check(adapter: Any, folder: Path) -> Iterator[Row]:
    """Yield a row for each rule."""
    yield from _recorded(adapter.FUNCTIONS)
    policy, reward = make_models(SHAPE, "mixed", folder)
    case = Case(policy, reward, make_prompts(SHAPE, "mixed", 8 * SHAPE.batch))
    whole = adapter.observe(case)
    for precision in ("float32", "bfloat16"):
        seen = adapter.observe(replace(case, precision=precision))
        error = float((seen.ratios - 1).abs().max())
        yield f"first ratio is 1 in {precision}", error <= 1e-5, f"off by at most {error:.0e}"
    yield _score_on_last_token(case, whole)
    yield _cuts(whole, [adapter.observe(replace(case, micro_batch=m, accumulated=a)) for m, a in CUTS[1:]])
    yield _pad(whole, adapter.observe(replace(case, pad_is_stop=True)))
    for micro_batch, accumulated, minibatches, epochs in ((8, 1, 4, 2), (2, 4, 4, 2), (2, 4, 2, 3)):
        sizes = {"micro_batch": micro_batch, "accumulated": accumulated, "minibatches": minibatches, "epochs": epochs}
        steps = adapter.observe(replace(case, **sizes)).steps
        rule = f"{epochs} epochs of {minibatches} minibatches, micro-batches of {micro_batch}"
        yield rule, steps == epochs * minibatches, f"{steps} optimiser steps, {epochs * minibatches} expected"


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    words = {True: "holds", False: "**does not hold**", None: "–"}
    lines = [("rule", "", "measured"), ("---",) * 3, *((rule, words[holds], text) for rule, holds, text in rows)]
    return markdown(lines)


def _recorded(functions: dict[str, Callable[..., Tensor]]) -> Iterator[Row]:
    for topic, (file, names, output) in TOPICS.items():
        rule = f"{topic}: as recorded from verl"
        if topic not in functions:
            yield rule, None, "the trainer has no such function"
            continue
        text = (VECTORS / f"{file}__verl.json").read_text(encoding="utf-8").replace('"-inf"', "-Infinity")
        calls = [
            call
            for call in json.loads(text)
            if call["inputs"].get("agg_mode", "token-mean") == "token-mean" and not call["name"].endswith("mask_hole")
        ]
        agree = sum(_agrees(functions[topic], call, names, output) for call in calls)
        yield rule, agree == len(calls), f"{agree} of {len(calls)} calls agree"


def _agrees(function: Callable[..., Tensor], call: dict[str, Any], names: tuple[str, ...], output: str) -> bool:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        found = torch.tensor(value, dtype=getattr(torch, call["dtype"]))
        return found.bool() if name == "mask" else found.long() if name == "labels" else found

    inputs = {name: read(name, call["inputs"][name]) for name in names}
    found, expected = function(*inputs.values()), torch.as_tensor(read(output, call["outputs"][output]))
    if found.dim() == 2 and "mask" in inputs:  # padding holds other numbers in verl than here
        found, expected = found[inputs["mask"]], expected[inputs["mask"]]
    return torch.allclose(found.double(), expected.double(), **call["tolerance"])


def _score_on_last_token(case: Case, seen: Seen) -> Row:
    """Without values and KL the advantage of token t of n is score x lam^(n - 1 - t)."""
    expected = torch.zeros(seen.advantages.shape, dtype=torch.float64)
    for row, (score, response) in enumerate(zip(seen.scores.tolist(), seen.responses, strict=True)):
        for t in range(len(response)):
            expected[row, t] = score * case.lam ** (len(response) - 1 - t)
    lasts = torch.tensor([len(response) - 1 for response in seen.responses])
    paid = seen.advantages.double().gather(1, lasts[:, None])[:, 0] / seen.scores.double()
    tokens = torch.arange(expected.shape[1]) <= lasts[:, None]
    off = float((seen.advantages - expected)[tokens].abs().max() / seen.scores.abs().max())
    measured = f"the last token has {', '.join(sorted({f'{share:.2f}' for share in paid.tolist()}))} of it"
    return "the score is paid on the last token", off <= 1e-5, measured


def _cuts(whole: Seen, others: list[Seen]) -> Row:
    rule = "the gradient does not depend on the cut into micro-batches"
    if any(other.responses != whole.responses for other in others):
        raise SystemExit("the cuts did not get the same responses: nothing to compare")
    off = max(_distance(whole, other) for other in others)
    return rule, off <= 1e-5, f"differs by up to {off:.1%}"


def _pad(whole: Seen, other: Seen) -> Row:
    """The end token counts, whatever the pad token is."""
    if other.responses != whole.responses:
        raise SystemExit("the pad token changed the responses: nothing to compare")
    counts = [int(seen.counted.sum()) for seen in (other, whole)]
    same = torch.equal(other.counted, whole.counted) and _distance(whole, other) <= 1e-5
    measured = f"{counts[0]} of {counts[1]} tokens count, the gradient differs by {_distance(whole, other):.1%}"
    return "the end of text may be the pad token", same, measured


def _distance(first: Seen, second: Seen) -> float:
    """Return the distance of the gradients over the length of the first."""
    return float((first.gradient - second.gradient).norm() / first.gradient.norm())


def main() -> None:
    """Print the table of the adapter; the exit status is 1 if a rule does not hold."""
    adapter = importlib.import_module(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="invariances-") as folder:
        rows = list(check(adapter, Path(folder)))
    print(table(rows))
    sys.exit(any(holds is False for _, holds, _ in rows))


if __name__ == "__main__":
    main()
