"""TRL 1.12's adapter of `invariances.py`, for the Python of an environment with TRL 1.12.

Its loop is one method, so its functions are wrapped to note what goes through them.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import torch
import trl.experimental.ppo.ppo_trainer as peer
from accelerate.state import AcceleratorState
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.trainer.utils import selective_log_softmax

from invariances import SHAPE, Case, Seen
from trl_side import load_models, load_tokenizer
from workload import STOP_TOKEN, Job, response_length_of

FUNCTIONS = {
    "log-probabilities": lambda logits, labels, temperature: selective_log_softmax(logits / temperature, labels),
    "whitening": peer.masked_whiten,
}


def observe(case: Case) -> Seen:
    """Train for one iteration, with an optimiser that stands still."""
    job = Job(SHAPE, "mixed", case.precision, "cpu", 1, case.policy, case.reward, case.prompts)
    os.environ.update(job.peer_environment)
    AcceleratorState._reset_state(reset_partial_state=True)  # of the precision of the iteration before
    tokenizer = load_tokenizer(job)
    if case.pad_is_stop:
        tokenizer.pad_token = tokenizer.eos_token
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        total_episodes=SHAPE.batch,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulated,
        num_mini_batches=case.minibatches,
        num_ppo_epochs=case.epochs,
        response_length=SHAPE.response_length,
        stop_token_id=STOP_TOKEN,
        temperature=1.0,
        lam=case.lam,
        kl_coef=0.0,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        num_sample_generations=0,
        disable_tqdm=True,
    )
    data = [{"input_ids": ids} for ids in case.prompts]
    trainer = PPOTrainer(args=config, processing_class=tokenizer, **load_models(job), train_dataset=data)
    seen: dict[str, list[Any]] = {name: [] for name in ("gradients", "batch_generation", "get_reward", "masked_whiten")}
    seen["selective_log_softmax"] = []
    optimizer = trainer.optimizer.optimizer

    def step(*_: Any, **__: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        seen["gradients"].append(torch.cat([p.grad.flatten() for p in parameters]))

    def noted(name: str) -> Any:
        function = getattr(peer, name)

        def call(*inputs: Any, **options: Any) -> Any:
            result = function(*inputs, **options)
            seen[name].append((inputs, result))
            return result

        return mock.patch.object(peer, name, call)

    optimizer.step = step
    with contextlib.ExitStack() as stack:
        for name in ("batch_generation", "get_reward", "masked_whiten", "selective_log_softmax"):
            stack.enter_context(noted(name))
        stack.enter_context(mock.patch.object(np.random, "permutation", np.arange))  # minibatches in order
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        trainer.train()
    (queries, *_), (sequences, _) = seen["batch_generation"][0][0][1:], seen["batch_generation"][0][1]
    responses = [row[: response_length_of(row, STOP_TOKEN)] for row in sequences[:, queries.shape[1] :].tolist()]
    (advantages, counted), _ = seen["masked_whiten"][0]
    old, _, new, *_ = (result.detach().float() for _, result in seen["selective_log_softmax"])
    ratios = (new - old[: len(new)]).exp()[counted[: len(new)]]
    scores = seen["get_reward"][1][1][1]
    return Seen(responses, scores, counted, advantages, ratios, seen["gradients"][0], len(seen["gradients"]))
