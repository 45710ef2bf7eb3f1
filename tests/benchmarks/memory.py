"""Compare `plan_memory` with measured peaks: real iterations on the CPU, each setting in a process of its own.

`python tests/benchmarks/memory.py [--only NAME …] [--json OUT] [--fit]` prints the table of docs/memory.md, and with
`--fit` the constants of `ppo_rlhf.training.memory.plan` that meet what was measured best. `--measure NAME` is what it
starts for each setting.

Measured is the peak of resident memory (VmHWM) over two iterations, above what is resident after all imports. The
kernel's mark is set back between phases, so that each has a peak of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
NO_SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """Return a GPT-2 shape."""
    shape = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "n_positions": 1024}
    return {"kind": "gpt2", **shape}


def llama(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """Return a Llama shape with grouped-query attention and an output matrix of its own."""
    return {
        "kind": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "vocab_size": vocabulary,
    }


TINY, SMALL = gpt2(4, 256, 4, 2000), gpt2(6, 512, 8, 8192)
LLAMA = llama(6, 512, 8, 8192)
WIDE = gpt2(2, 768, 12, 50257)  # two layers of GPT-2 (124M): most blocks are larger than the heap's
FOUR = {"per_device_train_batch_size": 32, "num_mini_batches": 4, "local_rollout_forward_batch_size": 32}
TWO = {"per_device_train_batch_size": 16, "num_mini_batches": 2, "local_rollout_forward_batch_size": 16}
PIECES = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "local_rollout_forward_batch_size": 16,
    "side_by_side": False,  # as it is with long responses, which are measured; null plans for short ones, too
}
SETTINGS: dict[str, dict[str, Any]] = {
    # name: model, tokens of each prompt, settings of PPO, and whether a reward model scores
    "tiny": {"model": TINY, "prompt": 16, "ppo": {**FOUR, "response_length": 32}},
    "tiny, longer": {"model": TINY, "prompt": 64, "ppo": {**FOUR, "response_length": 128}},
    "tiny, one minibatch": {"model": TINY, "prompt": 16, "ppo": {**FOUR, "response_length": 32, "num_mini_batches": 1}},
    "small": {"model": SMALL, "prompt": 32, "ppo": {**FOUR, "response_length": 64}},
    "small, bfloat16": {
        "model": SMALL,
        "prompt": 32,
        "ppo": {**TWO, "response_length": 64, "dtype": "bfloat16", "side_by_side": False},
    },
    "small, bfloat16, side by side": {
        "model": SMALL,
        "prompt": 32,
        "ppo": {**TWO, "response_length": 32, "dtype": "bfloat16"},
    },
    "small, in pieces": {"model": SMALL, "prompt": 32, "ppo": {**PIECES, "response_length": 64}},
    "small, LoRA": {"model": SMALL, "prompt": 32, "ppo": {**TWO, "response_length": 64, "use_peft": True}},
    "small, checkpointed": {
        "model": SMALL,
        "prompt": 32,
        "ppo": {**TWO, "response_length": 64, "gradient_checkpointing": True},
    },
    "small, shared": {"model": SMALL, "prompt": 32, "ppo": {**TWO, "response_length": 64, "value_model": "shared"}},
    "small, reward model": {"model": SMALL, "prompt": 32, "ppo": {**TWO, "response_length": 64}, "reward": True},
    "wide vocabulary": {"model": WIDE, "prompt": 32, "ppo": {**TWO, "response_length": 64}},
    "Llama": {"model": LLAMA, "prompt": 32, "ppo": {**TWO, "response_length": 64}},
    "Llama, side by side": {"model": LLAMA, "prompt": 32, "ppo": {**TWO, "response_length": 64, "side_by_side": True}},
    "Llama, LoRA, bfloat16": {
        "model": LLAMA,
        "prompt": 64,
        "ppo": {**TWO, "response_length": 64, "dtype": "bfloat16", "use_peft": True},
    },
}


def ppo_config(setting: dict[str, Any]) -> Any:
    """Return a setting's hyperparameters: one epoch is enough to reach the peak, and no response ends early."""
    from ppo_rlhf.config import PPOConfig

    fixed = {"num_ppo_epochs": 1, "total_episodes": 10_000, "stop_token": "none", "device": "cpu", "temperature": 1.0}
    return PPOConfig(**{**fixed, **setting["ppo"]})


def model_config(setting: dict[str, Any]) -> Any:
    """Return a setting's model configuration."""
    from transformers import AutoConfig

    shape = dict(setting["model"])
    return AutoConfig.for_model(shape.pop("kind"), **NO_SPECIAL_TOKENS, **shape)


def planned(setting: dict[str, Any]) -> Any:
    """Return the plan of a setting."""
    from ppo_rlhf.training.memory import RunShape, plan_memory

    config = model_config(setting)
    return plan_memory(ppo_config(setting), RunShape(config, setting["prompt"], reward_config(setting, config)))


def reward_config(setting: dict[str, Any], config: Any) -> Any:
    """Return the reward model's configuration, None without one."""
    from ppo_rlhf.models.reward_model import CausalLMRewardConfig

    return CausalLMRewardConfig(text_config=copy.deepcopy(config)) if setting.get("reward") else None


class Resident:
    """Resident memory of this process, in bytes, as Linux counts it."""

    def now(self) -> int:
        """Return what is resident."""
        return self._read("VmRSS")

    def peak(self) -> int:
        """Return the most since the start, or since `reset`."""
        return self._read("VmHWM")

    def reset(self) -> None:
        """Let the peak begin anew."""
        Path("/proc/self/clear_refs").write_text("5")

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(setting: dict[str, Any]) -> dict[str, Any]:
    """Run two iterations of a setting in this process and return its peaks, bytes above what imports left."""
    import torch
    from speed.imports import import_late
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

    from ppo_rlhf.data.prompts import PromptDataset
    from ppo_rlhf.models.loading import prepare
    from ppo_rlhf.ppo.accelerator import frozen_dtype, trained_dtype
    from ppo_rlhf.ppo.build import build_critic, policy_to_train
    from ppo_rlhf.ppo.experience import estimate_advantages, score_responses, shape_rewards
    from ppo_rlhf.ppo.rollout import generate_rollouts
    from ppo_rlhf.ppo.state import TrainingState
    from ppo_rlhf.ppo.update import optimise_policy
    from ppo_rlhf.rewards.scorers import ModelScorer, ResponseBatch, RewardScorer

    import_late()
    config, shape = ppo_config(setting), model_config(setting)
    resident = Resident()
    before = resident.now()
    torch.manual_seed(0)

    def make(auto: Any, start: Any, dtype: torch.dtype) -> Any:
        return prepare(auto.from_config(start, dtype=dtype))

    reference = make(AutoModelForCausalLM, shape, frozen_dtype(config)).requires_grad_(False)
    base = reference if config.use_peft else make(AutoModelForCausalLM, shape, trained_dtype(config))
    policy = policy_to_train(base, config)
    vocabulary = {f"t{i}": i for i in range(shape.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")), pad_token="t0", eos_token="t0"
    )

    def lengths(batch: ResponseBatch) -> torch.Tensor:
        return torch.tensor([float(len(set(ids))) for ids in batch.response_ids])

    scorer = RewardScorer([("different_tokens", 1.0, lengths)])
    start = reward_config(setting, shape)
    if start is not None:
        model = make(AutoModelForSequenceClassification, start, frozen_dtype(config)).requires_grad_(False)
        scorer = RewardScorer(
            [("model", 1.0, ModelScorer(model, tokenizer, tokenizer, config.local_rollout_forward_batch_size))], model
        )
    state = TrainingState.create(policy, build_critic(config, policy, scorer.model), tokenizer, config)
    ids = torch.randint(1, shape.vocab_size, (config.batch_size, setting["prompt"])).tolist()
    prompts = PromptDataset(ids, tokenizer.batch_decode(ids), {})
    peaks = {"models": resident.now() - before}

    def of_phase(name: str, action: Any) -> Any:
        resident.reset()
        result = action()
        peaks[name] = max(peaks.get(name, 0), resident.peak() - before)
        return result

    for _ in range(2):
        rollouts = of_phase("rollout", lambda: generate_rollouts(state, reference, prompts, config))
        scores = of_phase("scoring", lambda rollouts=rollouts: score_responses(rollouts, scorer, state))
        experience = estimate_advantages(rollouts, scores, shape_rewards(rollouts, scores, state), config)
        of_phase("update", lambda experience=experience: optimise_policy(state, experience, config))
    return {"peak": max(peaks.values()), **peaks}


def measured(name: str) -> dict[str, int]:
    """Return what `--measure NAME` finds, in a process of its own."""
    command = [sys.executable, __file__, "--measure", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def fitted(plans: list[Any], peaks: list[int]) -> dict[str, float]:
    """Return the constants whose plans have the least squared relative error; each plan is linear in them."""
    import numpy as np

    rows = np.array(
        [[1.0, float(plan.sixteen_bits), *(size / MEBIBYTE for size in plan.kept.values())] for plan in plans]
    )
    given_back, measured_MiB = (np.array(v) / MEBIBYTE for v in ([plan.given_back for plan in plans], peaks))
    constants = np.linalg.lstsq(rows / measured_MiB[:, None], 1.0 - given_back / measured_MiB, rcond=None)[0]
    names = ["LIBRARY_BYTES, MiB", "SIXTEEN_BIT_BYTES, MiB", *plans[0].kept]
    return dict(zip(names, constants.round(2).tolist(), strict=True))


def main() -> None:
    """Measure, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--measure", choices=list(SETTINGS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(SETTINGS[options.measure])))
        return
    rows: list[dict[str, Any]] = []
    plans = []
    print("| setting | phase with the most | tensors, MiB | planned, MiB | measured, MiB | planned / measured |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.only:
        plan, found = planned(SETTINGS[name]), measured(name)
        plans.append(plan)
        phases = {phase.name: {"held": phase.held, "passing": phase.passing} for phase in plan.phases}
        rows.append({"setting": name, "planned": plan.needed, "measured": found, "phases": phases})
        print(
            f"| {name} | {plan.peak.name} | {plan.peak.total / MEBIBYTE:.0f} | {plan.needed / MEBIBYTE:.0f} "
            f"| {found['peak'] / MEBIBYTE:.0f} | {plan.needed / found['peak']:.2f} |",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    if options.fit:
        print(fitted(plans, [row["measured"]["peak"] for row in rows]))


if __name__ == "__main__":
    main()
