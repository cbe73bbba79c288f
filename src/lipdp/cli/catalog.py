"""``lipdp data`` and ``lipdp recipes``: what there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from lipdp.cli import options
from lipdp.cli.output import console, print_fields, print_json, table

__all__ = ["DATA_EXAMPLE", "RECIPES_EXAMPLE", "data", "recipes"]

DATA_EXAMPLE = """Example: lipdp data

Example: lipdp data mnist --data /srv/datasets"""
RECIPES_EXAMPLE = "Example: lipdp recipes"


def data(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A dataset; without it, all are listed.", show_default=False)
    ] = None,
    root: options.DataRoot = None,
    download: Annotated[bool, typer.Option(help="Fetch what is missing.")] = True,
    as_json: options.Json = False,
) -> None:
    """List the datasets; or download one, verify it and describe it."""
    if name is None:
        _list_datasets(root, as_json)
    else:
        _describe_dataset(name, root, download, as_json)


def _list_datasets(root: Path | None, as_json: bool) -> None:
    from lipdp import data as datasets
    from lipdp.cli.settings import dataset_info

    found = [(dataset_info(name), where) for name, where in datasets.available(root).items()]
    if as_json:
        print_json(
            {
                "datasets": [
                    {**dataclasses.asdict(info), "on_disk": where.on_disk, "path": where.path and str(where.path)}
                    for info, where in found
                ]
            }
        )
        return
    rows = [
        (
            info.name,
            f"{info.train_size:,} + {info.test_size:,}",
            "×".join(map(str, info.shape)),
            str(info.classes),
            "yes" if where.on_disk else "no",
            "comes with scikit-learn" if where.path is None else str(where.path),
        )
        for info, where in found
    ]
    headers = ("dataset", "train + test", "shape", "classes", "on disk", "where")
    console().print(table(headers, rows, right=("train + test", "classes")))


def _describe_dataset(name: str, root: Path | None, download: bool, as_json: bool) -> None:
    from lipdp import data as datasets

    train, test, info = datasets.load(name, root=root, download=download)
    datasets.require_finite(train)
    datasets.require_finite(test)
    where = datasets.available(root)[info.name].path
    if as_json:
        print_json({**dataclasses.asdict(info), "on_disk": True, "path": where and str(where), "verified": True})
        return
    out = console()
    out.print(f"[bold]{info.name}[/bold]: verified")
    print_fields(
        out,
        (
            ("records", f"{len(train):,} to train, {len(test):,} to test"),
            ("shape", "×".join(map(str, info.shape))),
            ("classes", f"{info.classes}: {', '.join(info.class_names)}"),
            ("where", "comes with scikit-learn" if where is None else str(where)),
            ("licence", info.licence),
            ("citation", info.citation),
            ("source", info.source),
        ),
    )


def recipes(as_json: options.Json = False) -> None:
    """List the recipes that can be trained."""
    from lipdp import recipes as catalogue

    by_name = {name: catalogue.get(name) for name in catalogue.names()}
    short = {recipe.name: name for name, recipe in by_name.items() if recipe.name != name}
    all_recipes = [recipe for name, recipe in by_name.items() if recipe.name == name]
    if as_json:
        print_json({"recipes": [{**dataclasses.asdict(recipe), "alias": short.get(recipe.name)} for recipe in all_recipes]})
        return
    rows = [
        (
            recipe.name,
            short.get(recipe.name, ""),
            recipe.dataset,
            " ".join([recipe.model, *(f"{key}={_compact(value)}" for key, value in recipe.options.items())]),
            f"{recipe.batch_size:,}",
            f"{recipe.epochs:g}",
            f"{recipe.learning_rate:g}",
            f"{recipe.delta:g}",
        )
        for recipe in all_recipes
    ]
    headers = ("recipe", "short name", "dataset", "model", "batch", "epochs", "lr", "δ")
    console().print(table(headers, rows, right=("batch", "epochs", "lr", "δ")))


def _compact(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
