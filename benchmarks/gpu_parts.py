"""The parts of `gpu_report.py` that run this project's own functions: one part a process, a line for each result.

python benchmarks/gpu_parts.py decode --device cuda
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
FOUND = "found: "
"""Prefix of a line with a result; a JSON pair of name and result follows."""
NO_GPU = "no GPU: not run"
DEMO = ("run", "--env", "test")
"""The arguments of `kedro` that run the demo's stages with tiny settings."""
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "qwen2-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "qwen2-0.5b": {
        **SHAPES["qwen2-0.5b"],
        **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
}
LEARNING_RATE = 1e-7


def say(what: str, result: str) -> None:
    """Print a result."""
    print(FOUND + json.dumps([what, result]), flush=True)


class Part:
    """Tools that a part measures with: a device, sizes, and the clock."""

    def __init__(self, device: str, *, small: bool) -> None:
        self.device, self.small = torch.device(device), small
        self.on_gpu = self.device.type == "cuda"
        self.dtype = "bfloat16" if self.on_gpu else "float32"
        self.shapes = SMALL if small else SHAPES
        self.rows, self.length, self.epochs = (16, 12, 1) if small else (256, 128, 4)
        self.longest_prompt = 8 if small else 64

    def seconds(self, call: Callable[[], object], times: int = 5) -> tuple[float, float]:
        """Return median seconds of calls with all that they launch, and until they return."""
        whole, host = [], []
        for _ in range(times):
            self.wait()
            started = time.perf_counter()
            call()
            host.append(time.perf_counter() - started)
            self.wait()
            whole.append(time.perf_counter() - started)
        return statistics.median(whole), statistics.median(host)

    def report(self, what: str, measure: Callable[[], str], *, needs_gpu: bool = False) -> None:
        """Print what was measured, or the error, and continue with the next measurement."""
        if needs_gpu and not self.on_gpu:
            say(what, NO_GPU)
            return
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            say(what, measure())
        except Exception as error:  # of any library that is measured
            say(what, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def wait(self) -> None:
        """Wait until all work on the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def peak(self) -> str:
        """Return the most memory of what is reported."""
        return f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if self.on_gpu else ""


def launch(part: Part) -> None:
    """Time kernels that compute almost nothing, to measure the cost of a launch."""
    device = part.device
    count = 50 if part.small else 2000
    numbers, matrix = torch.zeros(1024, device=device), torch.zeros(64, 64, device=device)
    weights = torch.zeros(1024, device=device, requires_grad=True)

    def add() -> None:
        for _ in range(count):
            numbers.add_(1)

    def backward() -> None:
        product: Tensor = weights
        for _ in range(count // 4):
            product = product * 1.0
        product.sum().backward()

    def cast() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            for _ in range(count // 4):
                torch.mm(matrix, matrix)

    def timed(call: Callable[[], None], launches: int) -> str:
        call()
        whole, host = (1e6 * seconds / launches for seconds in part.seconds(call))
        return f"{whole:.1f} us each, {host:.1f} us of the processor"

    part.report("launch: an addition in place", partial(timed, add, count))
    part.report("launch: a product, forward and backward", partial(timed, backward, count // 2))
    part.report("launch: a matrix product and its casts by autocast", partial(timed, cast, 3 * (count // 4)))


def decode(part: Part) -> None:
    """Time the decoding of a batch by each engine: our own steps, and transformers' generate."""
    tokens: dict[str, Tensor] = {}  # of the first way, by shape

    def one(shape: str, engine: str) -> str:
        run, seconds = Run(part, shape, rollout_engine=engine), []
        for _ in range(3):
            rollouts = run.rollouts()
            seconds.append(run.state.progress.clock.seconds["sampling"])
        result = f"{min(seconds[1:]):.3f} s, at first {seconds[0]:.3f} s{part.peak()}"
        found = rollouts.responses.response_ids
        if shape not in tokens:
            tokens[shape] = found
            return result
        alike = (found == tokens[shape]).cumprod(dim=1).double().mean()
        return f"{result}; {alike:.1%} of tokens lie before the first other one"

    for engine in ("static", "hf"):
        for shape in part.shapes:
            part.report(f"decoding, {shape}: engine {engine}", partial(one, shape, engine))


def update(part: Part) -> None:
    """Time optimiser steps, and say whether the first ratio is 1: as they are, and with compiled layers."""

    def one(compiled: bool) -> str:
        run, times, scoring = Run(part, "gpt2", compile=compiled), [], []
        for _ in range(3):
            found, seconds = run.update()
            times.append(1e3 * run.state.progress.clock.seconds["update"] / len(found))
            scoring.append(seconds)
        ratio = found[0].mean("ratio")
        return (
            f"{min(times[1:]):.1f} ms a step, in the first iteration {times[0]:.1f} ms; log-probabilities "
            f"{min(scoring[1:]):.3f} s, at first {scoring[0]:.3f} s; first ratio "
            f"{'exactly 1' if ratio == 1.0 else repr(ratio)}{part.peak()}"
        )

    part.report("update: plain", partial(one, False))
    part.report("update: compiled", partial(one, True), needs_gpu=True)


def profile(part: Part) -> None:
    """Say which 25 operations of an update take the most time, of the device if there is one."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run = Run(part, "gpt2", num_ppo_epochs=1)
    run.update()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if part.on_gpu else [])]
    with profiler(activities=kinds) as measured:
        run.update()
    rows, clock = list(measured.key_averages()), run.state.progress.clock
    on_device = sum(row.self_device_time_total for row in rows)
    say(
        "an epoch's update",
        f"{clock.seconds['update']:.3f} s under the profiler, the device at work {on_device / 1e6:.3f} s",
    )

    def cost(row: Any) -> float:
        return float(row.self_device_time_total if part.on_gpu else row.self_cpu_time_total)

    for row in sorted(rows, key=cost, reverse=True)[:25]:
        device = f"{row.self_device_time_total / 1e3:.1f} ms of the device, " if part.on_gpu else ""
        say(f"`{row.key[:80]}`", f"{device}{row.self_cpu_time_total / 1e3:.1f} ms of the processor, {row.count} times")


def demo(part: Part) -> None:
    """Run the demo's stages with tiny settings (`--env test`) as a user does, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="demo-") as place:
        project = Path(place)
        (project / "src").mkdir()
        for name in ("pyproject.toml", "conf", "src/ppo_rlhf"):
            (project / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "data" / "01_raw", project / "data" / "01_raw")
        command = [sys.executable, "-m", "kedro", *DEMO]
        if part.small:
            command += ["--params", "ppo.total_episodes=32"]
        environment = {**os.environ} if part.on_gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        started = time.monotonic()
        ended = subprocess.run(command, cwd=project, env=environment).returncode
        seconds = time.monotonic() - started
        say(f"`kedro {' '.join(DEMO)}`", f"{seconds:.0f} s" if ended == 0 else f"failed: status {ended}")
        for file in sorted(project.rglob("evaluation_summary.json"))[:1]:  # another one is in the folder of its run
            found = json.loads(file.read_text(encoding="utf-8"))
            say("its win rate against SFT", f"{found['eval/win_rate']:.3f}")
        if ended:
            raise SystemExit(1)


class Run:
    """A run of PPO on a model with random weights: full responses that it samples, or given ones of mixed lengths."""

    def __init__(self, part: Part, shape: str, **settings: Any) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import (
            GPT2Config,
            GPT2LMHeadModel,
            PreTrainedTokenizerFast,
            Qwen2Config,
            Qwen2ForCausalLM,
        )

        from ppo_rlhf.config import PPOConfig
        from ppo_rlhf.data.prompt_dataset import PromptDataset
        from ppo_rlhf.models.critic import Critic
        from ppo_rlhf.ppo.precision import device_of, frozen_dtype, trained_dtype
        from ppo_rlhf.ppo.run_setup import build_state, check_device
        from ppo_rlhf.rewards.scoring import RewardScorer

        defaults = {
            "total_episodes": 100 * part.rows,
            "per_device_train_batch_size": part.rows,
            "num_mini_batches": 2 if part.small else 8,
            "num_ppo_epochs": part.epochs,
            "response_length": part.length,
            "temperature": 1.0,
            "learning_rate": LEARNING_RATE,
            "stop_token": "none",
            "missing_eos_penalty": None,
            "dtype": part.dtype,
            "device": str(part.device),
        }
        self.part, self.config = part, PPOConfig(**{**defaults, **settings})
        device = device_of(self.config)
        check_device(self.config, device)
        made, of = {"gpt2": (GPT2LMHeadModel, GPT2Config), "qwen2-0.5b": (Qwen2ForCausalLM, Qwen2Config)}[shape]
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if shape == "gpt2" else {}
        torch.manual_seed(0)
        with device:
            policy = made(of(**part.shapes[shape], **ids, **no_dropout)).to(trained_dtype(self.config)).eval()
            self.reference = made(policy.config).to(frozen_dtype(self.config)).eval().requires_grad_(False)
        self.reference.load_state_dict(policy.state_dict())
        backend = Tokenizer(WordLevel({"<pad>": 0, "a": 1}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="a")
        self.state = build_state(policy, Critic.from_policy(policy), tokenizer, self.config)
        self.numbers = torch.Generator().manual_seed(0)
        vocabulary, longest = part.shapes[shape]["vocab_size"], part.longest_prompt
        sizes = torch.randint(longest // 4, longest + 1, (part.rows,), generator=self.numbers).tolist()
        prompts = [torch.randint(vocabulary, (size,), generator=self.numbers).tolist() for size in sizes]
        self.prompts = PromptDataset(prompts, [""] * len(prompts), {})
        self.scorer = RewardScorer(
            [("length", 1.0, lambda batch: torch.tensor([len(r) / 7 for r in batch.response_ids]))]
        )
        self.vocabulary = vocabulary

    def rollouts(self) -> Any:
        """Return rollouts of an iteration, with responses of full length."""
        from ppo_rlhf.ppo.loop import generate_rollouts

        return generate_rollouts(self.state, self.reference, self.prompts, self.scorer)

    def update(self) -> tuple[Any, float]:
        """Learn from responses of mixed lengths; return its steps, and the seconds of all log-probabilities."""
        from ppo_rlhf.passes.sampling import Responses
        from ppo_rlhf.ppo import loop
        from ppo_rlhf.ppo.rollouts import measure

        rows, width = self.part.rows, self.part.length
        lengths = torch.randint(1, width + 1, (rows,), generator=self.numbers)
        ids = torch.randint(self.vocabulary, (rows, width), generator=self.numbers)
        responses = Responses(ids, lengths, torch.zeros(rows, dtype=torch.bool))
        self.state.progress.clock.restart()
        state = self.state
        rollouts = measure(state.learner, state.sampler, state.progress, self.reference, self.prompts, responses)
        scores = loop.score_responses(rollouts, self.scorer, self.state.sampler, self.state.progress)
        shaped = loop.shape_rewards(rollouts, scores, self.state.shaping)
        experience = loop.estimate_advantages(rollouts, scores, shaped, self.state.shaping)
        kl_coef = state.shaping.kl_controller.kl_coef
        found = loop.optimise_policy(state.learner, state.progress, experience, kl_coef, self.reference)
        metrics = loop.iteration_metrics(state.learner, state.sampler, state.shaping, state.progress, experience, found)
        state.advance(scores, metrics)
        return found, self.state.progress.clock.seconds["log-probabilities"]


PARTS: dict[str, Callable[[Part], None]] = {each.__name__: each for each in (launch, decode, update, profile, demo)}


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the part on a CPU")
    arguments = parser.parse_args()
    PARTS[arguments.part](Part(arguments.device, small=arguments.small))


if __name__ == "__main__":
    main()
