"""What to change first: the rules of the tuning guide applied to a run, in the guide's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.training.tuning.controller_rules import CONTROLLER_RULES
from ppo_rlhf.training.tuning.curves import Curves
from ppo_rlhf.training.tuning.exploitation_rules import EXPLOITATION_RULES
from ppo_rlhf.training.tuning.kl_rules import KL_RULES
from ppo_rlhf.training.tuning.reward_rules import FIRST_RULES, REWARD_RULES
from ppo_rlhf.training.tuning.rule import Change, Rule, Run, Stage
from ppo_rlhf.training.tuning.update_rules import UPDATE_RULES

RULES: tuple[Rule, ...] = (
    *FIRST_RULES,
    *KL_RULES,
    *CONTROLLER_RULES,
    *EXPLOITATION_RULES,
    *UPDATE_RULES,
    *REWARD_RULES,
)
"""All rules, in the order in which their advice is given."""
CURVE_RULES = tuple(rule for rule in RULES if rule.iterations)
"""Those that look at what a run measured: for the end of a run, which said at its start what settings alone say
(`PPOConfig.advice`)."""
ENOUGH_ITERATIONS = 10
"""Iterations below which most curves are not judged."""
SHOWN = 3
"""Pieces of advice shown at a time: the guide changes few things at once."""

History = Iterable[Mapping[str, float]]


@dataclass(frozen=True)
class Advice:
    """One rule that spoke: what it saw in this run, what that usually means, which setting to move first."""

    rule: Rule
    seen: str
    change: Change | None
    meaning: str

    @property
    def stage(self) -> Stage:
        """The rule's stage in the guide."""
        return self.rule.stage

    def __str__(self) -> str:
        """Write it as one or two sentences."""
        return f"{self.seen}: {self.meaning}.{f' {self.change}' if self.change else ''}"


def advise(config: PPOConfig, history: History, rules: Iterable[Rule] = RULES) -> list[Advice]:
    """Return what to change, first things first: before tuning, KL, learning rates and batches, epochs, reward.

    Args:
        config: The run's settings.
        history: One mapping an iteration with the metrics of docs/metrics.md by key, the eval/* ones where the
            iteration was evaluated (NaN or missing elsewhere), and `iteration`. It may be unfinished or empty.
        rules: Those to apply, in this order.

    Returns:
        One item for each rule that speaks; an empty list if all is well, or if the run is too short to say.
    """
    run = Run(config, _curves(config, history))
    found = ((rule, rule.apply(run)) for rule in rules)
    return [
        Advice(rule, finding.seen, finding.change, finding.meaning or rule.meaning)
        for rule, finding in found
        if finding is not None
    ]


def in_words(
    config: PPOConfig, advice: list[Advice], history: Sequence[Mapping[str, float]], most: int | None = SHOWN
) -> list[str]:
    """Return the advice as lines for a person: numbered, one setting once, and whether the run was long enough.

    Args:
        config: The run's settings.
        advice: From `advise`.
        history: As there.
        most: Settings to name at most; None names all.
    """
    lines = []
    iterations = _curves(config, history).iterations
    if iterations < ENOUGH_ITERATIONS:
        lines.append(
            f"{iterations} iteration{'' if iterations == 1 else 's'} of the policy: too early to judge the curves by. "
            f"Advice needs {ENOUGH_ITERATIONS}, some of it {max(rule.iterations for rule in RULES)}."
        )
    elif not advice:
        so_far = " so far" if iterations < max(rule.iterations for rule in RULES) else ""
        lines.append(
            f"Nothing to change{so_far}: over {iterations} iterations no rule of the tuning guide objects to the "
            "curves."
        )
    groups = _by_setting(advice)
    for place, (first, *others) in enumerate(groups[:most], start=1):
        lines.append(f"{place}. [{first.stage.value}: {first.rule.name}] {first}")
        lines.extend(f"   [also {other.rule.name}] {other.seen}: {other.meaning}." for other in others)
    if most is not None and len(groups) > most:
        lines.append(f"{len(groups) - most} more after that: kedro advise --all")
    return lines


def _curves(config: PPOConfig, history: History) -> Curves:
    return Curves(history, config.batch_size, config.critic_warmup_iterations)


def _by_setting(advice: list[Advice]) -> list[list[Advice]]:
    """Return the advice in its order, later items on a setting that is moved already beside the first one.

    A later item that would move it the other way is left out: the guide's order decides.
    """
    groups: list[list[Advice]] = []
    for item in advice:
        group = next((g for g in groups if _same_setting(g[0].change, item.change)), None)
        if group is None:
            groups.append([item])
        elif _same_direction(group[0].change, item.change):
            group.append(item)
    return groups


def _same_setting(first: Change | None, second: Change | None) -> bool:
    return first is not None and second is not None and first.setting == second.setting


def _same_direction(first: Change | None, second: Change | None) -> bool:
    assert first is not None
    assert second is not None
    if first.now is None or isinstance(first.now, str):
        return first.next == second.next
    return (first.next > first.now) == (second.next > second.now)
