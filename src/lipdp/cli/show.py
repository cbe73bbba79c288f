"""What there is, what a run would do, and what runs have reached: nothing here trains, and only ``data`` reads any.

``lipdp plan``, ``bounds``, ``recipes``, ``data``; and from what runs left in files, ``report``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._checks import match
from lipdp._texts import brief, guarantee, number, table
from lipdp.cli import options
from lipdp.cli.options import check_budget, configured, dataset_info, drawing, training_size
from lipdp.cli.output import check_new_file, console, duration, make_folder, print_fields, print_json, print_plan
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.recipes import Recipe

PLAN_EXAMPLE = "Example: lipdp plan mnist --epsilon 1 --epochs 30 --output plan.json"
BOUNDS_EXAMPLE = "Example: lipdp bounds mnist-lenet --set options.clip=0.1"


def plan(
    recipe: options.RecipeName,
    epsilon: options.Epsilon = None,
    noise_multiplier: options.NoiseMultiplier = None,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    learning_rate: options.LearningRate = None,
    settings: options.Settings = None,
    validation_fraction: options.ValidationFraction = None,
    sampling: options.SamplingScheme = "poisson",
    largest_batch: options.LargestBatch = None,
    adjacency: options.Adjacency = "add_remove",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan there as JSON.", rich_help_panel="Output")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """The privacy plan of a run: its sensitivities, noise, length and cost, before any data is read."""
    if output is not None:
        check_new_file(output, "--output")
    check_budget(epsilon, noise_multiplier, epochs=epochs)
    drawn = drawing(sampling, largest_batch, adjacency)
    given = {"epsilon": epsilon, "delta": delta, "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    chosen = configured(recipe, settings, **given, validation_fraction=validation_fraction)
    from lipdp import recipes

    info = dataset_info(chosen.dataset)
    size = training_size(info, validation_fraction)
    decided = recipes.prepare(chosen, info, epsilon=epsilon, noise_multiplier=noise_multiplier, dataset_size=size, **drawn).plan
    if output is not None:
        output.write_text(decided.to_json() + "\n", encoding="utf-8")
    if as_json:
        print_json(json.loads(decided.to_json()))
        return
    out = console()
    print_plan(out, decided)
    if output is not None:
        out.print(f"written to {output}", soft_wrap=True)


def bounds(recipe: options.RecipeName, settings: options.Settings = None, as_json: options.Json = False) -> None:
    """The calculus of bounds, layer by layer: X forward, G backward, Δ for each parameter."""
    chosen = configured(recipe, settings)
    from rich.text import Text

    from lipdp import recipes
    from lipdp.bounds import analyse

    # Any noise will do: the plan is not looked at, the model and the loss are those of `lipdp train`. Statistics need a budget.
    epsilon, noise = (None, 1.0) if chosen.statistics_budget is None else (chosen.epsilon, None)
    ready = recipes.prepare(chosen, dataset_info(chosen.dataset), epsilon=epsilon, noise_multiplier=noise)
    analysis = analyse(ready.model, ready.loss)
    total = ready.plan.sensitivity
    if as_json:
        layers = [dataclasses.asdict(row) for row in analysis.layers]
        parameters = [dataclasses.asdict(row) for row in analysis.parameters]
        print_json(
            {
                "recipe": chosen.name,
                "sensitivity": total,
                "loss_lipschitz": analysis.loss_lipschitz,
                "output_norm": analysis.output.norm,
                "lipschitz": analysis.lipschitz,
                "layers": layers,
                "parameters": parameters,
            }
        )
        return
    out = console()
    out.print(Text(chosen.name, "bold"), f": {ready.loss}, Lipschitz constant {number(analysis.loss_lipschitz)}", sep="")
    out.print(
        table(
            ("operation", "output", "X", "G"),
            [(row.where, "×".join(map(str, row.output)), number(row.norm), number(row.cotangent)) for row in analysis.layers],
            right=("X", "G"),
        )
    )
    out.print(
        table(
            ("parameter", "X", "G", "Δ", "uses", "size"),
            [
                (row.name, *map(number, (row.input_norm, row.cotangent_norm, row.sensitivity)), str(row.uses), f"{row.size:,}")
                for row in analysis.parameters
            ],
            right=("X", "G", "Δ", "uses", "size"),
        )
    )
    out.print(f"one example's whole gradient: at most {number(total)}")
    out.print(
        "X: bound on what leaves an operation (for a parameter, on what reaches it); G: on its cotangent; Δ: on one "
        "example's gradient, for every input, every target and all weights inside their constraints.",
        style="dim",
    )


# ``lipdp data`` and ``lipdp recipes``: what there is.

DATA_EXAMPLE = """Example: lipdp data

Example: lipdp data mnist --data /srv/datasets"""
RECIPES_EXAMPLE = """Example: lipdp recipes cifar10 lenet

Example: lipdp recipes cifar10-mixture-eps3"""


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

    known = [(dataset_info(name), where) for name, where in datasets.available(root).items()]
    if as_json:
        print_json(
            {
                "datasets": [
                    {**dataclasses.asdict(info), "on_disk": where.on_disk, "path": where.path and str(where.path)}
                    for info, where in known
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
        for info, where in known
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
    out.print(f"{info.name}: verified", style="bold")
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
    """List the recipes that can be trained, with what they gave; or show one, with its settings and where they come from."""
    from lipdp import recipes as catalogue

    by_name = {name: catalogue.get(name) for name in catalogue.names()}
    short = {catalogue.get(name, own.epsilon).name: name for name in by_name for own in by_name.values() if name == own.dataset}
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
    listed.sort(key=_record_first)
    if as_json:
        print_json({"recipes": [_as_fields(recipe, short.get(recipe.name)) for recipe in listed]})
        return
    rows = [_row(recipe, short.get(recipe.name)) for recipe in listed]
    headers = ("recipe", "ε", "accuracy %", "time", "memory", "method")
    out = console()
    out.print(table(headers, rows, right=("ε", "memory"), whole=headers[:3]))
    out.print(
        f"* what {', '.join(sorted(set(short.values())))} alone mean, at the nearest budget. By dataset and ε, best first.\n"
        "Accuracy: mean on the test set ± deviation over seeds; (…): on held-out records alone; AUROC for adbench-….\n"
        "Time: features and training of one run.\n"
        "`lipdp recipes NAME` shows one with its settings, `lipdp recipes WORD …` those with the words in their names.",
        style="dim",
    )


def _record_first(recipe: Recipe) -> tuple[bool, str, float, bool, float]:
    """What sorts recipes: tables last, by dataset, then by ε, the best on the test set first; held-out figures are too good."""
    from lipdp.recipes import measured

    figures = measured(recipe.name)
    tables = recipe.metric == "auroc"
    untested = figures is None or figures.part != "test"
    return tables, recipe.dataset, recipe.epsilon, untested, math.inf if figures is None else -figures.score


def _as_fields(recipe: Recipe, alias: str | None) -> dict[str, Any]:
    """A recipe for JSON, with its figures."""
    from lipdp.recipes import measured

    figures = measured(recipe.name)
    return {**dataclasses.asdict(recipe), "alias": alias, "measured": None if figures is None else dataclasses.asdict(figures)}


def _row(recipe: Recipe, alias: str | None) -> tuple[str, ...]:
    from lipdp.recipes import measured

    name, figures = recipe.name + ("" if alias is None else " *"), measured(recipe.name)
    if figures is None:
        return name, brief(recipe.epsilon), "–", "–", "–", recipe.method
    digits = 2 if figures.score >= 99 else 1
    score = f"{figures.score:.{digits}f}" + ("" if figures.deviation is None else f" ± {figures.deviation:.{digits}f}")
    seconds = 0 if figures.seconds is None else max(1, math.ceil(figures.seconds))
    taken = f"{f'{seconds} s' if seconds < 120 else duration(seconds)}, {figures.machine}" if seconds else "–"
    memory = "–" if figures.memory_gb is None else f"{figures.memory_gb:.1f} GB"
    return name, brief(recipe.epsilon), score if figures.part == "test" else f"({score})", taken, memory, recipe.method


def _describe_recipe(recipe: Recipe, alias: str | None, as_json: bool) -> None:
    if as_json:
        print_json(_as_fields(recipe, alias))
        return
    out = console()
    out.print(recipe.name + ("" if alias is None else f", also {alias}"), style="bold")
    elsewhere = ("name", "options", "provenance")
    fields = [(field.name, getattr(recipe, field.name)) for field in dataclasses.fields(recipe) if field.name not in elsewhere]
    fields += [(f"options.{name}", value) for name, value in recipe.options.items()]
    _, _, score, taken, memory, _ = _row(recipe, alias)
    fields += [("provenance", recipe.provenance), ("measured", f"{score} % ({_judged_on(recipe)}); {taken}; {memory}")]
    print_fields(out, [(name, _compact(value)) for name, value in fields if value is not None])


def _judged_on(recipe: Recipe) -> str:
    from lipdp.recipes import measured

    figures = measured(recipe.name)
    return "nothing was taken down" if figures is None else f"{recipe.metric}, {figures.part}, mean of {figures.runs}"


def _compact(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


REPORT_EXAMPLE = """Example: lipdp train digits --epsilon 3 --output run/ && lipdp report run/

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
    if place.suffix.lower() in (".html", ".md"):
        raise ConfigurationError(f"--output '{place}' names a folder to be filled with report.html and report.md, not a file")
    make_folder(place, "--output")
    written = write(records, place)
    if as_json:
        own = [{"run": run.name, "epsilon": run.epsilon, "delta": run.plan.delta, "private": run.private} for run in records]
        print_json({"output": str(place), "files": written, "runs": own})
        return
    out = console()
    for run in records:
        promise = guarantee(run.epsilon, run.plan.delta) if run.private else "NOT PRIVATE"
        out.print(f"{run.name}: {promise}", style=None if run.private else "bold red")
        for text in run.contradictions:
            out.print(f"contradiction: {text}", style="bold red", soft_wrap=True)
    out.print(f"wrote {', '.join(written)} in {place}", soft_wrap=True)
