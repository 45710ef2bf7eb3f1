"""Run everything that needs a GPU, part by part, and print one table: the tests, and the speed beside TRL's.

python benchmarks/gpu_report.py --minutes 20 --peer-python PATH --json OUT

Nothing is fetched: the models are of GPT-2's shape with random weights. It takes the environment that it is started in.
A part that fails, or takes longer than its share of the minutes, leaves the others to run. The exit code is 1 then.
`--device cpu --preset tiny --tests tests/test_benchmarks.py` tries the command itself on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
ALONE = re.compile(rf"^(?P<test>\S+::.+?) (?P<end>{ENDS})\b(?: \((?P<why>.*)\))?")
IN_A_WORKER = re.compile(rf"^\[gw\d+\] \[ *\d+%\] (?P<end>{ENDS}) (?P<test>\S+::.+?)(?P<why>) *$")
REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?) - (.*)$")
STOPPING_S = 20.0
"""How long a part that is stopped may take to say what it has found."""
DEVICE = """
import os, platform, torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, CUDA {torch.version.cuda}")
"""


@dataclass(frozen=True)
class Part:
    """A command, its share of the minutes, and what of its output goes into the table: pairs of what and result."""

    name: str
    command: list[str]
    share: float
    read: Callable[[list[str]], list[tuple[str, str]]]


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and what it found."""

    name: str
    state: str
    seconds: float
    found: list[tuple[str, str]] = field(default_factory=list)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="for all parts together")
    add("--peer-python", help="Python of an environment with TRL 1.12.0; without it only our side is timed")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--preset", default="gpt2", help="a preset of benchmarks/compare.py")
    add("--tests", nargs="+", help="tests in place of those marked `gpu`")
    add("--json", type=Path, help="where to write what was found, anew after each part")
    return parser.parse_args(arguments)


def parts_of(arguments: argparse.Namespace, folder: Path) -> list[Part]:
    """Return the parts in the order in which they run; files of theirs go to `folder`."""
    python, speed = sys.executable, [sys.executable, "-u", str(HERE / "compare.py"), "--pairs", "1"]
    speed += ["--device", arguments.device, "--presets", arguments.preset, "--iterations", "2"]
    peer = ["--peer-python", arguments.peer_python] if arguments.peer_python else []
    tests = arguments.tests or marked_tests()
    marker = [] if arguments.tests else ["-m", "gpu"]
    pytest = [python, "-u", "-m", "pytest", "-o", "addopts=", *marker, "-v", "-p", "no:cacheprovider", *tests]
    if importlib.util.find_spec("xdist"):  # most of a small model's time is the processor's
        pytest += ["-n", "4", "--dist", "worksteal"]
    types = "bfloat16,float32" if arguments.device == "cuda" else "float32"
    static, hf = folder / "static.json", folder / "hf.json"
    sixteen = types.split(",")[0]
    speed_of_hf = [*speed, "--lengths", "mixed", "--precisions", sixteen, "--set", "rollout_engine=hf"]
    speed += ["--lengths", "mixed,full", "--precisions", types, *peer]
    return [
        Part("device", [python, "-c", DEVICE], 0.05, lambda lines: [("", "".join(lines[-1:]).strip())]),
        Part("tests", pytest, 0.45, read_tests),
        Part("speed", [*speed, "--json", str(static)], 0.35, lambda _: read_speed(static)),
        Part("speed, engine hf", [*speed_of_hf, "--json", str(hf)], 0.15, lambda _: read_speed(hf)),
    ]


def marked_tests() -> list[str]:
    """Return the files with tests that need a GPU: other files may import what this environment lacks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


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


def read_speed(path: Path) -> list[tuple[str, str]]:
    """Return a row for each phase that `compare.py` has timed, and for each side that failed."""
    if not path.exists():
        return []
    rows, found = list[tuple[str, str]](), json.loads(path.read_text(encoding="utf-8"))
    for row in found["rows"]:
        result = f"ours {row['ours_s']:.2f} s"
        if "trl_s" in row:
            result += f", TRL {row['trl_s']:.2f} s, {row['ratio']:.2f} times faster"
        memory = [f"{row[f'{side}_mib']:.0f}" for side in ("ours", "trl") if f"{side}_mib" in row]
        result += f", {' / '.join(memory)} MiB" if memory else ""
        rows.append((f"{row['preset']}, {row['lengths']}, {row['precision']}: {row['phase']}", result))
    return [*rows, *((failure, "failed") for failure in found["failures"])]


def run(part: Part, seconds: float) -> Outcome:
    """Run a part, print what it prints, and end it with all that it started when its time is over."""
    print(f"\n=== {part.name}, {seconds:.0f} s at most: {' '.join(part.command)[:300]}", flush=True)
    started, lines, is_late = time.monotonic(), list[str](), threading.Event()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env={**environment, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},  # pytest cuts reasons to the width
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
        print(line, end="", flush=True)
        lines.append(line)
    status = process.wait()
    for timer in timers:
        timer.cancel()
    state = f"stopped after {seconds:.0f} s" if is_late.is_set() else "done" if status == 0 else f"status {status}"
    try:
        found = part.read(lines)
    except (ValueError, KeyError, OSError) as error:  # a file that was cut off
        found = [("its results", f"cannot be read: {type(error).__name__}: {error}")]
    return Outcome(part.name, state, time.monotonic() - started, found)


def table(outcomes: list[Outcome]) -> str:
    """Return what was found as one Markdown table."""
    lines = ["| part | what | result |", "| --- | --- | --- |"]
    for outcome in outcomes:
        lines.append(f"| **{outcome.name}** | {outcome.seconds:.0f} s | {outcome.state} |")
        lines += [f"| | {what} | {result} |" for what, result in outcome.found]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run all parts and print the table; return 1 if a part did not end well."""
    options, outcomes = parse_arguments(arguments), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        for part in parts_of(options, Path(folder)):
            outcomes.append(run(part, 60.0 * options.minutes * part.share))
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1), encoding="utf-8")
    print(f"\n{table(outcomes)}", flush=True)
    return int(any(outcome.state != "done" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
