"""The plots that Kedro-Viz previews and MLflow keeps, as plotly figures."""

from __future__ import annotations

import math

import pandas as pd
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from ppo_rlhf.pipelines.reporting.curves import column, panels_of

_COLOURS = ("#2f6fde", "#d9822b")
_COLUMNS = 3
# plotly stores numpy arrays in a binary form that older viewers cannot read: lists are understood by all.


def training_curves(history: pd.DataFrame) -> go.Figure:
    """Return every curve of training over iterations as small multiples, each with its own y axis."""
    panels = panels_of(history)
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    titles = [f"{panel.title} ({panel.unit})" for panel in panels]
    figure = make_subplots(
        rows=rows, cols=_COLUMNS, subplot_titles=titles, vertical_spacing=0.4 / rows, horizontal_spacing=0.07
    )
    iterations = column(history, "iteration").tolist()
    for place, panel in enumerate(panels):
        where = {"row": place // _COLUMNS + 1, "col": place % _COLUMNS + 1}
        for (key, label), colour in zip(panel.curves, _COLOURS, strict=False):
            figure.add_trace(
                go.Scatter(
                    x=iterations,
                    y=[value if math.isfinite(value) else None for value in column(history, key).tolist()],
                    name=f"{panel.title}: {label}",
                    mode="lines+markers" if len(history) < 30 else "lines",
                    connectgaps=True,
                    line={"color": colour, "width": 2},
                ),
                **where,
            )
        if panel.floor is not None:
            figure.update_yaxes(range=[panel.floor, max(panel.include)], **where)
    figure.update_layout(
        height=60 + 230 * rows, showlegend=False, template="plotly_white", margin={"l": 50, "r": 20, "t": 50, "b": 40}
    )
    figure.update_annotations(font_size=12)
    return figure


def score_distribution(sft_scores: list[float], ppo_scores: list[float], score_label: str) -> go.Figure:
    """Return the histograms of both policies' scores on the held-out prompts, one over the other."""
    figure = go.Figure(
        [
            go.Histogram(x=scores, name=name, opacity=0.6, nbinsx=30, histnorm="probability", marker_color=colour)
            for name, scores, colour in (("SFT", sft_scores, _COLOURS[1]), ("PPO", ppo_scores, _COLOURS[0]))
        ]
    )
    figure.update_layout(
        barmode="overlay",
        template="plotly_white",
        xaxis_title=score_label,
        yaxis_title="share of responses",
        title=f"{score_label} on the held-out prompts",
        height=420,
    )
    return figure
