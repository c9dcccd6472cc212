"""Bars and lines as SVG, by hand: figures in the documentation need no library for plots.

Every plot is a text that a browser shows as it is. Its colours are told apart also by who does not see red and green;
its background is drawn, for pages that are dark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH = 860
LABELS = 320  # on the left, for the names of rows
MARGIN = 20
BAR = 14
GAP = 12
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#555555", "#b8a900")
STYLE = "font-family: system-ui, sans-serif; font-size: 12px"


@dataclass(frozen=True)
class Row:
    """One group of bars: what it is about, and a value for each series that has one."""

    label: str
    values: Mapping[str, float]


def bars(title: str, rows: Sequence[Row], *, form: str = "{:,.0f}", is_log: bool = False) -> str:
    """Lying bars. On a logarithmic scale they grow from 1, to the right for more and to the left for less."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    colours = dict(zip(names, COLOURS * len(names), strict=False))
    scale = _LogScale(rows) if is_log else _Scale(rows)
    parts, y = [_text(MARGIN, 24, title, weight="bold"), _legend(colours, 44)], 68.0
    for row in rows:
        parts.append(_text(MARGIN, y + len(row.values) * BAR / 2 + 4, row.label))
        for name, value in row.values.items():
            left, right = sorted((scale.origin, scale.at(value)))
            parts.append(_rect(left, y, max(right - left, 1), BAR - 2, colours[name]))
            parts.append(_text(right + 4, y + BAR - 4, form.format(value)))
            y += BAR
        y += GAP
    parts.append(_line([(scale.origin, 60), (scale.origin, y - GAP + 4)], "#888888"))
    return _svg(parts, y)


def lines(title: str, series: Mapping[str, Sequence[float]], *, unit: str, height: int = 190, of: str = "s") -> str:
    """Over time, one sample a second."""
    colours = dict(zip(series, COLOURS, strict=False))
    highest = max((max(values) for values in series.values() if values), default=1.0) or 1.0
    longest = max((len(values) for values in series.values()), default=1)
    left, right, bottom = 70.0, WIDTH - MARGIN * 2.0, 64.0 + height
    parts = [_text(MARGIN, 24, title, weight="bold"), _legend(colours, 44)]
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * height
        parts.append(_line([(left, y), (right, y)], "#dddddd"))
        parts.append(_text(MARGIN, y + 4, f"{highest * share:,.3g} {unit}"))
    for name, values in series.items():
        step = (right - left) / max(longest - 1, 1)
        points = [(left + at * step, bottom - value / highest * height) for at, value in enumerate(values)]
        parts.append(_line(points, colours[name], width=1.5))
    parts.append(_text(left, bottom + 18, f"0 {of}"))
    parts.append(_text(right - 40, bottom + 18, f"{longest} {of}"))
    return _svg(parts, bottom + 30)


class _Scale:
    """From 0 to the largest value."""

    origin: float = LABELS

    def __init__(self, rows: Sequence[Row]) -> None:
        self._most = max((value for row in rows for value in row.values.values()), default=1.0) or 1.0

    def at(self, value: float) -> float:
        return LABELS + value / self._most * _ROOM


class _LogScale:
    """1 stands where the smallest value leaves room for it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        logs = [math.log(value) for row in rows for value in row.values.values() if value > 0]
        self._least = min([0.0, *logs])
        self._span = max([0.0, *logs]) - self._least or 1.0
        self.origin = self.at(1.0)

    def at(self, value: float) -> float:
        return LABELS + (math.log(value) - self._least) / self._span * _ROOM if value > 0 else LABELS


_ROOM = WIDTH - LABELS - MARGIN - 60  # for bars, and the figure behind the longest


def _svg(parts: Sequence[str], height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" style="{STYLE}">'
    return "\n".join([head, _rect(0, 0, WIDTH, height, "#ffffff"), *parts, "</svg>", ""])


def _legend(colours: Mapping[str, str], y: float) -> str:
    parts, x = [], float(MARGIN)
    for name, colour in colours.items():
        parts += [_rect(x, y - 9, 10, 10, colour), _text(x + 14, y, name)]
        x += 30 + 7 * len(name)
    return "\n".join(parts)


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" fill="#222222">{escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.0) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
