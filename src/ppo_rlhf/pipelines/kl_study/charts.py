"""The two plots of the KL study."""

from __future__ import annotations

import pandas as pd
from plotly import graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from ppo_rlhf.pipelines.reporting.charts import COLOURS, GREY, style


def kl_figure(history: pd.DataFrame, results: pd.DataFrame) -> go.Figure:
    """Return the KL over iterations, a line for each training; a dashed line is the adaptive controller's target.

    Args:
        history: `setting`, `iteration` and `objective/kl`.
        results: One row a training, in the order of the legend.
    """
    figure = go.Figure()
    for name, colour in _colours(results).items():
        own = history[history["setting"] == name]
        figure.add_scatter(
            x=own["iteration"].tolist(),
            y=own["objective/kl"].tolist(),
            name=name,
            mode="lines",
            line={"color": colour, "width": 2},
        )
    style(figure, height=380, showlegend=True)
    for target in results["kl_target"].dropna():
        figure.add_hline(target, line={"dash": "dash", "color": GREY, "width": 1})
    figure.update_layout(xaxis_title="iteration", yaxis_title="KL from SFT (nats a response)", margin_b=40, margin_l=60)
    figure.update_yaxes(rangemode="tozero")
    return figure


def frontier_figure(results: pd.DataFrame, best_of_n: pd.DataFrame) -> go.Figure:
    """Return the mean reward, and beside it the judge's score, over the KL from SFT: each training, and best-of-n.

    Args:
        results: `setting`, `kl_controller`, `kl`, `reward`, and `judge_score` if there is a judge.
        best_of_n: `n`, `kl`, and the same scores.
    """
    titles = {"reward": "Reward, which PPO maximises", "judge_score": "Judge score, which it never sees"}
    shown = {name: title for name, title in titles.items() if name in results and name in best_of_n}
    figure = make_subplots(1, len(shown), subplot_titles=list(shown.values()), horizontal_spacing=0.08)
    ppo = results.sort_values("kl")
    sides = [*["bottom right"] * (len(ppo) - 1), "bottom left"]  # the last label stays inside the plot
    symbols = ["circle" if kind == "fixed" else "diamond" for kind in ppo["kl_controller"]]
    for place, name in enumerate(shown, 1):
        for label, frame, texts, colour, marker in (
            ("PPO", ppo, ppo["setting"], COLOURS[0], {"size": 9, "symbol": symbols}),
            ("best-of-n by the reward", best_of_n, best_of_n["n"].map("n = {}".format), COLOURS[1], {"size": 5}),
        ):
            figure.add_scatter(
                x=frame["kl"].tolist(),
                y=frame[name].tolist(),
                text=texts.tolist(),
                name=label,
                mode="lines+markers+text" if label == "PPO" else "lines+markers",
                textposition=sides if label == "PPO" else None,
                line={"color": colour, "width": 2},
                marker=marker,
                showlegend=place == 1,
                row=1,
                col=place,
            )
    style(figure, height=380, showlegend=True)
    figure.update_layout(margin={"t": 60, "b": 40}, legend_y=1.08)
    figure.update_annotations(font_size=12)
    figure.update_xaxes(title_text="KL from SFT (nats a response)", rangemode="tozero")
    return figure


def _colours(results: pd.DataFrame) -> dict[str, str]:
    """Return a colour for each training: a scale over the betas, and one apart for the adaptive controller."""
    fixed = results[results["kl_controller"] == "fixed"]["setting"].tolist()
    scale = sample_colorscale("Viridis", [0.85 * i / max(1, len(fixed) - 1) for i in range(len(fixed))])
    return dict.fromkeys(results["setting"], COLOURS[1]) | dict(zip(fixed, scale, strict=True))
