"""The report as one self-contained HTML page, which contains plotly's script and loads nothing from the network.

Jinja escapes all text from models, data files and configuration.
"""

from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from plotly import graph_objects as go

from ppo_rlhf.core.escaped_text import escaped
from ppo_rlhf.reporting.charts import column
from ppo_rlhf.reporting.wording import write_number, write_share

PLOTLY = Path(__file__).parent / "plotly" / "plotly-basic.min.js"
"""plotly.js with only the chart types that the report uses, a quarter of the size of the script in Python's plotly."""
MAX_TEXT = 2_000
"""Largest number of characters of a prompt or response on the report page; the table of samples has the full text."""


def render_page(**content: object) -> str:
    """Return the report page as HTML. `content` gives the variables of the template `report.html`.

    Raises:
        jinja2.UndefinedError: `content` lacks a variable of the template.
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


def embed(figure: go.Figure, *, height: str | None = None) -> Markup:
    """Return a figure as an HTML fragment. plotly escapes markup in the figure's texts.

    `height` is a CSS height that replaces the figure's own.
    """
    options: Any = {"config": {"displayModeBar": False, "responsive": True}, "default_height": height or "100%"}
    if height is not None:
        figure = go.Figure(figure).update_layout(height=None)
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, **options))


def shorten(text: str, *, keep_end: bool = False) -> str:
    """Return the first MAX_TEXT characters of a text, or the last MAX_TEXT characters with `keep_end`.

    Characters that are not visible as themselves are written out.
    """
    if len(text) > MAX_TEXT:
        return f"… {escaped(text[-MAX_TEXT:])}" if keep_end else f"{escaped(text[:MAX_TEXT])} …"
    return escaped(text) if text.strip() else "(empty)"


def training_note(history: pd.DataFrame) -> str:
    """Return the length of the training in words: iterations, episodes and time."""
    episodes, seconds = column(history, "episode"), float(np.nansum(column(history, "time/iteration_s")))
    note = f"{len(history):,} iterations"
    if np.isfinite(episodes).any():
        note += f", {int(np.nanmax(episodes)):,} episodes"
    if seconds > 0:
        note += f", {seconds:.0f} seconds" if seconds < 120 else f", {seconds / 60:.0f} minutes"
    return note
