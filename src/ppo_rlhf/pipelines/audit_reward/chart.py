"""The plot of the audit."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from ppo_rlhf.pipelines.reporting.charts import COLOURS, GREY, style

_LABELS = {"reward": "by the reward itself", "judge_score": "by the judge"}
_TITLES = ("Best-of-n, picked by the reward: gain over n = 1", "Change of the reward by a cheap trick")


def audit_figure(best_of_n: pd.DataFrame, deviations: Mapping[str, float], probes: pd.DataFrame) -> go.Figure:
    """Return two charts in standard deviations of a score among the responses to one prompt.

    Args:
        best_of_n: `n`, and a column for each score.
        deviations: Of each score that is shown.
        probes: `probe`, `suffix` and `change`.
    """
    figure = make_subplots(1, 2, subplot_titles=_TITLES, horizontal_spacing=0.2)
    for (name, deviation), colour in zip(deviations.items(), COLOURS, strict=False):
        gains = (best_of_n[name] - best_of_n[name].iloc[0]) / deviation
        figure.add_scatter(
            x=best_of_n["n"].tolist(),
            y=gains.tolist(),
            name=_LABELS[name],
            mode="lines+markers",
            line={"color": colour, "width": 2},
            row=1,
            col=1,
        )
    texts = [
        f"{probe}: {suffix}" if suffix else probe
        for probe, suffix in zip(probes["probe"], probes["suffix"], strict=True)
    ]
    figure.add_bar(
        x=probes["change"].tolist(), y=texts, orientation="h", marker_color=COLOURS[0], showlegend=False, row=1, col=2
    )
    style(figure, height=340, showlegend=True)
    figure.update_layout(margin={"t": 60, "b": 40}, legend_y=1.08)
    figure.update_annotations(font_size=12)
    figure.add_vline(0, line={"color": GREY, "width": 1}, row=1, col=2)
    figure.update_xaxes(title_text="n", type="log", tickvals=best_of_n["n"].tolist(), row=1, col=1)
    figure.update_xaxes(title_text="standard deviations", row=1, col=2)
    figure.update_yaxes(title_text="standard deviations", row=1, col=1)
    return figure
