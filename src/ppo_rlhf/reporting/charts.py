"""Plotly charts of a run, for the report, Kedro-Viz and MLflow.

Text and grid are grey on a transparent background. No grey has enough contrast on light and on dark pages, so the
report and Kedro-Viz give the text a colour of their own. Values are passed as lists, because plotly stores arrays in a
binary form that older viewers cannot read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from plotly import graph_objects as go
from plotly.subplots import make_subplots
from pydantic import Field

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import parameter_group

MAX_POINTS = 400
"""Largest number of points of a curve. Longer curves are thinned, which keeps the report page small."""
COLOURS = ("#2f6fde", "#d9822b", "#3a9d5d")
_COLUMNS = 3
_TRANSPARENT, GREY, _GRID = "rgba(0, 0, 0, 0)", "#7d8590", "rgba(128, 128, 128, 0.25)"
_TEXT = "#5d6570"  # has a contrast of 6 on white; GREY, for lines, of 3.7


@parameter_group("reporting.expected_curve")
class ExpectedCurve:
    """A reference curve, for example from a published run, that the report draws beside the run's own curve."""

    metric: str
    """Metric of the curve, such as eval/judge_score (docs/metrics.md)."""
    label: str
    """Name of the curve in the chart."""
    points: Annotated[list[tuple[float, float]], Field(min_length=1)]
    """Pairs of iteration and value."""


@dataclass(frozen=True)
class Panel:
    """One small chart: metrics of one unit over iterations."""

    title: str
    unit: str
    curves: Mapping[str, str]  # metric key of each curve, with the curve's label
    explanation: str
    band: tuple[str, str] | None = None  # metric keys of the lower and upper edge of the chart's shaded band
    level: float | None = None  # value of a dashed horizontal line, which is drawn only if a curve comes near it
    limit: str | None = None  # name of the PPO setting whose value is the dashed line's level
    # Settings of the chart's y axis, as plotly takes them
    y_axis: Mapping[str, Any] = field(default_factory=lambda: {"rangemode": "tozero"})
    expected: ExpectedCurve | None = None  # reference curve, which is drawn dotted


PANELS = (
    Panel(
        "Score",
        "reward before the KL penalty",
        {"objective/scores": "mean"},
        "The score (shaded: 5th to 95th percentile) should rise, then level off. Compare the samples.",
        band=("objective/scores_p05", "objective/scores_p95"),
        y_axis={},
    ),
    Panel(
        "KL from SFT",
        "nats per response",
        {"objective/kl": "mean over responses"},
        "How far the policy moved from SFT. Above ppo.kl_warning (dashed if near) a policy often exploits its reward.",
        limit="kl_warning",
    ),
    Panel(
        "Held-out win rate",
        "ties count half",
        {"eval/win_rate": "win rate"},
        "PPO against SFT on prompts that PPO never trained on (shaded: 95% interval). One half (dashed) means equal.",
        band=("eval/win_rate_low", "eval/win_rate_high"),
        level=0.5,
        y_axis={"autorangeoptions": {"include": [0.4, 1.0]}},
    ),
    Panel(
        "Entropy",
        "nats per token",
        {"objective/entropy": "mean over tokens"},
        "How random the policy is. Entropy falls during training; entropy near 0 means that all responses are alike.",
    ),
    Panel(
        "Clip fraction",
        "share of tokens",
        {"policy/clipfrac_avg": "policy", "val/clipfrac_avg": "value"},
        "Share of tokens whose update was clipped. Above about 0.3 the updates are too large.",
    ),
    Panel(
        "Explained variance",
        "of the returns",
        {"val/explained_variance": "critic"},
        "How well the critic predicts the return: 1 is perfect, 0 is as good as a constant. The axis ends at −1.",
        y_axis={"autorangeoptions": {"include": [0.0, 1.0], "clipmin": -1.0}},
    ),
    Panel(
        "Policy loss",
        "clipped surrogate",
        {"loss/policy_avg": "mean over the iteration"},
        "The level of the policy loss means little; look for jumps.",
        y_axis={},
    ),
    Panel(
        "Value loss",
        "half squared error",
        {"loss/value_avg": "mean over the iteration"},
        "The value loss should fall as the critic learns.",
    ),
    Panel(
        "Update size",
        "nats per token",
        {"policy/approxkl_avg": "one iteration's update"},
        "Approximate KL between the policy before and after the update of one iteration.",
    ),
    Panel(
        "Response length",
        "tokens",
        {"response/length": "mean over responses"},
        "A steady rise or fall often means that the reward depends on length.",
    ),
    Panel(
        "Cut off",
        "share of responses",
        {"response/truncated_fraction": "no stop token"},
        "Responses that reached the length limit before a stop token.",
    ),
    Panel(
        "Gradient norm",
        "before clipping",
        {"policy/grad_norm": "policy", "value/grad_norm": "value"},
        "Spikes show unstable batches.",
    ),
)


def panels_of(history: pd.DataFrame, ppo: PPOConfig, expected: ExpectedCurve | None = None) -> list[Panel]:
    """Return the panels and curves for which the training history has numbers.

    If the metric of `expected` was measured, the expected curve gets its own panel, the first panel of the report page.
    """
    panels, shown = [*PANELS], []
    if expected is not None:
        explanation = f"Dotted: {expected.label}. The two curves should have similar values at the same iteration."
        own, title = {expected.metric: "this run"}, "Beside the expected curve"
        panels.insert(0, Panel(title, expected.metric, own, explanation, y_axis={}, expected=expected))
    for panel in panels:
        curves = {key: label for key, label in panel.curves.items() if np.isfinite(column(history, key)).any()}
        if curves:
            level = panel.level if panel.limit is None else getattr(ppo, panel.limit)
            shown.append(replace(panel, curves=curves, level=level))
    return shown


def column(history: pd.DataFrame, key: str) -> NDArray[np.float64]:
    """Return the values of a metric by iteration, NaN where the metric was not measured."""
    return pd.to_numeric(history.reindex(columns=[key])[key], errors="coerce").to_numpy(dtype=np.float64)


def panel_figure(panel: Panel, history: pd.DataFrame) -> go.Figure:
    """Return one panel (a small chart of metrics) as a separate figure."""
    figure = go.Figure()
    _draw(figure, panel, history)
    drawn = len(panel.curves) if panel.expected is None else len(panel.curves) + 1
    style(figure, height=232, showlegend=drawn > 1)
    figure.update_layout(margin_b=34)
    return figure


def training_curves(history: pd.DataFrame, ppo: PPOConfig, expected: ExpectedCurve | None = None) -> go.Figure:
    """Return the training curves: all panels as small multiples in one figure, several curves named in the title."""
    panels = panels_of(history, ppo, expected)
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    titles = [f"{panel.title} ({panel.unit}){_names(panel)}" for panel in panels]
    figure = make_subplots(rows, _COLUMNS, subplot_titles=titles, vertical_spacing=0.4 / rows, horizontal_spacing=0.07)
    for place, panel in enumerate(panels):
        _draw(figure, panel, history, row=place // _COLUMNS + 1, col=place % _COLUMNS + 1)
    style(figure, height=60 + 230 * rows, showlegend=False)
    figure.update_layout(margin_t=50)
    figure.update_annotations(font_size=12)
    return figure


def first_curves(curves: go.Figure) -> go.Figure:
    """Return the first four panels of `training_curves`, two in a row, which can be read at 400 by 300 pixels.

    Kedro-Viz draws a figure at that size before it shows it on the whole screen, and gives the first axes another text
    size than all others: this figure has no first axes.
    """
    titles, width, height = curves.layout.annotations[:4], 0.44, 0.39
    figure = go.Figure()
    style(figure, height=460, showlegend=False)
    for place, title in enumerate(titles):
        old, new = str(place + 1) if place else "", str(place + 2)
        left, top = place % 2 * (1.0 - width), 1.0 - place // 2 * (height + 0.22)
        for trace in curves.data:
            if trace.yaxis == f"y{old}":
                figure.add_trace(trace)
                figure.data[-1].update(xaxis=f"x{new}", yaxis=f"y{new}")
        for line in curves.layout.shapes:
            if line.yref == f"y{old}":
                figure.add_shape(line.to_plotly_json() | {"xref": f"x{new} domain", "yref": f"y{new}"})
        for axis, domain in (("x", (left, left + width)), ("y", (top - height, top))):
            other = "y" if axis == "x" else "x"
            drawn = curves.layout[f"{axis}axis{old}"].to_plotly_json()
            figure.layout[f"{axis}axis{new}"] = {**drawn, "domain": domain, "anchor": f"{other}{new}", "title": None}
        name = re.sub(r" \(.*?\)", "", title.text, count=1)
        at = {"x": left, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        figure.add_annotation({"text": name, "showarrow": False, **at})
    figure.update_layout(margin_t=25)
    return figure


def _names(panel: Panel) -> str:
    """Return the names of several curves after squares of their colours, for viewers that draw no legend."""
    named = [*zip(panel.curves.values(), COLOURS, strict=False)]
    named += [("expected", COLOURS[1])] if panel.expected is not None else []
    return ": " + " ".join(f"{_square(colour)} {name}" for name, colour in named) if len(named) > 1 else ""


def _square(colour: str) -> str:
    return f'<span style="color: {colour}">■</span>'


def score_distribution(sft_scores: Sequence[float], ppo_scores: Sequence[float], score_label: str) -> go.Figure:
    """Return overlaid histograms of both policies' scores on the held-out prompts."""
    figure, edges = go.Figure(), np.histogram_bin_edges([*sft_scores, *ppo_scores], bins=30)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    sides = ("SFT", sft_scores, COLOURS[1]), ("PPO", ppo_scores, COLOURS[0])
    for name, scores, colour in sides:
        shares = np.histogram(scores, edges)[0] / len(scores)
        figure.add_bar(x=middles, y=shares.tolist(), name=name, opacity=0.6, marker_color=colour)
    label = f"{score_label}: {' '.join(f'{_square(colour)} {name}' for name, _, colour in sides)}"
    style(figure, height=300, showlegend=False)
    figure.update_layout(barmode="overlay", bargap=0, xaxis_title=label, yaxis_title="share of responses", margin_b=40)
    return figure


def _draw(figure: go.Figure, panel: Panel, history: pd.DataFrame, **cell: int) -> None:
    """Add a panel's band, curves and level to a figure, or to one cell of a figure with several plots."""
    if panel.band is not None:
        x, low = _points(history, panel.band[0])
        _, high = _points(history, panel.band[1])
        if len(low) == len(high) > 1:
            figure.add_scatter(
                x=x + x[::-1],
                y=high + low[::-1],
                fill="toself",
                fillcolor="rgba(47, 111, 222, 0.16)",
                line_width=0,
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                **cell,
            )
    highest = -math.inf
    for (key, label), colour in zip(panel.curves.items(), COLOURS, strict=False):
        x, y = _points(history, key)
        highest = max([highest, *y])
        mode = "lines+markers" if len(x) < 30 else "lines"
        figure.add_scatter(x=x, y=y, name=label, mode=mode, line={"color": colour, "width": 2}, **cell)
    if panel.expected is not None:
        x, y = map(list, zip(*panel.expected.points, strict=True))
        dots = {"color": COLOURS[1], "width": 2, "dash": "dot"}
        figure.add_scatter(x=x, y=y, name="expected", mode="lines+markers", line=dots, **cell)
    if panel.level is not None and highest > 0.6 * panel.level:
        figure.add_hline(panel.level, line={"dash": "dash", "color": GREY, "width": 1}, **cell)
    # Few ticks, so that plotly labels the x axis with whole iterations
    name = {"text": "iteration", "standoff": 4, "font_size": 10}
    figure.update_xaxes(nticks=min(6, max(1, len(history))), title=name, **cell)
    figure.update_yaxes(panel.y_axis, **cell)


def _points(history: pd.DataFrame, key: str) -> tuple[list[float], list[float]]:
    """Return the measured points of a curve, at most MAX_POINTS points."""
    y = column(history, key)
    keep = np.flatnonzero(np.isfinite(y))
    if len(keep) > MAX_POINTS:
        keep = keep[np.linspace(0, len(keep) - 1, MAX_POINTS).round().astype(int)]
    return column(history, "iteration")[keep].tolist(), y[keep].tolist()


def style(figure: go.Figure, *, height: int, showlegend: bool) -> None:
    """Give a figure the report's style: grey on a transparent background, and no prefixes such as µ at its numbers."""
    figure.update_layout(
        template="none",
        height=height,
        showlegend=showlegend,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        margin={"l": 45, "r": 12, "t": 25 if showlegend else 8, "b": 22},
        paper_bgcolor=_TRANSPARENT,
        plot_bgcolor=_TRANSPARENT,
        font={"color": _TEXT, "size": 11},
        dragmode=False,  # without plotly's drag mode, a finger on a chart scrolls the page
    )
    figure.update_xaxes(gridcolor=_GRID, zeroline=False)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False, exponentformat="e", minexponent=4, automargin=True)
