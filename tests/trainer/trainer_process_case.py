"""PPOTrainer on two processes with different arguments; started by torchrun in `test_trainer_processes`.

torchrun --nproc_per_node 2 -m tests.trainer.trainer_process_case RESULTS
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.runtime.processes import from_all, is_main_process
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import tiny_model, word_tokenizer
from tests.trainer.test_trainer import PROMPTS, QUERIES, config

RANK = int(os.environ.get("RANK", "0"))
OWN = [query + RANK for query in QUERIES]  # different in each process
ALIKE = [0.0, 1.0, 2.0, 3.0]


def own_reward(completions: list[str]) -> list[float]:
    return [float(RANK) for _ in completions]


def trainer_of(**given: Any) -> PPOTrainer:
    settings = {"gradient_accumulation_steps": 1, "seed": given.pop("seed", 1)}
    return PPOTrainer(config(**settings), given.pop("policy", tiny_model()), None, word_tokenizer(), **given)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except PPORLHFError as error:
        return str(error)
    return ""


def step_with_own(what: str) -> None:
    trainer = trainer_of()
    given = {"queries": QUERIES, "responses": trainer.generate(QUERIES, return_prompt=False), "scores": ALIKE}
    own = {"queries": OWN, "responses": OWN, "scores": torch.tensor(ALIKE) + RANK}
    trainer.step(**{**given, what: own[what]})


REFUSED: dict[str, Callable[[], Any]] = {
    "generate: queries": lambda: trainer_of().generate(OWN),
    "generate: arguments": lambda: trainer_of().generate(QUERIES, max_new_tokens=3 + RANK),
    **{f"step: {what}": lambda what=what: step_with_own(what) for what in ("queries", "responses", "scores")},
    "PPOTrainer: config": lambda: trainer_of(seed=RANK),
    "PPOTrainer: prompts": lambda: trainer_of(prompts=PROMPTS[RANK:]),
    "PPOTrainer: reference_policy": lambda: trainer_of(policy=tiny_model(seed=RANK)),
    "train: output_dir": lambda: trainer_of(prompts=PROMPTS, reward=own_reward).train(output_dir=f"run-{RANK}"),
}


def results() -> dict[str, Any]:
    """Return this process's errors, and the metrics of runs with equal arguments."""
    actual: dict[str, Any] = {name: refusal(call) for name, call in REFUSED.items()}
    trainer = trainer_of()
    answers = trainer.generate(QUERIES, return_prompt=False, length_sampler=lambda: 2 + RANK)
    actual["lengths"] = max(map(len, answers))
    actual["first KL"] = trainer.step(QUERIES, answers, ALIKE)["objective/kl"]
    actual["scores"] = [row["objective/scores"] for row in trainer_of(prompts=PROMPTS, reward=own_reward).train()]
    return actual


if __name__ == "__main__":
    by_rank = from_all(results())
    if is_main_process():
        Path(sys.argv[1]).write_text(json.dumps(by_rank))
