"""Runs that must give the same results on several processes as on one; started by torchrun in `test_processes`.

torchrun --nproc_per_node 2 -m tests.ppo.process_cases RESULTS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.option_names import LossAggregation
from ppo_rlhf.evaluation.policy import Evaluator, ResolvedJudge
from ppo_rlhf.ppo import token_budget
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from ppo_rlhf.runtime.processes import (
    dealt_rows,
    from_all,
    gather_dealt,
    gather_tensors,
    is_main_process,
    own_rank,
    process_count,
    wait_for_all,
)
from tests.ppo.short_memory import FIRST_BACKWARD, ShortMemory
from tests.ppo.vllm_stand_in import SERVER, StandIn
from tests.ppo_runs import (
    MEASURED,
    Run,
    build_model,
    build_prompts_alike,
    build_run,
    first_letters,
    model_scorer,
    weight_sums,
)
from tests.supervised import process_case

ITERATIONS = 2
CASES: dict[str, dict[str, Any]] = {
    **{f"aggregation {name}": {"loss_aggregation": name} for name in get_args(LossAggregation)},
    "gpt2, which has absolute positions": {"kind": "gpt2"},
    "shared trunk": {"value_model": "shared", "vf_coef": 0.5},
    "shared trunk, critic first": {"value_model": "shared", "critic_warmup_iterations": 1},
    "critic first": {"critic_warmup_iterations": 1},
    "LoRA": {"use_peft": True, "lora_r": 2},
    "token budget": {"max_tokens_per_micro_batch": 20},
    "KL in the loss, entropy, dual clip": {
        "kl_in": "loss",
        "kl_estimator": "k3",
        "entropy_coef": 0.01,
        "dual_clip": 3.0,
    },
    "running normalisation, adaptive KL": {"reward_normalisation": "running", "kl_controller": "adaptive"},
    "components normalised": {"reward_normalisation": "running", "normalise": "component"},
    "the lowest component": {"reward_normalisation": "running", "normalise": "component", "combine": "min"},
    "several responses a prompt, masked": {
        "responses_per_prompt": 2,
        "truncated_responses": "mask",
        "missing_eos_penalty": None,
    },
    "lambda by length, positive examples": {
        "lam_alpha": 0.3,
        "lam_critic": 1.0,
        "positive_coef": 0.3,
        "positive_threshold": 0.75,
    },
    "more epochs of the critic, k3+": {"num_critic_epochs": 4, "kl_in": "loss", "kl_estimator": "k3+", "kl_coef": 0.5},
    "KL over the vocabulary": {"kl_in": "loss", "kl_estimator": "full", "kl_coef": 0.5, "use_peft": True, "lora_r": 2},
    "prompts without a signal": {"responses_per_prompt": 2, "drop_uniform_prompts": 3},
    "moving average": {"ema_decay": 0.9},
    "turns": {"environment": "tests.ppo.test_episodes:reply_twice", "turn_length": 3, "stop_token_id": 22},
    "early stop": {"target_kl": 1e-4},
    "band of ratios": {"importance_low": 0.7, "importance_high": 6.0},
    "frozen attention of the critic, no clip of values": {"value_freeze": "attention", "cliprange_value": None},
    "KL over the vocabulary in the reward": {"kl_estimator": "full", "kl_coef": 0.5},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "a shared prefix": {"kind": "gpt2", "prompts": build_prompts_alike(), "max_tokens_per_micro_batch": 40},
}
BY_TWO = (
    "a shared prefix",
    "aggregation token_mean",
    "LoRA",
    "token budget",
    "components normalised",
    "the lowest component",
    "turns",
)
"""Cases that two processes run in the default tests; four processes run all."""
BY_THREE = ("aggregation token_mean", "shared trunk", "LoRA")
"""Cases that three processes run; the number of responses is a multiple of three."""
BY_VLLM: dict[str, dict[str, Any]] = {"colocate": {"use_peft": True, "lora_r": 2}, "server": SERVER}


def build(settings: dict[str, Any], responses: int = 16) -> Run:
    """Build a run with the given number of responses per iteration, over all processes together.

    `micro_batch` among the settings is the number of responses in a pass of the update; without it, all of a process.
    """
    settings = dict(settings)
    if (normalise := settings.pop("normalise", None)) is not None:
        combine = settings.pop("combine", "sum")
        components = [("first", 1.0, first_letters), ("length", -0.5 if combine == "sum" else 1.0, response_lengths)]
        settings["scorer"] = RewardScorer(components, normalise=normalise, combine=combine)
    share = responses // process_count()
    micro_batch = settings.pop("micro_batch", share)
    sizes = {"gradient_accumulation_steps": share // micro_batch, "per_device_train_batch_size": micro_batch}
    return build_run(**{**settings, **sizes})


def response_lengths(batch: ResponseBatch) -> Tensor:
    return torch.tensor([float(len(ids)) for ids in batch.response_ids], dtype=torch.float64)


def results(settings: dict[str, Any], responses: int = 16) -> dict[str, Any]:
    """Return tokens, metrics and weights of a run's first iterations."""
    run = build(settings, responses)
    rollouts, _, _, experience = run.before_update()
    actual: dict[str, Any] = {
        "tokens": rollouts.responses.response_ids.tolist(),
        "values": rollouts.values.tolist(),
        "advantages": experience.advantages.tolist(),
    }
    for iteration in range(ITERATIONS):
        metrics = run.iteration()
        actual[f"metrics {iteration}"] = {key: value for key, value in metrics.items() if not key.startswith(MEASURED)}
    actual["weights"] = weight_sums(run)
    return actual


def by_vllm(settings: dict[str, Any]) -> dict[str, Any]:
    """Return tokens, metrics and weights of a float32 run that samples with the stand-in for vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        StandIn(build_model(dtype=torch.float32, seed=7)).install(patch)
        settings = {**settings, "rollout_engine": "vllm", "dtype": "float32"}
        return {**results(settings), "evaluation": evaluation(build(settings))}


def evaluation(run: Run) -> dict[str, Any]:
    """Return the evaluation of a policy on seven prompts, which do not split evenly across the processes."""
    prompts = run.prompts.select([0, 1, 2, 3, 4, 5, 0])
    given = prompts, run.scorer, ResolvedJudge(None, {}, "the reward"), run.config, run.state.sampler.settings
    evaluator = Evaluator(run.state.sampler.tokenizer, *given, seed=1, batch_size=2)
    actual = evaluator.evaluate(run.state.learner.policy, run.reference)
    return {"completions": actual.completions, "rewards": actual.rewards.tolist(), "kl": actual.kl.tolist()}


def resumed(folder: Path) -> dict[str, Any]:
    """Write a checkpoint after one iteration, and resume from a checkpoint that another number of processes wrote."""
    run = build({})
    run.iteration()
    if is_main_process():
        write_checkpoint(folder / f"by_{process_count()}", run.state)
    wait_for_all()
    other = folder / f"by_{3 - min(2, process_count())}" / "iteration_000001"
    if not other.exists():
        return {}
    again = build({})
    restore(again.state, other)
    metrics = again.iteration()
    return {"metrics": {k: v for k, v in metrics.items() if not k.startswith(MEASURED)}, "weights": weight_sums(again)}


def settled() -> dict[str, Any]:
    """Return the token budget of processes with unequal memory, and the results of training with it."""
    fitting = [50, 20, 30, 40][own_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_budget, "UNLIMITED_ON", ())
        patch.setattr(token_budget.UpdateBytes, "tokens_in", lambda self, free: fitting)
        run = build({})
        run.iteration()
    return {"tokens": run.state.learner.micro_batch_tokens, "weights": weight_sums(run)}


SHORT = {
    **{"sampling": 3, "reference": 3, "scoring": 3, "policy's passes": 4, "critic's passes": 4},
    **{"policy's update": 4, FIRST_BACKWARD: 1},
}
"""Phases in which the memory of process 1 runs out, and how many responses fit; a process has 8 of 16 responses."""


LATER = "policy's passes, one update after the first"
"""The phase before the second minibatch of a run, in which DDP rebuilds its buckets."""


def short_memory(phase: str) -> dict[str, Any]:
    """Return the results of a run in which only the memory of process 1 runs out, and how often it halved."""
    if phase == LATER:
        run = build({"num_mini_batches": 1, "num_ppo_epochs": 1, "total_episodes": 48})
        metrics = [run.iteration()]
        with pytest.MonkeyPatch.context() as patch:
            if own_rank() == 1:
                ShortMemory(patch, "policy's passes", 4)
            return _short_results(run, [*metrics, run.iteration()])
    with pytest.MonkeyPatch.context() as patch:
        if own_rank() == 1:
            ShortMemory(patch, phase, SHORT[phase])
        # Only before the last micro-batch of a minibatch can a backward pass be repeated
        several: dict[str, Any] = {"max_tokens_per_micro_batch": 40} if phase == FIRST_BACKWARD else {}
        if phase == "scoring":
            several = {"scorer": RewardScorer([("model", 1.0, model_scorer("llama", 6))])}
        run = build({"num_mini_batches": 1, "local_rollout_forward_batch_size": 6, **several})
        return _short_results(run, [run.iteration() for _ in range(ITERATIONS)])


def _short_results(run: Run, metrics: list[dict[str, float]]) -> dict[str, Any]:
    kept = [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in metrics]
    halvings = {name: halving.count for name, halving in run.state.halvings.items()}
    return {"metrics": kept, "weights": weight_sums(run), "halvings": halvings}


def check_gathers() -> None:
    """Gather rows of each supported type from unequal shards; each row holds its index."""
    for count in (1, 2, 5, 8):
        shards = dealt_rows([(7 * row) % 5 for row in range(count)])
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
            whole = torch.arange(2 * count).view(count, 2).to(dtype)
            assert torch.equal(gather_dealt(whole[shards[own_rank()]], shards), whole)
    mine = torch.tensor([float(own_rank())])
    assert [float(one) for one in gather_tensors(mine)] == list(range(process_count()))


def main(path: Path, folder: Path) -> None:
    """Run the cases; write the main process's results, which the other processes must match."""
    check_gathers()
    if process_count() == 3:
        actual = {name: results(CASES[name], responses=12) for name in BY_THREE}
    else:
        actual = {name: results(CASES[name]) for name in (BY_TWO if process_count() == 2 else CASES)}
        actual["evaluation"] = evaluation(build({}))
        actual["resumed"] = resumed(folder)
        actual["settled"] = settled()
        actual["short memory"] = {phase: short_memory(phase) for phase in (*SHORT, LATER)}
        actual["vLLM"] = {name: by_vllm(settings) for name, settings in BY_VLLM.items()}
        actual["supervised"] = process_case.results(folder)
        process_case.check_several()
    assert len(set(from_all(json.dumps(actual)))) == 1, "the processes differ"
    if is_main_process():
        path.write_text(json.dumps(actual))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
