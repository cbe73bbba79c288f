"""The command line: each command parses its options, calls the library and prints what came back.

Modules here import torch and the rest of the library inside the commands only: reading a command line adds nothing to the import of
``lipdp`` itself (which imports torch). The commands stand below in the order of the help text.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from lipdp.cli import account, audit, mechanism, own, show, start, sweep, train
from lipdp.cli.output import FriendlyGroup

__all__ = ["app", "main"]

app = typer.Typer(
    name="lipdp",
    cls=FriendlyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 unexpected error; 2 bad configuration or data; 3 the privacy budget does not allow it; "
    "4 an audit refutes the guarantee; "
    "130 interrupted, 143 by SIGTERM. LIPDP_DEBUG=1 shows tracebacks.",
)
app.command("train", epilog=train.EXAMPLE)(train.train)
app.command("predict", epilog=own.PREDICT_EXAMPLE)(own.predict)
app.command("sweep", epilog=sweep.EXAMPLE)(sweep.sweep)
app.command("pareto", epilog=sweep.PARETO_EXAMPLE)(sweep.pareto)
app.command("report", epilog=show.REPORT_EXAMPLE)(show.report)
app.command("certify", epilog=audit.CERTIFY_EXAMPLE)(audit.certify)
app.command("audit", epilog=audit.AUDIT_EXAMPLE)(audit.audit)
app.command("plan", epilog=show.PLAN_EXAMPLE)(show.plan)
app.command("bounds", epilog=show.BOUNDS_EXAMPLE)(show.bounds)
app.command("epsilon", epilog=account.EPSILON_EXAMPLE)(account.epsilon)
app.command("calibrate", epilog=account.CALIBRATE_EXAMPLE)(account.calibrate)
app.add_typer(account.app, name="budget")
app.add_typer(mechanism.app, name="mechanism")
app.add_typer(start.features, name="features")
app.command("new", epilog=start.NEW_EXAMPLE)(start.new)
app.command("doctor")(start.doctor)
app.command("data", epilog=show.DATA_EXAMPLE)(show.data)
app.command("recipes", epilog=show.RECIPES_EXAMPLE)(show.recipes)


def _version(wanted: bool) -> None:
    if wanted:
        from lipdp import __version__

        typer.echo(f"lipdp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Differentially private deep learning whose sensitivities are proved, not clipped."""


def main() -> None:
    """The console script ``lipdp``."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that can't show an ε shows a question mark; it is not a reason to lose a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    said = logging.getLogger("lipdp")  # what takes a while before there is a bar: public constants of features
    said.addHandler(logging.StreamHandler())
    said.setLevel(logging.INFO)
    app(prog_name="lipdp")
