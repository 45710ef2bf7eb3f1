"""Time and peak memory of iterations with a vocabulary of 262,144, at the size of Gemma 3 270M. See docs/speed.md.

python benchmarks/large_vocabulary.py [--lora] [--dtype bfloat16] [--folder FOLDER]

The weights are random, and the tokenizer is a list of words. The peak is of resident memory, imports included.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from ppo_rlhf import PPOConfig, PPOTrainer
from ppo_rlhf.preflight.memory import PROCESS_BYTES, RunShape, plan_memory

VOCABULARY, PROMPTS, PROMPT, RESPONSE = 262_144, 16, 24, 40
GEMMA_3_270M: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32_768,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def write_model(folder: Path) -> None:
    """Write a random model and its tokenizer, unless the folder has a model."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA_3_270M)).save_pretrained(folder)
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"w{number}" for number in range(4, VOCABULARY))]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of PPOConfig."""
    fields = {
        "total_episodes": PROMPTS * arguments.iterations,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": PROMPTS // 8,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "response_length": RESPONSE,
        "stop_token": "none",
        "value_model": "shared",
        "value_learning_rate": 1e-4,
        "device": "cpu",
        "dtype": arguments.dtype,
        "seed": 0,
    }
    return fields | ({"use_peft": True, "learning_rate": 1e-4} if arguments.lora else {"learning_rate": 1e-6})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", action="store_true", help="adapters instead of whole weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keeps the random model, 1 GiB; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        write_model(folder)
        measure(folder, arguments)


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    """Train, and print the CPU seconds of each iteration and the peak beside the plan's."""
    config, reads = PPOConfig(**settings(arguments)), []
    load = AutoTokenizer.from_pretrained
    AutoTokenizer.from_pretrained = lambda *a, **options: reads.append(a) or load(*a, **options)
    prompts = [" ".join(f"w{4 + (97 * row + 13 * at) % 5000}" for at in range(PROMPT)) for row in range(PROMPTS)]
    started, seconds = time.process_time(), list[float]()

    def reward(completions: list[str], **_: Any) -> list[float]:
        seconds.append(time.process_time())
        return [float(len(text) % 7) for text in completions]

    trainer = PPOTrainer(config, str(folder), reward=reward, prompts=prompts)
    ready = time.process_time()
    trainer.train()
    ends = [*seconds, time.process_time()]
    shape = RunShape(Gemma3TextConfig(**GEMMA_3_270M), PROMPT)
    planned = plan_memory(trainer.config, shape).needed + PROCESS_BYTES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    print(
        f"{'LoRA' if arguments.lora else 'whole weights'}, {arguments.dtype}: {ready - started:.1f} CPU seconds until "
        f"ready, {len(reads)} readings of the tokenizer, then {ends[-1] - ready:.1f} for {arguments.iterations} "
        f"iterations; from reward to reward {', '.join(f'{b - a:.1f}' for a, b in itertools.pairwise(ends))}; peak "
        f"{peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f}, {planned / peak:.2f} of it"
    )


if __name__ == "__main__":
    main()
