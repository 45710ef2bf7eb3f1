"""Run this project and TRL 1.12's PPO on the same work in turn, and compare time and memory. See docs/speed.md.

python benchmarks/compare.py --peer-python PATH --presets tiny,small --lengths full,mixed --pairs 3 --json OUT
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from inputs import chat_ids, find_noise_seed, make_models, make_prompts, raw_rows, recipe, with_system_turn
from tables import markdown
from workload import LENGTHS, PRECISIONS, PRESETS, SAMPLED, Job

HERE = Path(__file__).resolve().parent
ENVIRONMENT = dict(os.environ)
"""The environment as it was given, without the variables that `import ppo_rlhf` sets for this project's libraries."""
PHASES = ("experience", "update", "iteration")
TOLERANCE = {"ours": 0.05, "trl": 0.3}
"""Allowed deviation from the expected number of response tokens. Our noise is chosen (`find_noise_seed`); TRL's is not,
but TRL's times do not depend on where responses end."""
RECIPE = ("learning_rate", "kl_coef", "temperature", "missing_eos_penalty")
"""What a job of a real model takes of the recipe obedience."""
Result = dict[str, Any]
"""Figures of one process: `iterations` (seconds of each phase, tokens, score), `steps`, `memory_mib`, and `cpu_s`, the
processor seconds of an iteration."""


class SideError(SystemExit):
    """One side's process failed or did the wrong work, and the benchmark cannot continue without this side."""

    def __init__(self, side: str, why: str) -> None:
        super().__init__(f"{side}: {why}")
        self.side = side


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peer-python", help="Python of an environment with TRL 1.12.0; without it only our side runs")
    add("--model", type=Path, help="for the presets smollm2: a directory of SmolLM2-135M-Instruct in safetensors")
    add("--presets", type=names_of(PRESETS), default=["tiny", "small"], help="comma-separated: " + ", ".join(PRESETS))
    add(
        "--lengths",
        type=names_of(LENGTHS),
        default=["full", "mixed"],
        help="of random models' responses. full: none ends early; mixed: half as long on average",
    )
    add("--precisions", type=names_of(PRECISIONS), default=["float32"], help=", ".join(PRECISIONS))
    add("--pairs", type=int, default=3, help="runs of each side, in turn")
    add("--iterations", type=int, default=3, help="measured iterations of a run, after one for warm-up")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="a field of our PPOConfig")
    add("--json", type=Path, help="where to write the results, anew after each combination")
    parsed = parser.parse_args(arguments)
    if parsed.model is None and any(PRESETS[name].chats for name in parsed.presets):
        parser.error("the presets smollm2 need --model")
    return parsed


def names_of(known: Iterable[str]) -> Any:
    """Return a parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return names

    return parse


def setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE with a JSON value or a plain string."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def compare(job: Job, peer_python: str | None, pairs: int, folder: Path) -> list[tuple[Result, ...]]:
    """Run both sides in turn, each in a process of its own, and return their results pair by pair."""
    path = folder / "job.json"
    job.write(path)
    commands = {"ours": (sys.executable, "our_side.py")}
    if peer_python is not None:
        commands["trl"] = peer_python, "trl_side.py"
    results = list[tuple[Result, ...]]()
    for pair in range(pairs):
        found = {}
        for side in list(commands) if pair % 2 == 0 else reversed(commands):
            python, script = commands[side]
            environment = ENVIRONMENT | (job.peer_environment if side == "trl" else {})
            found[side] = run_side(side, [python, str(HERE / script), str(path)], environment)
            check_work(job, side, found[side])
            phases = ", ".join(f"{phase} {seconds(found[side], phase):.2f} s" for phase in PHASES)
            print(f"{side}: {phases}", file=sys.stderr, flush=True)
        results.append(tuple(found[side] for side in commands))
        times = ", ".join(f"{side} {seconds(result, 'iteration'):.2f} s" for side, result in found.items())
        print(f"pair {pair + 1} of {pairs}: {times}", file=sys.stderr, flush=True)
    return results


def compare_what_runs(
    job: Job, peer_python: str | None, pairs: int, folder: Path
) -> tuple[list[tuple[Result, ...]], list[str]]:
    """Return the results of `compare` and the reason of a failure.

    If TRL fails the results are only ours; if our side fails there are no results.
    """
    try:
        return compare(job, peer_python, pairs, folder), []
    except SideError as error:
        print(error, file=sys.stderr, flush=True)
        failed, reasons = error.side, [str(error).splitlines()[-1]]
    if failed == "ours":
        return [], reasons
    results, more = compare_what_runs(job, None, pairs, folder)
    return results, reasons + more


def run_side(side: str, command: list[str], environment: dict[str, str]) -> Result:
    """Run one process and return the figures in its last line of output."""
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        why = f"{' '.join(command)} ended with status {finished.returncode}:\n{finished.stderr.strip()[-3000:]}"
        raise SideError(side, why)
    result: Result = json.loads(finished.stdout.splitlines()[-1])
    return result


def check_work(job: Job, side: str, result: Result) -> None:
    """Raise an error if a side took another number of optimiser steps or sampled another number of tokens than
    planned. How many tokens a real model samples is its own matter.
    """
    expected = job.iterations * job.preset.steps
    if result["steps"] != expected:
        raise SideError(side, f"{result['steps']} optimiser steps, {expected} expected")
    if job.preset.chats:
        return
    found = tokens(result)
    if abs(found / job.expected_tokens - 1) > TOLERANCE[side]:
        raise SideError(side, f"{found:.0f} response tokens an iteration, {job.expected_tokens:g} expected")


def seconds(result: Result, phase: str) -> float:
    """Return the median time of a phase after the first iteration, which warms up."""
    return median(iteration[phase] for iteration in result["iterations"][1:])


def tokens(result: Result) -> float:
    """Return the mean number of response tokens of an iteration after the first one."""
    counts = [iteration["tokens"] for iteration in result["iterations"][1:]]
    return float(sum(counts)) / len(counts)


def rows_of(labels: dict[str, str], pairs: Sequence[tuple[Result, ...]]) -> list[dict[str, Any]]:
    """Return one row a phase: median seconds, and TRL's seconds over ours as the median and the range of the pairs.

    Where only our side ran, nothing of TRL is in the rows.
    """
    rows = list[dict[str, Any]]()
    for phase in PHASES:
        ours, *others = ([seconds(result, phase) for result in side] for side in zip(*pairs, strict=True))
        row: dict[str, Any] = {**labels, "phase": phase, "ours_s": median(ours)}
        for trl in others:
            ratios = sorted(b / a for a, b in zip(ours, trl, strict=True))
            row |= {"trl_s": median(trl), "ratio": median(ratios), "ratios": ratios}
        rows.append(row)
    for side, name in enumerate(("ours", "trl")[: len(pairs[0])]):
        rows[-1][f"{name}_tokens"] = median(tokens(pair[side]) for pair in pairs)
        rows[-1][f"{name}_mib"] = max(pair[side]["memory_mib"] for pair in pairs)
        rows[-1][f"{name}_cpu"] = median(pair[side]["cpu_s"] for pair in pairs)
    if len(pairs[0]) > 1:
        rows[-1]["cpu_ratios"] = sorted(trl["cpu_s"] / ours["cpu_s"] for ours, trl in pairs)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    head = ["preset", "lengths", "precision", "phase", "ours s", "TRL s", "times faster", "range"]
    head += ["tokens", "MiB", "CPU s", "times fewer", "range"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        line = [row[name] for name in ("preset", "lengths", "precision", "phase")]
        line.append(f"{row['ours_s']:.2f}")
        if "trl_s" in row:
            line += [f"{row['trl_s']:.2f}", f"{row['ratio']:.2f}"]
            line.append(f"{row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f}")
        else:
            line += ["–"] * 3
        for name, digits in (("tokens", 0), ("mib", 0), ("cpu", 1)):
            found = [row[f"{side}_{name}"] for side in ("ours", "trl") if f"{side}_{name}" in row]
            line.append(" / ".join(f"{figure:.{digits}f}" for figure in found))
        ratios = row.get("cpu_ratios", [])
        line += [f"{median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"] if ratios else ["", ""]
        lines.append(line)
    return markdown(lines)


def curve_rows(pairs: Sequence[tuple[Result, ...]]) -> list[dict[str, Any]]:
    """Return one row a run of a real model: the mean score of each iteration's responses."""
    return [
        {"side": side, "pair": number, "scores": [iteration["score"] for iteration in result["iterations"]]}
        for number, pair in enumerate(pairs, 1)
        for side, result in zip(("ours", "trl"), pair, strict=False)
    ]


def curves_table(curves: list[dict[str, Any]]) -> str:
    """Return the mean scores of blocks of four iterations as a Markdown table."""
    starts = range(0, max(len(row["scores"]) for row in curves), 4)
    head = ["score of iterations", *(f"{start + 1} to {start + 4}" for start in starts)]
    lines = [head, ["---"] * len(head)]
    for row in curves:
        blocks = [row["scores"][start : start + 4] for start in starts]
        means = [f"{sum(block) / len(block):.3f}" if block else "" for block in blocks]
        lines.append([f"{row['precision']}, {row['side']}, run {row['pair']}", *means])
    return "\n" + markdown(lines)


def machine(peer_python: str | None) -> dict[str, Any]:
    """Return the processor and the versions on both sides."""
    code = "import json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in NAMES}))"

    def versions(python: str, *names: str) -> dict[str, str]:
        found: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code.replace("NAMES", str(names))]))
        return found

    information = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in information.splitlines() if line.startswith("model name")]
    libraries = ("torch", "transformers", "accelerate")
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "versions": {
            "ours": versions(sys.executable, *libraries),
            **({"trl": versions(peer_python, *libraries, "trl")} if peer_python else {}),
        },
    }


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, the versions on both sides, and the settings."""
    settings = {"pairs": arguments.pairs, "iterations": arguments.iterations, "ours": dict(arguments.set)}
    return {**machine(arguments.peer_python), **settings}


def make_job(name: str, lengths: str, arguments: argparse.Namespace, folder: Path) -> Job:
    """Return the job of a preset in float32, and write its models, unless they are real, into the folder."""
    preset, iterations = PRESETS[name], 1 + arguments.iterations
    work: dict[str, Any]
    if preset.chats:
        policy, settings = str(arguments.model), recipe("obedience")["ppo"]
        rows = with_system_turn(raw_rows(), preset.system_words)
        work = {"policy": policy, "reward": None, "prompt_ids": chat_ids(policy, rows), "rows": rows}
        work |= {name: settings[name] for name in RECIPE}
    else:
        policy, reward = make_models(preset, lengths, folder)
        prompts = make_prompts(preset, lengths, preset.batch * iterations)
        seed = find_noise_seed(preset, 1, iterations) if lengths == "mixed" else 0
        work = {"policy": policy, "reward": reward, "prompt_ids": prompts, "seed": seed}
    return Job(
        preset=preset,
        lengths=lengths,
        precision="float32",
        device=arguments.device,
        iterations=iterations,
        overrides=dict(arguments.set),
        **work,
    )


def main() -> int:
    """Measure each combination, write the results and print them; return 1 if a side failed in one of them."""
    arguments, failures = parse_arguments(), list[str]()
    rows, curves, description = list[dict[str, Any]](), list[dict[str, Any]](), describe(arguments)
    for name in arguments.presets:
        for lengths in [SAMPLED] if PRESETS[name].chats else arguments.lengths:
            with tempfile.TemporaryDirectory(prefix="compare-") as folder:
                job = make_job(name, lengths, arguments, Path(folder))
                for precision in arguments.precisions:
                    print(f"{name}, {lengths}, {precision}", file=sys.stderr, flush=True)
                    given = replace(job, precision=precision), arguments.peer_python, arguments.pairs, Path(folder)
                    pairs, reasons = compare_what_runs(*given)
                    failures += [f"{name}, {lengths}, {precision}: {reason}" for reason in reasons]
                    labels = {"preset": name, "lengths": lengths, "precision": precision}
                    if pairs:
                        rows += rows_of(labels, pairs)
                    if pairs and job.preset.chats:
                        curves += [{**labels, **row} for row in curve_rows(pairs)]
                    if arguments.json:
                        results = {**description, "rows": rows, "curves": curves, "failures": failures}
                        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join([table(rows), *([curves_table(curves)] if curves else []), *failures]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
