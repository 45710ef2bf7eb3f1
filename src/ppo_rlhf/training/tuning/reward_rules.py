"""Rules before the guide's first stage, on numbers that are wrong, and after its last, on the reward and the texts."""

from __future__ import annotations

import numpy as np

from ppo_rlhf.config.advice import TUNING_GUIDE
from ppo_rlhf.training.tuning.kl_rules import stronger_penalty
from ppo_rlhf.training.tuning.rule import Change, Finding, Rule, Run, Stage, number, rounded

HALF_PRECISION = ("bfloat16", "float16")


def _mismatch(run: Run, threshold: float) -> Finding | None:
    gaps = run.curves.values("policy/rollout_logprob_gap")
    gap = float(np.fmax(gaps[0], run.curves.last("policy/rollout_logprob_gap")))  # the other one where one is NaN
    if not gap > threshold:
        return None
    c, seen = run.config, f"policy/rollout_logprob_gap is {number(gap)} nats per token in {run.config.dtype}"
    if c.cuda_graphs:  # excludes the engine hf
        suspect = "the captured steps may be at fault; without them ppo.rollout_engine=hf can be tried next"
        return Finding(seen, Change("cuda_graphs", True, False), suspect)
    if c.rollout_engine != "hf":
        return Finding(seen, Change("rollout_engine", c.rollout_engine, "hf"))
    return Finding(seen)


def _mismatch_full(run: Run, threshold: float) -> Finding | None:
    return None if run.config.dtype in HALF_PRECISION else _mismatch(run, threshold)


def _mismatch_half(run: Run, threshold: float) -> Finding | None:
    if run.config.dtype not in HALF_PRECISION:
        return None
    found = _mismatch(run, threshold)
    if found and run.config.importance_cap is None:
        return Finding(found.seen, Change("importance_cap", None, 2.0))
    return found


def _truncated(run: Run, threshold: float) -> Finding | None:
    c = run.config
    cut, start = (level("response/truncated_fraction") for level in (run.curves.last, run.curves.start))
    if c.stop_token == "none" or not cut > threshold:
        return None
    seen = f"{cut:.0%} of the responses are cut off at {c.response_length} tokens ({start:.0%} at the start)"
    if c.missing_eos_penalty:
        penalty = run.scaled("missing_eos_penalty", 2.0)
    else:
        penalty = Change("missing_eos_penalty", c.missing_eos_penalty, rounded(run.spread))
    needed = start > threshold  # the SFT policy needs that length itself
    if needed or not penalty.next > 0.0 or not run.allows(penalty):
        return Finding(seen, run.scaled("response_length", 1.5))
    return Finding(seen, penalty)


def _length_drifted(run: Run, threshold: float) -> Finding | None:
    length, start = run.curves.last("response/length"), run.curves.start("response/length")
    if not (length > threshold * start or length < start / threshold):
        return None
    seen = f"Responses went from {number(start)} to {number(length)} tokens"
    return Finding(seen, stronger_penalty(run, 1.5))


def _spread_lost(run: Run, threshold: float) -> Finding | None:
    c, key = run.config, "objective/scores_std"
    spread, start = run.curves.last(key), run.curves.start_above_zero(key)
    if c.batch_size > 1 and run.curves.highest(key) == 0.0:  # of one response it is 0 by definition
        return Finding("The reward gives every response the same score")
    if not spread < threshold * start:
        return None
    # the first iteration after the last that kept it: batches of a sparse reward may have none early on
    kept = np.flatnonzero(run.curves.values(key) >= threshold * start)
    episodes = (c.critic_warmup_iterations + int(kept[-1]) + 2) * c.batch_size
    seen = f"The scores' standard deviation fell from {number(start)} to {number(spread)}"
    change = Change("total_episodes", c.total_episodes, episodes)
    return Finding(seen, change if episodes < c.total_episodes else None)


def _reward_clipped(run: Run, threshold: float) -> Finding | None:
    c = run.config
    if c.reward_clip is None or c.reward_normalisation != "none":
        return None
    low, middle, high = (run.curves.last(f"objective/scores_p{q}") * c.reward_scale for q in ("05", "50", "95"))
    if not abs(middle) >= threshold * c.reward_clip:
        return None
    seen = f"The median score is {number(middle)}, and ppo.reward_clip={c.reward_clip:g} cuts it"
    widest = float(np.nanmax(np.abs([low, middle, high])))  # the tails may not have been measured, the median was
    return Finding(seen, Change("reward_clip", c.reward_clip, rounded(1.5 * widest)))


FIRST_RULES = (
    Rule(
        name="rollout_mismatch",
        stage=Stage.BEFORE,
        looks_at=("policy/rollout_logprob_gap", "ppo.dtype"),
        threshold=1e-3,
        source="a thousand times float32's rounding (measured: 4e-7 on the demo)",
        meaning="decoding and training disagree on the same tokens, as by a fault in masks or positions; KL and ratios "
        "cannot be trusted. If the other engine shows it too, the model's code is at fault",
        check=_mismatch_full,
        iterations=1,
    ),
    Rule(
        name="rollout_mismatch_half_precision",
        stage=Stage.BEFORE,
        looks_at=("policy/rollout_logprob_gap", "ppo.dtype"),
        threshold=0.05,
        source="bfloat16's rounding: at most 0.03 a token (measured with TRL 1.12), 0.011 on average between two "
        "engines (vllm-project/vime, issue 64)",
        meaning="the tokens come from another distribution than the one that is trained",
        check=_mismatch_half,
        iterations=1,
    ),
)

REWARD_RULES = (
    Rule(
        name="truncated",
        stage=Stage.REWARD,
        looks_at=("response/truncated_fraction",),
        threshold=0.5,
        source="beyond it the reward sees an unfinished text more often than not",
        meaning="the reward judges texts without an end",
        check=_truncated,
    ),
    Rule(
        name="length_drifted",
        stage=Stage.REWARD,
        looks_at=("response/length",),
        threshold=2.0,
        source="measured on the demo: 0.6 to 0.8 of the start over five seeds that win, 0.4 where the penalty is weak",
        meaning="the reward may pay for length (Singhal et al. 2023, arXiv:2310.03716); read samples",
        check=_length_drifted,
    ),
    Rule(
        name="spread_lost",
        stage=Stage.REWARD,
        looks_at=("objective/scores_std",),
        threshold=0.1,
        source=f"{TUNING_GUIDE}: track the reward's distribution; the demo keeps 0.55 to 1 of it, 0.4 without KL",
        meaning="the reward no longer tells responses apart: there is nothing left to learn from it",
        check=_spread_lost,
    ),
    Rule(
        name="reward_clipped",
        stage=Stage.REWARD,
        looks_at=("objective/scores_p50", "ppo.reward_clip"),
        threshold=1.0,
        source="the setting: beyond it half of the responses get one and the same score",
        meaning="the better half of the responses cannot be told apart",
        check=_reward_clipped,
    ),
)
