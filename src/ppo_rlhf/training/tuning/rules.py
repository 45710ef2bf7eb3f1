"""The tuning rules as one table: the metrics a rule reads, when it fires, what that means, and the setting to change.

Rules stand in the order of their advice. docs/tuning.md gives the source of each threshold. A comparison with an
unmeasured level (NaN) is False, so no rule fires on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ppo_rlhf.training.tuning import changes
from ppo_rlhf.training.tuning.changes import MOVED, USUAL_KL_COEF, Change, clamped, rounded
from ppo_rlhf.training.tuning.curves import Run

FLAT = 0.25
"""Standard deviations of the score: two standard errors of 64 responses."""
TINY_UPDATE = 1e-4
"""policy/approxkl_avg, nats per token. The demo has 2e-3 where it learns, 2e-7 at a hundredth of its rate."""

KL, KL_COEF, ENTROPY = "objective/kl", "objective/kl_coef", "objective/entropy"
SCORES, SPREAD, REWARD = "objective/scores", "objective/scores_std", "eval/reward"
UPDATE, CLIPPED, NORM = "policy/approxkl_avg", "policy/clipfrac_avg", "policy/grad_norm"
VALUE_LOSS, EXPLAINED, VALUES_CLIPPED = "loss/value_avg", "val/explained_variance", "val/clipfrac_avg"
LENGTH, TRUNCATED = "response/length", "response/truncated_fraction"
SKIPPED, STEPS = "optimiser/skipped_steps", "optimiser/steps"
DISTINCT, JUDGED = "eval/distinct_2", ("eval/judge_score", "eval/judge_score_sft")


class Stage(Enum):
    """The order of tuning: a later stage cannot repair an earlier one."""

    BEFORE = "before tuning"
    KL = "KL"
    RATES = "learning rates and batch sizes"
    EPOCHS = "epochs and clipping"
    REWARD = "reward and responses"


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        name: The rule's name.
        stage: When its advice comes.
        reads: Metric keys, and settings as ppo.<name>.
        iterations: Fewest iterations to judge by.
        fires: Whether the run calls for the change.
        seen: The numbers that it fired on, the beginning of a sentence: {last:KEY} is a level, {c.NAME} a setting.
        meaning: What they usually mean, the rest of that sentence.
        change: The change to make; None if no setting helps.
    """

    name: str
    stage: Stage
    reads: tuple[str, ...]
    iterations: int
    fires: Callable[[Run], bool]
    seen: str
    meaning: str
    change: Callable[[Run], Change | None]

    def what_was_seen(self, run: Run) -> str:
        """Return the beginning of the sentence."""
        levels = {name: _Level(getattr(run, name)) for name in ("last", "start", "highest", "lowest", "median", "end")}
        numbers = {"kl": run.kl, "gain": run.gain, "gap": run.rollout_gap}
        return self.seen.format(c=run.config, **{name: _number(value) for name, value in numbers.items()}, **levels)


@dataclass(frozen=True)
class _Level:
    """Lets a text name a level: "{last:objective/kl}" is `last("objective/kl")` with three digits."""

    of: Callable[[str], float]

    def __format__(self, key: str) -> str:
        return _number(self.of(key))


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# Conditions of more than a line.


def _rollout_mismatch(r: Run) -> bool:
    return r.rollout_gap > (0.05 if r.config.dtype in ("bfloat16", "float16") else 1e-3)


def _updates_are_tiny(r: Run) -> bool:
    """With one step an iteration approxkl is 0 by definition: then only a weak penalty tells."""
    if r.config.num_ppo_epochs * r.config.num_mini_batches == 1:
        return r.kl < MOVED and r.config.kl_coef <= 4 * USUAL_KL_COEF * r.spread
    return r.highest(UPDATE) < TINY_UPDATE


def _penalty_too_strong(r: Run) -> bool:
    weak = r.adaptive or r.config.kl_coef == 0.0 or _updates_are_tiny(r)
    return not weak and r.kl < MOVED and r.gain < FLAT


def _reward_hacked(r: Run) -> bool:
    """The judge's score lost a quarter of its rise, or is below SFT's for certain, while the reward rose."""
    certainly_worse = r.end("eval/win_rate_high") < 0.5 and r.end(REWARD) > r.end("eval/reward_sft")
    return r.judge_lost > 0.25 or certainly_worse


def _steps_skipped(r: Run) -> bool:
    """With float16 the first half is left out: there the loss scale is found by skipped steps."""
    skipped, steps = r.values(SKIPPED), r.values(STEPS)
    if r.config.dtype != "float16":
        return r.end(SKIPPED) > 0
    half = len(skipped) // 2
    late, taken = r.end(SKIPPED) - skipped.iloc[half], r.end(STEPS) - steps.iloc[half]
    return bool(late > 0.01 * (late + taken))


def _value_loss_grows(r: Run) -> bool:
    return r.last(VALUE_LOSS) > 3.0 * r.lowest(VALUE_LOSS) and r.last(EXPLAINED) < 0.05


# fmt: off
RULES: tuple[Rule, ...] = (
    # Before tuning: the numbers themselves are wrong.
    Rule("rollout_mismatch", Stage.BEFORE, ("policy/rollout_logprob_gap", "ppo.dtype"), 1,
         _rollout_mismatch,
         "policy/rollout_logprob_gap is {gap} nats per token in {c.dtype}",
         "sampling and training disagree on the same tokens, as after an error in masks or positions, so KL and ratios "
         "are wrong. If engine hf shows the gap too, the model's code is at fault",
         lambda r: changes.set_to(r, "rollout_engine", "hf")),
    # KL.
    Rule("kl_negative", Stage.KL, (KL, "ppo.top_k", "ppo.top_p", "ppo.min_response_length"), 20,
         lambda r: r.highest(KL) < 0.0,
         "KL is {kl} nats per response, and was below 0 throughout",
         "responses are not drawn from the distribution that is trained, and the policy is paid for that",
         changes.without_filter),
    Rule("kl_alarm", Stage.KL, (KL, "ppo.kl_alarm"), 3,
         lambda r: r.kl > r.config.kl_alarm,
         "KL is {kl} nats per response, above {c.kl_alarm:g}",
         "the policy has left the SFT model's language, most likely to exploit the reward",
         changes.lower_kl),
    Rule("kl_warning", Stage.KL, (KL, "ppo.kl_warning"), 3,
         lambda r: r.config.kl_warning < r.kl <= r.config.kl_alarm,
         "KL is {kl} nats per response, above {c.kl_warning:g}",
         "the policy is leaving the SFT model's language; read the samples",
         changes.lower_kl),
    Rule("kl_collapsed", Stage.KL, (KL,), 20,
         lambda r: r.highest(KL) >= MOVED and r.kl < 0.1 * r.highest(KL),
         "KL fell from {highest:objective/kl} to {kl} nats per response",
         "the policy is back where it started: the penalty outweighs the score, or without a penalty its updates undo "
         "each other",
         changes.weaker_penalty),
    Rule("kl_penalty_too_strong", Stage.KL, (KL, REWARD, SCORES, UPDATE), 20,
         _penalty_too_strong,
         "KL is {kl} nats per response, and the score changed by {gain} standard deviations",
         "updates are taken, and the penalty undoes them",
         lambda r: changes.scaled(r, "kl_coef", clamped(r.kl / 2.0, 0.1, 0.5))),
    Rule("kl_off_target", Stage.KL, (KL, KL_COEF, "ppo.kl_target"), 20,
         lambda r: r.adaptive and abs(r.kl / r.config.kl_target - 1.0) > 0.25 and r.kl <= r.config.kl_warning,
         "KL is {kl} nats per response, more than 25% off the target of {c.kl_target:g}; the controller took the "
         "coefficient from {c.kl_coef:g} to {last:objective/kl_coef}",
         "the controller began too far off or reacts too late, or the size of the updates keeps KL from its target",
         changes.help_controller),
    Rule("reward_hacked", Stage.KL, (*JUDGED, REWARD, "eval/reward_sft", "eval/win_rate_high"), 10,
         _reward_hacked,
         "eval/judge_score is {end:eval/judge_score}, SFT's {end:eval/judge_score_sft}, while eval/reward rose to "
         "{end:eval/reward}",
         "the policy exploits its reward; more training makes it worse",
         lambda r: changes.stronger_penalty(r, 2.0)),
    Rule("diversity_lost", Stage.KL, (DISTINCT, "eval/distinct_2_sft"), 10,
         lambda r: r.end(DISTINCT) < 0.5 * r.end("eval/distinct_2_sft"),
         "eval/distinct_2 is {end:eval/distinct_2}, SFT's {end:eval/distinct_2_sft}",
         "stock phrases are taking over",
         lambda r: changes.stronger_penalty(r, 1.5)),
    Rule("entropy_collapsed", Stage.KL, (ENTROPY,), 10,
         lambda r: r.last(ENTROPY) < r.start(ENTROPY) / 3,
         "objective/entropy fell from {start:objective/entropy} to {last:objective/entropy} nats per token",
         "the policy has settled on few answers and no longer explores",
         changes.more_entropy),
    # Learning rates and batch sizes.
    Rule("steps_skipped", Stage.RATES, (SKIPPED, STEPS, "ppo.dtype"), 1,
         _steps_skipped,
         "{end:optimiser/skipped_steps} optimiser steps were skipped for a non-finite gradient, and "
         "{end:optimiser/steps} were taken",
         "steps are too large, or the range of float16 is too small",
         lambda r: changes.set_to(r, "dtype", "bfloat16") if r.config.dtype == "float16"
         else changes.scaled(r, "learning_rate", 0.5)),
    Rule("score_fell", Stage.RATES, (REWARD, SCORES), 10,
         lambda r: r.gain < -0.5,
         "The score changed by {gain} standard deviations from SFT's",
         "updates destroy more than they teach",
         lambda r: changes.scaled(r, "learning_rate", 0.5)),
    Rule("update_too_large", Stage.RATES, (UPDATE,), 10,
         lambda r: r.highest(UPDATE) > 0.1,
         "policy/approxkl_avg reached {highest:policy/approxkl_avg} nats per token",
         "an iteration moves the policy far beyond its data",
         lambda r: changes.rate_for_update(r, changes.CALM_UPDATE, 0.1, 0.5)),
    Rule("update_too_small", Stage.RATES, (REWARD, SCORES, UPDATE), 20,
         lambda r: r.gain < FLAT and _updates_are_tiny(r),
         "The score changed by {gain} standard deviations; policy/approxkl_avg never exceeded "
         "{highest:policy/approxkl_avg} nats per token",
         "training is stable, and too slow to see",
         lambda r: changes.rate_for_update(r, changes.LEARNING_UPDATE, 2.0, 10.0)),
    Rule("drift_without_gain", Stage.RATES, (KL, REWARD, SCORES), 20,
         lambda r: r.kl > MOVED and abs(r.gain) < 0.1 * math.sqrt(2.0 * r.kl),
         "KL is {kl} nats per response, and the score changed by {gain} standard deviations",
         "updates follow the noise of the batch; larger batches have less",
         lambda r: changes.scaled(r, "gradient_accumulation_steps", 2)),
    Rule("value_loss_grows", Stage.RATES, (VALUE_LOSS, EXPLAINED), 20,
         _value_loss_grows,
         "loss/value_avg grew from {lowest:loss/value_avg} to {last:loss/value_avg}, val/explained_variance is "
         "{last:val/explained_variance}",
         "the critic diverges, and the advantages with it",
         lambda r: changes.critic_rate(r, 0.5)),
    Rule("critic_is_poor", Stage.RATES, (EXPLAINED,), 30,
         lambda r: r.last(EXPLAINED) < 0.05 and not _value_loss_grows(r),
         "val/explained_variance is {last:val/explained_variance}",
         "the critic predicts no more than a constant would, so the advantages are noisy",
         lambda r: changes.critic_rate(r, 2.0)),
    Rule("gradient_mostly_clipped", Stage.RATES, (NORM, "ppo.max_grad_norm"), 10,
         lambda r: r.median(NORM) > 2.0 * r.config.max_grad_norm,
         "The median of policy/grad_norm is {median:policy/grad_norm}, and ppo.max_grad_norm={c.max_grad_norm:g}",
         "most steps are cut to one length, not only the outliers",
         lambda r: changes.set_to(r, "max_grad_norm", rounded(r.median(NORM)))),
    # Epochs and clipping.
    Rule("much_clipped", Stage.EPOCHS, (CLIPPED,), 10,
         lambda r: r.highest(CLIPPED) > 0.3,
         "policy/clipfrac_avg reached {highest:policy/clipfrac_avg}",
         "later epochs see data that the policy has left behind",
         lambda r: changes.scaled(r, "num_ppo_epochs" if r.config.num_ppo_epochs > 1 else "learning_rate", 0.5)),
    Rule("values_much_clipped", Stage.EPOCHS, (VALUES_CLIPPED,), 10,
         lambda r: r.highest(VALUES_CLIPPED) > 0.6,
         "val/clipfrac_avg reached {highest:val/clipfrac_avg}",
         "the clip range is small for the size of the returns and holds the critic back",
         lambda r: changes.scaled(r, "cliprange_value", max(2.0, r.spread))),
    # Reward and responses.
    Rule("truncated", Stage.REWARD, (TRUNCATED, "ppo.stop_token"), 10,
         lambda r: r.config.stop_token != "none" and r.last(TRUNCATED) > 0.5,
         "A share of {last:response/truncated_fraction} of the responses is cut off "
         "({start:response/truncated_fraction} at the start)",
         "the reward judges texts without an end",
         changes.less_truncation),
    Rule("length_drifted", Stage.REWARD, (LENGTH,), 10,
         lambda r: r.last(LENGTH) > 2.0 * r.start(LENGTH) or r.last(LENGTH) < r.start(LENGTH) / 2.0,
         "Responses went from {start:response/length} to {last:response/length} tokens",
         "the reward may pay for length (Singhal et al. 2023, arXiv:2310.03716); read samples",
         lambda r: changes.stronger_penalty(r, 1.5)),
    Rule("spread_lost", Stage.REWARD, (SPREAD,), 10,
         lambda r: r.config.batch_size > 1 and r.last(SPREAD) <= 0.1 * r.deviation,
         "The scores' standard deviation fell to {last:objective/scores_std} (highest: {highest:objective/scores_std})",
         "the reward no longer tells responses apart, so there is nothing left to learn from it; stop here",
         lambda r: None),
)
"""All rules, in the order of their advice."""
# fmt: on
