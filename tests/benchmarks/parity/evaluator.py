"""Measure the saved policies of one job, of either side, by one and the same code: `evaluator.py JOB.json HELD_OUT`.

HELD_OUT is a JSON file of held-out prompts: `{"prompt_ids": …, "texts": …, "columns": …, "judge": …}`, the judge being
`module:name` or null. Writes `evaluations.json` beside the policies: one row a saved policy.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from job import Job
from our_side import build_scorer, our_config

from ppo_rlhf.data.prompts import PromptDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.evaluation import EvaluationConfig, PolicyEvaluation, evaluate_policy, resolve_judge
from ppo_rlhf.ppo.state import sampling_settings

NOISE_SEED = 1


def evaluate(job: Job, held_out: Path) -> list[dict[str, float]]:
    """Return one row for the SFT policy (iteration 0) and one for each saved policy."""
    table = json.loads(held_out.read_text(encoding="utf-8"))
    prompts = PromptDataset(table["prompt_ids"], table["texts"], table["columns"])
    config, sft = our_config(replace(job, variant="default")), PretrainedHandle(job.sft)
    tokenizer, reference, scorer = sft.tokenizer(), sft.causal_lm(), build_scorer(job, sft)
    judge = resolve_judge(EvaluationConfig(judge=table["judge"], prompts_path=None))
    sampling = sampling_settings(config, tokenizer, reference)

    def measured(directory: Path | None) -> PolicyEvaluation:
        return evaluate_policy(
            reference if directory is None else PretrainedHandle(str(directory)).causal_lm(),
            None if directory is None else reference,
            tokenizer,
            prompts,
            scorer,
            judge,
            config,
            sampling,
            seed=NOISE_SEED,
            batch_size=128,
        )

    before = measured(None)
    rows = [_row(0, before, before, job)]
    for iteration in filter(job.is_saved, range(1, job.settings.iterations + 1)):
        rows.append(_row(iteration, measured(job.saved_policy(iteration)), before, job))
    return rows


def _row(iteration: int, result: PolicyEvaluation, before: PolicyEvaluation, job: Job) -> dict[str, float]:
    """Means over the held-out prompts; `score` is the reward less the missing-EOS penalty: what both sides maximise."""
    penalty = (job.settings.missing_eos_penalty or 0.0) * ~result.terminated
    row = {
        "iteration": iteration,
        "score": np.mean(result.rewards - penalty),
        "reward": result.rewards.mean(),
        "kl": result.kl.mean(),
        "length": result.lengths.mean(),
        "truncated": (~result.terminated).mean(),
    }
    if result.judge_scores is not None and before.judge_scores is not None:
        difference = result.judge_scores - before.judge_scores
        row |= {"gold": result.judge_scores.mean(), "win_rate": np.mean((np.sign(difference) + 1) / 2)}
    return {name: float(value) for name, value in row.items()}


if __name__ == "__main__":
    described = Job.read(sys.argv[1])
    measured_rows = evaluate(described, Path(sys.argv[2]))
    (Path(described.out) / "evaluations.json").write_text(json.dumps(measured_rows), encoding="utf-8")
