"""Rules of the guide's second and third stage: size and noise of the updates, the critic, epochs and clipping."""

from __future__ import annotations

import math

from ppo_rlhf.config.advice import TUNING_GUIDE
from ppo_rlhf.training.tuning.kl_rules import FLAT, MOVED, updates_are_tiny
from ppo_rlhf.training.tuning.rule import Change, Finding, Rule, Run, Stage, number, rounded

CALM_UPDATE = 0.02
"""policy/approxkl_avg, ½ (log-ratio)², at which the log-ratios' root mean square is the usual clip range of 0.2."""
LEARNING_UPDATE = 1e-3
"""policy/approxkl_avg of the demo where it learns; it grows with the square of the learning rate."""
POOR_CRITIC = 0.05


def _steps_skipped(run: Run, threshold: float) -> Finding | None:
    skipped, steps = (run.curves.values(f"optimiser/{key}") for key in ("skipped_steps", "steps"))
    if not len(skipped) or not skipped[-1] > 0:
        return None
    seen = f"{skipped[-1]:g} of {skipped[-1] + steps[-1]:g} optimiser steps were skipped for a non-finite gradient"
    if run.config.dtype != "float16":
        return Finding(seen, run.scaled("learning_rate", 0.5))
    middle = len(skipped) // 2  # before it, loss scaling finds its scale by such steps
    late, taken = skipped[-1] - skipped[middle], steps[-1] - steps[middle]
    return Finding(seen, Change("dtype", "float16", "bfloat16")) if late > threshold * (late + taken) else None


def _score_fell(run: Run, threshold: float) -> Finding | None:
    if not run.gain < -threshold:
        return None
    seen = f"The score fell by {number(-run.gain)} standard deviations below SFT's"
    return Finding(seen, run.scaled("learning_rate", 0.5))


def _update_too_large(run: Run, threshold: float) -> Finding | None:
    size = run.curves.highest("policy/approxkl_avg")
    if not size > threshold:
        return None
    steps = run.config.num_ppo_epochs * run.config.num_mini_batches
    seen = f"policy/approxkl_avg reached {number(size)} nats per token ({steps} steps an iteration)"
    return Finding(seen, run.scaled("learning_rate", min(0.5, max(0.1, math.sqrt(CALM_UPDATE / size)))))


def _update_too_small(run: Run, threshold: float) -> Finding | None:
    if not (run.gain < threshold and updates_are_tiny(run)):
        return None
    size, clipped = (run.curves.highest(f"policy/{key}") for key in ("approxkl_avg", "clipfrac_avg"))
    seen = (
        f"The score changed by {number(run.gain)} standard deviations; policy/approxkl_avg never exceeded "
        f"{number(size)} nats per token, policy/clipfrac_avg {number(clipped)}"
    )
    factor = math.sqrt(LEARNING_UPDATE / size) if size > 0.0 else 2.0
    return Finding(seen, run.scaled("learning_rate", min(10.0, max(2.0, factor))))


def _drift_without_gain(run: Run, threshold: float) -> Finding | None:
    kl = run.curves.last("objective/kl")
    if not (kl > MOVED and abs(run.gain) < threshold * math.sqrt(2.0 * kl)):
        return None
    seen = f"KL is {number(kl)} nats per response, and the score changed by {number(run.gain)} standard deviations"
    return Finding(seen, run.scaled("gradient_accumulation_steps", 2))


def _value_loss_grows(run: Run, threshold: float) -> Finding | None:
    loss, lowest = run.curves.last("loss/value_avg"), run.curves.lowest("loss/value_avg")
    explained = run.curves.last("val/explained_variance")
    if not (loss > threshold * lowest and explained < POOR_CRITIC):
        return None
    seen = f"loss/value_avg grew from {number(lowest)} to {number(loss)}, explained variance is {number(explained)}"
    return Finding(seen, _critic_change(run, 0.5))


def _value_loss_dominates(run: Run, threshold: float) -> Finding | None:
    c, loss = run.config, run.curves.last("loss/value_avg")
    weight = c.vf_coef * math.sqrt(2.0 * loss) if loss >= 0.0 else math.nan
    if c.value_model != "shared" or not c.whiten_advantages or not weight > threshold:
        return None
    seen = (
        f"ppo.vf_coef={c.vf_coef:g} at loss/value_avg={number(loss)} pulls at the trunk {number(weight)} times as much"
    )
    return Finding(f"{seen} as the policy", run.scaled("vf_coef", 0.5 / weight))


def _critic_is_poor(run: Run, threshold: float) -> Finding | None:
    explained = run.curves.last("val/explained_variance")
    if not explained < threshold or _value_loss_grows(run, 3.0):
        return None
    return Finding(f"val/explained_variance is {number(explained)}", _critic_change(run, 2.0))


def _critic_change(run: Run, factor: float) -> Change:
    c = run.config
    if c.value_model == "shared":
        return run.scaled("vf_coef", factor)
    now = c.value_learning_rate or c.learning_rate
    return Change("value_learning_rate", now, rounded(now * factor))


def _mostly_clipped(run: Run, threshold: float) -> Finding | None:
    norm, limit = run.curves.median("policy/grad_norm"), run.config.max_grad_norm
    if not norm > threshold * limit:
        return None
    seen = (
        f"In at least half of the last {run.curves.window} iterations policy/grad_norm, the mean over their steps, is "
        f"{number(norm)} or more, {number(norm / limit)} times ppo.max_grad_norm"
    )
    return Finding(seen, Change("max_grad_norm", limit, rounded(norm)))


def _vf_coef_without_effect(run: Run, threshold: float) -> Finding | None:
    c = run.config
    if c.value_model == "shared" or c.vf_coef == threshold:
        return None
    return Finding(f"ppo.vf_coef={c.vf_coef:g}", Change("vf_coef", c.vf_coef, threshold))


def _much_clipped(run: Run, threshold: float) -> Finding | None:
    clipped, c = run.curves.highest("policy/clipfrac_avg"), run.config
    if not clipped > threshold:
        return None
    seen = f"policy/clipfrac_avg reached {number(clipped)} over {run.curves.window} iterations"
    if c.num_ppo_epochs > 1:
        return Finding(seen, run.scaled("num_ppo_epochs", 0.5))
    return Finding(seen, run.scaled("learning_rate", 0.5))


def _values_much_clipped(run: Run, threshold: float) -> Finding | None:
    clipped = run.curves.highest("val/clipfrac_avg")
    if not clipped > threshold:
        return None
    seen = f"val/clipfrac_avg reached {number(clipped)} over {run.curves.window} iterations"
    return Finding(seen, run.scaled("cliprange_value", max(2.0, run.spread)))


UPDATE_RULES = (
    Rule(
        name="steps_skipped",
        stage=Stage.LEARNING_RATES,
        looks_at=("optimiser/skipped_steps",),
        threshold=0.01,
        source="none is normal; with float16's loss scaling about 1 in 2,000 (torch.amp.GradScaler's interval)",
        meaning="steps are too large, or the range of float16 too small",
        check=_steps_skipped,
        iterations=1,
    ),
    Rule(
        name="score_fell",
        stage=Stage.LEARNING_RATES,
        looks_at=("eval/reward", "objective/scores"),
        threshold=0.5,
        source=f"four standard errors of 64 responses; {TUNING_GUIDE}: if unstable, decrease the learning rate",
        meaning="updates destroy more than they teach",
        check=_score_fell,
    ),
    Rule(
        name="update_too_large",
        stage=Stage.LEARNING_RATES,
        looks_at=("policy/approxkl_avg",),
        threshold=0.1,
        source="log-ratios of twice the usual clip range; measured on the demo: 0.002 where it learns, 0.4 at ten "
        "times its learning rate",
        meaning="an iteration moves the policy far beyond what its data say",
        check=_update_too_large,
    ),
    Rule(
        name="update_too_small",
        stage=Stage.LEARNING_RATES,
        looks_at=("eval/reward", "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg"),
        threshold=FLAT,
        source=f"two standard errors of 64 responses; {TUNING_GUIDE}: if stable but slow, increase the learning rate",
        meaning="training is stable, and too slow to see",
        check=_update_too_small,
        iterations=20,
    ),
    Rule(
        name="drift_without_gain",
        stage=Stage.LEARNING_RATES,
        looks_at=("objective/kl", "eval/reward", "objective/scores"),
        threshold=0.1,
        source="a tilted Gaussian: √(2 KL) standard deviations are the most that a KL can buy (arXiv:2210.10760 finds "
        "the √KL in measurements); the demo reaches 0.6 of that",
        meaning="updates follow the batch's noise; larger batches have less",
        check=_drift_without_gain,
        iterations=20,
    ),
    Rule(
        name="value_loss_grows",
        stage=Stage.LEARNING_RATES,
        looks_at=("loss/value_avg", "val/explained_variance"),
        threshold=3.0,
        source="TRL's logging page: the value loss spikes when training does not go well; the demo's falls tenfold",
        meaning="the critic diverges, and the advantages with it",
        check=_value_loss_grows,
        iterations=20,
    ),
    Rule(
        name="value_loss_dominates",
        stage=Stage.LEARNING_RATES,
        looks_at=("loss/value_avg", "ppo.vf_coef", "ppo.value_model"),
        threshold=1.0,
        source="gradients with respect to values, vf_coef x √(2 x loss), and to log-probabilities, whose whitened "
        "advantages have mean square 1",
        meaning="the shared trunk learns to foresee the reward rather than to raise it",
        check=_value_loss_dominates,
    ),
    Rule(
        name="critic_is_poor",
        stage=Stage.LEARNING_RATES,
        looks_at=("val/explained_variance",),
        threshold=POOR_CRITIC,
        source="by definition a constant explains 0; the demo's critic passes 0.2 within ten iterations",
        meaning="the critic foresees no more than a constant would, so the advantages are noisy",
        check=_critic_is_poor,
        iterations=30,
    ),
    Rule(
        name="gradient_mostly_clipped",
        stage=Stage.LEARNING_RATES,
        looks_at=("policy/grad_norm", "ppo.max_grad_norm"),
        threshold=2.0,
        source="Pascanu et al. 2013 (arXiv:1211.5063): a limit between half and ten times the average norm; the demo's "
        "norm is a third of its limit",
        meaning="most steps are cut to one length, not only the outliers",
        check=_mostly_clipped,
    ),
    Rule(
        name="vf_coef_without_effect",
        stage=Stage.LEARNING_RATES,
        looks_at=("ppo.vf_coef", "ppo.value_model"),
        threshold=0.1,
        source="the default; Adam's step does not depend on the scale of the loss",
        meaning="a critic with an optimiser of its own hardly feels it; ppo.value_learning_rate is what it feels",
        check=_vf_coef_without_effect,
        iterations=0,
    ),
    Rule(
        name="much_clipped",
        stage=Stage.EPOCHS,
        looks_at=("policy/clipfrac_avg",),
        threshold=0.3,
        source="measured on a 3-million-parameter model: 0.07 where it learns, 0.30 in the run that collapsed",
        meaning="later epochs see data that the policy has left behind",
        check=_much_clipped,
    ),
    Rule(
        name="values_much_clipped",
        stage=Stage.EPOCHS,
        looks_at=("val/clipfrac_avg",),
        threshold=0.6,
        source="TRL's logging page: often from 0.3 to 0.6",
        meaning="the clip range is small for the size of the returns and holds the critic back",
        check=_values_much_clipped,
    ),
)
