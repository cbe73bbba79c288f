"""What the user sees: numbers, tables, plans, JSON; and, when something goes wrong, one line and an exit code."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from typer.core import TyperGroup

from lipdp._texts import NEIGHBOURS, guarantee, number, table
from lipdp.errors import AuditError, BudgetError, ConfigurationError, LipdpError, LipdpWarning

if TYPE_CHECKING:
    from rich.console import Console

    from lipdp.training import PrivacyPlan

_WIDTH = 100  # where there is no terminal to ask


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or 100 columns into a pipe; brackets are no markup but where that is asked for."""
    from rich.console import Console

    own = Console(stderr=stderr, highlight=False, markup=False)
    return own if own.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=_WIDTH)


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


def duration(seconds: float) -> str:
    """The text 4.2 s, 41 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


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
    from lipdp.planning.plan import columns, grid_line, signal_line

    batches = f"Poisson batches of {plan.batch_size:,} expected"
    if plan.sampling == "fixed_size":
        batches = f"batches of {plan.batch_size:,} without replacement"
    elif plan.largest_batch is not None:
        batches += f" and {plan.largest_batch:,} at most"
    where.print("Privacy plan", style="bold")
    print_fields(
        where,
        (
            ("guarantee", f"({guarantee(plan.epsilon, plan.delta)}) for {NEIGHBOURS[plan.adjacency]} ({plan.accountant.upper()})"),
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
    where.print(table(**columns(plan)))
    where.print("X, G: bounds on activations and cotangents; Δ: on one example's gradient; noise goes on the sum.", style="dim")


_UNEXPECTED, _REFUSED, _BUDGET, _REFUTED = 1, 2, 3, 4


class FriendlyGroup(TyperGroup):
    """The group of all commands, which turns exceptions into messages and exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note whether JSON is wanted: errors of the command's own parser have to know."""
        ctx.meta["lipdp.json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        as_json = bool(ctx.meta["lipdp.json"])
        try:
            with _plain_warnings():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as error:
            hint = str(error)
            console(stderr=True).show_cursor(True)  # which a bar that was cut short may have hidden
            _report("interrupted" + (f": {hint}" if hint else ""), "KeyboardInterrupt", as_json)
            raise typer.Exit(128 + getattr(error, "signal", signal.SIGINT)) from None
        except Exception as error:
            if hasattr(error, "format_message"):  # of the parser, which prints it itself, with the usage
                if as_json:
                    print_json({"error": error.format_message(), "kind": "UsageError"})
                raise
            if isinstance(error, BrokenPipeError) or os.environ.get("LIPDP_DEBUG", "0") not in ("", "0"):
                raise
            message, code = _describe(error)
            _report(message, type(error).__name__, as_json)
            raise typer.Exit(code) from None


def make_folder(folder: Path, option: str) -> None:
    """A folder for what a command writes; what stands in its way is said in the option's terms."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(
            f"{option} '{folder}' names a folder to be filled, and a file is in its place: choose another name"
        ) from None


def check_new_file(file: Path, option: str) -> None:
    """A file that a command will write: its folder is there, and nothing is overwritten. Looked at before the work."""
    if not file.parent.is_dir():
        raise ConfigurationError(f"{option} {file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise ConfigurationError(f"{option} {file} is a folder: give the name of a file in it")
    if file.exists():
        raise ConfigurationError(f"{option} {file} exists, and nothing is overwritten: choose another file")


def make_run_folder(folder: Path, *, resume: bool = False) -> None:
    """The folder of ``--output``; one that holds a file that would be written is refused, unless its run is to be continued."""
    from lipdp.report.page import HTML, MARKDOWN
    from lipdp.report.run import ABOUT, FILES, SCHEMA

    present = [name for name in (*FILES, SCHEMA, ABOUT, HTML, MARKDOWN) if (folder / name).exists()]
    if present and not resume:
        raise ConfigurationError(
            f"'{folder}' already holds {', '.join(present)}, of another run perhaps, and nothing is overwritten. Choose another "
            "--output folder."
        )
    make_folder(folder, "--output")


def _describe(error: Exception) -> tuple[str, int]:
    text = " ".join(str(error).split())
    if isinstance(error, BudgetError):
        return text, _BUDGET
    if isinstance(error, AuditError):
        return text, _REFUTED
    if isinstance(error, LipdpError):
        return text, _REFUSED
    if isinstance(error, OSError):
        return f"'{error.filename}': {error.strerror}" if error.filename else text, _REFUSED
    return f"unexpected {type(error).__name__}: {text} (LIPDP_DEBUG=1 shows where it comes from)", _UNEXPECTED


def _report(message: str, kind: str, as_json: bool) -> None:
    typer.echo(f"error: {message}" if kind != "KeyboardInterrupt" else message, err=True)
    if as_json:
        print_json({"error": message, "kind": kind})


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show each LipdpWarning once, as one line on stderr. Other warnings are shown as ever."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", LipdpWarning)
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, LipdpWarning):
                usual(message, category, filename, lineno, file, line)
            elif str(message) not in shown:
                shown.add(str(message))
                print(f"warning: {message}", file=sys.stderr, flush=True)

        warnings.showwarning = show
        yield
