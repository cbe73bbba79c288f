"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Accountant",
    "Adjacency",
    "BatchSize",
    "BudgetFile",
    "DataRoot",
    "DatasetSize",
    "Delta",
    "Epochs",
    "Epsilon",
    "Json",
    "LearningRate",
    "NoiseMultiplier",
    "RecipeName",
    "RequiredDelta",
    "RunEpochs",
    "RunSteps",
    "SamplingRate",
    "Settings",
    "ValidationFraction",
]

_BUDGET, _RECIPE, _OUTPUT = "Privacy", "Recipe settings", "Output"

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A name that `lipdp recipes` lists, e.g. digits.", show_default=False)
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Target ε. Together with a noise multiplier, the run gets as long as this budget allows.",
        show_default="3.0, without a noise multiplier",
        rich_help_panel=_BUDGET,
    ),
]
NoiseMultiplier = Annotated[
    float | None,
    typer.Option(help="Noise multiplier σ of the whole step, instead of the one that ε asks for.", rich_help_panel=_BUDGET),
]
Delta = Annotated[float | None, typer.Option(help="δ of the guarantee, best well below 1/N.", rich_help_panel=_BUDGET)]
BudgetFile = Annotated[
    Path | None,
    typer.Option(
        "--budget",
        metavar="FILE",
        help="The dataset's account (`lipdp budget create`): charged before anything is released.",
        rich_help_panel=_BUDGET,
    ),
]
Epochs = Annotated[float | None, typer.Option(help="Expected passes over the data.", rich_help_panel=_RECIPE)]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size.", rich_help_panel=_RECIPE)]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate, in units of the sensitivity.", rich_help_panel=_RECIPE)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting of the recipe, or options.NAME of its model: --set momentum=0.8 --set options.hidden=64,64. "
        "Can be repeated.",
        rich_help_panel=_RECIPE,
    ),
]
ValidationFraction = Annotated[
    float | None,
    typer.Option(help="Hold out this part of the training set, for choosing settings without the test set."),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="ROOT", help="Folder of the datasets.", show_default="$LIPDP_DATA, else the user's cache folder"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.", rich_help_panel=_OUTPUT)]

# --- accounting ---
RequiredDelta = Annotated[float, typer.Option("--delta", help="δ of the guarantee.", show_default=False)]
SamplingRate = Annotated[float | None, typer.Option(help="q: each record's chance to be in a step's batch.")]
DatasetSize = Annotated[int | None, typer.Option(help="N, with --batch-size: instead of the sampling rate.")]
RunSteps = Annotated[int | None, typer.Option("--steps", help="Number of steps T.")]
RunEpochs = Annotated[float | None, typer.Option("--epochs", help="Instead of --steps: expected passes over the data.")]
Accountant = Annotated[str, typer.Option(help="pld (tight) or rdp.")]
Adjacency = Annotated[str, typer.Option(help="Neighbouring datasets: add_remove or replace_one.")]
