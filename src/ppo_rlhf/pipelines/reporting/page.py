"""The report as one self-contained page: no script, nothing fetched, readable on paper, phone and in the dark.

Whatever a model, a data file or a person's configuration wrote passes through `html.escape` on its way in.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

import numpy as np
import pandas as pd

from ppo_rlhf.pipelines.reporting.charts import LineChart, Series, histogram, interval_bar, line_chart
from ppo_rlhf.pipelines.reporting.curves import Panel, column, panels_of
from ppo_rlhf.pipelines.reporting.measures import measure, write_change, write_number, write_share, write_value
from ppo_rlhf.pipelines.reporting.remarks import headline, remarks, verdict
from ppo_rlhf.ppo.comparison import Decided

MAX_TEXT = 2_000
"""Characters of a prompt or response that the page shows; the table of samples holds all."""


@dataclass(frozen=True)
class Report:
    """Everything the page is made of."""

    title: str
    summary: Mapping[str, float]
    """The eval/* metrics."""
    prompts: int
    """Held-out prompts that were answered."""
    decided_by: str
    """Who decided the win rate, as it reads in a sentence."""
    before_after: pd.DataFrame
    history: pd.DataFrame
    sample_pairs: pd.DataFrame
    sft_scores: Sequence[float]
    ppo_scores: Sequence[float]
    score_label: str
    settings: Sequence[tuple[str, str, str]]
    """Name, value here, default."""
    next_steps: Sequence[tuple[str, str]]
    """What to look at, and the path or command."""
    reward_model_accuracy: float | None = None
    advice: Sequence[str] = ()
    """What to change first, one line each."""

    @property
    def decided(self) -> Decided:
        """Prompts that were won and lost."""
        return Decided.of(self.ppo_scores, self.sft_scores)


def render_page(report: Report) -> str:
    """Return the page as HTML text."""
    template = importlib.resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(report.title),
        verdict=escape(verdict(report.summary, report.decided)),
        headline=escape(headline(report.summary, report.prompts, report.decided_by)),
        interval=interval_bar(*(report.summary[f"eval/win_rate{end}"] for end in ("", "_low", "_high"))),
        remarks=_remarks(report),
        before_after=_before_after(report),
        distribution=_distribution(report),
        training_note=_training_note(report.history),
        charts="".join(_panel(panel, report.history) for panel in panels_of(report.history)),
        advice=_advice(report.advice),
        samples_note=(
            "The first ones were drawn at random. The last ones are the widest wins and the widest losses: "
            "they show the extremes, not the rule."
        ),
        samples="".join(_sample(row, report.score_label) for row in report.sample_pairs.to_dict("records")),
        settings=_settings(report.settings),
        next_steps=_next_steps(report.next_steps),
    )


def _remarks(report: Report) -> str:
    found = remarks(report.summary, report.decided, report.before_after, report.reward_model_accuracy)
    if not found:
        return '<p class="soft">Nothing looks off in the result. The samples below are the better judge.</p>'
    return f'<ul class="remarks">{"".join(f"<li>{escape(remark)}</li>" for remark in found)}</ul>'


def _before_after(report: Report) -> str:
    rows = "".join(
        f"<tr><th>{_name(row['measure'])}</th><td>{write_value(row['measure'], row['sft'])}</td>"
        f"<td>{write_value(row['measure'], row['ppo'])}</td>"
        f"<td>{write_change(row['measure'], row['sft'], row['ppo'])}</td></tr>"
        for row in report.before_after.to_dict("records")
    )
    accuracy = ""
    if report.reward_model_accuracy is not None:
        accuracy = (
            '<p class="unit">The reward model prefers the better response on '
            f"{write_share(report.reward_model_accuracy)} of its held-out pairs.</p>"
        )
    return (
        "<table><thead><tr><th>Mean over responses</th><th>SFT</th><th>PPO</th><th>Change</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>{accuracy}"
    )


def _name(name: str) -> str:
    shown = measure(name)
    return escape(shown.label) + (f' <span class="unit">{escape(shown.unit)}</span>' if shown.unit else "")


def _distribution(report: Report) -> str:
    chart = histogram(
        np.asarray(report.sft_scores, dtype=np.float64),
        np.asarray(report.ppo_scores, dtype=np.float64),
        ("SFT", "PPO"),
        report.score_label,
    )
    return (
        f"<figure><figcaption><b>{escape(report.score_label)} of each response</b>"
        '<span class="key s1">PPO</span><span class="key s2">SFT</span></figcaption>'
        f"{chart}<p>Share of the held-out prompts.</p></figure>"
    )


def _training_note(history: pd.DataFrame) -> str:
    episodes, seconds = column(history, "episode"), column(history, "time/iteration_s")
    note = f"{len(history):,} iterations"
    if np.isfinite(episodes).any():
        note += f", {int(np.nanmax(episodes)):,} episodes"
    if np.isfinite(seconds).any():
        note += f", {_duration(float(np.nansum(seconds)))}"
    return f"{note}. MLflow has every metric; these are the ones to look at first."


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _advice(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    kinds = ((' class="also"' if line.startswith(" ") else "", line.strip()) for line in lines)
    shown = "".join(f"<p{kind}>{escape(line)}</p>" for kind, line in kinds)
    return f'<h2>What to change first</h2><div class="card advice">{shown}</div>'


def _panel(panel: Panel, history: pd.DataFrame) -> str:
    low, high = (column(history, key) for key in panel.band) if panel.band else (None, None)
    series = [
        Series(label, column(history, key), *((low, high) if place == 0 else (None, None)))
        for place, (key, label) in enumerate(panel.curves)
    ]
    chart = LineChart(
        title=panel.title,
        unit=panel.unit,
        x=column(history, "iteration"),
        series=series,
        level=panel.level,
        floor=panel.floor,
        include=panel.include,
    )
    keys = "".join(
        f'<span class="key s{number}">{escape(label)}</span>' for number, (_, label) in enumerate(panel.curves, start=1)
    )
    caption = f'<b>{escape(panel.title)}</b><span class="unit">{escape(panel.unit)}</span>'
    if len(panel.curves) > 1:
        caption += f"<br>{keys}"
    return f"<figure><figcaption>{caption}</figcaption>{line_chart(chart)}<p>{escape(panel.explanation)}</p></figure>"


def _sample(row: Mapping[str, object], score_label: str) -> str:
    outcome, chosen = str(row["outcome"]), str(row["chosen"])
    sides = "".join(
        f'<div class="side s{number}"><b>{name}</b> <span class="unit">{escape(score_label.lower())} '
        f"{write_number(float(str(row[f'{key}_score'])), 2)}</span>"
        f'<p class="response">{_text(row[f"{key}_response"])}</p></div>'
        for name, key, number in (("SFT", "sft", 2), ("PPO", "ppo", 1))
    )
    return (
        f'<article class="card sample"><span class="tag {escape(outcome)}">PPO: {escape(outcome)}</span> '
        f'<span class="unit">{escape(chosen)}</span><p class="prompt">{_text(row["prompt"], keep_end=True)}</p>'
        f'<div class="sides">{sides}</div></article>'
    )


def _text(value: object, *, keep_end: bool = False) -> str:
    text = str(value)
    if len(text) > MAX_TEXT:  # a prompt's end is what the response answers
        text = f"… {text[-MAX_TEXT:]}" if keep_end else f"{text[:MAX_TEXT]} …"
    return escape(text) if text.strip() else '<span class="unit">(empty)</span>'


def _settings(settings: Sequence[tuple[str, str, str]]) -> str:
    rows = "".join(
        f'<tr><td><code>{escape(name)}</code></td><td class="words"><code>{escape(value)}</code></td>'
        f'<td class="words"><code>{escape(default)}</code></td></tr>'
        for name, value, default in settings
    )
    head = '<tr><th>Setting</th><th style="text-align:left">Here</th><th style="text-align:left">Default</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _next_steps(next_steps: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(what)}</dt><dd><code>{escape(where)}</code></dd>" for what, where in next_steps)
    return f"<dl>{rows}</dl>"
