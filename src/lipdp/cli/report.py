"""``lipdp report`` and ``lipdp pareto``: what runs promise and reached, from what they left in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._checks import match
from lipdp._texts import brief, guarantee, table, upwards
from lipdp.cli import options
from lipdp.cli.output import console, make_folder, print_json
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.recipes.pareto import Dot

__all__ = ["PARETO_EXAMPLE", "REPORT_EXAMPLE", "pareto", "report"]

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


PARETO_EXAMPLE = """Example: lipdp pareto mnist.journal.jsonl --output front/ --epsilons 1,3,8

Example: lipdp pareto sweeps/*.jsonl --by method --metric accuracy --json"""


def pareto(
    paths: Annotated[list[Path], typer.Argument(metavar="PATHS…", help="History files of sweeps, or folders of train --output.")],
    by: Annotated[str, typer.Option(help="What to compare: model, method, recipe or dataset.")] = "model",
    metric: Annotated[str, typer.Option(help="accuracy or auroc.")] = "accuracy",
    epsilons: Annotated[str, typer.Option(help="Budgets to name the best recipe for.")] = "1,3,8",
    dataset: Annotated[str | None, typer.Option(help="Only runs on this dataset.", show_default="the only one")] = None,
    evaluated_on: Annotated[str, typer.Option(help="validation or test: they are never mixed.")] = "validation",
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for dots.csv, front.csv and the plots.", rich_help_panel="Output"),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw; needs matplotlib.", rich_help_panel="Output")] = True,
    as_json: options.Json = False,
) -> None:
    """Accuracy against ε: every evaluation a dot, the convex hull, the best recipe for each budget."""
    if by not in ("model", "method", "recipe", "dataset"):
        raise ConfigurationError(f"--by is {by!r}: model, method, recipe or dataset")
    try:
        budgets = [float(part) for part in epsilons.split(",")]
    except ValueError:
        raise ConfigurationError(f"--epsilons takes numbers with commas between them, not {epsilons!r}") from None
    from lipdp.recipes import pareto as fronts

    dots = _selected(fronts.read_dots(paths, metric), dataset, evaluated_on)
    plain = [dot for dot in dots if dot.radius == 0]
    corners, best = fronts.hull(plain), fronts.best_by_epsilon(plain, budgets)
    files = [] if output is None else _write(dots, corners, by, output, plots)
    if as_json:
        groups = {name: [_brief(d) for d in fronts.hull(group)] for name, group in fronts.grouped(plain, _field(by)).items()}
        print_json(
            {
                "dots": len(dots),
                "metric": metric,
                "evaluated_on": evaluated_on,
                "hull": [_brief(dot) for dot in corners],
                "by": {by: groups},
                "best": {brief(budget): {**_brief(dot), "settings": dot.settings} for budget, dot in best.items()},
                "certified": _certified(dots, budgets),
                "files": files,
            }
        )
        return
    out = console()
    rows = [
        (brief(budget), f"{100 * dot.score:.2f}", upwards(dot.epsilon), dot.recipe, dot.model, dot.method)
        for budget, dot in best.items()
    ]
    headers = ("ε up to", f"{metric} %", "ε spent", "recipe", "model", "method")
    out.print(f"{len(dots):,} dots, {evaluated_on}, {plain[0].dataset}" if plain else f"{len(dots):,} dots, {evaluated_on}")
    out.print(table(headers, rows, right=("ε up to", f"{metric} %", "ε spent")))
    if output is not None:
        out.print(f"wrote {', '.join(files)} in {output}", soft_wrap=True)


def _field(name: str) -> Any:
    return lambda dot: str(getattr(dot, name))


def _selected(dots: list[Dot], dataset: str | None, evaluated_on: str) -> list[Dot]:
    wanted = dataset if dataset is None else match(dataset, {dot.dataset for dot in dots})
    kept = [dot for dot in dots if dot.evaluated_on == evaluated_on and (dataset is None or dot.dataset == wanted)]
    if not kept:
        have = sorted({f"{dot.dataset} ({dot.evaluated_on})" for dot in dots})
        raise ConfigurationError(f"no dots of {dataset or 'any dataset'} ({evaluated_on}); there are those of {', '.join(have)}")
    datasets = sorted({dot.dataset for dot in kept})
    if len(datasets) > 1:
        raise ConfigurationError(
            f"the histories are of {', '.join(datasets)}, which don't share a front: choose one with --dataset"
        )
    return kept


def _brief(dot: Dot) -> dict[str, Any]:
    return {"epsilon": dot.epsilon, "score": dot.score, "recipe": dot.recipe, "model": dot.model, "method": dot.method}


def _certified(dots: list[Dot], budgets: list[float]) -> dict[str, Any]:
    from lipdp.recipes.pareto import best_by_epsilon

    shares = {}
    for radius in sorted({dot.radius for dot in dots if dot.radius > 0}):
        best = best_by_epsilon([dot for dot in dots if dot.radius == radius], budgets)
        shares[f"{radius:g}"] = {brief(budget): dot.score for budget, dot in best.items()}
    return shares


def _write(dots: list[Dot], corners: list[Dot], by: str, folder: Path, plots: bool) -> list[str]:
    from lipdp.recipes import pareto as fronts

    make_folder(folder, "--output")
    fronts.write_csv(dots, folder / "dots.csv")
    fronts.write_csv(corners, folder / "front.csv")
    files = ["dots.csv", "front.csv"]
    if plots:
        fronts.plot_dots(dots, folder / "front.svg")
        fronts.plot_by(dots, by, folder / f"by_{by}.svg")
        files += ["front.svg", f"by_{by}.svg"]
        if any(dot.radius > 0 for dot in dots):
            fronts.plot_radii(dots, folder / "certified.svg")
            files.append("certified.svg")
    return files
