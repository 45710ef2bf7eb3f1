"""PPO, GRPO and best-of-n with the same model, prompts, reward and number of sampled responses. See docs/results.md.

python benchmarks/methods.py --model DIR --policies DIR,DIR,DIR --samples TABLE,TABLE,TABLE --seeds 1,2,3 --json OUT

DIR of --model is SmolLM2-135M-Instruct in safetensors; those of --policies are the policies that
`kedro run --env obedience --params seed=…` exported, one a seed. TRL's GRPOTrainer gets the settings of the recipe
where it has them, and its defaults elsewhere. One evaluator measures every policy on the held-out prompts under the
same noise. TABLE is `best_of_n_samples.parquet` of `kedro run --env obedience --pipelines audit_reward`, one a seed. A
result that OUT already holds is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from compare import ENVIRONMENT, machine, run_side
from inputs import recipe
from intervals import with_interval
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.best_of_n import best_of_n_kl, best_of_n_mean
from ppo_rlhf.evaluation.best_of_n import by_prompt
from tables import markdown
from workload import QUIET_PEER

HERE = Path(__file__).resolve().parent
NAMES = {"sft": "SFT policy", "ppo": "PPO, this project", "grpo4": "GRPO, 4 responses", "grpo8": "GRPO, 8 responses"}
COLUMNS = ("reward", "kl", "copied", "cut_off")
BEST_OF = {"sft": 1, "best of 4": 4, "best of 16": 16}
Results = dict[str, dict[str, dict[str, Any]]]
"""Of each method and seed: the means of COLUMNS over held-out responses, and of GRPO what training took."""


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the directory of the SFT policy")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=[], help="PPO's policies, one a seed")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["ppo", "grpo4", "grpo8"])
    parser.add_argument("--samples", type=lambda text: text.split(","), default=[], help="SFT's samples, one a seed")
    parser.add_argument("--json", type=Path, required=True, help="where the results are kept")
    arguments = parser.parse_args()
    if "ppo" in arguments.methods and len(arguments.policies) != len(arguments.seeds):
        parser.error("--policies names one directory for each seed")
    if arguments.samples and len(arguments.samples) != len(arguments.seeds):
        parser.error("--samples names one table for each seed")
    return arguments


def make_job(arguments: argparse.Namespace, method: str, number: int, folder: str) -> dict[str, Any]:
    """Return the job of a method and of the seed with this number."""
    seed = arguments.seeds[number]
    return {
        "method": method,
        "seed": seed,
        "model": arguments.model,
        "policy": arguments.policies[number] if method == "ppo" else None,
        "config": dataclasses.asdict(PPOConfig(**recipe("obedience", seed)["ppo"])),
        "folder": folder,
    }


def best_of(samples: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the expected means of the best of n of the SFT policy's responses, for each n of `BEST_OF`."""
    rewards, found = by_prompt(samples, "reward"), dict[str, dict[str, float]]()
    columns = {name: by_prompt(samples, name) for name in ("reward", "copied", "terminated")}
    for name, n in BEST_OF.items():
        means = {column: float(best_of_n_mean(rewards, values, n).mean()) for column, values in columns.items()}
        cut_off = 1 - means.pop("terminated")
        found[name] = {**means, "cut_off": cut_off, "kl": best_of_n_kl(n)}
    return found


def table(results: Results) -> str:
    """Return the results as a Markdown table."""
    head = ["method", "seeds", "reward", "KL, nats a response", "copied", "cut off", "CPU minutes", "GiB"]
    lines = [head, ["---"] * len(head)]
    for method, found in results.items():
        rows = list(found.values())
        line = [NAMES.get(method, method), str(len(rows))]
        line += [with_interval([row[name] for row in rows], 1 if name == "kl" else 3) for name in COLUMNS]
        if "cpu_s" in rows[0]:
            line.append(f"{mean(row['cpu_s'] for row in rows) / 60:.0f}")
            line.append(f"{max(row['memory_mib'] for row in rows) / 1024:.1f}")
        lines.append(line + [""] * (len(head) - len(line)))
    return markdown(lines)


def main() -> None:
    """Measure what is missing, write the results after each process and print them."""
    arguments = parse_arguments()
    kept: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else machine(None)
    results: Results = kept.setdefault("results", {})
    for number, seed in enumerate(arguments.seeds):
        if arguments.samples:
            for name, means in best_of(pd.read_parquet(arguments.samples[number])).items():
                results.setdefault(name, {})[str(seed)] = means
        for method in arguments.methods:
            if str(seed) in kept.setdefault("done", {}).setdefault(method, []):
                continue
            with tempfile.TemporaryDirectory(prefix="methods-") as folder:
                job = Path(folder) / "job.json"
                job.write_text(json.dumps(make_job(arguments, method, number, folder)), encoding="utf-8")
                command = [sys.executable, str(HERE / "methods_side.py"), str(job)]
                for name, found in run_side(method, command, ENVIRONMENT | QUIET_PEER).items():
                    results.setdefault(name, {})[str(seed)] = found
                    figures = ", ".join(f"{column} {found[column]:.3f}" for column in COLUMNS)
                    print(f"seed {seed}, {name}: {figures}", file=sys.stderr, flush=True)
            kept["done"][method].append(str(seed))
            arguments.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
