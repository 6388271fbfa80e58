"""Plots as SVG, drawn by hand: a page needs no library, and a file opens anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 380, 80, 36, 190, 46
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#e08214")
_ROW, _NAMES = 24, 210

Points = Sequence[tuple[float, float]]


def curves(series: Mapping[str, Points], title: str, across: str, upwards: str) -> str:
    """One line a series, both axes logarithmic: times over sizes and scales span many powers."""
    known = {name: [point for point in points if min(point) > 0] for name, points in series.items()}
    xs = [x for points in known.values() for x, _ in points]
    ys = [y for points in known.values() for _, y in points]
    if not xs:
        return ""
    x_axis, y_axis = _Axis(xs, _LEFT, _WIDTH - _RIGHT), _Axis(ys, _HEIGHT - _BOTTOM, _TOP)
    drawn = [f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>']
    for x in sorted(set(xs)):
        at = x_axis.place(x)
        drawn.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    for y in y_axis.ticks():
        at = y_axis.place(y)
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e7ec"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for number, (name, points) in enumerate(known.items()):
        paint = _COLOURS[number % len(_COLOURS)]
        placed = [(x_axis.place(x), y_axis.place(y)) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{paint}" stroke-width="2"/>')
        for (x, y), (given_x, given_y) in zip(placed, sorted(points), strict=True):
            said = escape(f"{name}: {given_y:.4g} at {given_x:g}")
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{paint}"><title>{said}</title></circle>')
        row = _TOP + 18 * number
        drawn.append(f'<rect x="{_WIDTH - _RIGHT + 16}" y="{row}" width="12" height="12" fill="{paint}"/>')
        drawn.append(f'<text x="{_WIDTH - _RIGHT + 34}" y="{row + 11}">{escape(name[:24])}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>')
    drawn.append(f'<text x="8" y="{_TOP - 2}">{escape(upwards)}</text>')
    return _svg(_WIDTH, _HEIGHT, drawn)


def bars(values: Mapping[str, tuple[float, float, float]], title: str, unit: str) -> str:
    """One bar a name, (median, low, high) each: the bar ends at the median, a thin line spans the interval."""
    longest = max((high for _, _, high in values.values()), default=0.0)
    if longest <= 0:
        return ""
    scale = (_WIDTH - _NAMES - 110) / longest
    drawn = [f'<text x="8" y="18" font-size="14">{escape(title)}</text>']
    for number, (name, (median, low, high)) in enumerate(values.items()):
        top, paint = 30 + number * _ROW, _COLOURS[number % len(_COLOURS)]
        middle = top + _ROW / 2 - 2
        drawn += [
            f'<text x="{_NAMES - 8}" y="{middle + 4}" text-anchor="end">{escape(name[:32])}</text>',
            f'<rect x="{_NAMES}" y="{top}" width="{max(1.0, median * scale):.1f}" height="{_ROW - 6}" fill="{paint}"/>',
            f'<line x1="{_NAMES + low * scale:.1f}" x2="{_NAMES + high * scale:.1f}" y1="{middle}" y2="{middle}"'
            ' stroke="#1c2330" stroke-width="1.5"/>',
            f'<text x="{_NAMES + high * scale + 8:.1f}" y="{middle + 4}">{median:.4g} {escape(unit)}</text>',
        ]
    return _svg(_WIDTH, 40 + len(values) * _ROW, drawn)


class _Axis:
    """A logarithmic axis between two places on the paper."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = math.log10(min(values)), math.log10(max(values))
        if self._high - self._low < 0.3:  # less than a factor of two: leave some air
            self._low, self._high = self._low - 0.15, self._high + 0.15
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        return self._start + (math.log10(value) - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        steps = (
            (1, 1.5, 2, 3, 5, 7) if self._high - self._low < 1 else (1, 2, 5) if self._high - self._low < 2 else (1,)
        )
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        found = [step * 10.0**power for power in powers for step in steps]
        return [one for one in found if self._low - 1e-9 <= math.log10(one) <= self._high + 1e-9]


def _svg(width: int, height: int, drawn: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *drawn,
            "</svg>",
        ]
    )
