"""``lipdp sweep``: search for a recipe's best settings; ``lipdp pareto``: what searches have found, by ε."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._checks import match
from lipdp._texts import brief, guarantee, table, upwards
from lipdp.cli import options
from lipdp.cli.options import configured, numbers
from lipdp.cli.output import check_new_file, console, duration, make_folder, print_fields, print_json
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.recipes.pareto import Dot
    from lipdp.recipes.sweep import Finding, Progress, Sweep

EXAMPLE = """Example: lipdp sweep mnist-mlp --epsilon 3 --trials 60 --storage mnist.journal --workers 2 --test

Example: lipdp sweep digits --epsilon 3 --trials 10 --private-tuning"""

_SEARCH, _PRIVATE, _OUTPUT = "Search", "Private tuning", "Output"


def sweep(
    recipe: options.RecipeName,
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε of every run; with --private-tuning, of the whole search.", show_default="the recipe's"),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(help="Named search space; an unknown name lists them.", show_default="by recipe", rich_help_panel=_SEARCH),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Stop when the study holds so many trials, earlier calls' included.", rich_help_panel=_SEARCH)
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long.", rich_help_panel=_SEARCH)] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Optuna journal file, or RDB url: the search continues there.", rich_help_panel=_SEARCH),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes; they meet in the storage.", rich_help_panel=_SEARCH)] = 1,
    sampler: Annotated[str, typer.Option(help="tpe or random.", rich_help_panel=_SEARCH)] = "tpe",
    prune: Annotated[bool, typer.Option(help="Stop runs early that fall behind (Hyperband).", rich_help_panel=_SEARCH)] = True,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the training set that judges the settings.", rich_help_panel=_SEARCH)
    ] = 0.2,
    settings: options.Settings = None,
    radii: Annotated[
        str | None, typer.Option(help="Certified accuracies to note in the histories, e.g. 0.01,0.02.", rich_help_panel=_OUTPUT)
    ] = None,
    histories: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Gets a line for each run, for lipdp pareto.",
            show_default="STORAGE.jsonl, beside a storage file",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Add the best settings to this file of recipes (TOML), as NAME-found or under --name, with where they come from.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the recipe that --save writes.", show_default="NAME-found", rich_help_panel=_OUTPUT)
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="At the end, run the best settings and look at the test set, once.")] = False,
    seeds: Annotated[int, typer.Option(help="Runs for --test.")] = 3,
    private_tuning: Annotated[
        bool,
        typer.Option(
            "--private-tuning",
            help="Account for the search: a random number of runs, --trials on average, of which only the best is shown.",
            rich_help_panel=_PRIVATE,
        ),
    ] = False,
    repetitions: Annotated[
        str,
        typer.Option(
            help="Distribution of the number of runs: logarithmic, geometric, poisson, or a shape η of the truncated negative "
            "binomial.",
            rich_help_panel=_PRIVATE,
        ),
    ] = "geometric",
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to save the weights that private tuning chose.", rich_help_panel=_PRIVATE),
    ] = None,
    budget_file: options.BudgetFile = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1 …", show_default="cpu")] = None,
    data: options.DataRoot = None,
    as_json: options.Json = False,
) -> None:
    """Search for a recipe's best settings on a held-out part of the training set."""
    if private_tuning and (minutes is not None or storage is not None or histories is not None or workers != 1 or trials is None):
        raise ConfigurationError(
            "--private-tuning takes --trials, the mean number of runs, and none of --minutes, --storage, --histories, --workers: "
            "the number of runs is random and secret, and the runs that are not chosen must not be kept"
        )
    if trials is None and minutes is None:
        raise ConfigurationError("say when the search ends: --trials 20, --minutes 30, or both")
    if weights is not None:
        if not private_tuning:
            raise ConfigurationError("--weights goes with --private-tuning")
        make_folder(weights.parent, "--weights")
        check_new_file(weights, "--weights")
    if budget_file is not None and not private_tuning:
        raise ConfigurationError("--budget goes with --private-tuning: an ordinary search is not paid for, whatever it spends")
    if save is not None and private_tuning:
        raise ConfigurationError("--save writes how many trials a search took, and private tuning keeps that secret: leave it out")
    if name is not None and save is None:
        raise ConfigurationError("--name is that of the recipe that --save writes: give --save FILE")
    from lipdp.recipes import read_recipes
    from lipdp.recipes.spaces import get_space
    from lipdp.recipes.sweep import Sweep

    chosen = configured(recipe, settings, epsilon=epsilon)
    target_name = f"{chosen.name}-found" if name is None else name
    if save is not None and save.exists() and target_name in read_recipes(save):
        raise ConfigurationError(f"'{save}' already holds a recipe {target_name!r}: give this one another --name")
    in_file = storage is not None and "://" not in storage
    target = str(histories) if histories is not None else f"{storage}.jsonl" if in_file else None
    wanted = Sweep(
        recipe=chosen,
        epsilon=chosen.epsilon if epsilon is None else epsilon,
        space=None if space is None else get_space(space),
        storage=storage,
        histories=None if private_tuning else target,
        validation_fraction=validation_fraction,
        sampler=sampler,  # type: ignore[arg-type]
        prune=prune,
        radii=() if radii is None else numbers("--radii", radii),
        device=device,
        root=None if data is None else str(data),
    )
    if private_tuning:
        assert trials is not None
        _tune(wanted, trials, repetitions, weights, test, budget_file, as_json)
    else:
        _search(wanted, trials, minutes, workers, seeds if test else 0, None if save is None else (save, target_name), as_json)


def _search(
    wanted: Sweep,
    trials: int | None,
    minutes: float | None,
    workers: int,
    seeds: int,
    saved: tuple[Path, str] | None,
    as_json: bool,
) -> None:
    from lipdp.recipes import save_recipe
    from lipdp.recipes.sweep import final_test, search

    with _bar(trials) as progress:
        finding = search(wanted, trials=trials, minutes=minutes, workers=workers, progress=progress)
    report = _report(wanted, finding)
    if saved is not None:
        save_recipe(finding.to_recipe(wanted, saved[1]), saved[0])
        report["saved"] = {"file": str(saved[0]), "recipe": saved[1]}
    if seeds:
        figures = final_test(wanted, finding.recipe, seeds)
        report["test"] = {
            "metric": finding.metric,
            "mean": figures.mean,
            "std": figures.std,
            "scores": list(figures.scores),
            "epsilon": figures.epsilon,
            "delta": figures.delta,
        }
    if as_json:
        print_json(report)
        return
    fields = [
        ("search", f"{wanted.study}: {finding.complete} complete, {finding.pruned} stopped early, {finding.failed} refused"),
        ("time", duration(finding.seconds)),
        ("best", f"held-out {finding.metric} {100 * finding.score:.2f}% (the best of many: optimistic)"),
        ("settings", _settings(finding.settings)),
    ]
    if seeds:
        shown = report["test"]
        promise = guarantee(shown["epsilon"], shown["delta"])
        fields.append(("test", f"{100 * shown['mean']:.2f} ± {100 * shown['std']:.2f}% over {seeds} runs, each with ({promise})"))
    if saved is not None:
        fields.append(("saved", f"recipe {saved[1]} in {saved[0]}"))
    fields.append(("not paid for", "the search itself; --private-tuning pays for it"))
    print_fields(console(), fields)


def _tune(
    wanted: Sweep, trials: int, distribution: str, weights: Path | None, test: bool, budget: Path | None, as_json: bool
) -> None:
    import torch

    from lipdp.privacy.tuning import Repetitions
    from lipdp.recipes.private_tuning import tune_privately

    finding = tune_privately(wanted, Repetitions(trials, _shape(distribution)), budget=budget)
    report: dict[str, Any] = {
        "recipe": wanted.recipe.name,
        "space": wanted.chosen_space.name,
        "private_tuning": True,
        "epsilon": finding.epsilon,
        "delta": finding.delta,
        "run_epsilon": finding.run_epsilon,
        "mean_trials": trials,
        "repetitions": distribution,
        "metric": "accuracy",
        "score": finding.score,
        "score_noise": finding.score_noise,
        "settings": finding.settings,
    }
    if weights is not None:
        torch.save({name: tensor.cpu() for name, tensor in finding.model.state_dict().items()}, weights)
    if test:
        from lipdp import data
        from lipdp.losses import CrossEntropy
        from lipdp.training import evaluate

        held = data.load(wanted.recipe.dataset, root=wanted.root)[1]
        report["test"] = {"accuracy": evaluate(finding.model, CrossEntropy(), held, device=wanted.device)["accuracy"]}
    if as_json:
        print_json(report)
        return
    fields = [
        (
            "guarantee",
            f"({guarantee(finding.epsilon, finding.delta)}) for settings, model and score; one run alone "
            f"{upwards(finding.run_epsilon)}",
        ),
        ("best", f"held-out accuracy {100 * finding.score:.2f}%, of which noise about ±{100 * finding.score_noise:.2g}"),
        ("settings", _settings(finding.settings)),
    ]
    if test:
        fields.append(("test", f"accuracy {100 * report['test']['accuracy']:.2f}%, of the chosen model"))
    print_fields(console(), fields)


def _report(wanted: Sweep, finding: Finding) -> dict[str, Any]:
    return {
        "recipe": wanted.recipe.name,
        "space": wanted.chosen_space.name,
        "private_tuning": False,
        "epsilon": wanted.epsilon,
        "metric": finding.metric,
        "score": finding.score,
        "settings": finding.settings,
        "complete": finding.complete,
        "pruned": finding.pruned,
        "failed": finding.failed,
        "failure": finding.failure,
        "seconds": finding.seconds,
        "storage": wanted.storage,
        "histories": wanted.histories,
    }


@contextmanager
def _bar(trials: int | None) -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[best]}"))
    with Progress(*columns, console=console(stderr=True)) as shown:
        task = shown.add_task("", total=trials, best="")

        def update(done: int, best: float | None) -> None:
            shown.update(task, completed=done, best="" if best is None else f"best {100 * best:.2f}%")

        yield update


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items())


def _shape(name: str) -> float:
    from lipdp.privacy.tuning import DISTRIBUTIONS

    try:
        return DISTRIBUTIONS[name] if name in DISTRIBUTIONS else float(name)
    except ValueError:
        raise ConfigurationError(f"--repetitions is {name!r}: one of {', '.join(DISTRIBUTIONS)}, or a shape η ≥ 0") from None


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
    budgets = numbers("--epsilons", epsilons)
    from lipdp.recipes import pareto as fronts

    dots = _selected(fronts.read_dots(paths, metric), dataset, evaluated_on)
    plain = [dot for dot in dots if dot.radius == 0]
    corners, best = fronts.hull(plain), fronts.best_by_epsilon(plain, budgets)
    files = [] if output is None else _write(dots, corners, by, output, plots)
    if as_json:
        groups = fronts.grouped(plain, lambda dot: str(getattr(dot, by)))
        print_json(
            {
                "dots": len(dots),
                "metric": metric,
                "evaluated_on": evaluated_on,
                "hull": [_brief(dot) for dot in corners],
                "by": {by: {name: [_brief(dot) for dot in fronts.hull(group)] for name, group in groups.items()}},
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


def _certified(dots: list[Dot], budgets: Sequence[float]) -> dict[str, Any]:
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
