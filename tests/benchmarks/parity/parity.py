"""Train the same task by this project and by TRL's last PPO, several seeds each, and measure both by one evaluator.

    python tests/benchmarks/parity/parity.py --peer-python PATH --sft DIR --reward DIR|module:function \\
        --prompts FILE --seeds 5 --json OUT

The peer's Python belongs to an environment with TRL 1.12.0, the last release with `trl.experimental.ppo`. Runs that OUT
already holds are not repeated, so an interrupted comparison goes on where it stopped, and more variants, seeds or KL
coefficients can be added to it. `summary.py` makes the table and the figure of docs/results.md from it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from departures import VARIANTS
from job import GIVEN, Job, Settings

from ppo_rlhf.data.prompts import PromptDataset, split_held_out, tokenise_prompts
from ppo_rlhf.datasets.pretrained_model import newest_version
from ppo_rlhf.models.loading import PretrainedHandle, context_length

HERE = Path(__file__).resolve().parent
SPLIT_SEED = 42  # the prompts' split is the same for every run
LIBRARIES = ("torch", "transformers", "trl")


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peer-python", required=True, help="Python of an environment with TRL 1.12.0")
    add("--sft", required=True, type=_newest, help="model directory, or one of versions: policy and reference")
    add(
        "--reward",
        required=True,
        type=_newest,
        help="reward model directory, or module:function (from this folder, too)",
    )
    add("--prompts", required=True, type=Path, help=".jsonl with a column prompt")
    add("--json", required=True, type=Path, help="results; runs that it holds are not repeated")
    add("--seeds", type=int, default=5)
    add("--sides", nargs="+", default=["ours", "trl"], choices=["ours", "trl"])
    add("--variants", nargs="+", default=["default"], choices=[*VARIANTS, "accumulated"])
    add("--kl-coefs", nargs="+", type=float, default=[0.08], help="score units per nat")
    add("--iterations", type=int, default=40, help="of 64 responses")
    add("--num-mini-batches", type=int, default=4)
    add("--response-length", type=int, default=36)
    add("--learning-rate", type=float, default=2e-4)
    add("--missing-eos-penalty", type=float)
    add("--held-out", type=int, default=512, help="prompts that policies are measured on")
    add("--judge", help="module:function that the evaluation also asks, never the training")
    add("--save-every", type=int, default=5, help="iterations between the policies that are measured")
    add("--jobs", type=int, default=2, help="runs at a time; each has one thread")
    return parser.parse_args()


def _newest(source: str) -> str:
    """Return the absolute path of a model directory, the newest if it holds versions; other text as it is."""
    return str(Path(newest_version(source)).resolve()) if Path(source).is_dir() else source


def split_prompts(arguments: argparse.Namespace) -> tuple[PromptDataset, PromptDataset]:
    """Return (prompts to train on, held-out prompts), tokenised once for both sides."""
    sft = PretrainedHandle(arguments.sft)
    frames = split_held_out(
        pd.read_json(arguments.prompts, lines=True), None, 0.2, arguments.held_out, SPLIT_SEED, "prompt"
    )
    training, held_out = (
        tokenise_prompts(
            frame,
            sft.tokenizer(),
            column="prompt",
            response_length=arguments.response_length,
            context=context_length(sft.config()),
            overlong="error",
        )
        for frame in frames
    )
    return training, held_out


def planned_jobs(arguments: argparse.Namespace, prompt_ids: list[list[int]]) -> list[Job]:
    """Return every run that is asked for, in the order of seeds, so that an early stop leaves whole comparisons."""
    tokenizer = PretrainedHandle(arguments.sft).tokenizer()
    jobs = []
    for seed in range(arguments.seeds):
        for kl_coef in arguments.kl_coefs:
            settings = Settings(
                iterations=arguments.iterations,
                response_length=arguments.response_length,
                learning_rate=arguments.learning_rate,
                kl_coef=kl_coef,
                num_mini_batches=arguments.num_mini_batches,
                missing_eos_penalty=arguments.missing_eos_penalty,
            )
            jobs += [
                Job(
                    side=side,
                    variant=variant,
                    seed=seed,
                    settings=settings,
                    sft=arguments.sft,
                    reward=arguments.reward,
                    prompt_ids=prompt_ids,
                    stop_token_id=int(tokenizer.eos_token_id),
                    save_every=arguments.save_every,
                    out="",
                )
                for side in arguments.sides
                for variant in arguments.variants
                if variant in _variants_of(side)
            ]
    return jobs


def _variants_of(side: str) -> set[str]:
    return {"default", "accumulated"} if side == "trl" else set(VARIANTS)


def run_job(job: Job, arguments: argparse.Namespace, held_out: Path) -> dict[str, Any]:
    """Train in a process of its own, measure the saved policies in another, and return the run's record."""
    out = Path(tempfile.mkdtemp(prefix="parity-"))
    try:
        job = Job(**{**asdict(job), "settings": job.settings, "out": str(out)})
        job.write(out / "job.json")
        peer = job.side == "trl"
        started = time.perf_counter()
        _python(arguments.peer_python if peer else sys.executable, "trl_side.py" if peer else "our_side.py", out)
        seconds = time.perf_counter() - started
        _python(sys.executable, "evaluator.py", out, str(held_out))
        return {
            "name": job.name,
            **{key: getattr(job, key) for key in ("side", "variant", "seed")},
            "settings": asdict(job.settings),
            "seconds": round(seconds, 1),
            "history": json.loads((out / "history.json").read_text(encoding="utf-8")),
            "evaluations": json.loads((out / "evaluations.json").read_text(encoding="utf-8")),
        }
    finally:
        shutil.rmtree(out)


def _python(executable: str, script: str, out: Path, *rest: str) -> None:
    environment = {**GIVEN, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [executable, str(HERE / script), str(out / "job.json"), *rest]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{script} failed:\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}")


def _versions(executable: str) -> dict[str, str]:
    code = f"from importlib.metadata import version; print(*map(version, {LIBRARIES}))"
    printed = subprocess.check_output([executable, "-c", code], text=True).split()
    return dict(zip(LIBRARIES, printed, strict=True))


def main() -> None:
    """Run what is missing from the results, two runs at a time, and write the results after each."""
    arguments = parse_arguments()
    sys.path.insert(0, str(HERE))
    training, held_out = split_prompts(arguments)
    results: dict[str, Any] = {"runs": []}
    if arguments.json.exists():
        results = json.loads(arguments.json.read_text(encoding="utf-8"))
    results["versions"] = {
        side: _versions(executable) for side, executable in (("ours", sys.executable), ("trl", arguments.peer_python))
    }
    done = {run["name"] for run in results["runs"]}
    jobs = [job for job in planned_jobs(arguments, training.prompt_ids) if job.name not in done]
    print(f"{len(training)} prompts to train on, {len(held_out)} held out; {len(jobs)} runs to do", flush=True)
    lock, failed = threading.Lock(), list[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        table = Path(folder) / "held_out.json"
        columns = {"prompt_ids": held_out.prompt_ids, "texts": held_out.texts, "columns": held_out.columns}
        table.write_text(json.dumps({**columns, "judge": arguments.judge}), encoding="utf-8")

        def do(job: Job) -> None:
            try:
                record = run_job(job, arguments, table)
            except RuntimeError as error:
                failed.append(job.name)
                print(f"{job.name}: {error}", file=sys.stderr, flush=True)
                return
            with lock:
                results["runs"].append(record)
                arguments.json.write_text(json.dumps(results), encoding="utf-8")
            last = record["evaluations"][-1]
            print(f"{job.name}: score {last['score']:.3f}, KL {last['kl']:.2f}, {record['seconds']} s", flush=True)

        list(pool.map(do, jobs))
    if failed:
        sys.exit(f"{len(failed)} runs failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
