"""How things are printed: numbers, tables, plans, JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lipdp.training import PrivacyPlan

__all__ = [
    "NEIGHBOURS",
    "console",
    "duration",
    "guarantee",
    "number",
    "print_fields",
    "print_json",
    "print_plan",
    "table",
    "upwards",
]

NEIGHBOURS = {"add_remove": "adding or removing one record", "replace_one": "replacing one record"}
_WIDTH = 100  # where there is no terminal to ask


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or 100 columns into a pipe."""
    from rich.console import Console

    own = Console(stderr=stderr, highlight=False)
    return own if own.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH)


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on one line of stdout, the last thing a command prints. Infinities and NaN become null."""
    typer.echo(json.dumps(_finite(content), ensure_ascii=False))
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


def number(value: float) -> str:
    """A number for a table, to four digits."""
    return "∞" if math.isinf(value) else f"{value:.4g}"


def upwards(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, rounded *up*: a guarantee must not look better than it is."""
    if not math.isfinite(value) or value == 0:
        return "∞" if math.isinf(value) else f"{value:g}"
    rounded = Decimal(f"{value:.12g}")  # 3.0000000000000004 is a 3 spoilt by rounding
    for _ in range(2):  # twice: 0.9999 becomes 1.000 and then 1.00
        rounded = rounded.quantize(Decimal(1).scaleb(min(0, rounded.adjusted() - digits + 1)), rounding=ROUND_CEILING)
    return f"{rounded:f}"


def guarantee(epsilon: float, delta: float) -> str:
    """The text (ε = 3.00, δ = 1e-05)."""
    return f"(ε = {upwards(epsilon)}, δ = {delta:g})"


def duration(seconds: float) -> str:
    """The text 4.2 s, 41 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


def table(
    headers: Iterable[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = (), whole: Iterable[str] = (), **options: Any
) -> Table:
    """A table in the style of all commands; the columns named in ``right`` are numbers, those in ``whole`` are never folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    numeric, unbroken, lines = set(right), set(whole), list(rows)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, **options)
    for number, header in enumerate(headers):
        justify: Literal["left", "right"] = "right" if header in numeric else "left"
        least = max((len(line[number]) for line in lines), default=0) if header in unbroken else None
        grid.add_column(header, justify=justify, overflow="fold", no_wrap=header in unbroken, min_width=least)
    for row in lines:
        grid.add_row(*row)
    return grid


def print_fields(where: Console, fields: Iterable[tuple[str, str]]) -> None:
    """Names and values, each on its line; long values are folded inside their column."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in fields:
        # Text: what stands in brackets is no markup.
        grid.add_row(Text("  " + name, style="cyan", no_wrap=True), Text(value))
    where.print(grid)


def print_plan(where: Console, plan: PrivacyPlan) -> None:
    """A plan: what it guarantees, what it does, and a row for each parameter."""
    from lipdp.planning.table import grid_line, signal_line
    from lipdp.planning.table import table as groups

    batches = f"Poisson batches of {plan.batch_size:,} expected"
    if plan.sampling == "fixed_size":
        batches = f"batches of {plan.batch_size:,} without replacement"
    elif plan.largest_batch is not None:
        batches += f" and {plan.largest_batch:,} at most"
    where.print("[bold]Privacy plan[/bold]")
    print_fields(
        where,
        (
            ("guarantee", f"{guarantee(plan.epsilon, plan.delta)} for {NEIGHBOURS[plan.adjacency]} ({plan.accountant.upper()})"),
            (
                "run",
                f"{plan.steps:,} steps, {batches} out of {plan.dataset_size:,} "
                f"(q = {plan.sampling_rate:.4g}, {plan.epochs:.3g} epochs)",
            ),
            ("noise", f"multiplier {plan.noise_multiplier:.4f}, {plan.allocation} allocation; {grid_line(plan)}"),
            ("signal", signal_line(plan)),
            ("method", f"{plan.method}; {plan.precision}, rounding slack {plan.slack - 1:.1e}"),
            ("loss", f"{plan.loss}, Lipschitz constant {number(plan.loss_lipschitz)}"),
        ),
    )
    where.print(groups(plan))
    where.print("[dim]X, G: bounds on activations and cotangents; Δ: on one example's gradient; noise goes on the sum.[/dim]")
