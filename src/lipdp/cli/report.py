"""``lipdp report``: what a run promises, as one HTML file and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipdp.cli import options
from lipdp.cli.output import console, print_json, upwards
from lipdp.errors import ConfigurationError

__all__ = ["EXAMPLE", "report"]

EXAMPLE = """Example: lipdp train digits --epsilon 3 --output run/ && lipdp report run/

Example: lipdp report first/ second/ --output comparison/"""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of train --output.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder to put report.html and report.md in.", show_default="that of the run, if it is one"
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write what was promised, spent and reached: for colleagues, auditors and data-protection officers."""
    if output is None and len(runs) > 1:
        raise ConfigurationError("a report of several runs needs a place of its own: give --output FOLDER")
    from lipdp.report import read_run, write

    records = [read_run(folder) for folder in runs]
    place = output or runs[0]
    written = write(records, place)
    if as_json:
        own = [{"run": run.name, "epsilon": run.epsilon, "delta": run.plan.delta, "private": run.private} for run in records]
        print_json({"output": str(place), "files": written, "runs": own})
        return
    out = console()
    for run in records:
        promise = f"ε = {upwards(run.epsilon)} at δ = {run.plan.delta:g}" if run.private else "[bold red]NOT PRIVATE[/bold red]"
        out.print(f"{run.name}: {promise}")
        for text in run.contradictions:
            out.print(f"[bold red]contradiction[/bold red]: {text}", soft_wrap=True)
    out.print(f"wrote {', '.join(written)} in {place}", markup=False, soft_wrap=True)
