"""Figures as inline SVG: no scripts, no fonts from elsewhere, as wide as the page lets them be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#0b5fa5", "#b3480f", "#2d7d46", "#7a3e9d", "#8a6d00", "#5b5b5b")
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 16, 44


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, title: str) -> str:
    """Lines through points, one for each name; points that are no numbers are left out.

    Args:
        series: (x, y) by name.
        x: what the horizontal axis is.
        y: what the vertical axis is.
        title: for those who can't see the figure.
    """
    kept = {name: [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)] for name, points in series.items()}
    everything = [point for points in kept.values() for point in points]
    if not everything:
        return ""
    across, up = (_ticks([point[axis] for point in everything]) for axis in (0, 1))
    parts = [_axes(across, up, x, y)]
    for place, (name, points) in enumerate(kept.items()):
        colour = COLOURS[place % len(COLOURS)]
        spots = [(_place(a, across, _LEFT, _WIDTH - _RIGHT), _place(b, up, _HEIGHT - _BOTTOM, _TOP)) for a, b in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in spots]
        if len(kept) > 1:
            parts.append(_text(_LEFT + 8, _TOP + 14 + 16 * place, name, anchor="start", fill=colour))
    return _figure(parts, title, _HEIGHT)


def bars(values: Mapping[str, float], *, y: str, title: str, notes: Mapping[str, str] | None = None) -> str:
    """A horizontal bar for each name, with its value beside it.

    Args:
        values: by name, not negative.
        y: what the values are.
        title: for those who can't see the figure.
        notes: what to write behind a value.
    """
    finite = {name: value for name, value in values.items() if math.isfinite(value) and value >= 0}
    if not finite:
        return ""
    largest = max(finite.values()) or 1.0
    parts = [_text(_LEFT, 14, y, anchor="start")]
    for place, (name, value) in enumerate(finite.items()):
        top = 26 + 34 * place
        length = max(1.0, value / largest * (_WIDTH - 2 * _RIGHT - 150))
        note = f" {notes[name]}" if notes and name in notes else ""
        parts += [
            _text(_RIGHT, top + 10, _short(name), anchor="start"),
            f'<rect x="{_RIGHT}" y="{top + 14}" width="{length:.1f}" height="12" fill="{COLOURS[0]}"/>',
            _text(_RIGHT + length + 6, top + 24, f"{value:.3g}{note}", anchor="start"),
        ]
    return _figure(parts, title, 34 + 34 * len(finite))


def matrix(counts: Sequence[Sequence[int]], names: Sequence[str], *, title: str) -> str:
    """A confusion matrix: true classes down, predicted ones across, darker where there are more of a row.

    Args:
        counts: by true and predicted class.
        names: of the classes.
        title: for those who can't see the figure.
    """
    size = len(names)
    if not size or len(counts) != size:
        return ""
    cell = min(48.0, (_WIDTH - 120) / size)
    letters = max(9.0, min(13.0, cell / 2.6))
    parts = []
    for row, (name, own) in enumerate(zip(names, counts, strict=True)):
        total = sum(own) or 1
        y = 34 + row * cell
        parts.append(_text(112, y + cell / 2 + 4, _short(name, 14), anchor="end"))
        for column, count in enumerate(own):
            share, x = count / total, 118 + column * cell
            shade = round(255 - 185 * share)
            tint = f"rgb({shade},{shade},255)"
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}" fill="{tint}" stroke="#fff"/>')
            if count:
                ink = "#fff" if share > 0.6 else "#111"
                parts.append(_text(x + cell / 2, y + cell / 2 + letters / 3, str(count), fill=ink, size=letters))
    for column, name in enumerate(names):
        parts.append(_text(118 + (column + 0.5) * cell, 26, _short(name, max(2, int(cell / 7))), size=letters))
    parts.append(_text(118, 12, "predicted →, true ↓", anchor="start"))
    return _figure(parts, title, math.ceil(40 + size * cell))


def _figure(parts: Sequence[str], title: str, height: int) -> str:
    return (
        f'<svg class="figure" role="img" viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", fill: str = "#333", size: float = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:.0f}" fill="{fill}">{escape(text)}</text>'


def _short(name: str, most: int = 60) -> str:
    return name if len(name) <= most else name[: max(1, most - 1)] + "…"


def _axes(across: Sequence[float], up: Sequence[float], x: str, y: str) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value in up:
        place = _place(value, up, bottom, _TOP)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, place + 4, f"{value:g}", anchor="end"))
    for value in across:
        place = _place(value, across, _LEFT, right)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#333"/>')
        parts.append(_text(place, bottom + 18, f"{value:g}"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, x))
    middle = (_TOP + bottom) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle:.0f})">{_text(14, middle, y)}</g>')
    return "".join(parts)


def _place(value: float, ticks: Sequence[float], start: float, stop: float) -> float:
    low, high = ticks[0], ticks[-1]
    return start + (value - low) / (high - low) * (stop - start)


def _ticks(values: Sequence[float]) -> list[float]:
    """About five round numbers that enclose the values."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = (0.0, 2 * high) if high > 0 else (low - 1, low + 1)
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= min((factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (factor * step) <= 5), default=10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]
