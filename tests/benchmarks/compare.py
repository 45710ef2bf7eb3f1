"""Run this project and TRL's last PPO on identical work in turn, and compare their times.

    python tests/benchmarks/compare.py --peer-python PATH --presets tiny,small --forms full,mixed \\
        --precisions float32,bf16 --pairs 5 --json OUT

The peer's Python belongs to an environment with TRL 1.12.0, the last release with `trl.experimental.ppo`. Each side is
a process of its own that holds the same models and runs one iteration at a time on command, while the others sleep.
What the columns mean stands in docs/speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from roofline import Rates, Work, adamw_seconds
from speed.channel import Worker
from speed.inputs import find_noise_seed, make_models, make_prompts
from speed.rows import rows_of, table
from speed.workload import FORMS, PRECISIONS, PRESETS, Job

Run = dict[str, Any]  # what a worker says of one iteration
LIBRARIES = ("torch", "transformers", "accelerate", "trl")
TOLERANCE = {"ours": 0.05, "peer": 0.15}
"""Of response tokens. Our noise is chosen (`find_noise_seed`); the peer's can't be, but its times don't follow it."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peer-python", required=True, help="Python of an environment with TRL 1.12.0")
    add("--presets", type=names_of(PRESETS), default=["tiny", "small"], help="comma-separated: " + ", ".join(PRESETS))
    add("--forms", type=names_of(FORMS), default=["full"], help="full: no response ends early; mixed: half as long")
    add("--precisions", type=names_of(PRECISIONS), default=["float32"], help="float32, bf16")
    add("--pairs", type=_positive, default=5, help="measured iterations of each side")
    add("--warmup", type=_positive, default=1, help="iterations of each side before the measured ones")
    add("--json", type=Path, required=True, help="results, written anew after each combination")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--no-defaults", action="store_true", help="leave out the peer with its default settings")
    add("--peer-bf16", choices=["autocast", "autocast-frozen", "weights"], default="autocast", help=PEER_BF16)
    add("--set", action="append", type=setting, default=[], metavar="NAME=VALUE", help="a PPOConfig field of ours")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


PEER_BF16 = (
    "autocast: float32 weights (its fastest on CPU); autocast-frozen: reference and reward model in bfloat16 as well; "
    "weights: all weights in bfloat16, which hardly move at usual learning rates"
)


def names_of(known: Iterable[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return names

    return parse


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def compare(job: Job, name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure one combination and return its rows."""
    best, usual = folder / "job.json", folder / "defaults.json"
    job.write(best)
    replace(job, setting="defaults").write(usual)
    with ExitStack() as stack:

        def start(python: str, module: str, path: Path) -> Worker:
            worker = Worker(python, module, path, **Job.read(path).peer_environment)
            stack.callback(worker.close)
            worker.ready()  # one after the other: loading takes all cores
            return worker

        roof = start(sys.executable, "roofline", best)
        sides = {
            "ours": start(sys.executable, "speed.our_side", best),
            "peer": start(arguments.peer_python, "speed.trl_side", best),
        }
        if not arguments.no_defaults:
            sides["defaults"] = start(arguments.peer_python, "speed.trl_side", usual)
        runs, rates = take_turns({side: worker.run for side, worker in sides.items()}, roof.run, job.iterations)
    return combination_rows(job, name, arguments.warmup, runs, [Rates(**found) for found in rates])


def take_turns(
    sides: dict[str, Callable[[], Run]], roof: Callable[[], Run], rounds: int
) -> tuple[dict[str, list[Run]], list[Run]]:
    """Run one iteration of each side a round, every second round in reversed order; after each, measure the machine."""
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    rates: list[Run] = []
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else reversed(sides):
            runs[side].append(sides[side]())
        rates.append(roof())
        times = ", ".join(f"{side} {found[-1]['iteration']:.2f} s" for side, found in runs.items())
        print(f"round {round_ + 1} of {rounds}: {times}", file=sys.stderr, flush=True)
    return runs, rates


def combination_rows(
    job: Job, name: str, warmup: int, runs: dict[str, list[Run]], rates: list[Rates]
) -> list[dict[str, Any]]:
    """Return the rows of a combination's rounds, without the warm-up.

    Raises:
        SystemExit: The sides have not done the same work.
    """
    check_steps(job, runs)
    measured, rates = {side: found[warmup:] for side, found in runs.items()}, rates[warmup:]
    works = [Work(job.preset, job.precision, run["prompt_tokens"], run["response_tokens"]) for run in measured["ours"]]
    needed = [(work.seconds(found), work.seconds(found.fastest())) for work, found in zip(works, rates, strict=True)]
    labels = {"preset": name, "form": job.form, "precision": job.precision}
    rows = rows_of(labels, measured["ours"], measured["peer"], measured.get("defaults", []), needed)
    check_tokens(job, rows[-1])
    by_phase = {row["phase"]: row for row in rows}
    by_phase["update"]["adamw_s"] = median(adamw_seconds(job.preset, found) for found in rates)
    by_phase["iteration"]["matmul_gflop_per_s"] = {
        product: round(median(found.forward[product] for found in rates) / 1e9, 1) for product in rates[0].forward
    }
    by_phase["iteration"]["bandwidth_gb_per_s"] = round(median(found.bandwidth for found in rates) / 1e9, 2)
    return rows


def check_steps(job: Job, runs: dict[str, list[Run]]) -> None:
    """Raise if a side has not taken the optimiser steps that the work has: its times would be those of less work."""
    expected = job.iterations * job.preset.epochs * (job.preset.batch // job.preset.minibatch)
    for side, found in runs.items():
        if found[-1]["steps"] != expected:
            raise SystemExit(f"{side}: {found[-1]['steps']} optimiser steps, {expected} expected")


def check_tokens(job: Job, row: dict[str, Any]) -> None:
    """Raise if a side's responses are not as long as they should be: it would have done other work."""
    for side, tolerance in TOLERANCE.items():
        found = row[f"{side}_tokens"]
        if abs(found / job.expected_tokens - 1) > tolerance:
            raise SystemExit(
                f"{row['preset']} {job.form}, {side}: {found:.0f} response tokens an iteration, "
                f"{job.expected_tokens:g} expected: not the same work"
            )


def _versions(python: str) -> dict[str, str]:
    code = (
        "from importlib.metadata import version, PackageNotFoundError as E\n"
        "import json, platform\n"
        f"found = {{'python': platform.python_version()}}\n"
        f"for name in {LIBRARIES}:\n"
        "    try: found[name] = version(name)\n"
        "    except E: pass\n"
        "print(json.dumps(found))"
    )
    versions: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code], text=True))
    return versions


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the last row: machine, versions and settings."""
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_before": round(os.getloadavg()[0], 2),
    }
    if arguments.device == "cuda":
        import torch

        machine["gpu"] = torch.cuda.get_device_name(0)
    return {
        "machine": machine,
        "versions": {"ours": _versions(sys.executable), "peer": _versions(arguments.peer_python)},
        "settings": {
            "pairs": arguments.pairs,
            "warmup": arguments.warmup,
            "peer_bf16": arguments.peer_bf16,
            "ours": dict(arguments.set),
        },
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Measure every combination that is asked for; write and print the results."""
    arguments = parse_arguments()
    last, rows = describe(arguments), list[dict[str, Any]]()
    started = time.perf_counter()
    for name in arguments.presets:
        for form in arguments.forms:
            with tempfile.TemporaryDirectory(prefix="compare-") as place:
                folder, preset = Path(place), PRESETS[name]
                models = make_models(preset, form, folder, arguments.seed)
                iterations = arguments.warmup + arguments.pairs
                noise_seed = arguments.seed
                if form == "mixed":
                    stops = models.stop_probability
                    noise_seed = find_noise_seed(preset, stops, arguments.warmup, iterations, arguments.seed)
                for precision in arguments.precisions:
                    job = Job(
                        preset=preset,
                        form=form,
                        precision=precision,
                        device=arguments.device,
                        iterations=iterations,
                        policy=models.policy,
                        reward=models.reward,
                        prompt_ids=make_prompts(preset, form, preset.batch * iterations, arguments.seed),
                        seed=arguments.seed,
                        noise_seed=noise_seed,
                        overrides=dict(arguments.set),
                        peer_bf16=arguments.peer_bf16,
                    )
                    print(f"{name} {form} {precision}", file=sys.stderr, flush=True)
                    rows += compare(job, name, arguments, folder)
                    arguments.json.write_text(json.dumps([*rows, last], indent=1), encoding="utf-8")
    print(table(rows))
    print(f"{arguments.json}, {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
