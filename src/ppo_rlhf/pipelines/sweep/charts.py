"""Chart of a sweep."""

import pandas as pd
from plotly import graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from ppo_rlhf.pipelines.reporting.charts import GREY, style
from ppo_rlhf.studies.sweep import MEASURES


def frontier_figure(table: pd.DataFrame, best_of_n: pd.DataFrame | None) -> go.Figure:
    """Return judge score, win rate and reward over the KL that they cost: a point a setting, and best-of-n's curve.

    Bars are the standard deviations over the seeds.

    Args:
        table: From `studies.sweep.compare_settings`.
        best_of_n: From `evaluation.best_of_n.best_of_n_curve`.
    """
    shown = {name: title.capitalize() for name, title in MEASURES.items() if name in table and name != "kl"}
    figure = make_subplots(1, len(shown), subplot_titles=list(shown.values()), horizontal_spacing=0.08)
    table = table.dropna(subset="kl").fillna(0.0)
    colours = sample_colorscale("Turbo", [(i + 0.5) / len(table) for i in range(len(table))])
    for place, name in enumerate(shown, 1):
        where = {"row": 1, "col": place, "showlegend": place == 1}
        if best_of_n is not None and name in best_of_n:
            curve = {"x": best_of_n["kl"].tolist(), "y": best_of_n[name].tolist(), "text": best_of_n["n"].tolist()}
            figure.add_scatter(**curve, name="best-of-n", legendgroup="best-of-n", line_color=GREY, **where)
        for row, colour in zip(table.to_dict("records"), colours, strict=True):
            figure.add_scatter(
                x=[row["kl"]],
                y=[row[name]],
                error_x={"array": [row["kl_sd"]]},
                error_y={"array": [row[f"{name}_sd"]]},
                mode="markers",
                marker={"size": 9, "color": colour},
                name=row["setting"],
                legendgroup=row["setting"],
                **where,
            )
    style(figure, height=380 + 8 * len(table), showlegend=True)
    legend = {"orientation": "h", "x": 0, "y": -0.25, "yanchor": "top"}
    figure.update_layout(margin={"t": 40, "b": 40}, legend=legend)
    figure.update_annotations(font_size=12)
    figure.update_xaxes(title_text="KL from SFT (nats a response)", rangemode="tozero")
    return figure
