"""Wording of a run's numbers and results, the same in the report and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ppo_rlhf.evaluation.equal_reward import CERTAIN
from ppo_rlhf.evaluation.policy import JUDGE_COLUMN
from ppo_rlhf.evaluation.verdict import MIN_PROMPTS, Verdict, read_verdict
from ppo_rlhf.evaluation.win_rate import sign_test
from ppo_rlhf.passes.halvings import ROLLOUT_HALVINGS, UPDATE_HALVINGS
from ppo_rlhf.people.win_rate import BY_JUDGE, OVER_PEOPLE, PREFIX
from ppo_rlhf.supervised.reward_training import RELIABLE_ACCURACY


@dataclass(frozen=True)
class Measure:
    """Format of one row in the table that compares SFT and PPO."""

    label: str
    unit: str = ""
    decimals: int = 2
    is_share: bool = False  # True: write the metric's value in per cent

    @property
    def heading(self) -> str:
        """The label, with the unit in parentheses if there is one."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


COSTLY = 0.1
"""A rise of the perplexity, or a fall of distinct-2, by more than this share is called a cost."""
_KNOWN = {
    "judge_score": Measure("Judge score"),
    "reward": Measure("Reward"),
    "kl": Measure("KL from SFT", "nats per response", 1),
    "greedy_kl": Measure("Log-ratio to SFT of greedy responses (no estimate of the KL)", "nats per response", 1),
    "response_length": Measure("Response length", "tokens", 1),
    "reference_perplexity": Measure("Perplexity of reference texts"),
    "truncated_fraction": Measure("Cut off before a stop token", is_share=True, decimals=1),
    "distinct_1": Measure("Distinct words", "distinct-1", 3),
    "distinct_2": Measure("Distinct word pairs", "distinct-2", 3),
}

_VERDICTS = {
    Verdict.BETTER: "{ours} beats {theirs}",
    Verdict.WORSE: "{ours} loses to {theirs}",
    Verdict.REWARD_ROSE: "The reward rose",
    Verdict.REWARD_FELL: "The reward fell",
    Verdict.NO_CLEAR_DIFFERENCE: "No clear difference between {ours} and {theirs}",
    Verdict.TOO_FEW_PROMPTS: "Too few {compared} to tell {ours} and {theirs} apart",
}


def measure(name: str) -> Measure:
    """Return the format of a measure. An unknown name is the name of one of the user's rate functions."""
    if name.startswith(f"{JUDGE_COLUMN}_"):
        return Measure(f"Judge score, {name.removeprefix(f'{JUDGE_COLUMN}_')}")
    if name.startswith("pass_at_"):
        return Measure(f"pass@{name.removeprefix('pass_at_')}", is_share=True, decimals=1)
    label = name.removesuffix("_rate").replace("_", " ")
    return _KNOWN.get(name) or Measure(label[:1].upper() + label[1:], is_share=True, decimals=1)


def table_rows(before_after: pd.DataFrame) -> list[tuple[Measure, str, str, str]]:
    """Return one row for each measure: SFT's value, PPO's value and the change as text, with standard errors."""
    rows = []
    for row in before_after.to_dict("records"):
        shown = measure(row["measure"])
        sft, ppo = float(row["sft"]), float(row["ppo"])
        sft_error, ppo_error, error = (float(row.get(f"{name}_se", math.nan)) for name in ("sft", "ppo", "change"))
        values = write_value(shown, sft, sft_error), write_value(shown, ppo, ppo_error)
        rows.append((shown, *values, write_change(shown, sft, ppo, error)))
    return rows


def write_value(shown: Measure, value: float, standard_error: float = math.nan) -> str:
    """Return a value as text in the format of its measure, followed by ± the standard error if there is one.

    A standard error of exactly 0 is left out, because it means that all values were equal.
    """
    scale, parts = 100.0 if shown.is_share else 1.0, [value, *([standard_error] if standard_error > 0.0 else [])]
    text = " ± ".join(write_number(scale * part, shown.decimals) for part in parts)
    return text + ("%" if shown.is_share else "")


def write_change(shown: Measure, before: float, after: float, standard_error: float = math.nan) -> str:
    """Return the change of a measure with its sign, followed by ± the standard error if there is one.

    The change of a share is in percentage points.
    """
    scale = 100.0 if shown.is_share else 1.0
    change = (after - before) * scale
    if not math.isfinite(change):
        return "–"
    error = f" ± {write_number(scale * standard_error, shown.decimals)}" if standard_error > 0.0 else ""
    text = f"{change:+.{shown.decimals}f}".replace("-", "−")
    if round(change, shown.decimals) == 0.0:
        text = "0" if error else "±0"
    return text + error + (" points" if shown.is_share else "")


def write_share(value: float, decimals: int = 1) -> str:
    """Return a share in [0, 1] as a percentage."""
    return f"{write_number(100.0 * value, decimals)}%"


def write_number(value: float, decimals: int) -> str:
    """Return a number with a true minus sign, or `–` if it is not finite."""
    return f"{value:z.{decimals}f}".replace("-", "−") if math.isfinite(value) else "–"


def say_verdict(verdict: str, *, ours: str = "PPO", theirs: str = "SFT", compared: str = "held-out prompts") -> str:
    """Return a stored verdict (`evaluation.verdict.read_verdict`) in words, without a full stop.

    `ours` and `theirs` are the names of the two policies, and `compared` says on what the policies were compared.
    """
    return _VERDICTS[read_verdict(verdict)].format(ours=ours, theirs=theirs, compared=compared)


def say_result_by_people(summary: Mapping[str, Any]) -> str:
    """Return the result of `people.win_rate.compare_by_people` in a few sentences.

    With a judge, `summary` must also have the name of the `judge`, and what it `favours`.
    """
    ours, theirs, metrics = summary["ours"], summary["theirs"], summary["metrics"]
    if summary["verdict"] is None:
        return f"Nobody has compared {ours} and {theirs} yet."
    verdict = say_verdict(summary["verdict"], ours=ours, theirs=theirs, compared="answered pairs")
    people = "one person" if summary["people"] == 1 else f"{summary['people']} people"
    pairs = f"{summary['answered']} pairs"
    if summary["prompts"] < summary["answered"]:
        pairs += f" of {summary['prompts']} prompts"
    rate = _by_people(metrics, "win_rate")
    if BY_JUDGE in metrics:
        says = f"{summary['judge']} says {write_share(metrics[BY_JUDGE])} on {summary['pairs']} pairs, corrected"
        text = f"{verdict}: {says} by the answers of {people} on {pairs} {rate}"
        text += "".join(f"; the judge favours {trait}" for trait in summary["favours"]) + "."
    else:
        text = f"{verdict}, decided by {people} on {pairs}: win rate {rate}."
    text += f" Verdict and interval hold for {'this person' if summary['people'] == 1 else 'these people'} only."
    if f"{PREFIX}{OVER_PEOPLE}" in metrics:
        text += f" Over people like these, the win rate is {_by_people(metrics, OVER_PEOPLE)}."
    if f"{PREFIX}agreement" in metrics:
        text += f" The agreement of the people (Krippendorff's alpha) is {metrics[f'{PREFIX}agreement']:.2f}."
    return text


def _by_people(metrics: Mapping[str, float], name: str) -> str:
    rate, low, high = (100 * metrics[f"{PREFIX}{name}{end}"] for end in ("", "_low", "_high"))
    return f"{rate:.1f}% (95% interval {low:.1f}% to {high:.1f}%)"


def headline(summary: Mapping[str, Any]) -> str:
    """Return the result of the final evaluation in one sentence. `summary` is the dataset `evaluation_summary`."""
    rate, low, high = (write_share(summary[f"eval/win_rate{end}"]) for end in ("", "_low", "_high"))
    prompts, samples = summary["prompts"], summary.get("samples_per_prompt", 1)
    pairs = "" if samples == 1 else f"{prompts * samples:,} pairs of responses to "
    other_judges = []
    for key, value in summary.items():
        if key.startswith("eval/win_rate_") and not key.endswith(("_low", "_high")):
            ends = f"{write_share(summary[f'{key}_low'])} to {write_share(summary[f'{key}_high'])}"
            other_judges.append(f" {key.removeprefix('eval/win_rate_')} {write_share(value)} ({ends})")
    better = "scores higher" if summary["by_trained_reward"] else "is the better one"
    return (
        f"PPO's response {better} on {rate} of {pairs}{prompts:,} held-out prompts "
        f"(95% interval {low} to {high}; ties count half), decided by {summary['decided_by']}."
        + (f" By other judges:{','.join(other_judges)}." if other_judges else "")
        + say_perplexity(summary)
    )


def say_perplexity(summary: Mapping[str, Any]) -> str:
    """Return a sentence, after a space, on the change of the reference texts' perplexity; "" if chance explains it.

    Chance explains a change if its 95 % interval contains 0. A single text has no interval.
    """
    change, low, high = (summary.get(f"eval/reference_nll_change{end}", math.nan) for end in ("", "_low", "_high"))
    if not (low > 0.0 or high < 0.0):
        return ""
    before, after = (write_number(summary[f"eval/reference_perplexity{side}"], 2) for side in ("_sft", ""))
    nats = f"{change:+.2g} nats a token, 95% interval {low:.2g} to {high:.2g}".replace("-", "−")
    return (
        f" On {summary['reference_texts']:,} reference texts the perplexity {'rose' if low > 0.0 else 'fell'} from "
        f"{before} to {after} ({nats})."
    )


def say_stop(summary: Mapping[str, Any]) -> str:
    """Return a sentence, after a space, on the evaluation that stopped a run; "" if none did."""
    if (exported := summary.get("exported_iteration")) is None:
        return ""
    policy = f"that of iteration {exported}" if exported else "SFT's"
    after = summary["stopped_after"]
    return f" evaluation.on_exploitation stopped training after iteration {after}; the policy is {policy}."


def remarks(
    summary: Mapping[str, Any],
    before_after: pd.DataFrame,
    reward_model_accuracy: tuple[float, float, float] | None = None,
) -> list[str]:
    """Return one sentence for each problem in the result of a run.

    `summary` and `before_after` come from the node `compare_policies`. If the run trained a reward model,
    `reward_model_accuracy` is its accuracy on held-out pairs with the ends of its interval. The tuning advice
    (docs/tuning.md), not the remarks, judges KL, clipping, the critic and lengths, and says which setting to change.
    """
    means = before_after.set_index("measure")[["sft", "ppo"]].to_dict("index")
    verdict = read_verdict(summary["verdict"])
    unchosen = summary.get("unchosen_prompts")
    problems = []
    if (exported := summary.get("exported_iteration")) is not None:
        policy = f"of iteration {exported}, its best evaluation"
        if not exported:
            policy = "from before training, so PPO and SFT are the same policy here"
        problems.append(
            f"Training stopped after iteration {summary['stopped_after']}, because the policy exploited its reward: "
            "the judge's score had fallen since its best evaluation, and the reward had not. The policy of this report "
            f"is the one {policy}."
        )
    if unchosen is not None:
        problems.append(_say_choice(summary["choice_prompts"], unchosen))
    if verdict == Verdict.NO_CLEAR_DIFFERENCE and exported != 0:
        problems.append(
            "The win rate's interval contains 50%, so these prompts cannot tell the two policies apart. More held-out "
            "prompts (prompts.held_out_share, prompts.max_held_out) make the interval narrower."
        )
    elif verdict == Verdict.TOO_FEW_PROMPTS and (unchosen is None or unchosen >= MIN_PROMPTS):
        problems.append(
            f"PPO won {summary['wins']} held-out prompts and lost {summary['losses']}. Equal policies would differ by "
            f"that much with probability {sign_test(summary['wins'], summary['losses']):.2g}, and with fewer than "
            f"{MIN_PROMPTS} prompts no winner is named. More held-out prompts (prompts.held_out_share, "
            "evaluation_prompts_path) can tell the two policies apart."
        )
    elif verdict in (Verdict.WORSE, Verdict.REWARD_FELL) and not summary.get("exploits"):
        problems.append(f"{say_verdict(verdict)}. Look at the KL curve and the samples first.")
    if summary.get("exploits"):
        problems.append(
            "The judge's score fell significantly since its best evaluation, and the reward did not: the policy "
            "exploits its reward."
        )
    elif summary.get("eval/judge_gap_p", 1.0) < CERTAIN and summary["eval/judge_gap"] < 0.0:
        problems.append(
            f"At equal reward the judge scores PPO's responses {-summary['eval/judge_gap']:.3g} lower than SFT's "
            f"({summary['eval/judge_gap_prompts']} prompts; by chance with probability "
            f"{summary['eval/judge_gap_p']:.2g}): the reward pays PPO for something that the judge does not."
        )
    elif (least := summary.get("untested_p")) is not None:
        problems.append(
            "The evaluations during training had too few prompts to show whether the judge's score fell since its best "
            f"evaluation: even a fall on every prompt would happen by chance with probability {least:.2g}. Each "
            "further held-out prompt (evaluation.iteration_prompts, prompts.held_out_share) halves this probability."
        )
    passes = {"rollouts": summary.get(ROLLOUT_HALVINGS), "updates": summary.get(UPDATE_HALVINGS)}
    if halved := [f"{name} computed 1/{2**count}" for name, count in passes.items() if count]:
        problems.append(
            f"Memory ran out while training: {' and '.join(halved)} of their responses at a time. The next run can "
            "begin so (docs/memory.md)."
        )
    if trained := summary.get("trained_prompts"):
        problems.append(f"PPO trained on {trained:,} of the evaluation prompts: they are not held-out.")
    if verdict == Verdict.REWARD_ROSE:
        problems.append(
            "The reward that PPO was trained on also decides the win rate, so the win rate cannot show that PPO "
            "exploits the reward. Set evaluation.judge to another function, and read the samples."
        )
    if costs := _costs(summary, means.get("distinct_2")):
        problems.append(f"{' '.join(costs)} Read the samples to see whether the result is worth it.")
    grammatical = means.get("grammatical_rate")
    if grammatical is not None and grammatical["ppo"] < 0.95 * grammatical["sft"]:
        problems.append(f"{measure('grammatical_rate').label} responses fell below 95% of SFT's rate.")
    if reward_model_accuracy is not None and reward_model_accuracy[2] < RELIABLE_ACCURACY:
        share, low, high = map(write_share, reward_model_accuracy)
        problems.append(
            f"The reward model is right on only {share} of its held-out pairs (95% interval {low} to {high}), so PPO "
            "can raise the reward without writing better text."
        )
    return problems


def say_holes(holes: Sequence[str]) -> list[str]:
    """Return a sentence that names the holes that an audit found in the reward of the run; none without holes."""
    if not holes:
        return []
    return [
        f"The audit of this reward found {len(holes)} hole{'s' if len(holes) > 1 else ''}: it scores answers without "
        f"worth ({', '.join(holes)}) above SFT's. Look for such answers in the samples."
    ]


def _costs(summary: Mapping[str, Any], distinct: Mapping[str, float] | None) -> list[str]:
    """Return a sentence on what PPO made worse, beside what it was trained for, by more than COSTLY."""
    costs, rise = [], math.expm1(summary.get("eval/reference_nll_change", 0.0))
    if summary.get("eval/reference_nll_change_low", 0.0) > 0.0 and rise > COSTLY:
        costs.append(
            f"The perplexity of the reference texts is {write_share(rise, 0)} higher, which is bad: PPO finds texts "
            "like these less probable than SFT does."
        )
    if distinct is not None and distinct["sft"] > 0.0 and (fall := 1.0 - distinct["ppo"] / distinct["sft"]) > COSTLY:
        costs.append(
            f"The share of distinct word pairs is {write_share(fall, 0)} lower, which is bad: PPO's responses repeat "
            "each other more than SFT's."
        )
    return costs


def _say_choice(choice: int, unchosen: int) -> str:
    """Return what a policy that was chosen by its scores on some prompts is compared on."""
    chosen = f"The policy was chosen by its scores on {choice:,} held-out prompts, where noise favoured it"
    if unchosen >= MIN_PROMPTS:
        return f"{chosen}: verdict, win rate and table are of the {unchosen:,} others."
    return (
        f"{chosen}. The {unchosen:,} others are too few for a verdict, which needs {MIN_PROMPTS}: win rate and table "
        "are of all prompts, and too favourable."
    )


def result_section(headline: str, before_after: pd.DataFrame, notes: Sequence[str]) -> str:
    """Return the result in Markdown: the headline, the table that compares SFT and PPO, and the notes."""
    rows = [f"| {' | '.join([shown.heading, *values])} |" for shown, *values in table_rows(before_after)]
    table = ["| Held-out mean ± standard error | SFT | PPO | change |", "|---|---:|---:|---:|", *rows]
    return "\n\n".join([headline, "\n".join(table), *notes])
