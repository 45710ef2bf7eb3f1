"""The tuning rules as one table: the metrics a rule reads, when it fires, what that means, and the setting to change.

Rules stand in the order of their advice. docs/tuning.md gives the source of each threshold. A comparison with an
unmeasured level (NaN) is False, so no rule fires on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ppo_rlhf.advice.curves import Run
from ppo_rlhf.ppo import kl_rules
from ppo_rlhf.ppo.kl_rules import KL_RULES, MOVED, USUAL_KL_COEF, Change, allowed, scaled, set_to

FLAT = 0.25
"""Standard deviations of the score: two standard errors of 64 responses."""
USUAL_EOS_PENALTY = 1.0
"""For scores of standard deviation 1; TRL's examples have 1, too."""
LEARNING_UPDATE, CALM_UPDATE = 1e-3, 0.02
"""policy/approxkl_avg to aim at, nats per token. It grows with the square of the learning rate."""
UNDONE = 2.0
"""Times the KL of a policy that has moved. With conf/demo the updates walk 1.0 times the KL at the end, and 66 times
that KL under sixty times the penalty."""

KL, KL_COEF, ENTROPY = "objective/kl", "objective/kl_coef", "objective/entropy"
SCORES, SPREAD, REWARD = "objective/scores", "objective/scores_std", "eval/reward"
UPDATE, CLIPPED, VALUES_CLIPPED = "policy/approxkl_avg", "policy/clipfrac_avg", "val/clipfrac_avg"
LENGTH, TRUNCATED = "response/length", "response/truncated_fraction"
SKIPPED, STEPS = "optimiser/skipped_steps", "optimiser/steps"
DISTINCT, SINCE_BEST = "eval/distinct_2", ("eval/since_best_score", "eval/since_best_p", "eval/since_best_reward")
SUCCESS, JUDGED_SUCCESS = "succeeded", "judged_success"
"""Properties of a run that refute a rule."""


class Stage(Enum):
    """The order of tuning: a later stage cannot repair an earlier one."""

    BEFORE = "before tuning"
    KL = "KL"
    RATES = "learning rates and batch sizes"
    EPOCHS = "epochs and clipping"
    REWARD = "reward and responses"


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    name: str
    stage: Stage  # when its advice comes
    reads: tuple[str, ...]  # metric keys, and settings as ppo.<name>
    iterations: int  # fewest to judge by
    fires: Callable[[Run], bool]  # whether the run calls for the change
    seen: str  # the numbers that it fired on, the beginning of a sentence on the run s; {s:last:KEY} is a level
    meaning: str  # what they usually mean, the rest of that sentence
    change: Callable[[Run], Change | None]  # None if no setting helps
    refuted_by: str = ""  # property of a run that shows that what the rule fears did no harm; empty if none can


# Conditions of more than a line.


def _stands_still(r: Run) -> bool:
    return r.kl < MOVED and r.gain < FLAT


def _updates_are_undone(r: Run) -> bool:
    """Whether a policy that stands still took updates that lead elsewhere; else they are too small to lead anywhere.

    With one step an iteration their size is unknown: then only a penalty that is strong for the scores tells.
    """
    if math.isnan(r.walked):
        spread = r.config.reward_scale * (r.deviation if r.config.reward_normalisation == "none" else 1.0)
        return r.config.kl_coef > 4 * USUAL_KL_COEF * spread
    return r.walked > UNDONE * MOVED


def _penalty_too_strong(r: Run) -> bool:
    return not r.adaptive and r.config.kl_coef > 0.0 and _stands_still(r) and _updates_are_undone(r)


def _update_too_small(r: Run) -> bool:
    return not math.isnan(r.last(UPDATE)) and _stands_still(r) and not _updates_are_undone(r)


def _steps_skipped(r: Run) -> bool:
    """The first half is left out: there the loss scale is found by skipped steps."""
    skipped, steps = r.values(SKIPPED), r.values(STEPS)
    half = len(skipped) // 2
    late, taken = r.end(SKIPPED) - skipped.iloc[half], r.end(STEPS) - steps.iloc[half]
    return r.config.dtype == "float16" and bool(late > 0.01 * (late + taken))


def _kl_rule(name: str, reads: tuple[str, ...], iterations: int) -> Rule:
    """Return the row of a rule that the alarms while a run trains have, too."""
    rule = KL_RULES[name]
    return Rule(f"kl_{name}", Stage.KL, reads, iterations, rule.holds, rule.seen, rule.meaning, rule.change)


# Changes of more than a factor.


def _rate_for_update(r: Run, now: float, size: float, least: float, most: float) -> Change:
    """Bring policy/approxkl_avg from its value now to a size: it grows with the square of the learning rate."""
    return scaled(r, "learning_rate", min(most, max(least, math.sqrt(size / now) if now > 0.0 else least)))


def _less_truncation(r: Run) -> Change:
    """Penalise truncated responses, unless SFT's were as long already or a penalty is excluded."""
    now = r.config.missing_eos_penalty
    penalty = scaled(r, "missing_eos_penalty", 2.0) if now else set_to(r, "missing_eos_penalty", USUAL_EOS_PENALTY)
    if r.start(TRUNCATED) > 0.5 or not allowed(penalty, r.config):
        return scaled(r, "response_length" if r.config.turn_length is None else "turn_length", 1.5)
    return penalty


# fmt: off
RULES: tuple[Rule, ...] = (
    # Before tuning: the numbers themselves are wrong.
    Rule("rollout_mismatch", Stage.BEFORE, ("policy/rollout_logprob_gap", "ppo.dtype"), 1,
         lambda r: r.config.rollout_engine != "vllm"  # which computes in a type of its own
         and r.rollout_gap > (0.05 if r.config.dtype in ("bfloat16", "float16") else 1e-3),
         "policy/rollout_logprob_gap is {s.rollout_gap:.3g} nats per token in {s.config.dtype}",
         "sampling and training disagree on the same tokens, as after an error in masks or positions, so KL and ratios "
         "are wrong. If engine hf shows the gap too, the model's code is at fault",
         lambda r: set_to(r, "rollout_engine", "hf")),
    # KL.
    _kl_rule("negative", (KL, "ppo.top_k", "ppo.top_p", "ppo.min_response_length"), 20),
    _kl_rule("alarm", (KL, "ppo.kl_alarm"), 3),
    _kl_rule("warning", (KL, "ppo.kl_warning"), 3),
    Rule("kl_penalty_too_strong", Stage.KL, (KL, REWARD, SCORES, UPDATE, LENGTH), 20,
         _penalty_too_strong,
         "KL is {s.kl:.3g} nats per response, all updates come to {s.walked:.3g}, and the score changed by "
         "{s.gain:.3g} standard deviations",
         "updates are taken, and the penalty undoes them",
         lambda r: scaled(r, "kl_coef", min(0.5, max(0.1, r.kl / 2.0)))),
    Rule("kl_off_target", Stage.KL, (KL, KL_COEF, "ppo.kl_target"), 20,
         lambda r: r.adaptive and abs(r.kl / r.config.kl_target - 1.0) > 0.25 and r.kl <= r.config.kl_warning,
         "KL is {s.kl:.3g} nats per response, more than 25% off the target of {s.config.kl_target:g}; the controller "
         "took the coefficient from {s.config.kl_coef:g} to {s:last:objective/kl_coef}",
         "the controller began too far off or reacts too late, or the size of the updates keeps KL from its target",
         kl_rules.help_controller, JUDGED_SUCCESS),
    Rule("reward_hacked", Stage.KL, SINCE_BEST, 10,
         lambda r: r.fell and r.end("eval/since_best_reward") >= 0.0,
         "Since the best evaluation, SFT's included, the judge's score changed by {s:end:eval/since_best_score} (by "
         "chance with probability {s:end:eval/since_best_p}), the reward by {s:end:eval/since_best_reward}",
         "the policy exploits its reward; more training makes it worse",
         lambda r: kl_rules.stronger_penalty(r, 2.0)),
    Rule("diversity_lost", Stage.KL, (DISTINCT, "eval/distinct_2_sft"), 10,
         lambda r: r.end(DISTINCT) < 0.5 * r.end("eval/distinct_2_sft"),
         "eval/distinct_2 is {s:end:eval/distinct_2}, SFT's {s:end:eval/distinct_2_sft}",
         "stock phrases are taking over",
         lambda r: kl_rules.stronger_penalty(r, 1.5), JUDGED_SUCCESS),
    Rule("entropy_collapsed", Stage.KL, (ENTROPY, KL), 10,
         lambda r: r.kl >= MOVED and r.last(ENTROPY) < r.start(ENTROPY) / 3,
         "objective/entropy fell from {s:start:objective/entropy} to {s:last:objective/entropy} nats per token",
         "the policy has settled on few answers and no longer explores",
         lambda r: kl_rules.stronger_penalty(r, 1.5), JUDGED_SUCCESS),
    # Learning rates and batch sizes.
    Rule("steps_skipped", Stage.RATES, (SKIPPED, STEPS, "ppo.dtype"), 1,
         _steps_skipped,
         "{s:end:optimiser/skipped_steps} optimiser steps were skipped for a non-finite gradient, and "
         "{s:end:optimiser/steps} were taken",
         "the range of float16 is too small for the gradients",
         lambda r: set_to(r, "dtype", "bfloat16")),
    Rule("update_too_large", Stage.RATES, (UPDATE,), 10,
         lambda r: r.typical(UPDATE) > 0.1,
         "policy/approxkl_avg is {s:typical:policy/approxkl_avg} nats per token in the median, up to "
         "{s:highest:policy/approxkl_avg}",
         "an iteration moves the policy far beyond its data",
         lambda r: _rate_for_update(r, r.highest(UPDATE), CALM_UPDATE, 0.1, 0.5), SUCCESS),
    Rule("update_too_small", Stage.RATES, (KL, REWARD, SCORES, UPDATE, LENGTH), 20,
         _update_too_small,
         "KL is {s.kl:.3g} nats per response, all updates come to {s.walked:.3g} (median of policy/approxkl_avg: "
         "{s:typical:policy/approxkl_avg} nats per token), and the score changed by {s.gain:.3g} standard deviations",
         "training is stable, and too slow to see",
         lambda r: _rate_for_update(r, r.typical(UPDATE), LEARNING_UPDATE, 2.0, 10.0)),
    # Epochs and clipping.
    Rule("much_clipped", Stage.EPOCHS, (CLIPPED, "ppo.num_ppo_epochs"), 10,
         lambda r: r.config.num_ppo_epochs > 1 and r.typical(CLIPPED) > 0.3,
         "policy/clipfrac_avg is {s:typical:policy/clipfrac_avg} in the median",
         "later epochs see data that the policy has left behind",
         lambda r: scaled(r, "num_ppo_epochs", 0.5), SUCCESS),
    Rule("values_much_clipped", Stage.EPOCHS, (VALUES_CLIPPED,), 10,
         lambda r: r.highest(VALUES_CLIPPED) > 0.6,
         "val/clipfrac_avg reached {s:highest:val/clipfrac_avg}",
         "the clip range is small for the size of the returns and holds the critic back",
         lambda r: scaled(r, "cliprange_value", 2.0), SUCCESS),
    # Reward and responses.
    Rule("truncated", Stage.REWARD, (TRUNCATED, "ppo.stop_token"), 10,
         lambda r: r.config.stop_token != "none" and r.last(TRUNCATED) > 0.5,
         "{s.cut_off}",
         "the reward judges texts without an end",
         _less_truncation),
    Rule("length_drifted", Stage.REWARD, (LENGTH,), 10,
         lambda r: r.last(LENGTH) > 2.0 * r.start(LENGTH) or r.last(LENGTH) < r.start(LENGTH) / 2.0,
         "Responses went from {s:start:response/length} to {s:last:response/length} tokens",
         "the reward may pay for length (Singhal et al. 2023, arXiv:2310.03716); read samples",
         lambda r: kl_rules.stronger_penalty(r, 1.5), JUDGED_SUCCESS),
    Rule("spread_lost", Stage.REWARD, (SPREAD,), 10,
         lambda r: r.config.batch_size > 1 and r.last(SPREAD) <= 0.1 * r.deviation,
         "The scores' standard deviation fell to {s:last:objective/scores_std} (from {s:highest:objective/scores_std})",
         "the reward no longer tells responses apart, so there is nothing left to learn from it; stop here",
         lambda r: None),
)
"""All rules, in the order of their advice."""
# fmt: on
