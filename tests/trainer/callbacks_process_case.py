"""Callbacks, reports, evaluation and max_time on two processes; started by torchrun in `test_trainer_processes`.

torchrun --nproc_per_node 2 -m tests.trainer.callbacks_process_case FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.runtime.processes import from_all, is_main_process
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import tiny_model, word_tokenizer
from tests.trainer.test_trainer import PROMPTS, config, early_letters

MODES: dict[str, dict[str, Any]] = {"plain": {}, "stops": {}, "fails": {}, "time": {"max_time": 1e-9}}


class Watching(TrainerCallback):
    """Records evaluations. In the mode `stops` the main process ends training; in `fails` the other process raises."""

    def __init__(self, mode: str) -> None:
        self.mode, self.rewards = mode, []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = self.mode == "stops" and state.global_step == 2 and state.is_world_process_zero
        if self.mode == "fails" and state.global_step == 2 and not state.is_world_process_zero:
            raise ValueError("only here")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        self.rewards.append(metrics["eval_reward"])


def train(mode: str, folder: Path) -> dict[str, Any]:
    seen = Watching(mode)
    trainer = PPOTrainer(
        config(report_to="tensorboard", eval_interval=2, save_interval=100, total_episodes=24, **MODES[mode]),
        tiny_model(),
        None,
        word_tokenizer(),
        reward=early_letters,
        prompts=PROMPTS,
        evaluation_prompts=["q r", "s", "a b"],
        callbacks=[seen],
    )
    end = "finished"
    try:
        trainer.train(output_dir=folder / mode)
    except PPORLHFError as error:
        end = f"{type(error).__name__}: {error}"
    return {"end": end, "iteration": trainer.state.progress.iteration, "rewards": seen.rewards}


def main(folder: Path) -> None:
    actual = {mode: from_all(train(mode, folder)) for mode in MODES}
    if is_main_process():
        (folder / "results.json").write_text(json.dumps(actual))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
