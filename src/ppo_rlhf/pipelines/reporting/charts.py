"""Charts as inline SVG: a few kilobytes each, no script, coloured by the page's style sheet so that dark mode works."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 34
_MAX_POINTS = 240
"""Longer curves are thinned: more points than pixels only make the page heavy."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """A curve; NaN marks x where nothing was measured, and the line joins its neighbours."""

    label: str
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    """Ends of the band drawn behind the curve."""


@dataclass(frozen=True)
class LineChart:
    """Curves over a shared x axis."""

    title: str
    unit: str
    x: Numbers
    series: Sequence[Series]
    x_label: str = "iteration"
    level: float | None = None
    """A horizontal reference line, drawn where the curves come near it."""
    floor: float | None = None
    """Lower end of the y axis however low the curves go; the note under the chart says so."""
    include: Sequence[float] = field(default_factory=tuple)
    """Values that the y axis must hold."""


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) that enclose [low, high]."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # ticks between values that only rounding parts would be equal
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1.0, 2.0, 5.0, 10.0) if raw <= factor * power * (1.0 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]  # 0.3, not 0.30000000000000004


def line_chart(chart: LineChart) -> str:
    """Return the chart as an SVG element with a text alternative."""
    drawn = [_thinned(chart.x, series) for series in chart.series]
    values = np.concatenate([part[np.isfinite(part)] for _, *parts in drawn for part in parts if part is not None])
    low, high = float(values.min()), float(values.max())
    low, high = min([low, *chart.include]), max([high, *chart.include])
    is_cut = chart.floor is not None and low < chart.floor < high
    if is_cut:
        low = float(chart.floor or 0.0)
    shows_level = chart.level is not None and high > 0.6 * chart.level
    if shows_level and chart.level is not None:
        high = max(high, chart.level)
    ticks = [tick for tick in nice_ticks(low, high) if not is_cut or tick >= low]
    x_ticks = _x_ticks(chart.x)
    to_x, to_y = _Scale(x_ticks[0], x_ticks[-1], _LEFT, WIDTH - _RIGHT), _Scale(ticks[0], ticks[-1], *_Y_SPAN)
    parts = [_y_axis(ticks, to_y), _x_axis(x_ticks, to_x, chart.x_label)]
    if shows_level and chart.level is not None:
        parts.append(f'<path class="level" d="M{_LEFT} {to_y(chart.level)}H{WIDTH - _RIGHT}"/>')
    for number, (x, y, band_low, band_high) in enumerate(drawn, start=1):
        if band_low is not None and band_high is not None:
            parts.append(_band(x, band_low, band_high, to_x, to_y, number))
        parts.append(_curve(x, y, to_x, to_y, number))
    return _svg(parts, _alternative(chart), low if is_cut else None)


def histogram(before: Numbers, after: Numbers, labels: tuple[str, str], x_label: str, bins: int = 24) -> str:
    """Return two overlaid histograms with shared bins, as shares of the responses, as an SVG element."""
    both = np.concatenate([before, after])
    ticks = nice_ticks(float(both.min()), float(both.max()), 5)
    edges = np.linspace(ticks[0], ticks[-1], bins + 1)
    shares = [np.histogram(values, edges)[0] / max(len(values), 1) for values in (before, after)]
    y_ticks = nice_ticks(0.0, float(max(share.max() for share in shares)))
    to_x, to_y = _Scale(ticks[0], ticks[-1], _LEFT, WIDTH - _RIGHT), _Scale(y_ticks[0], y_ticks[-1], *_Y_SPAN)
    parts = [_y_axis(y_ticks, to_y, as_share=True), _x_axis(ticks, to_x, x_label)]
    for number, share in zip((2, 1), shares, strict=True):  # before is drawn in the second colour
        outline = "".join(f"V{to_y(height)}H{to_x(right)}" for height, right in zip(share, edges[1:], strict=True))
        parts.append(f'<path class="step s{number}" d="M{to_x(edges[0])} {to_y(0.0)}{outline}V{to_y(0.0)}"/>')
    means = " and ".join(
        f"{label} with mean {values.mean():.3g}" for label, values in zip(labels, (before, after), strict=True)
    )
    return _svg(parts, f"Histograms of {x_label}: {means}.")


def interval_bar(rate: float, low: float, high: float) -> str:
    """Return a bar from 0 to 100 % with the rate, its interval and the 50 % line, as an SVG element."""
    to_x = _Scale(0.0, 1.0, 8, 412)
    ticks = "".join(
        f'<text class="tick" x="{to_x(share)}" y="44" text-anchor="middle">{share:.0%}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    return (
        '<svg class="interval" viewBox="0 0 420 48" role="img" '
        f'aria-label="Win rate {rate:.1%}, 95% interval {low:.1%} to {high:.1%}">'
        f'<path class="grid" d="M{to_x(0.0)} 18H{to_x(1.0)}"/><path class="level" d="M{to_x(0.5)} 4V32"/>'
        f'<path class="span" d="M{to_x(low)} 18H{to_x(high)}"/><circle class="dot s1" cx="{to_x(rate)}" cy="18" r="6"/>'
        f"{ticks}</svg>"
    )


class _Scale:
    """Maps values to coordinates, written with one decimal: a tenth of a pixel is enough."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self._low, self._per_unit = low, (stop - start) / (high - low)
        self._start, self._ends = start, (min(start, stop), max(start, stop))

    def __call__(self, value: float) -> str:
        place = self._start + (value - self._low) * self._per_unit
        return f"{min(max(place, self._ends[0]), self._ends[1]):.1f}".removesuffix(".0")


_Y_SPAN = (HEIGHT - _BOTTOM, _TOP)


def _x_ticks(x: Numbers) -> list[float]:
    low, high = float(x.min()), float(x.max())
    if high <= low:
        return [low - 1.0, low, low + 1.0]
    inside = [tick for tick in nice_ticks(low, high, 5) if low < tick < high and tick == round(tick)]
    crowd = 0.08 * (high - low)  # the ends are always named; what would touch them is not
    return [low, *(tick for tick in inside if tick - low > crowd and high - tick > crowd), high]


def _thinned(x: Numbers, series: Series) -> tuple[Numbers, Numbers, Numbers | None, Numbers | None]:
    is_measured = np.isfinite(series.y)
    keep = np.flatnonzero(is_measured)
    if len(keep) > _MAX_POINTS:
        keep = keep[np.unique(np.linspace(0, len(keep) - 1, _MAX_POINTS).round().astype(int))]

    def kept(values: Numbers | None) -> Numbers | None:
        return None if values is None else values[keep]

    return x[keep], series.y[keep], kept(series.low), kept(series.high)


def _curve(x: Numbers, y: Numbers, to_x: _Scale, to_y: _Scale, number: int) -> str:
    points = [f"{to_x(a)} {to_y(b)}" for a, b in zip(x, y, strict=True)]
    line = f'<path class="line s{number}" d="M{"L".join(points)}"/>' if len(points) > 1 else ""
    end = points[-1].split(" ")
    return f'{line}<circle class="dot s{number}" cx="{end[0]}" cy="{end[1]}" r="3"/>'


def _band(x: Numbers, low: Numbers, high: Numbers, to_x: _Scale, to_y: _Scale, number: int) -> str:
    is_whole = np.isfinite(low) & np.isfinite(high)
    upper = [f"{to_x(a)} {to_y(b)}" for a, b in zip(x[is_whole], high[is_whole], strict=True)]
    lower = [f"{to_x(a)} {to_y(b)}" for a, b in zip(x[is_whole], low[is_whole], strict=True)]
    return f'<path class="band s{number}" d="M{"L".join(upper + lower[::-1])}Z"/>' if len(upper) > 1 else ""


def _y_axis(ticks: Sequence[float], to_y: _Scale, *, as_share: bool = False) -> str:
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    return "".join(
        f'<path class="grid" d="M{_LEFT} {to_y(tick)}H{WIDTH - _RIGHT}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{to_y(tick)}" dy="0.35em" text-anchor="end">'
        f"{_tick(tick * 100, step * 100) + '%' if as_share else _tick(tick, step)}</text>"
        for tick in ticks
    )


def _x_axis(ticks: Sequence[float], to_x: _Scale, label: str) -> str:
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=1.0)
    base = HEIGHT - _BOTTOM
    names = "".join(
        f'<text class="tick" x="{to_x(tick)}" y="{base + 14}" text-anchor="middle">{_tick(tick, step)}</text>'
        for tick in ticks
    )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return (
        f'<path class="axis" d="M{_LEFT} {base}H{WIDTH - _RIGHT}"/>{names}'
        f'<text class="tick" x="{middle:g}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(label)}</text>'
    )


def _tick(value: float, step: float) -> str:
    """Return a tick as short as its step allows: 0.05, 10, 2e-5, 20k."""
    if value == 0.0 or abs(value) < step * 1e-6:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e7:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    if step >= 1000:
        return f"{value / 1000:g}k".replace("-", "−")
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}".replace("-", "−")


def _alternative(chart: LineChart) -> str:
    ends = []
    for series in chart.series:
        measured = series.y[np.isfinite(series.y)]
        ends.append(f"{series.label} from {measured[0]:.3g} to {measured[-1]:.3g}")
    return f"{chart.title} by {chart.x_label}: {'; '.join(ends)}."


def _svg(parts: Sequence[str], alternative: str, cut_at: float | None = None) -> str:
    note = ""
    if cut_at is not None:
        note = (
            f'<text class="tick" x="{WIDTH - _RIGHT}" y="{HEIGHT - _BOTTOM - 6}" text-anchor="end">'
            f"values below {_tick(cut_at, 1.0)} lie on the edge</text>"
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(alternative, quote=True)}">'
        f"{''.join(parts)}{note}</svg>"
    )
