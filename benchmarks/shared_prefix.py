"""CPU seconds of an iteration's passes with the prompts' common beginning computed once, and in every row.

python benchmarks/shared_prefix.py --model MODEL --system 0,360

MODEL is a chat model such as SmolLM2-135M-Instruct: a folder, or a GGUF file. The settings and prompts are those of the
recipe obedience. One process alternates between the two ways, on the same responses, and prints a table for
docs/speed.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from inputs import raw_rows, recipe, with_system_turn
from ppo_rlhf.passes import prefixes
from ppo_rlhf.passes.decoding import Decoder
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.rollouts import measure
from ppo_rlhf.recipes.obedience import strict
from ppo_rlhf.training import PPOConfig, PPOTrainer

NEVER = 2**62
"""A value of `LEAST_SHARED` with which every row is computed whole."""
PARTS = ("prefill of the batch", "log-probabilities and values", "update", "all three")


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, of all threads, and what it returned."""
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def measured(model: str, words: int, pairs: int, settings: dict[str, Any]) -> tuple[str, dict[str, list[list[float]]]]:
    """Return the tokens of the prompts in words, and of each part the seconds of both ways in each pair."""
    config = PPOConfig(**recipe("obedience")["ppo"] | {"total_episodes": 10**6, "eval_interval": 10**6} | settings)
    rows = with_system_turn(raw_rows(), words)
    trainer = PPOTrainer(config, model, reward=strict, prompts=rows)
    state, reference = trainer.state, trainer.reference_policy
    assert trainer._prompts is not None
    first = loop.generate_rollouts(state, reference, trainer._prompts, trainer._scorer)
    prompts, responses = first.prompts, first.responses
    longest = max(prompts.lengths) + config.response_length

    @torch.no_grad()
    def prefill() -> None:
        Decoder(state.learner.policy, prompts.prompt_ids, longest).prefill()

    found: dict[str, list[list[float]]] = {part: [] for part in PARTS}
    shared, tokens = prefixes.LEAST_SHARED, {}
    for pair in range(pairs):
        seconds: dict[int, list[float]] = {}
        for least in (shared, NEVER) if pair % 2 else (NEVER, shared):
            prefixes.LEAST_SHARED = least
            parts = state.learner, state.sampler, state.progress, reference, prompts, responses
            first_s, _ = cpu_seconds(prefill)
            second_s, rollouts = cpu_seconds(lambda parts=parts: measure(*parts))
            tokens[least] = sum(batch.rows.packed_ids.shape[1] for batch in rollouts.cut.first_inputs)
            third_s, _ = cpu_seconds(lambda given=rollouts: loop.learn(state, reference, given, trainer._scorer))
            seconds[least] = [first_s, second_s, third_s, first_s + second_s + third_s]
        for part, number in zip(PARTS, range(len(PARTS)), strict=True):
            found[part].append([seconds[shared][number], seconds[NEVER][number]])
    prefixes.LEAST_SHARED = shared
    mean = sum(prompts.lengths) / len(prompts.lengths)
    common = prefixes.common_to_all(prompts.prompt_ids)
    sizes = f"{common} of {mean:.0f} ({tokens[shared]:,} of {tokens[NEVER]:,})"
    return sizes, found


def lines(sizes: str, found: dict[str, list[list[float]]]) -> list[str]:
    """Return the rows of the table of one length of the system turn."""
    rows = []
    for part, pairs in found.items():
        ratios = [whole / once for once, whole in pairs]
        once, whole = (median(side) for side in zip(*pairs, strict=True))
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append(f"| {sizes} | {part} | {once:.2f} | {whole:.2f} | {spread} |")
    return rows


def main() -> None:
    """Measure each length of the system turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model: a folder, or a GGUF file")
    parser.add_argument("--system", default="0,360", help="words of a system turn; 0: the template's own")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of PPOConfig")
    given = parser.parse_args()
    settings = dict(each.split("=", 1) for each in given.set)
    print("| prompt tokens shared (tokens computed) | part | once, s | each row, s | times faster |")
    print("| --- | --- | --- | --- | --- |")
    for words in map(int, given.system.split(",")):
        print("\n".join(lines(*measured(given.model, words, given.pairs, settings))), flush=True)


if __name__ == "__main__":
    main()
