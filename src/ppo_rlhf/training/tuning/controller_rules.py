"""Rules on the adaptive KL controller: too slow for the run, off its target, or at its end."""

from __future__ import annotations

from ppo_rlhf.config.advice import HORIZONS_NEEDED
from ppo_rlhf.training.tuning.rule import Change, Finding, Rule, Run, Stage, number, rounded

ELSEWHERE = 1.5
"""Factor from which on the coefficient that the controller went to is a better start than the one it was given."""
HELD = 10
"""Iterations of holding still that brought the demo back from a coefficient ten times too small."""
SATURATED = 10.0
SETTLED = 0.25
RUN_IN_HORIZONS = 20


def help_controller(run: Run) -> Change:
    """Return what brings KL nearer to the target: a better start, a quicker controller, or another step size."""
    c, now = run.config, run.curves.last("objective/kl_coef")
    too_high = run.curves.last("objective/kl") > c.kl_target
    if now > ELSEWHERE * c.kl_coef if too_high else now < c.kl_coef / ELSEWHERE:
        return Change("kl_coef", c.kl_coef, rounded(now))
    if too_high and run.curves.lowest("objective/kl_coef") < c.kl_coef / ELSEWHERE and c.kl_hold_iterations < HELD:
        return Change("kl_hold_iterations", c.kl_hold_iterations, HELD)  # it wound down while KL was still near 0
    if c.kl_horizon > 2 * c.batch_size:
        return run.scaled("kl_horizon", 0.5)
    return run.scaled("learning_rate", 0.5 if too_high else 2.0)


def _horizon_too_long(run: Run, threshold: float) -> Finding | None:
    c = run.config
    if c.kl_controller != "adaptive" or c.total_episodes >= threshold * c.kl_horizon:
        return None
    seen = f"ppo.total_episodes={c.total_episodes} is less than {threshold:g} x ppo.kl_horizon={c.kl_horizon:g}"
    return Finding(seen, Change("kl_horizon", c.kl_horizon, rounded(c.total_episodes / RUN_IN_HORIZONS)))


def _coefficient_saturated(run: Run, threshold: float) -> Finding | None:
    c, now, kl = run.config, run.curves.last("objective/kl_coef"), run.curves.last("objective/kl")
    too_high = kl > (1.0 + SETTLED) * c.kl_target and now > threshold * c.kl_coef
    too_low = kl < (1.0 - SETTLED) * c.kl_target and now < c.kl_coef / threshold
    if c.kl_controller != "adaptive" or not (too_high or too_low):
        return None
    seen = (
        f"The controller took the coefficient from {number(c.kl_coef)} to {number(now)}, and KL is {number(kl)} nats "
        f"per response, not {c.kl_target:g}"
    )
    return Finding(seen, run.scaled("learning_rate", 0.5 if too_high else 2.0))


def _off_target(run: Run, threshold: float) -> Finding | None:
    c, kl = run.config, run.curves.last("objective/kl")
    if c.kl_controller != "adaptive" or not abs(kl / c.kl_target - 1.0) > threshold or kl > c.kl_warning:
        return None
    if _coefficient_saturated(run, SATURATED):
        return None
    seen = f"KL is {number(kl)} nats per response, more than {threshold:.0%} off the target of {c.kl_target:g}"
    slow = _horizon_too_long(run, HORIZONS_NEEDED)  # mended first: a better start would be left at once
    return Finding(seen, slow.change if slow else help_controller(run))


CONTROLLER_RULES = (
    Rule(
        name="kl_horizon_too_long",
        stage=Stage.KL,
        looks_at=("ppo.kl_controller", "ppo.total_episodes", "ppo.kl_horizon"),
        threshold=HORIZONS_NEEDED,
        source="Ziegler et al. 2019 (arXiv:1909.08593), section 2.2: 20 % a horizon at most, five make a factor of e",
        meaning="the controller cannot move the coefficient far within the run",
        check=_horizon_too_long,
        iterations=0,
    ),
    Rule(
        name="kl_coef_saturated",
        stage=Stage.KL,
        looks_at=("objective/kl_coef", "objective/kl", "ppo.kl_target"),
        threshold=SATURATED,
        source="measured on the demo: a start ten times too high or too low still reaches the target",
        meaning="it is not the coefficient that keeps KL from its target but the size of the updates",
        check=_coefficient_saturated,
        iterations=20,
    ),
    Rule(
        name="kl_off_target",
        stage=Stage.KL,
        looks_at=("objective/kl", "objective/kl_coef", "ppo.kl_target"),
        threshold=SETTLED,
        source="measured on the demo: a controller that works ends within 25 % of its target",
        meaning="the controller began too far off, or reacts too late",
        check=_off_target,
        iterations=20,
    ),
)
