"""One worker of TRL 1.12.0, run by the Python of the peer's environment: `-m speed.trl_side JOB`.

TRL's loop cannot be called iteration by iteration, so a callback holds it at the end of each until the next command.

`best` settings: rollouts of the whole batch, fused AdamW, no gradient checkpointing; bf16 as in `peer_bf16`. `defaults`
leaves all that is not part of the work as TRL has it: its `bf16` has no effect on its PPO, so it computes in float32.
"""

from __future__ import annotations

import os

os.environ.update(
    TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false"
)

import copy
import sys
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch
import transformers
import trl.experimental.ppo.ppo_trainer as peer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from speed.channel import Channel, peak_memory_mib
from speed.imports import import_late
from speed.workload import Job, response_length_of


def load_tokenizer(job: Job) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose pad token lies outside the vocabulary: TRL finds padding by its id.

    So does the end of text where nothing is to end early.
    """
    size = job.preset.shape.vocabulary
    words = {f"t{i}": i for i in range(size)} | {"<pad>": size, "<eos>": size + 1}
    backend = Tokenizer(WordLevel(words, unk_token="t1"))
    backend.pre_tokenizer = Whitespace()
    end = "<eos>" if job.stop_token_id is None else f"t{job.stop_token_id}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=end, padding_side="left")


def peer_config(job: Job) -> PPOConfig:
    """Return TRL's configuration of a job; gradient_accumulation_steps 1, or it would take one step an epoch."""
    preset = job.preset
    best = {
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "local_rollout_forward_batch_size": preset.batch,
    }
    return PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        seed=job.seed,
        total_episodes=job.iterations * preset.batch,
        per_device_train_batch_size=preset.batch,
        gradient_accumulation_steps=1,
        num_mini_batches=preset.batch // preset.minibatch,
        num_ppo_epochs=preset.epochs,
        learning_rate=job.learning_rate,
        kl_coef=job.kl_coef,
        response_length=preset.response_length,
        temperature=1.0,
        stop_token_id=job.stop_token_id,
        use_cpu=job.device == "cpu",
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        num_sample_generations=0,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=job.device != "cpu",
        **(best if job.setting == "best" else {}),
    )


def load_models(job: Job) -> dict[str, PreTrainedModel]:
    """Return TRL's four models on the device, from the files that our side reads."""
    bf16 = job.precision == "bf16" and job.setting == "best"
    trained = torch.bfloat16 if bf16 and job.peer_bf16 == "weights" else torch.float32
    frozen = torch.bfloat16 if bf16 and job.peer_bf16 != "autocast" else torch.float32
    policy = AutoModelForCausalLM.from_pretrained(job.policy, dtype=trained)
    value = AutoModelForSequenceClassification.from_pretrained(job.policy, dtype=trained, num_labels=1)
    nn.init.zeros_(value.score.weight)
    reward = AutoModelForSequenceClassification.from_pretrained(job.reward, dtype=frozen)
    models = {
        "model": policy,
        "ref_model": copy.deepcopy(policy).to(frozen).requires_grad_(False),
        "value_model": value,
        "reward_model": reward.eval().requires_grad_(False),
    }
    return {name: model.to(job.device) for name, model in models.items()}


class Stepper(TrainerCallback):
    """Takes the times of an iteration, and holds the loop between iterations."""

    def __init__(self, job: Job, channel: Channel, imported_mib: float) -> None:
        self.job = job
        self.channel = channel
        self.imported_mib = imported_mib
        self.marks: dict[str, float] = {}
        self.responses = torch.zeros(0)
        self.queries = torch.zeros(0)
        self.steps = 0

    def listen(self) -> None:
        """Take note of when TRL's own functions are called."""
        generation, forward = peer.batch_generation, peer.forward

        def timed_generation(model: nn.Module, queries: Tensor, *rest: Any) -> Any:
            self.mark("generating")
            result = generation(model, queries, *rest)
            self.mark("generated")
            self.queries, self.responses = queries, result[0][:, queries.shape[1] :]
            return result

        def timed_forward(model: nn.Module, *rest: Any) -> Any:
            if isinstance(model, peer.PolicyAndValueWrapper) and "scored" not in self.marks:
                self.mark("scored")
            return forward(model, *rest)

        peer.batch_generation, peer.forward = timed_generation, timed_forward

    def mark(self, name: str) -> None:
        """Note the time."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        self.marks[name] = time.perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Everything is loaded."""
        self.channel.send(threads=torch.get_num_threads())
        self.next()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An iteration ends here; what TRL tidies up behind this point counts to the next one."""
        self.mark("ended")
        marks, pad = self.marks, self.job.preset.shape.vocabulary
        self.channel.send(
            rollout=marks["generated"] - marks["generating"],
            score=marks["scored"] - marks["generated"],
            update=marks["ended"] - marks["scored"],
            iteration=marks["ended"] - marks["started"],
            prompt_tokens=(self.queries != pad).sum(1).tolist(),
            response_tokens=[response_length_of(row, self.job.stop_token_id) for row in self.responses.tolist()],
            memory_mib=self.memory_mib(),
            steps=self.steps,
        )
        self.next()

    def next(self) -> None:
        """Sleep until the next iteration is asked for."""
        self.marks.clear()
        if not self.channel.wait():
            sys.exit(0)
        self.mark("started")

    def memory_mib(self) -> float:
        """Return the peak, measured as on our side."""
        if self.job.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return peak_memory_mib() - self.imported_mib


def main() -> None:
    """Serve compare.py."""
    import_late()
    imported, channel, job = peak_memory_mib(), Channel(), Job.read(sys.argv[1])
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    stepper = Stepper(job, channel, imported)
    stepper.listen()
    trainer = PPOTrainer(
        args=peer_config(job),
        processing_class=load_tokenizer(job),
        **load_models(job),
        train_dataset=[{"input_ids": ids} for ids in job.prompt_ids],
        callbacks=[stepper],
    )
    trainer.log = lambda *_, **__: None  # it would print
    step = trainer.optimizer.step

    def counted_step(*arguments: Any, **options: Any) -> Any:
        stepper.steps += 1
        return step(*arguments, **options)

    trainer.optimizer.step = counted_step
    np.random.seed(job.seed)
    trainer.train()


if __name__ == "__main__":
    main()
