"""The tuning rules as one table: the metrics a rule reads, when it fires, what that means, and the setting to change.

Rules stand in the order of their advice. docs/tuning.md gives the source of each threshold. A comparison with an
unmeasured level (NaN) is False, so no rule fires on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ppo_rlhf.config.advice import HORIZONS_NEEDED
from ppo_rlhf.training.tuning import changes
from ppo_rlhf.training.tuning.changes import MOVED, USUAL_KL_COEF, Change, clamped, rounded
from ppo_rlhf.training.tuning.curves import Run

FLAT = 0.25
"""Standard deviations of the score: two standard errors of 64 responses."""
TINY_UPDATE = 1e-4
"""policy/approxkl_avg, nats per token. The demo has 2e-3 where it learns, 2e-7 at a hundredth of its rate."""

KL, KL_COEF = "objective/kl", "objective/kl_coef"
SCORES, SPREAD, REWARD = "objective/scores", "objective/scores_std", "eval/reward"
UPDATE, CLIPPED, NORM, GAP = (
    f"policy/{name}" for name in ("approxkl_avg", "clipfrac_avg", "grad_norm", "rollout_logprob_gap")
)
VALUE_LOSS, EXPLAINED, VALUES_CLIPPED = "loss/value_avg", "val/explained_variance", "val/clipfrac_avg"
ENTROPY, LENGTH, TRUNCATED = "objective/entropy", "response/length", "response/truncated_fraction"
SKIPPED, STEPS = "optimiser/skipped_steps", "optimiser/steps"
DISTINCT = ("eval/distinct_2", "eval/distinct_2_sft")
JUDGED = ("eval/judge_score", "eval/judge_score_sft", "eval/reward", "eval/reward_sft", "eval/kl")


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
        iterations: Fewest iterations to judge by; 0 for a rule on settings alone.
        fires: Whether the run calls for the change.
        seen: The numbers that it fired on, the beginning of a sentence.
        meaning: What they usually mean, the rest of that sentence.
        change: The change to make; None if no setting helps.
    """

    name: str
    stage: Stage
    reads: tuple[str, ...]
    iterations: int
    fires: Callable[[Run], bool]
    seen: str | Callable[[Run], str]
    meaning: str
    change: Callable[[Run], Change | None]

    def what_was_seen(self, run: Run) -> str:
        """Return the beginning of the sentence. In a text, {last:KEY} is a level, {c.NAME} a setting."""
        if callable(self.seen):
            return self.seen(run)
        levels = {name: _Level(getattr(run, name)) for name in ("last", "start", "highest", "lowest", "median")}
        return self.seen.format(c=run.config, kl=number(run.kl), gain=number(run.gain), window=run.window, **levels)


@dataclass(frozen=True)
class _Level:
    """Lets a text name a level: "{last:objective/kl}" is `last("objective/kl")` with three digits."""

    of: Callable[[str], float]

    def __format__(self, key: str) -> str:
        return number(self.of(key))


def number(value: float) -> str:
    """Return a number of three digits for a sentence."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# Conditions of more than a line.


def _gap(r: Run) -> float:
    """Return the gap of the first iteration or of the last window, whichever is larger."""
    return float(np.fmax(r.values(GAP)[0], r.last(GAP)))


def _is_16_bit(r: Run) -> bool:
    return r.config.dtype in ("bfloat16", "float16")


def _gap_seen(r: Run) -> str:
    return f"{GAP} is {number(_gap(r))} nats per token in {r.config.dtype}"


def _kl_above(limit: str) -> Callable[[Run], str]:
    def seen(r: Run) -> str:
        level = getattr(r.config, limit)
        aim = (
            f", and the controller aims at {r.config.kl_target:g}" if r.adaptive and r.config.kl_target < level else ""
        )
        return f"KL is {number(r.kl)} nats per response, above {level:g}{aim}"

    return seen


def _collapsed(r: Run) -> bool:
    return r.highest(KL) >= MOVED and r.kl < 0.1 * r.highest(KL)


def _updates_are_tiny(r: Run) -> bool:
    """With one step an iteration approxkl is 0 by definition: then only a weak penalty tells."""
    if r.config.num_ppo_epochs * r.config.num_mini_batches == 1:
        return r.kl < MOVED and r.config.kl_coef <= 4 * USUAL_KL_COEF * r.spread
    return r.highest(UPDATE) < TINY_UPDATE


def _penalty_too_strong(r: Run) -> bool:
    weak = r.adaptive or r.config.kl_coef == 0.0 or _updates_are_tiny(r)
    return not weak and r.kl < MOVED and r.gain < FLAT


def _horizon_too_long(r: Run) -> bool:
    return r.adaptive and r.config.total_episodes < HORIZONS_NEEDED * r.config.kl_horizon


def _saturated(r: Run) -> bool:
    """Return whether the coefficient moved tenfold and KL is still a quarter off its target."""
    now, start, target = r.last(KL_COEF), r.config.kl_coef, r.config.kl_target
    return r.adaptive and ((r.kl > 1.25 * target and now > 10 * start) or (r.kl < 0.75 * target and now < start / 10))


def _off_target(r: Run) -> bool:
    off = abs(r.kl / r.config.kl_target - 1.0) > 0.25 and r.kl <= r.config.kl_warning
    return r.adaptive and off and not _saturated(r)


def _judge(r: Run) -> float:
    scores = [row[0] for row in r.evaluations(*JUDGED)[-2:]]
    return sum(scores) / len(scores)


def _reward_hacked(r: Run) -> bool:
    """The judge's score lost a quarter of its rise, or is below SFT's for certain, while the reward rose."""
    rows, win_rates = r.evaluations(*JUDGED), r.evaluations("eval/win_rate_high")
    if len(rows) < 3:
        return False
    best, (_, judge_sft, reward, reward_sft, _) = max(rows), rows[-1]
    fell = best[0] - _judge(r) > 0.25 * (best[0] - judge_sft) > 0.0 and reward >= best[2]
    return fell or (bool(win_rates) and win_rates[-1][0] < 0.5 and reward > reward_sft)


def _hacked_seen(r: Run) -> str:
    rows = r.evaluations(*JUDGED)
    best, sft, reward = (number(value) for value in (max(rows)[0], rows[-1][1], rows[-1][2]))
    return f"eval/judge_score is {number(_judge(r))} (best {best}, SFT's {sft}), while eval/reward rose to {reward}"


def _towards_best_kl(r: Run) -> Change:
    rows = r.evaluations(*JUDGED)
    at_best = max(rows)[4]
    return changes.stronger_penalty(r, clamped(rows[-1][4] / at_best, 1.5, 4.0) if at_best > 0.0 else 4.0)


def _less_diverse(r: Run) -> bool:
    rows = r.evaluations(*DISTINCT)
    return bool(rows) and rows[-1][0] < 0.5 * rows[-1][1]


def _diversity_seen(r: Run) -> str:
    ours, sft = r.evaluations(*DISTINCT)[-1]
    return f"eval/distinct_2 is {number(ours)}, SFT's {number(sft)}"


def _steps_skipped(r: Run) -> bool:
    """With float16 the first half is left out: there the loss scale is found by skipped steps."""
    skipped, steps = r.values(SKIPPED), r.values(STEPS)
    first = len(skipped) // 2 if r.config.dtype == "float16" else 0
    late, taken = skipped[-1] - skipped[first], steps[-1] - steps[first]
    return bool(skipped[-1] > 0 and (r.config.dtype != "float16" or late > 0.01 * (late + taken)))


def _skipped_seen(r: Run) -> str:
    skipped, steps = r.values(SKIPPED)[-1], r.values(STEPS)[-1]
    return f"{skipped:g} of {skipped + steps:g} optimiser steps were skipped for a non-finite gradient"


def _value_loss_grows(r: Run) -> bool:
    return r.last(VALUE_LOSS) > 3.0 * r.lowest(VALUE_LOSS) and r.last(EXPLAINED) < 0.05


def _value_weight(r: Run) -> float:
    """Return the gradient of a shared trunk from values over that from log-probabilities (whitened advantages)."""
    loss, c = r.last(VALUE_LOSS), r.config
    if c.value_model != "shared" or not c.whiten_advantages or not loss >= 0.0:
        return math.nan
    return c.vf_coef * math.sqrt(2.0 * loss)


def _one_score(r: Run) -> bool:
    return r.config.batch_size > 1 and r.highest(SPREAD) == 0.0


def _stop_where_spread_was_lost(r: Run) -> Change | None:
    c, kept = r.config, np.flatnonzero(r.values(SPREAD) >= 0.1 * r.start_above_zero(SPREAD))
    episodes = (c.critic_warmup_iterations + int(kept[-1]) + 2) * c.batch_size
    return None if _one_score(r) or episodes >= c.total_episodes else changes.set_to(r, "total_episodes", episodes)


def _reward_clipped(r: Run) -> bool:
    c, median = r.config, r.last("objective/scores_p50") * r.config.reward_scale
    return c.reward_clip is not None and c.reward_normalisation == "none" and abs(median) >= c.reward_clip


def _drifts(r: Run) -> bool:
    return r.last(LENGTH) > 2.0 * r.start(LENGTH) or r.last(LENGTH) < r.start(LENGTH) / 2.0


# fmt: off
RULES: tuple[Rule, ...] = (
    # Before tuning: the numbers themselves are wrong.
    Rule("rollout_mismatch", Stage.BEFORE, (GAP, "ppo.dtype"), 1,
         lambda r: not _is_16_bit(r) and _gap(r) > 1e-3,
         _gap_seen,
         "sampling and training disagree on the same tokens, as after an error in masks or positions, so KL and ratios "
         "are wrong. If engine hf shows the gap too, the model's code is at fault",
         lambda r: changes.set_to(r, "rollout_engine", "hf")),
    Rule("rollout_mismatch_half_precision", Stage.BEFORE, (GAP, "ppo.dtype"), 1,
         lambda r: _is_16_bit(r) and _gap(r) > 0.05,
         _gap_seen,
         "the tokens come from another distribution than the one that is trained",
         lambda r: changes.set_to(r, "importance_cap", 2.0) if r.config.importance_cap is None
         else changes.set_to(r, "rollout_engine", "hf")),
    # KL.
    Rule("kl_negative", Stage.KL, (KL, "ppo.top_k", "ppo.top_p", "ppo.min_response_length"), 20,
         lambda r: r.kl < -0.05 and r.kl < -3.0 * r.standard_error(KL),
         "KL is {kl} nats per response, below 0 by more than sampling noise",
         "responses are not drawn from the distribution that is trained, and the policy is paid for that",
         changes.without_filter),
    Rule("kl_alarm", Stage.KL, (KL, "ppo.kl_alarm"), 3,
         lambda r: r.kl > r.config.kl_alarm,
         _kl_above("kl_alarm"),
         "the policy has left the SFT model's language, most likely to exploit the reward",
         lambda r: changes.lower_kl(r, r.config.kl_alarm)),
    Rule("kl_warning", Stage.KL, (KL, "ppo.kl_warning"), 3,
         lambda r: r.config.kl_warning < r.kl <= r.config.kl_alarm,
         _kl_above("kl_warning"),
         "the policy is leaving the SFT model's language; read the samples",
         lambda r: changes.lower_kl(r, r.config.kl_warning)),
    Rule("kl_collapsed", Stage.KL, (KL,), 20,
         _collapsed,
         "KL fell from {highest:objective/kl} to {kl} nats per response",
         "the policy is back where it started: the penalty outweighs the score, or without a penalty its updates undo "
         "each other",
         changes.weaker_penalty),
    Rule("kl_penalty_too_strong", Stage.KL, (KL, REWARD, SCORES, UPDATE), 20,
         _penalty_too_strong,
         "KL is {kl} nats per response, and the score changed by {gain} standard deviations",
         "updates are taken, and the penalty undoes them",
         lambda r: changes.scaled(r, "kl_coef", clamped(r.kl / 2.0, 0.1, 0.5))),
    Rule("kl_horizon_too_long", Stage.KL, ("ppo.kl_controller", "ppo.total_episodes", "ppo.kl_horizon"), 0,
         _horizon_too_long,
         f"ppo.total_episodes={{c.total_episodes}} is less than {HORIZONS_NEEDED} x ppo.kl_horizon={{c.kl_horizon:g}}",
         "the controller cannot move the coefficient far within the run",
         changes.shorter_horizon),
    Rule("kl_coef_saturated", Stage.KL, (KL_COEF, KL, "ppo.kl_target"), 20,
         _saturated,
         "The controller took the coefficient from {c.kl_coef:g} to {last:objective/kl_coef}, and KL is {kl} nats per "
         "response, not {c.kl_target:g}",
         "the size of the updates keeps KL from its target, not the coefficient",
         lambda r: changes.scaled(r, "learning_rate", 0.5 if r.kl > r.config.kl_target else 2.0)),
    Rule("kl_off_target", Stage.KL, (KL, KL_COEF, "ppo.kl_target"), 20,
         _off_target,
         "KL is {kl} nats per response, more than 25% off the target of {c.kl_target:g}",
         "the controller began too far off, or reacts too late",
         lambda r: changes.shorter_horizon(r) if _horizon_too_long(r) else changes.help_controller(r)),
    Rule("reward_hacked", Stage.KL, (*JUDGED, "eval/win_rate_high"), 10,
         _reward_hacked,
         _hacked_seen,
         "the policy exploits its reward; more training makes it worse",
         _towards_best_kl),
    Rule("diversity_lost", Stage.KL, DISTINCT, 10,
         _less_diverse,
         _diversity_seen,
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
         _skipped_seen,
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
         changes.smaller_updates),
    Rule("update_too_small", Stage.RATES, (REWARD, SCORES, UPDATE, CLIPPED), 20,
         lambda r: r.gain < FLAT and _updates_are_tiny(r),
         "The score changed by {gain} standard deviations; policy/approxkl_avg never exceeded "
         "{highest:policy/approxkl_avg} nats per token, policy/clipfrac_avg {highest:policy/clipfrac_avg}",
         "training is stable, and too slow to see",
         changes.larger_updates),
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
    Rule("value_loss_dominates", Stage.RATES, (VALUE_LOSS, "ppo.vf_coef", "ppo.value_model"), 10,
         lambda r: _value_weight(r) > 1.0,
         "ppo.vf_coef={c.vf_coef:g} is large for loss/value_avg={last:loss/value_avg}",
         "the shared trunk learns to predict the reward rather than to raise it",
         lambda r: changes.scaled(r, "vf_coef", 0.5 / _value_weight(r))),
    Rule("critic_is_poor", Stage.RATES, (EXPLAINED,), 30,
         lambda r: r.last(EXPLAINED) < 0.05 and not _value_loss_grows(r),
         "val/explained_variance is {last:val/explained_variance}",
         "the critic predicts no more than a constant would, so the advantages are noisy",
         lambda r: changes.critic_rate(r, 2.0)),
    Rule("gradient_mostly_clipped", Stage.RATES, (NORM, "ppo.max_grad_norm"), 10,
         lambda r: r.median(NORM) > 2.0 * r.config.max_grad_norm,
         "The median of policy/grad_norm over {window} iterations is {median:policy/grad_norm}, and "
         "ppo.max_grad_norm={c.max_grad_norm:g}",
         "most steps are cut to one length, not only the outliers",
         lambda r: changes.set_to(r, "max_grad_norm", rounded(r.median(NORM)))),
    Rule("vf_coef_without_effect", Stage.RATES, ("ppo.vf_coef", "ppo.value_model"), 0,
         lambda r: r.config.value_model != "shared" and r.config.vf_coef != 0.1,
         "ppo.vf_coef={c.vf_coef:g}",
         "a critic with its own optimiser hardly feels it; ppo.value_learning_rate has the effect",
         lambda r: changes.set_to(r, "vf_coef", 0.1)),
    # Epochs and clipping.
    Rule("much_clipped", Stage.EPOCHS, (CLIPPED,), 10,
         lambda r: r.highest(CLIPPED) > 0.3,
         "policy/clipfrac_avg reached {highest:policy/clipfrac_avg} over {window} iterations",
         "later epochs see data that the policy has left behind",
         lambda r: changes.scaled(r, "num_ppo_epochs" if r.config.num_ppo_epochs > 1 else "learning_rate", 0.5)),
    Rule("values_much_clipped", Stage.EPOCHS, (VALUES_CLIPPED,), 10,
         lambda r: r.highest(VALUES_CLIPPED) > 0.6,
         "val/clipfrac_avg reached {highest:val/clipfrac_avg} over {window} iterations",
         "the clip range is small for the size of the returns and holds the critic back",
         lambda r: changes.scaled(r, "cliprange_value", max(2.0, r.spread))),
    # Reward and responses.
    Rule("truncated", Stage.REWARD, (TRUNCATED, "ppo.stop_token"), 10,
         lambda r: r.config.stop_token != "none" and r.last(TRUNCATED) > 0.5,
         "A share of {last:response/truncated_fraction} of the responses is cut off at {c.response_length} tokens "
         "({start:response/truncated_fraction} at the start)",
         "the reward judges texts without an end",
         changes.less_truncation),
    Rule("length_drifted", Stage.REWARD, (LENGTH,), 10,
         _drifts,
         "Responses went from {start:response/length} to {last:response/length} tokens",
         "the reward may pay for length (Singhal et al. 2023, arXiv:2310.03716); read samples",
         lambda r: changes.stronger_penalty(r, 1.5)),
    Rule("spread_lost", Stage.REWARD, (SPREAD,), 10,
         lambda r: _one_score(r) or r.last(SPREAD) < 0.1 * r.start_above_zero(SPREAD),
         "The scores' standard deviation fell to {last:objective/scores_std} (highest: {highest:objective/scores_std})",
         "the reward no longer tells responses apart, so there is nothing left to learn from it",
         _stop_where_spread_was_lost),
    Rule("reward_clipped", Stage.REWARD, ("objective/scores_p50", "ppo.reward_clip"), 10,
         _reward_clipped,
         "The median score is {last:objective/scores_p50}, and ppo.reward_clip={c.reward_clip:g} cuts it",
         "the better half of the responses get the same score",
         changes.wider_clip),
)
"""All rules, in the order of their advice."""
# fmt: on
CURVE_RULES = tuple(rule for rule in RULES if rule.iterations)
"""The rules on metrics, for the end of a run: `PPOConfig.advice` has said the others at its start."""
