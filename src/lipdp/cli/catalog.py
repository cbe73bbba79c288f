"""``lipdp data`` and ``lipdp recipes``: what there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipdp._names import match
from lipdp.cli import options
from lipdp.cli.output import console, print_fields, print_json, table
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.recipes.running import AnyRecipe

__all__ = ["DATA_EXAMPLE", "RECIPES_EXAMPLE", "data", "recipes"]

DATA_EXAMPLE = """Example: lipdp data

Example: lipdp data mnist --data /srv/datasets"""
RECIPES_EXAMPLE = """Example: lipdp recipes cifar10 lenet

Example: lipdp recipes cifar10-lenet-boundaries"""


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


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|WORDS]",
            help="A recipe, to see all of it; or words, to list the recipes with all of them in their names.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the recipes that can be trained; or show one, with its settings and where they come from."""
    from lipdp import recipes as catalogue

    by_name = {name: catalogue.get(name) for name in catalogue.names()}
    short = {recipe.name: name for name, recipe in by_name.items() if recipe.name != name}
    wanted = [word.lower() for word in words or ()]
    one = match(wanted[0], by_name) if len(wanted) == 1 else None
    if one is not None:
        _describe_recipe(by_name[one], short.get(by_name[one].name), as_json)
        return
    listed = [recipe for name, recipe in by_name.items() if recipe.name == name and all(word in name for word in wanted)]
    if not listed:
        raise ConfigurationError(
            f"no recipe has {' and '.join(repr(word) for word in wanted)} in its name; `lipdp recipes` lists all of them"
        )
    if as_json:
        print_json({"recipes": [{**dataclasses.asdict(recipe), "alias": short.get(recipe.name)} for recipe in listed]})
        return
    rows = [
        (
            recipe.name,
            short.get(recipe.name, ""),
            recipe.model,
            recipe.method,
            f"{recipe.batch_size:,}",
            f"{recipe.epochs:.3g}",
        )
        for recipe in listed
    ]
    headers = ("recipe", "short name", "model", "method", "batch", "epochs")
    out = console()
    out.print(table(headers, rows, right=("batch", "epochs")))
    out.print(
        "[dim]`lipdp recipes NAME` shows one with its settings, `lipdp recipes WORD …` those with the words in their names.[/dim]"
    )


def _describe_recipe(recipe: AnyRecipe, alias: str | None, as_json: bool) -> None:
    if as_json:
        print_json({**dataclasses.asdict(recipe), "alias": alias})
        return
    out = console()
    out.print(f"[bold]{recipe.name}[/bold]" + ("" if alias is None else f", also {alias}"))
    elsewhere = ("name", "options", "provenance")
    fields = [(field.name, getattr(recipe, field.name)) for field in dataclasses.fields(recipe) if field.name not in elsewhere]
    fields += [(f"options.{name}", value) for name, value in recipe.options.items()]
    fields.append(("provenance", recipe.provenance))
    print_fields(out, [(name, _compact(value)) for name, value in fields if value is not None])


def _compact(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
