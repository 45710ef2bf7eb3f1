"""Run the shipped demo with other critics, with LoRA, and with an adaptive KL penalty; print docs/results.md's tables.

    python tests/benchmarks/options.py --folder DIR --seeds 42 1 2 --figure docs/images/adaptive_kl.svg

The supervised stages run once a seed, with the demo as it is; every other run is `kedro run --pipelines align` on their
models in a copy of the project. Runs that DIR already holds are not repeated, so further names and seeds can be added.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT = "default"
Settings = dict[str, object]
_LORA: Settings = {"use_peft": True, "learning_rate": 1e-3, "value_learning_rate": 2e-3}
OPTIONS: dict[str, Settings] = {
    DEFAULT: {},
    "separate": {"value_model": "separate"},
    "shared": {"value_model": "shared", "value_learning_rate": None},
    "lora": {**_LORA, "lora_target_modules": "all-linear+head"},
    "lora_without_head": _LORA,
    "ema": {"ema_decay": 0.98},  # measured is the average
}
TARGET, LAST = 6.0, 10  # nats a response; iterations whose mean counts as where a run ends
_ADAPTIVE: Settings = {
    "kl_controller": "adaptive",
    "kl_target": TARGET,
    "kl_horizon": 200,
    "total_episodes": 7040,
    "learning_rate": 8e-4,
}
KL_RUNS: dict[str, Settings] = {
    "kl_from_0.8": {**_ADAPTIVE, "kl_coef": 0.8},
    "kl_from_0.008": {**_ADAPTIVE, "kl_coef": 0.008, "kl_hold_iterations": 10},
}
RUNS = OPTIONS | KL_RUNS
MODELS = ("sft_policy", "reward_model")


def copy_project(folder: Path, models: Path | None = None) -> None:
    """Copy this project without results, or with the supervised stages' models of another copy."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(REPOSITORY / "conf", folder / "conf", ignore=shutil.ignore_patterns("local"))
    shutil.copytree(REPOSITORY / "data" / "01_raw", folder / "data" / "01_raw")
    for name in ("pyproject.toml", ".telemetry"):
        shutil.copy(REPOSITORY / name, folder / name)
    for name in ("src", "conf/local"):
        (folder / name).mkdir()
    if models:
        for name in MODELS:
            shutil.copytree(models / "data/06_models" / name, folder / "data/06_models" / name)


def run(folder: Path, seed: int, settings: Settings, models: Path | None = None) -> None:
    """Run the whole demo in a copy of the project, or with `models` only what comes after them, unless it is done."""
    if (folder / "done").exists():
        return
    copy_project(folder, models)
    settings_file = folder / "conf/local/parameters_ppo.yml"
    settings_file.write_text(json.dumps({"ppo": settings}), encoding="utf-8")  # JSON is YAML
    kedro(folder, "--params", f"seed={seed}", *(["--pipelines", "align"] if models else []))
    if "ema_decay" in settings:
        [average] = (folder / "data/06_models/ppo_policy").glob("*/ema")
        shutil.copytree(average, average.parents[1] / "9999_average")  # sorts as the newest, which is evaluated
        kedro(folder, "--params", f"seed={seed}", "--pipelines", "evaluation")
    (folder / "done").touch()
    print(f"{folder.name}: done", file=sys.stderr, flush=True)


def kedro(folder: Path, *arguments: str, threads: int = 1) -> None:
    """Call `kedro run` in a copy of the project."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DO_NOT_TRACK": "true"}
    command = [sys.executable, "-m", "kedro", "run", *arguments]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{folder.name} failed:\n{(finished.stdout + finished.stderr)[-3000:]}")


def run_all(folder: Path, names: list[str], seeds: list[int], jobs: int) -> dict[str, list[Path]]:
    """Run what is missing, the default first, and return the finished runs' folders by name, a seed each."""
    folders = {name: [folder / f"{name}-{seed}" for seed in seeds] for name in (DEFAULT, *names)}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda place, seed: run(place, seed, RUNS[DEFAULT]), folders[DEFAULT], seeds))
        others = [
            pool.submit(run, place, seed, RUNS[name], models)
            for name in names
            for place, seed, models in zip(folders[name], seeds, folders[DEFAULT], strict=True)
        ]
        for other in others:
            other.result()
    return folders


def summary(folder: Path) -> dict[str, float]:
    """Return the evaluation of a finished run, with its gain by the gold judge."""
    result: dict[str, float] = json.loads((folder / "data/08_reporting/evaluation_summary.json").read_text("utf-8"))
    return {**result, "gain": result["eval/judge_score"] - result["eval/judge_score_sft"]}


def history(folder: Path) -> pd.DataFrame:
    """Return the metrics of every iteration of a finished run."""
    return pd.read_csv(folder / "data/08_reporting/training_history/training_history.csv")


def table_of_options(folder: Path, seeds: list[int], names: list[str]) -> list[str]:
    """Return gold-score gains, one line an option, with their share of the default's."""
    rows = {name: [summary(folder / f"{name}-{seed}") for seed in seeds] for name in (DEFAULT, *names)}
    default = np.mean([row["gain"] for row in rows[DEFAULT]])
    keys = ("eval/win_rate", "eval/kl", "eval/grammatical_rate", "eval/response_length")
    lines = [_line(["run", *(f"gain, seed {seed}" for seed in seeds), "mean", "of the default's", *keys])]
    lines.append(_line(["---"] * (len(seeds) + 3 + len(keys))))
    for name, results in rows.items():
        gains = [row["gain"] for row in results]
        means = [float(np.mean([row[key] for row in results])) for key in keys]
        cells = [*(f"{gain:.3f}" for gain in gains), f"{np.mean(gains):.3f}", f"{np.mean(gains) / default:.0%}"]
        lines.append(_line([name, *cells, *(f"{mean:.3g}" for mean in means)]))
    return lines


def table_of_kl(folder: Path, seeds: list[int], names: list[str]) -> list[str]:
    """Return where adaptive KL ended, one line a run."""
    titles = ["run", "seed", f"KL, last {LAST}", "of the target", "peak KL", "at", "last β", "lowest β", "gain"]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for name in names:
        for seed in seeds:
            curves = history(folder / f"{name}-{seed}")
            kl, beta = curves["objective/kl"], curves["objective/kl_coef"]
            end, peak = kl.tail(LAST).mean(), int(kl.argmax())
            cells = [f"{end:.2f}", f"{end / TARGET:.2f}", f"{kl[peak]:.1f}", str(peak + 1)]
            cells += [f"{beta.iloc[-1]:.3f}", f"{beta.min():.4f}", f"{summary(folder / f'{name}-{seed}')['gain']:.3f}"]
            lines.append(_line([name, str(seed), *cells]))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(folder: Path, seeds: list[int], path: Path) -> None:
    """Draw KL and coefficient of the adaptive runs by iteration."""
    plt.switch_backend("svg")
    plt.rcParams.update({"svg.hashsalt": "options", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(2, 1, figsize=(6.2, 5.0), sharex=True, layout="constrained")
    for (name, settings), colour in zip(KL_RUNS.items(), ("#1f5fa8", "#c8501e"), strict=True):
        for seed in seeds:
            curves = history(folder / f"{name}-{seed}")
            label = f"β from {settings['kl_coef']}" if seed == seeds[0] else None
            for axis, key in zip(axes, ("objective/kl", "objective/kl_coef"), strict=True):
                axis.plot(curves.index + 1, curves[key].round(4), color=colour, lw=1.0, alpha=0.8, label=label)
    axes[0].axhspan(0.75 * TARGET, 1.25 * TARGET, color="#888888", alpha=0.18, lw=0, label="target ± 25 %")
    axes[0].axhline(TARGET, color="#444444", lw=0.8, ls="--")
    axes[0].set(ylabel="KL from SFT, nats a response")
    axes[1].set(ylabel="β, score units a nat", xlabel="iteration (64 responses)", yscale="log")
    for axis in axes:
        axis.legend(frameon=False, loc="upper right")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run what is missing, then print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="where the copies of the project lie")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--names", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each has one thread")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    folder, seeds = arguments.folder.resolve(), arguments.seeds
    run_all(folder, arguments.names, seeds, arguments.jobs)
    options, kl_runs = ([name for name in arguments.names if name in table] for table in (OPTIONS, KL_RUNS))
    print(*table_of_options(folder, seeds, [name for name in options if name != DEFAULT]), sep="\n")
    if kl_runs:
        print("", *table_of_kl(folder, seeds, kl_runs), sep="\n")
    if arguments.figure:
        draw(folder, seeds, arguments.figure)


if __name__ == "__main__":
    main()
