"""Rules of the guide's first stage: how far the policy is from the SFT policy, and what holds it there."""

from __future__ import annotations

from ppo_rlhf.config.advice import TUNING_GUIDE
from ppo_rlhf.ppo.alarms import COLLAPSED_SHARE, NEGATIVE, STANDARD_ERRORS, WORTH_WATCHING
from ppo_rlhf.training.tuning.controller_rules import help_controller
from ppo_rlhf.training.tuning.rule import Change, Finding, Rule, Run, Stage, number

USUAL_KL = 10.0
"""Nats per response that a stronger penalty aims at: TRL's training FAQ keeps KL between 0 and 10."""
USUAL_KL_COEF = 0.05
"""TRL's default, for scores of standard deviation 1."""
MOVED = 0.5
"""Nats per response below which the policy has hardly moved, as in training's alarm."""
TINY_UPDATE = 1e-4
"""policy/approxkl_avg (nats per token) below which an iteration's update is tiny: the log-ratios' root mean square is
then 7 % of the usual clip range of 0.2. The demo's is 2e-3 where it learns, 2e-7 at a hundredth of its rate."""
FLAT = 0.25
"""Standard deviations of the score: a smaller rise is within two standard errors of 64 responses."""


def updates_are_tiny(run: Run) -> bool:
    """Return whether the policy hardly changes in an update, wherever in the run it changed most.

    With one optimiser step an iteration approxkl is 0 by definition; then a weak penalty leaves no other explanation.
    """
    c = run.config
    if c.num_ppo_epochs * c.num_mini_batches == 1:
        return run.curves.last("objective/kl") < MOVED and c.kl_coef <= 4 * USUAL_KL_COEF * run.spread
    return run.curves.highest("policy/approxkl_avg") < TINY_UPDATE


def stronger_penalty(run: Run, factor: float) -> Change:
    """Return the change that holds the policy closer: a larger coefficient, or a lower target of the controller.

    KL falls about as fast as the coefficient rises (demo: 9.9, 4 to 6 and 1.2 nats at 0.05, 0.15 and 0.5).
    """
    if run.config.kl_controller == "adaptive":
        return run.scaled("kl_target", 1.0 / factor)
    if run.config.kl_coef == 0.0:
        spread = run.spread if run.spread > 0.0 else 1.0  # unknown, as in batches of one response
        return Change("kl_coef", 0.0, float(f"{USUAL_KL_COEF * spread:.1g}"))
    return run.scaled("kl_coef", factor)


def _kl_negative(run: Run, threshold: float) -> Finding | None:
    kl, error = run.curves.last("objective/kl"), run.curves.standard_error("objective/kl")
    if not (kl < threshold and kl < -STANDARD_ERRORS * error):
        return None
    off = {"top_k": 0, "top_p": 1.0, "min_response_length": 0}
    filters = {setting: getattr(run.config, setting) for setting in off}
    change = next((Change(name, now, off[name]) for name, now in filters.items() if now != off[name]), None)
    return Finding(f"KL is {number(kl)} nats per response, below 0 by more than sampling noise", change)


def _kl_above(run: Run, threshold: float) -> Finding | None:
    kl = run.curves.last("objective/kl")
    if not kl > threshold:
        return None
    seen = f"KL is {number(kl)} nats per response, above {threshold:g}"
    if run.config.kl_controller == "adaptive" and run.config.kl_target < threshold:
        return Finding(f"{seen}, and the controller aims at {run.config.kl_target:g}", help_controller(run))
    return Finding(seen, stronger_penalty(run, min(4.0, max(1.5, kl / USUAL_KL))))


def _kl_warned(run: Run, threshold: float) -> Finding | None:
    return None if run.curves.last("objective/kl") > run.config.kl_alarm else _kl_above(run, threshold)


def _kl_collapsed(run: Run, threshold: float) -> Finding | None:
    kl, peak = run.curves.last("objective/kl"), run.curves.highest("objective/kl")
    if not (kl < threshold * peak and peak >= WORTH_WATCHING):
        return None
    seen = f"KL fell from {number(peak)} to {number(kl)} nats per response"
    if run.config.kl_controller == "adaptive":
        return Finding(seen, help_controller(run))
    if run.config.kl_coef:
        return Finding(seen, run.scaled("kl_coef", 0.5))
    undone = "no penalty holds the policy, so its updates have undone each other"
    return Finding(seen, run.scaled("learning_rate", 0.5), undone)


def _penalty_too_strong(run: Run, threshold: float) -> Finding | None:
    kl = run.curves.last("objective/kl")
    if run.config.kl_controller == "adaptive" or run.config.kl_coef == 0.0 or updates_are_tiny(run):
        return None
    if not (kl < threshold and run.gain < FLAT):
        return None
    seen = f"KL is {number(kl)} nats per response, and the score changed by {number(run.gain)} standard deviations"
    return Finding(seen, run.scaled("kl_coef", min(0.5, max(0.1, kl / 2.0))))


KL_RULES = (
    Rule(
        name="kl_negative",
        stage=Stage.KL,
        looks_at=("objective/kl", "ppo.top_k", "ppo.top_p", "ppo.min_response_length"),
        threshold=NEGATIVE,
        source="a KL is not negative; three standard errors away from it; TRL's training FAQ on sampling filters",
        meaning="responses are not drawn from the distribution that is trained, and the policy is paid for that",
        check=_kl_negative,
        iterations=20,
    ),
    Rule(
        name="kl_alarm",
        stage=Stage.KL,
        looks_at=("objective/kl", "ppo.kl_alarm"),
        threshold="kl_alarm",
        source=f"{TUNING_GUIDE}: keep KL below 15 to 20 nats",
        meaning="the policy has left the SFT model's language, most likely to exploit the reward",
        check=_kl_above,
        iterations=3,
    ),
    Rule(
        name="kl_warning",
        stage=Stage.KL,
        looks_at=("objective/kl", "ppo.kl_warning"),
        threshold="kl_warning",
        source=f"{TUNING_GUIDE}: keep KL below 15 to 20 nats",
        meaning="the policy is leaving the SFT model's language; read the samples",
        check=_kl_warned,
        iterations=3,
    ),
    Rule(
        name="kl_collapsed",
        stage=Stage.KL,
        looks_at=("objective/kl",),
        threshold=COLLAPSED_SHARE,
        source=f"{TUNING_GUIDE}: adjust the coefficient if KL collapses to zero; a tenth, as in training's alarm",
        meaning="the penalty outweighs the score and has pulled the policy back to where it started",
        check=_kl_collapsed,
        iterations=20,
    ),
    Rule(
        name="kl_penalty_too_strong",
        stage=Stage.KL,
        looks_at=("objective/kl", "eval/reward", "objective/scores", "policy/approxkl_avg"),
        threshold=MOVED,
        source=f"{TUNING_GUIDE}: a high coefficient holds the policy at the SFT model; 0.5 nats as in training's alarm",
        meaning="updates are taken, and the penalty undoes them",
        check=_penalty_too_strong,
        iterations=20,
    ),
)
