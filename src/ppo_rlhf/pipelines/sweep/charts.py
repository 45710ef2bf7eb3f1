"""Chart of a sweep."""

import pandas as pd
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from ppo_rlhf.pipelines.reporting.charts import COLOURS, style
from ppo_rlhf.studies.sweep import MEASURES


def sweep_figure(table: pd.DataFrame) -> go.Figure:
    """Return a panel for each measure: the mean of each setting, with the standard deviation over its seeds.

    Args:
        table: From `spread_over_seeds`.
    """
    shown = {name: text for name, text in MEASURES.items() if name in table}
    figure = make_subplots(1, len(shown), subplot_titles=list(shown.values()), shared_yaxes=True)
    for place, name in enumerate(shown, 1):
        figure.add_scatter(
            x=table[name].tolist(),
            y=table["setting"].tolist(),
            error_x={"array": table[f"{name}_sd"].fillna(0.0).tolist()},
            mode="markers",
            marker={"color": COLOURS[0], "size": 8},
            row=1,
            col=place,
        )
    style(figure, height=120 + 30 * len(table), showlegend=False)
    figure.update_layout(margin={"t": 40, "l": 20})
    figure.update_yaxes(automargin=True, autorange="reversed")
    return figure
