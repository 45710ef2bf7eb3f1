"""How an iteration's cost grows with batch, response length and model size, and what Kedro and MLflow add to it.

    python tests/benchmarks/scaling.py --json OUT

The sweeps vary one size of the preset `tiny`. All points of a sweep are measured in turn, several rounds, so that a
machine that grows slower touches all of them alike; a point is the median of its rounds. `compaction` is the time of
rollouts of the preset `small` that end early, with and without leaving out what has ended. Kedro's overhead is measured
on `kedro run --pipelines align` in a copy of the project: the time between the ends of two iterations less what the
iteration's own functions took (`time/iteration_s`). Iterations in the middle of a run have no evaluation and no
checkpoint here.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import correlation, linear_regression, mean, median
from typing import Any
from unittest.mock import patch

import torch
from compare import names_of, setting
from options import copy_project, kedro
from roofline import matrix_elements
from speed.inputs import make_models, make_prompts
from speed.our_side import OurSide, our_config
from speed.rows import PHASES
from speed.workload import PRECISIONS, PRESETS, Job, Preset

from ppo_rlhf.config import MODEL_PATHS
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.ppo import sampling as responses
from ppo_rlhf.ppo.accelerator import autocast

BASE = PRESETS["tiny"]
SWEEPS: dict[str, tuple[list[int], Callable[[int], Preset]]] = {
    "batch": ([16, 32, 48, 64, 96], lambda size: replace(BASE, batch=size)),
    "response_length": ([16, 32, 64, 96, 128], lambda length: replace(BASE, response_length=length)),
    "layers": ([2, 4, 6, 8, 12], lambda layers: replace(BASE, shape=replace(BASE.shape, layers=layers))),
}
COMPACTION = "compaction"
COMPACTED = ((32, 64), (64, 64), (128, 64), (32, 256))  # prompts, tokens of the longest response
KEDRO = "kedro"
KEDRO_ITERATIONS = 20


def fit(x: list[float], y: list[float]) -> dict[str, float]:
    """Return slope, intercept and R² of the line through the points."""
    slope, intercept = linear_regression(x, y)
    return {"slope": slope, "intercept": intercept, "r2": correlation(x, y) ** 2}


def sweep(name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure one sweep; return a row a phase, with slope and R² over its points."""
    sizes, preset_of = SWEEPS[name]
    sides = {size: _side(preset_of(size), arguments, folder / f"{name}-{size}") for size in sizes}
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    for round_ in range(1 + arguments.rounds):
        for size, side in sides.items():
            runs[size].append(side.iterate())
        print(f"{name}, round {round_} of {arguments.rounds}", file=sys.stderr, flush=True)
    x = [float(size) for size in sizes]
    if name == "layers":
        x = [matrix_elements(preset_of(size).shape) / 1e6 for size in sizes]
    rows = []
    for phase in PHASES:
        seconds = [median(run[phase] for run in runs[size][1:]) for size in sizes]
        labels = {"sweep": name, "unit": "million weights" if name == "layers" else name, "phase": phase}
        rows.append({**labels, "precision": arguments.precision, "x": x, "seconds": seconds, **fit(x, seconds)})
    return rows


def compaction(batch: int, longest: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of rollouts whose responses are half of the maximum long on average, with it and without."""
    preset = replace(PRESETS["small"], batch=batch, response_length=longest)
    job = _job(preset, arguments, folder, 1, form="mixed")
    state = OurSide(job).state
    seconds: dict[bool, list[float]] = {True: [], False: []}
    lengths: list[float] = []
    for round_ in range(1 + arguments.rounds):
        uniforms = episode_uniforms(0, COMPACTION, round_, preset.batch, preset.response_length)
        for compacts in (True, False) if round_ % 2 else (False, True):
            stay = patch.object(responses, "_leaving", responses._leaving if compacts else _nobody)
            started = time.perf_counter()
            with stay, autocast(state.config, state.device):
                found = responses.generate_responses(
                    state.policy, job.prompt_ids, uniforms, state.sampling, batch_size=batch
                )
            seconds[compacts].append(time.perf_counter() - started)
        lengths.append(float(found.lengths.double().mean()))
    compacted, whole = (median(seconds[compacts][1:]) for compacts in (True, False))
    return {
        "sweep": COMPACTION,
        "batch": batch,
        "precision": arguments.precision,
        "mean_length": mean(lengths[1:]),
        "maximum": preset.response_length,
        "seconds": compacted,
        "seconds_without": whole,
        "saved": median(1 - a / b for a, b in zip(seconds[True][1:], seconds[False][1:], strict=True)),
    }


def _nobody(ended: list[bool], _: int) -> list[bool]:
    return [False] * len(ended)


def _side(preset: Preset, arguments: argparse.Namespace, folder: Path) -> OurSide:
    return OurSide(_job(preset, arguments, folder, 1 + arguments.rounds))


def _job(preset: Preset, arguments: argparse.Namespace, folder: Path, iterations: int, form: str = "full") -> Job:
    models = make_models(preset, form, folder)
    return Job(
        preset=preset,
        form=form,
        precision=arguments.precision,
        device=arguments.device,
        iterations=iterations,
        policy=models.policy,
        reward=models.reward,
        prompt_ids=make_prompts(preset, form, preset.batch * iterations),
        overrides=dict(arguments.set),
    )


def kedro_overhead(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return seconds an iteration of `kedro run` takes beside the functions of its nodes."""
    job = _job(BASE, arguments, folder / "models", KEDRO_ITERATIONS)
    project = folder / "project"
    copy_project(project)
    prompts = folder / "prompts.jsonl"
    texts = (" ".join(f"t{index}" for index in ids) for ids in job.prompt_ids)
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    places = {"sft_model_path": job.policy, "reward_model_path": job.reward, "prompts_path": str(prompts)}
    rare = {"eval_interval": KEDRO_ITERATIONS, "save_interval": KEDRO_ITERATIONS}
    config, elsewhere = our_config(job), ("seed", *MODEL_PATHS)
    # all of them: a default that is left out would be the demo's value
    settings = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in elsewhere}
    settings |= rare
    for name, content in {"globals": places, "parameters_ppo": {"ppo": settings}}.items():
        (project / "conf" / "local" / f"{name}.yml").write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    kedro(project, "--pipelines", "align", threads=torch.get_num_threads())
    with sqlite3.connect(project / "mlflow.db") as store:
        query = "select timestamp / 1000.0, value from metrics where key = 'time/iteration_s' order by step"
        found = store.execute(query).fetchall()
    if len(found) != KEDRO_ITERATIONS:
        raise SystemExit(f"kedro run logged {len(found)} iterations, {KEDRO_ITERATIONS} expected")
    beside = [ended - before - own for (before, _), (ended, own) in pairwise(found)]
    own = median(seconds for _, seconds in found)
    return {
        "sweep": KEDRO,
        "iterations": len(beside),
        "iteration_s": own,
        "overhead_s": median(beside),
        "overhead_mean_s": mean(beside),
        "share": median(beside) / own,
    }


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows for people."""
    text = []
    for row in rows:
        if row["sweep"] == KEDRO:
            text.append(
                f"Kedro and MLflow: {row['overhead_s'] * 1000:.0f} ms an iteration (mean "
                f"{row['overhead_mean_s'] * 1000:.0f}), {row['share']:.1%} of one of {row['iteration_s']:.2f} s"
            )
            continue
        if row["sweep"] == COMPACTION:
            times = f"{row['seconds']:.2f} s instead of {row['seconds_without']:.2f}, {row['saved']:.0%} saved"
            lengths = f"mean length {row['mean_length']:.1f} of {row['maximum']}"
            text.append(f"{COMPACTION}: {row['batch']} responses, {lengths}: {times}")
            continue
        points = ", ".join(f"{x:g}: {y:.3f}" for x, y in zip(row["x"], row["seconds"], strict=True))
        fitted = f"{row['slope'] * 1000:.2f} ms per {row['unit']}, R² {row['r2']:.4f}"
        text.append(f"{row['sweep']:16}{row['phase']:10} {fitted}   [{points}]")
    return text


def main() -> None:
    """Measure what is asked for; write and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, everything = parser.add_argument, [*SWEEPS, COMPACTION, KEDRO]
    add("--parts", type=names_of(everything), default=everything, help="comma-separated: " + ", ".join(everything))
    add("--rounds", type=int, default=5, help="measured iterations of each point")
    add("--precision", choices=PRECISIONS, default="float32")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--set", action="append", type=setting, default=[], metavar="NAME=VALUE", help="a field of PPOConfig")
    add("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="scaling-") as place:
            if part in SWEEPS:
                rows += sweep(part, arguments, Path(place))
            elif part == COMPACTION:
                rows += [compaction(*size, arguments, Path(place) / "x".join(map(str, size))) for size in COMPACTED]
            else:
                rows.append(kedro_overhead(arguments, Path(place)))
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    main()
