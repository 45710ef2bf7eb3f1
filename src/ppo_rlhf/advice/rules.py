"""Table of the tuning rules: each rule has the metrics to read, a condition, its meaning, and the setting to change.

The tuning rules are listed in the order in which their advice is given.
docs/decisions/0019-advice-has-to-show-that-it-helps.md has the sources of the thresholds. A comparison with the level
of an unmeasured metric (NaN) is False, so no rule applies to an unmeasured metric.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ppo_rlhf.advice.curves import Run, in_digits
from ppo_rlhf.config.advice import head_rate
from ppo_rlhf.config.rules import Change, Rule
from ppo_rlhf.evaluation.equal_reward import CERTAIN
from ppo_rlhf.evaluation.exploitation import EXPLOITS
from ppo_rlhf.evaluation.since_best import TRAINED_REWARD
from ppo_rlhf.ppo import kl_alarms
from ppo_rlhf.ppo.kl_alarms import KL, KL_RULES, MOVED, USUAL_KL_COEF, allowed, scaled, set_to

FLAT = 0.25
"""A score that changed by less than this value counts as unchanged. The unit is the standard deviation of the score;
the value is two standard errors of a mean over 64 responses."""
USUAL_EOS_PENALTY = 1.0
"""Usual missing_eos_penalty for scores of standard deviation 1; TRL's examples also use 1."""
LEARNING_UPDATE, CALM_UPDATE = 1e-3, 0.02
"""Target values of policy/approxkl_avg, in nats per token, which grows with the square of the learning rate."""
UNDONE = 2.0
"""Updates count as undone if their KLs add up to more than UNDONE times MOVED, the KL of a policy that has moved. With
conf/demo the updates add up to 1.0 times the final KL, and to 66 times the final KL with a sixty times larger
penalty."""
FEW = 20
"""A run with fewer iterations than FEW must have ended, or be too slow for its planned end, to count as too slow."""
LEARNT = 30
"""A critic has learnt after that many iterations, or at the end of a shorter run."""
EXPLAINS_NOTHING, EXPLAINS_LITTLE = 0.1, 0.2
"""Limits of val/explained_variance: of its median over the run, and of its mean over the last iterations. A linear fit
of 384 responses' returns to SmolLM2's last hidden states explains 0.15 of other responses' variance."""
VALUE_TERM, MOST_VF_COEF = 0.15, 3.0
"""Aim for ppo.vf_coef x loss/value_avg of a shared trunk, beside whitened advantages; and the largest ppo.vf_coef that
did no harm. In the recipe obedience (loss/value_avg 0.05) the critic explains 0.2 with 0.1 and 0.5 with 3, three seeds
each; with 10 the policy of the only seed learnt less."""
FELT = 0.1
"""A gap of the judge's score at equal reward counts from this share of the change of the judge's score on."""

KL_COEF, ENTROPY = "objective/kl_coef", "objective/entropy"
SCORES, SPREAD, REWARD = "objective/scores", "objective/scores_std", "eval/reward"
UPDATE, CLIPPED, VALUES_CLIPPED = "policy/approxkl_avg", "policy/clipfrac_avg", "val/clipfrac_avg"
LENGTH, TRUNCATED = "response/length", "response/truncated_fraction"
VALUE_LOSS = "loss/value_avg"
SKIPPED, STEPS = "optimiser/skipped_steps", "optimiser/steps"
DISTINCT, DISTINCT_OF_SFT = "eval/distinct_2", "eval/distinct_2_sft"
SINCE_BEST_SCORE, SINCE_BEST_P = "eval/since_best_score", "eval/since_best_p"
JUDGE_GAP, JUDGE_GAP_P = "eval/judge_gap", "eval/judge_gap_p"
EXPLAINED = "val/explained_variance"
SUCCESS, JUDGED_SUCCESS = "succeeded", "judged_success"
"""Names of the properties of `Run` that show that a rule's finding did no harm."""


class Stage(Enum):
    """Stages of tuning, in order. A later stage cannot fix a problem of an earlier stage."""

    BEFORE = "before tuning"
    KL = "KL"
    RATES = "learning rates and batch sizes"
    EPOCHS = "epochs and clipping"
    REWARD = "reward and responses"


@dataclass(frozen=True, kw_only=True)
class TuningRule(Rule[Run]):
    """One row of the table of tuning rules. `seen` and `meaning` are the halves of the advice's sentence."""

    name: str
    stage: Stage  # stage of tuning to which the rule's advice belongs
    iterations: int  # smallest number of iterations with metrics that the rule needs
    # Name of a property of `Run` that is true if the finding did no harm; empty: there is no such property
    refuted_by: str = ""


# Conditions of rules that need more than one line.


def _rollout_mismatch(r: Run) -> bool:
    """Whether the log-probabilities of sampling and training disagree. vLLM is left out: its data type differs."""
    is_half = r.config.dtype in ("bfloat16", "float16")
    return r.config.rollout_engine != "vllm" and r.rollout_gap > (0.05 if is_half else 1e-3)


def _stands_still(r: Run) -> bool:
    return r.kl < MOVED and r.gain < FLAT


def _updates_are_undone(r: Run) -> bool:
    """Return whether later updates undid earlier updates, for a policy that has not moved. If the result is False, the
    updates are too small.

    With one optimiser step per iteration the size of the updates is unknown. A KL penalty that is large compared with
    the scores is then the only sign of undone updates.
    """
    if math.isnan(r.walked):
        spread = r.config.reward_scale * (r.deviation if r.config.reward_normalisation == "none" else 1.0)
        return r.config.kl_coef > 4 * USUAL_KL_COEF * spread
    return r.walked > UNDONE * MOVED


def _sum_of_updates(r: Run) -> str:
    """Return a clause with the sum of all updates; empty if it is unknown, with one optimiser step per iteration."""
    return "" if math.isnan(r.walked) else f", all updates add up to {r.walked:.3g}"


def _penalty_too_strong(r: Run) -> bool:
    return not r.adaptive and r.config.kl_coef > 0.0 and _stands_still(r) and _updates_are_undone(r)


def _update_too_small(r: Run) -> bool:
    """Return whether the updates are too small to show an effect.

    Of a run with few iterations that goes on, the KL at the planned end decides: KL grows with the square of the
    iterations while all updates go in one direction.
    """
    if r.iterations < FEW and r.kl * (r.planned / r.iterations) ** 2 >= MOVED:
        return False
    return not math.isnan(r.last(UPDATE)) and _stands_still(r) and not _updates_are_undone(r)


def _critic_explains_nothing(r: Run) -> bool:
    """Return whether the critic never explained the returns. A critic that goes on learning has `LEARNT` iterations."""
    if r.iterations < min(LEARNT, r.planned):
        return False
    return r.typical(EXPLAINED) < EXPLAINS_NOTHING and r.last(EXPLAINED) < EXPLAINS_LITTLE


def _reward_is_blind(r: Run) -> bool:
    gap, change = r.end(JUDGE_GAP), r.end("eval/judge_score") - r.end("eval/judge_score_sft")
    return r.end(JUDGE_GAP_P) < CERTAIN and gap < -FELT * abs(change)


def _steps_skipped(r: Run) -> bool:
    """Return whether float16 skipped over 1 % of the steps in the second half of the run.

    Skipped steps in the first half of the run do not count, because loss scaling skips steps until it has found its
    scale.
    """
    skipped, steps = r.values(SKIPPED), r.values(STEPS)
    half = len(skipped) // 2
    late_skipped, late_steps = r.end(SKIPPED) - skipped.iloc[half], r.end(STEPS) - steps.iloc[half]
    return r.config.dtype == "float16" and bool(late_skipped > 0.01 * (late_skipped + late_steps))


def _kl_rule(name: str, iterations: int) -> TuningRule:
    """Return the tuning rule for a KL rule that also raises alarms during training."""
    return TuningRule(**vars(KL_RULES[name]), name=f"kl_{name}", stage=Stage.KL, iterations=iterations)


# Changes of settings that are not just multiplications by a factor.


def _rate_for_update(r: Run, now: float, size: float, least: float, most: float) -> Change:
    """Return the change of the learning rate that takes policy/approxkl_avg from `now` to `size`.

    policy/approxkl_avg grows with the square of the learning rate. The factor of the learning rate stays within `least`
    and `most`.
    """
    return scaled(r, "learning_rate", min(most, max(least, math.sqrt(size / now) if now > 0.0 else least)))


def _stronger_critic(r: Run) -> Change:
    """Return a higher learning rate of the critic, or a heavier value loss of a shared critic.

    A shared critic gets first the rate that its head needs, then the weight with which its trunk learns values.
    """
    now, policy = r.config.value_learning_rate, r.config.learning_rate
    if r.config.value_model == "shared":
        if 3.0 * (now or policy) < head_rate(policy):
            return set_to(r, "value_learning_rate", head_rate(policy))
        if r.config.whiten_advantages and (loss := r.typical(VALUE_LOSS)) > 0.0:
            weight = round(min(VALUE_TERM / loss, MOST_VF_COEF), 9)  # 0.15 / 0.05 is 3, not 2.9999999999999996
            if weight >= 2.0 * r.config.vf_coef:
                return set_to(r, "vf_coef", float(f"{weight:.1g}"))
    if now is None:
        return set_to(r, "value_learning_rate", float(f"{3.0 * policy:.3g}"))
    return scaled(r, "value_learning_rate", 3.0)


def _less_truncation(r: Run) -> Change:
    """Return a penalty on truncated responses, or longer responses.

    The function returns longer responses if over half of the SFT policy's responses were truncated already, or if other
    settings exclude the penalty.
    """
    now = r.config.missing_eos_penalty
    penalty = scaled(r, "missing_eos_penalty", 2.0) if now else set_to(r, "missing_eos_penalty", USUAL_EOS_PENALTY)
    if r.start(TRUNCATED) > 0.5 or not allowed(penalty, r.config):
        return scaled(r, "response_length" if r.config.turn_length is None else "turn_length", 1.5)
    return penalty


RULES: tuple[TuningRule, ...] = (
    # Rules that apply before tuning, because the run's measured numbers themselves are wrong.
    TuningRule(
        name="rollout_mismatch",
        stage=Stage.BEFORE,
        reads=("policy/rollout_logprob_gap", "ppo.dtype"),
        iterations=1,
        holds=_rollout_mismatch,
        seen=lambda r: f"policy/rollout_logprob_gap is {r.rollout_gap:.3g} nats per token in {r.config.dtype}",
        meaning="sampling and training compute different log-probabilities for the same tokens, as after an error in "
        "masks or positions, so KL and ratios are wrong. If ppo.rollout_engine=hf shows the gap, too, the model's code "
        "is at fault",
        change=lambda r: set_to(r, "rollout_engine", "hf"),
    ),
    # Rules about the KL from the reference policy.
    _kl_rule("negative", iterations=20),
    _kl_rule("alarm", iterations=3),
    _kl_rule("warning", iterations=3),
    TuningRule(
        name="kl_penalty_too_strong",
        stage=Stage.KL,
        reads=(KL, REWARD, SCORES, UPDATE, LENGTH),
        iterations=20,
        holds=_penalty_too_strong,
        seen=lambda r: (
            f"KL is {r.kl:.3g} nats per response{_sum_of_updates(r)}, and the score changed by {r.gain:.3g} standard "
            "deviations"
        ),
        meaning="the policy is updated, and the KL penalty undoes the updates",
        change=lambda r: scaled(r, "kl_coef", min(0.5, max(0.1, r.kl / 2.0))),
    ),
    TuningRule(
        name="kl_off_target",
        stage=Stage.KL,
        reads=(KL, KL_COEF, "ppo.kl_target"),
        iterations=20,
        holds=lambda r: r.adaptive and abs(r.kl / r.config.kl_target - 1.0) > 0.25 and r.kl <= r.config.kl_warning,
        seen=lambda r: (
            f"KL is {r.kl:.3g} nats per response, more than 25% off the target of {r.config.kl_target:g}; the "
            f"controller changed the coefficient from {r.config.kl_coef:g} to {in_digits(r.last(KL_COEF))}"
        ),
        meaning="the controller started too far from the right coefficient or reacts too slowly, or the size of the "
        "updates keeps KL away from its target",
        change=kl_alarms.help_controller,
        refuted_by=JUDGED_SUCCESS,
    ),
    TuningRule(
        name="reward_hacked",
        stage=Stage.KL,
        reads=(EXPLOITS, SINCE_BEST_SCORE, SINCE_BEST_P, TRAINED_REWARD),
        iterations=1,
        holds=lambda r: r.end(EXPLOITS) == 1.0,
        seen=lambda r: (
            f"Since the best evaluation, SFT's included, the judge's score changed by "
            f"{in_digits(r.end(SINCE_BEST_SCORE))} (by chance with probability {in_digits(r.end(SINCE_BEST_P))}), the "
            f"trained reward by {in_digits(r.end(TRAINED_REWARD))}"
        ),
        meaning="the policy exploits its reward, and more training makes the exploit worse",
        change=lambda r: kl_alarms.stronger_penalty(r, 2.0),
    ),
    TuningRule(
        name="diversity_lost",
        stage=Stage.KL,
        reads=(DISTINCT, DISTINCT_OF_SFT),
        iterations=10,
        holds=lambda r: r.end(DISTINCT) < 0.5 * r.end(DISTINCT_OF_SFT),
        seen=lambda r: f"eval/distinct_2 is {in_digits(r.end(DISTINCT))}, SFT's {in_digits(r.end(DISTINCT_OF_SFT))}",
        meaning="the responses repeat the same phrases",
        change=lambda r: kl_alarms.stronger_penalty(r, 1.5),
        refuted_by=JUDGED_SUCCESS,
    ),
    TuningRule(
        name="entropy_collapsed",
        stage=Stage.KL,
        reads=(ENTROPY, KL),
        iterations=10,
        holds=lambda r: r.kl >= MOVED and r.last(ENTROPY) < r.start(ENTROPY) / 3,
        seen=lambda r: (
            f"objective/entropy fell from {in_digits(r.start(ENTROPY))} to {in_digits(r.last(ENTROPY))} nats per token"
        ),
        meaning="the policy has settled on few answers and no longer explores",
        change=lambda r: kl_alarms.stronger_penalty(r, 1.5),
        refuted_by=JUDGED_SUCCESS,
    ),
    # Rules about learning rates and batch sizes.
    TuningRule(
        name="steps_skipped",
        stage=Stage.RATES,
        reads=(SKIPPED, STEPS, "ppo.dtype"),
        iterations=1,
        holds=_steps_skipped,
        seen=lambda r: (
            f"{in_digits(r.end(SKIPPED))} optimiser steps were skipped for a non-finite gradient, and "
            f"{in_digits(r.end(STEPS))} were taken"
        ),
        meaning="the range of float16 is too small for the gradients",
        change=lambda r: set_to(r, "dtype", "bfloat16"),
    ),
    TuningRule(
        name="update_too_large",
        stage=Stage.RATES,
        reads=(UPDATE,),
        iterations=10,
        holds=lambda r: r.typical(UPDATE) > 0.1,
        seen=lambda r: (
            f"policy/approxkl_avg is {in_digits(r.typical(UPDATE))} nats per token in the median, up to "
            f"{in_digits(r.highest(UPDATE))}"
        ),
        meaning="one iteration moves the policy too far from the policy that sampled the data",
        change=lambda r: _rate_for_update(r, r.highest(UPDATE), CALM_UPDATE, least=0.1, most=0.5),
        refuted_by=SUCCESS,
    ),
    TuningRule(
        name="update_too_small",
        stage=Stage.RATES,
        reads=(KL, REWARD, SCORES, UPDATE, LENGTH),
        iterations=10,
        holds=_update_too_small,
        seen=lambda r: (
            f"KL is {r.kl:.3g} nats per response{_sum_of_updates(r)} (median of policy/approxkl_avg: "
            f"{in_digits(r.typical(UPDATE))} nats per token), and the score changed by {r.gain:.3g} standard deviations"
        ),
        meaning="training is stable, but too slow to show an effect",
        change=lambda r: _rate_for_update(r, r.typical(UPDATE), LEARNING_UPDATE, least=2.0, most=10.0),
    ),
    TuningRule(
        name="critic_explains_nothing",
        stage=Stage.RATES,
        reads=(EXPLAINED, VALUE_LOSS, "ppo.value_model"),
        iterations=10,
        holds=_critic_explains_nothing,
        seen=lambda r: (
            f"val/explained_variance is {in_digits(r.typical(EXPLAINED))} in the median and "
            f"{in_digits(r.last(EXPLAINED))} at the end"
        ),
        meaning="the critic has learnt next to nothing, so the advantages are as noisy as without a critic",
        change=_stronger_critic,
    ),
    # Rules about epochs per batch and the clip range.
    TuningRule(
        name="much_clipped",
        stage=Stage.EPOCHS,
        reads=(CLIPPED, "ppo.num_ppo_epochs"),
        iterations=10,
        holds=lambda r: r.config.num_ppo_epochs > 1 and r.typical(CLIPPED) > 0.3,
        seen=lambda r: f"policy/clipfrac_avg is {in_digits(r.typical(CLIPPED))} in the median",
        meaning="later epochs train on data that no longer matches the policy",
        change=lambda r: scaled(r, "num_ppo_epochs", 0.5),
        refuted_by=SUCCESS,
    ),
    TuningRule(
        name="values_much_clipped",
        stage=Stage.EPOCHS,
        reads=(VALUES_CLIPPED,),
        iterations=10,
        holds=lambda r: r.highest(VALUES_CLIPPED) > 0.6,
        seen=lambda r: f"val/clipfrac_avg reached {in_digits(r.highest(VALUES_CLIPPED))}",
        meaning="the clipping range is too small for the size of the returns, so the critic learns slowly",
        change=lambda r: scaled(r, "cliprange_value", 2.0),
        refuted_by=SUCCESS,
    ),
    # Rules about the reward and the responses.
    TuningRule(
        name="truncated",
        stage=Stage.REWARD,
        reads=(TRUNCATED, "ppo.stop_token"),
        iterations=10,
        holds=lambda r: r.config.stop_token != "none" and r.last(TRUNCATED) > 0.5,
        seen=lambda r: r.cut_off,
        meaning="the reward scores unfinished texts",
        change=_less_truncation,
    ),
    TuningRule(
        name="length_drifted",
        stage=Stage.REWARD,
        reads=(LENGTH,),
        iterations=10,
        holds=lambda r: r.last(LENGTH) > 2.0 * r.start(LENGTH) or r.last(LENGTH) < r.start(LENGTH) / 2.0,
        seen=lambda r: f"Responses went from {in_digits(r.start(LENGTH))} to {in_digits(r.last(LENGTH))} tokens",
        meaning="the reward may depend on length (Singhal et al. 2023, arXiv:2310.03716); read the samples",
        change=lambda r: kl_alarms.stronger_penalty(r, 1.5),
        refuted_by=JUDGED_SUCCESS,
    ),
    TuningRule(
        name="reward_is_blind",
        stage=Stage.REWARD,
        reads=(JUDGE_GAP, JUDGE_GAP_P, "eval/judge_score"),
        iterations=1,
        holds=_reward_is_blind,
        seen=lambda r: (
            f"At equal reward the judge scores PPO's responses {in_digits(-r.end(JUDGE_GAP))} lower than SFT's (by "
            f"chance with probability {in_digits(r.end(JUDGE_GAP_P))}), and its score went from "
            f"{in_digits(r.end('eval/judge_score_sft'))} to {in_digits(r.end('eval/judge_score'))}"
        ),
        meaning="the reward pays the policy for something that the judge does not; read the samples, and put into the "
        "reward what the judge sees and the reward does not",
    ),
    TuningRule(
        name="spread_lost",
        stage=Stage.REWARD,
        reads=(SPREAD,),
        iterations=10,
        holds=lambda r: r.config.batch_size > 1 and r.last(SPREAD) <= 0.1 * r.deviation,
        seen=lambda r: (
            f"The scores' standard deviation fell to {in_digits(r.last(SPREAD))} (from {in_digits(r.highest(SPREAD))})"
        ),
        meaning="the reward no longer distinguishes responses, so the policy cannot learn more from it; stop training",
    ),
)
"""All tuning rules, in the order in which their advice is given."""
