"""What the user sees when something goes wrong: one line, an exit code, and JSON where JSON was asked for."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from lipdp.cli.output import console, print_json
from lipdp.errors import AuditError, BudgetError, LipdpError, LipdpWarning

__all__ = ["FriendlyGroup"]

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
