"""Measure and test all that needs a GPU, in one call of at most nine minutes, and print one table for docs/speed.md.

python benchmarks/gpu_report.py --out FOLDER --peer-python PATH

The most telling parts come first. Each is a process with a limit of its own; one that fails or takes too long leaves
the others to run, and the exit code is 1 then. Results are printed as they come, and after each part FOLDER has them,
too, so that nothing is lost if the call is cut off. Nothing is fetched: models have random weights.
`--small` tries every part on a CPU with tiny models; what only a GPU can do is then said not to have run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from gpu_parts import FOUND, NO_GPU

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
SHARDING_TESTS = "tests/ppo/test_sharding.py"
ALONE = re.compile(rf"^(?P<test>\S+::.+?) (?P<end>{ENDS})\b(?: \((?P<why>.*)\))?")
IN_A_WORKER = re.compile(rf"^\[gw\d+\] \[ *\d+%\] (?P<end>{ENDS}) (?P<test>\S+::.+?)(?P<why>) *$")
REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?) - (.*)$")
STOPPING_S = 8.0
"""Seconds that a stopped part may take to print its results."""
WITHOUT_HURRY_S = 600.0
"""Time limit of each part with `--small`, long enough that other work on the machine does not cut a trial off."""
LEAST_S = 15.0
"""A part does not start if less time is left."""
DEVICE = """
import os, platform, torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, CUDA {torch.version.cuda}")
"""


@dataclass(frozen=True)
class Part:
    """A command, its limit in seconds, and a function that takes pairs of name and result from its output."""

    name: str
    command: list[str]
    limit: float
    read: Callable[[list[str]], list[tuple[str, str]]]


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and its results."""

    name: str
    state: str
    seconds: float
    found: list[tuple[str, str]] = field(default_factory=list)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_report")), help="folder for results; else $OUT")
    add("--minutes", type=float, default=9.0, help="for all parts together")
    add("--parts", type=lambda text: text.split(","), help="only these, comma-separated")
    add("--peer-python", help="Python of an environment with TRL 1.12.0; without it only our side is timed")
    add("--small", action="store_true", help="tiny models on a CPU, to try the command itself, without hurry")
    return parser.parse_args(arguments)


def parts_of(arguments: argparse.Namespace, folder: Path) -> list[Part]:
    """Return the parts in the order in which they run; files of theirs go to `folder`."""
    python, small = [sys.executable, "-u"], arguments.small
    ours = [*python, str(HERE / "gpu_parts.py"), *(["--device", "cpu", "--small"] if small else [])]
    pytest = [*python, "-m", "pytest", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider"]
    pytest += ["--collect-only", "-q"] if small else ["-v"]
    speed = [
        *python,
        str(HERE / "compare.py"),
        "--pairs",
        "1",
        "--lengths",
        "mixed",
        "--json",
        str(folder / "speed.json"),
    ]
    of_gpu = ["--device", "cuda", "--presets", "gpt2", "--precisions", "bfloat16", "--iterations", "2"]
    of_cpu = ["--device", "cpu", "--presets", "toy", "--precisions", "float32", "--iterations", "1"]
    speed += of_cpu if small else of_gpu
    if arguments.peer_python:
        speed += ["--peer-python", arguments.peer_python]
    read = read_collected if small else read_tests
    parts = [
        Part("device", [*python, "-c", DEVICE], 15, lambda lines: [(commit(), "".join(lines[-1:]).strip())]),
        Part("launches", [*ours, "launch"], 25, read_found),
        Part("decoding", [*ours, "decode"], 90, read_found),
        Part("update", [*ours, "update"], 110, read_found),
        Part("beside TRL", speed, 120, lambda lines: read_speed(folder / "speed.json", lines)),
        Part("dearest operations", [*ours, "profile"], 30, read_found),
        Part("FSDP2", [*pytest, SHARDING_TESTS], 40, read),
        Part("demo", [*ours, "demo"], 40, read_found),
    ]
    return [replace(part, limit=WITHOUT_HURRY_S) for part in parts] if small else parts


def commit() -> str:
    """Return what is measured: the commit, if this is a git repository."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return "commit " + subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "commit unknown"


def read_found(lines: list[str]) -> list[tuple[str, str]]:
    """Return the results that `gpu_parts.py` has printed so far."""
    said = [line.removeprefix(FOUND) for line in lines if line.startswith(FOUND)]
    return [(what, result) for what, result in map(json.loads, said)]


def read_collected(lines: list[str]) -> list[tuple[str, str]]:
    """Return the tests that a machine with a GPU would run."""
    tests = [line.strip() for line in lines if "::" in line]
    if not tests:
        raise ValueError("no test was found")
    return [(test, NO_GPU) for test in tests]


def read_tests(lines: list[str]) -> list[tuple[str, str]]:
    """Return how many tests ended how, and of those that did not pass the names and reasons; and the one cut off."""
    matches = [match for line in lines if (match := ALONE.match(line) or IN_A_WORKER.match(line))]
    reasons = {match[1]: match[2].strip() for line in lines if (match := REASON.match(line))}
    counts: dict[str, int] = {}
    for match in matches:
        counts[match["end"].lower()] = counts.get(match["end"].lower(), 0) + 1
    rows = [("tests", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none ran")]
    for match in matches:
        if match["end"] != "PASSED":
            why = match["why"] or reasons.get(match["test"], "")
            rows.append((match["test"], f"{match['end'].lower()}: {why}" if why else match["end"].lower()))
    last = lines[-1].strip() if lines else ""
    is_cut_off = "::" in last and last[0] != "[" and not ALONE.match(last) and " - " not in last
    return [*rows, (last, "cut off")] if is_cut_off else rows


def read_speed(path: Path, lines: list[str]) -> list[tuple[str, str]]:
    """Return a row for each phase that `compare.py` has timed, and for each side that failed; if cut off, each side."""
    if not path.exists():
        sides = [line.strip().partition(": ") for line in lines if re.match("(ours|trl): experience", line)]
        return [(side, times) for side, _, times in sides]
    rows, found = list[tuple[str, str]](), json.loads(path.read_text(encoding="utf-8"))
    for row in found["rows"]:
        result = f"ours {row['ours_s']:.2f} s"
        if "trl_s" in row:
            result += f", TRL {row['trl_s']:.2f} s, {row['ratio']:.2f} times faster"
        memory = [f"{row[f'{side}_mib']:.0f}" for side in ("ours", "trl") if f"{side}_mib" in row]
        result += f", {' / '.join(memory)} MiB" if memory else ""
        rows.append((f"{row['preset']}, {row['lengths']}, {row['precision']}: {row['phase']}", result))
    return [*rows, *((failure, "failed") for failure in found["failures"])]


def run(part: Part, seconds: float, log: IO[str]) -> Outcome:
    """Run a part, print what it prints, and end it with all that it started when its time is over."""

    def tell(text: str) -> None:
        print(text, end="", flush=True)
        log.write(text)
        log.flush()

    tell(f"\n=== {part.name}, {seconds:.0f} s at most: {' '.join(part.command)[:300]}\n")
    started, lines, is_late = time.monotonic(), list[str](), threading.Event()
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},  # pytest cuts reasons to them
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def end(by: signal.Signals) -> None:
        is_late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, by)

    timers = [
        threading.Timer(seconds, end, [signal.SIGINT]),  # pytest then says what has failed, and why
        threading.Timer(seconds + STOPPING_S, end, [signal.SIGKILL]),
    ]
    for timer in timers:
        timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        tell(line)
        lines.append(line)
    status = process.wait()
    for timer in timers:
        timer.cancel()
    state = f"stopped after {seconds:.0f} s" if is_late.is_set() else "done" if status == 0 else f"status {status}"
    try:
        found = part.read(lines)
    except (ValueError, KeyError, OSError) as error:  # a file that was cut off
        state, found = "failed", [("its results", f"cannot be read: {type(error).__name__}: {error}")]
    return Outcome(part.name, state, time.monotonic() - started, found)


def table(outcomes: list[Outcome]) -> str:
    """Return all results as one Markdown table."""
    lines = ["| part | what | result |", "| --- | --- | --- |"]
    for outcome in outcomes:
        lines.append(f"| **{outcome.name}** | {outcome.seconds:.0f} s | {outcome.state} |")
        lines += [f"| | {what} | {result} |" for what, result in outcome.found]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and print the table; return 1 if a part did not end well, or found something that failed."""
    options, outcomes, started = parse_arguments(arguments), list[Outcome](), time.monotonic()
    seconds = 10 * WITHOUT_HURRY_S if options.small else 60.0 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="gpu-report-") as folder,
        (options.out / "log.txt").open("w", encoding="utf-8") as log,
    ):
        parts = parts_of(options, Path(folder))
        if unknown := {*(options.parts or ())} - {part.name for part in parts}:
            names = ", ".join(part.name for part in parts)
            raise SystemExit(f"--parts: there is no {', '.join(sorted(unknown))}; the parts are {names}")
        for part in parts:
            if options.parts and part.name not in options.parts:
                continue
            left = seconds - (time.monotonic() - started) - STOPPING_S
            if left < min(LEAST_S, part.limit):
                outcomes.append(Outcome(part.name, "no time left", 0.0))
            else:
                outcomes.append(run(part, min(part.limit, left), log))
            results = json.dumps([asdict(each) for each in outcomes], indent=1)
            (options.out / "results.json").write_text(results, encoding="utf-8")
            (options.out / "table.md").write_text(table(outcomes) + "\n", encoding="utf-8")
    print(f"\n{table(outcomes)}", flush=True)
    failed = [what for each in outcomes for what, result in each.found if result.startswith("failed")]
    return int(bool(failed) or any(outcome.state != "done" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
