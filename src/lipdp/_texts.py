"""What people read, the same everywhere: numbers, promises (rounded up), what may not be published, tables and figures."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table

NEIGHBOURS = {"add_remove": "adding or removing one record", "replace_one": "replacing one record by any other"}
REPRODUCIBLE = (
    "NOT PRIVATE: a reproducible run. Whoever knows its seed can subtract the noise; its epsilon is that of a secret key."
)
_WIDTH = 140  # of a table as text
_LONG = 1e15  # numbers that nobody reads digit by digit


def number(value: float | None, digits: int = 4) -> str:
    """A number to so many digits; "–" where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.{digits}g}"


def bound(value: float, digits: int = 4) -> str:
    """A bound of an activation, a cotangent or a gradient; "–" where none is proved."""
    return number(value if math.isfinite(value) else None, digits)


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent; "–" where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"


def upwards(value: float, digits: int = 4) -> str:
    """A number to so many significant digits, rounded *up*: a guarantee must not look better than it is."""
    if not math.isfinite(value) or value == 0:
        return _unrounded(value)
    if abs(value) >= _LONG:
        return brief(value, digits)
    rounded = Decimal(f"{value:.12g}")  # 3.0000000000000004 is a 3 spoilt by rounding
    for _ in range(2):  # twice: 0.9999 becomes 1.000 and then 1.00
        rounded = rounded.quantize(Decimal(1).scaleb(min(0, rounded.adjusted() - digits + 1)), rounding=ROUND_CEILING)
    return f"{rounded:f}"


def brief(value: float | None, digits: int = 6) -> str:
    """A number rounded *up*, as short as it can be written: 3, 0.1, 1e-05. For δ, and for what was asked for."""
    return "–" if value is None else _short(value, digits, ROUND_CEILING)


def downwards(value: float, digits: int = 4) -> str:
    """A number rounded *down*, as short as it can be written: what is left of a budget, what an attack has shown."""
    return _short(value, digits, ROUND_FLOOR)


def _short(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value) or value == 0:
        return _unrounded(value)
    exact = Decimal(f"{value:.12g}")
    return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding=rounding)):.{digits}g}"


def _unrounded(value: float) -> str:
    return "∞" if value == math.inf else f"{value:g}"


def guarantee(epsilon: float, delta: float) -> str:
    """The text "ε = 3.000, δ = 1e-05", both rounded up: what may be said of a run without saying too much.

    Args:
        epsilon: what was spent, e.g. ``history.epsilon``.
        delta: of the plan.
    """
    return f"ε = {upwards(epsilon)}, δ = {brief(delta)}"


def source(public: bool) -> str:
    """Whether figures that were computed without noise may be published: what their records are."""
    if public:
        return "public data"
    return "NOT PRIVATE: computed from the records without noise. Do not publish it, unless the data are public."


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    footer: Sequence[str] = (),
) -> Table:
    """A table for rich; the columns named in ``right`` are numbers, those in ``whole`` are never folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    lines = list(rows)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=bool(footer))
    for place, header in enumerate(headers):
        below = footer[place] if footer else ""
        least = max(map(len, (below, *(line[place] for line in lines)))) if header in whole else None
        grid.add_column(
            header,
            footer=below,
            justify="right" if header in right else "left",
            overflow="fold",
            no_wrap=header in whole,
            min_width=least,
        )
    for line in lines:
        grid.add_row(*map(Text, line))  # Text: what stands in brackets is no markup
    return grid


def text_table(headers: Sequence[str], rows: Iterable[Sequence[str]], **columns: Any) -> str:
    """:func:`table` as plain text."""
    from rich.console import Console

    text, grid = io.StringIO(), table(headers, rows, **columns)
    own = Console(file=text, width=10**5, highlight=False, markup=False, color_system=None)
    own.width = max(_WIDTH, own.measure(grid).minimum)  # what may not be folded is not cut off either
    own.print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def figure(what: str, width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches; ``what`` asks for it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"{what} needs matplotlib: pip install 'lipdp[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def saved(drawn: Any, path: str | Path | None) -> Any:
    """The figure, written to a file where one is named."""
    if path is not None:
        drawn.savefig(path, dpi=150)
    return drawn
