"""The report as one self-contained page: plotly's script is in the page, and nothing is fetched.

Jinja escapes every text that a model, a data file or a configuration wrote.
"""

from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from plotly import graph_objects as go

from ppo_rlhf.reporting.charts import column
from ppo_rlhf.reporting.wording import write_number, write_share

PLOTLY = Path(__file__).parent / "plotly" / "plotly-basic.min.js"
"""A quarter of the script that Python's plotly brings; it has bars and scatters, all that the charts use."""
MAX_TEXT = 2_000
"""Characters of a prompt or response that the page shows; the table of samples holds all."""


def render_page(**content: object) -> str:
    """Return the page as HTML text; `content` has the names that `report.html` uses.

    Raises:
        jinja2.UndefinedError: A name is missing.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ppo_rlhf.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"share": write_share, "number": write_number, "shorten": shorten, "embed": embed}
    return environment.get_template("report.html").render(
        plotly_js=Markup(PLOTLY.read_text(encoding="utf-8")), **content
    )


def embed(figure: go.Figure) -> Markup:
    """Return a figure as a part of the page; plotly escapes markup in the figure's texts."""
    config = {"displayModeBar": False, "responsive": True}
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def shorten(text: str, *, keep_end: bool = False) -> str:
    """Return at most MAX_TEXT characters from the start, or from the end."""
    if len(text) > MAX_TEXT:
        return f"… {text[-MAX_TEXT:]}" if keep_end else f"{text[:MAX_TEXT]} …"
    return text if text.strip() else "(empty)"


def training_note(history: pd.DataFrame) -> str:
    """Return how long the training was."""
    episodes, seconds = column(history, "episode"), float(np.nansum(column(history, "time/iteration_s")))
    note = f"{len(history):,} iterations"
    if np.isfinite(episodes).any():
        note += f", {int(np.nanmax(episodes)):,} episodes"
    if seconds > 0:
        note += f", {seconds:.0f} seconds" if seconds < 120 else f", {seconds / 60:.0f} minutes"
    return note
