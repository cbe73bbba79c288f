"""``lipdp certify``: how far a trained model's decisions are certified, on a dataset's test part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lipdp.cli import options
from lipdp.cli.output import console, print_json, table
from lipdp.errors import ConfigurationError

__all__ = ["EXAMPLE", "MODEL", "RESULT", "certify"]

EXAMPLE = """Example: lipdp train digits --epsilon 3 --output run/ && lipdp certify run/

Example: lipdp certify model.lipdp --dataset mnist --radii 0,8,16,32,64 --examples 1000 --json"""

MODEL, RESULT = "model.lipdp", "result.json"


def certify(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A folder of train --output, or a file of lipdp.save_model.", show_default=False)
    ],
    dataset: Annotated[
        str | None, typer.Option(help="Whose test part to certify on.", show_default="the one that it was trained on")
    ] = None,
    radii: Annotated[
        str, typer.Option(help="Radii in 255ths of a unit of the inputs (L2; pixels are from 0 to 1), with commas between them.")
    ] = "0,1,2,4,8,16",
    examples: Annotated[int | None, typer.Option(min=1, help="Only so many examples.", show_default="all")] = None,
    data: options.DataRoot = None,
    as_json: options.Json = False,
) -> None:
    """Certified accuracy: the share of test examples that are classified rightly, whatever moves them by less than a radius.

    For two classes a certified AUROC too: what remains of it, whatever moves *every* example by up to the radius.
    """
    try:
        asked = [float(part) for part in radii.split(",")]
    except ValueError:
        raise ConfigurationError(f"--radii takes numbers with commas between them, not {radii!r}") from None
    file, trained_on = _found(path)
    name = dataset or trained_on
    if name is None:
        raise ConfigurationError(f"'{path}' does not say what it was trained on: give --dataset, a name that `lipdp data` lists")
    from torch.utils.data import Dataset, Subset

    import lipdp
    from lipdp.training.batches import gather_tensors

    model = lipdp.load(file)
    _, test, info = lipdp.data.load(name, root=data)
    part: Dataset[Any] = Subset(test, range(min(len(test), examples or len(test))))
    x, y = gather_tensors(part, _numbers(len(part)))  # type: ignore[arg-type]
    certified = lipdp.certify(model, x, y)
    shares = lipdp.certified_accuracy(certified, [radius / 255 for radius in asked])
    columns = {"certified accuracy": list(shares.values())}
    if info.classes == 2:
        columns["certified AUROC"] = list(lipdp.certified_auroc(model, x, y, [radius / 255 for radius in asked]).values())
    report = {
        "model": str(file),
        "dataset": info.name,
        "examples": len(x),
        "median_radius": float(certified.median()),
        **{
            name.replace(" ", "_").lower(): {f"{radius:g}/255": value for radius, value in zip(asked, values, strict=True)}
            for name, values in columns.items()
        },
    }
    if as_json:
        print_json(report)
        return
    rows = [
        (f"{radius:g}/255", *(f"{100 * value:.1f}%" for value in values))
        for radius, *values in zip(asked, *columns.values(), strict=True)
    ]
    out = console()
    out.print(
        f"[bold]{file}[/bold] on {len(x):,} test examples of {info.name}; L2 radii in the units of its inputs (pixels: [0, 1])",
        soft_wrap=True,
    )
    headers = ("radius", *columns)
    out.print(table(headers, rows, right=headers))
    out.print(f"median radius {float(certified.median()):.4g}")


def _found(path: Path) -> tuple[Path, str | None]:
    """The model's file, and the dataset that it was trained on where that is known."""
    file, beside = (path / MODEL, path / RESULT) if path.is_dir() else (path, path.parent / RESULT)
    if not file.exists():
        hint = f"there is no {MODEL} in the folder '{path}'" if path.is_dir() else f"there is no file '{path}'"
        raise ConfigurationError(f"{hint}: `lipdp train RECIPE --output DIR` writes one, and so does lipdp.save_model")
    try:
        known = json.loads(beside.read_text(encoding="utf-8"))["dataset"] if file.name == MODEL else None
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    return file, known if isinstance(known, str) else None


def _numbers(count: int) -> Any:
    import torch

    return torch.arange(count)
