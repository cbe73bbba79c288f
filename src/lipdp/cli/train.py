"""``lipdp train``: a recipe from the data to the test accuracy."""

from __future__ import annotations

import shlex
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._texts import REPRODUCIBLE, brief, downwards, guarantee, upwards
from lipdp.cli import options
from lipdp.cli.audit import audit_recipe
from lipdp.cli.csv_files import CsvForm
from lipdp.cli.options import (
    again,
    check_budget,
    configured,
    dataset_info,
    drawing,
    is_rank,
    joined,
    shared_seed,
    start_ranks,
    training_size,
    usable_device,
)
from lipdp.cli.output import console, duration, make_run_folder, print_json, print_plan
from lipdp.cli.own import train_images, train_table
from lipdp.errors import ConfigurationError, Interrupted, LipdpWarning

if TYPE_CHECKING:
    from rich.console import Console

    from lipdp.recipes import Recipe, Result
    from lipdp.training import Callback

EXAMPLE = """Example: lipdp train digits --epsilon 3

Example: lipdp train mnist --epsilon 1 --epochs 30 --set options.hidden=128 --checkpoint run.ckpt --output run/ --json

Example: lipdp train --images photos/ --epsilon 3 --validation-fraction 0.1

Example: lipdp train --csv people.csv --target income --schema schema.json --epsilon 1 --validation-fraction 0.2 --output run/"""

_OWN = "Your own records"


def train(
    recipe: options.OptionalRecipeName = None,
    epsilon: options.Epsilon = None,
    noise_multiplier: options.NoiseMultiplier = None,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    learning_rate: options.LearningRate = None,
    settings: options.Settings = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of the initial weights. Noise and samples stay secret: no two runs are the same.",
            show_default="drawn from the operating system",
        ),
    ] = None,
    reproducible: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="SEED",
            help="Draw the noise and the samples from this seed as well: the run can be repeated, and is NOT PRIVATE.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where to compute: cpu, cuda, cuda:1 …; auto takes CUDA where there is one.")
    ] = "auto",
    data: options.DataRoot = None,
    microbatch_size: Annotated[int | None, typer.Option(help="Rows that go through the model at once; caps the memory.")] = None,
    validation_fraction: options.ValidationFraction = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File to save the run in as it goes. It holds the run's secret key.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    budget_file: options.BudgetFile = None,
    sampling: options.SamplingScheme = "poisson",
    largest_batch: options.LargestBatch = None,
    adjacency: options.Adjacency = "add_remove",
    audit: Annotated[
        bool,
        typer.Option("--audit", help="Audit the plan before any data are read (`lipdp audit`); one that is refuted is not run."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for plan.json, history.json, result.json, the weights (model.pt), the model (model.lipdp) and a report.",
            rich_help_panel="Output",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|FILE.npz",
            help="Images of your own in the place of a recipe: a folder of pictures for each class, or arrays images and labels.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    features: Annotated[str, typer.Option(help="Of images: small, large or auto.", rich_help_panel=_OWN)] = "auto",
    table: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE.csv", help="A table of your own: names of columns in the first row.", rich_help_panel=_OWN
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Of the table: the column to predict.", rich_help_panel=_OWN)
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Of the table: what is public of its columns, ranges and categories, "
            '{"age": [18, 90], "job": ["clerk", "nurse"]}; a target with a range is predicted as a number. Ranges that it leaves '
            "out are found privately, from a fifth of ε.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Of the table: a column to leave out, a record's number or name. Can be repeated.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    separator: Annotated[
        str, typer.Option(metavar="CHARACTER", help="Of the table: what parts its cells; tab for tabulators.", rich_help_panel=_OWN)
    ] = ",",
    decimal: Annotated[
        str, typer.Option(metavar="CHARACTER", help="Of the table: the decimal point of its numbers.", rich_help_panel=_OWN)
    ] = ".",
    encoding: Annotated[str, typer.Option(help="Of the table: utf-8, latin-1, utf-16, …", rich_help_panel=_OWN)] = "utf-8",
    test: Annotated[
        Path | None, typer.Option(metavar="FOLDER|FILE", help="Images or a table to judge it on.", rich_help_panel=_OWN)
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Train in N processes of this machine together (torchrun): the same result, one GPU or processor core each.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a recipe's network, or a model of your own images or table, privately; report its accuracy with its (ε, δ)."""
    if nproc is not None and not is_rank():
        raise typer.Exit(start_ranks(nproc))
    check_budget(epsilon, noise_multiplier, epochs=epochs)
    drawn = drawing(sampling, largest_batch, adjacency)
    usual = drawn == drawing("poisson", None, "add_remove")
    sources = {f"the recipe {recipe!r}": recipe, "--images": images, "--csv": table}
    named = [name for name, given in sources.items() if given is not None]
    if len(named) != 1:
        given = f"{' and '.join(named)} are given, and one of them is trained on: " if named else ""
        raise ConfigurationError(
            f"{given}give the name of a recipe, which `lipdp recipes` lists, or records of your own: --images FOLDER or --csv FILE"
        )
    if recipe is None:
        refused: dict[str, object] = {"--noise-multiplier": noise_multiplier, "--epochs": epochs, "--batch-size": batch_size}
        refused |= {"--learning-rate": learning_rate, "--checkpoint": checkpoint, "--microbatch-size": microbatch_size}
        foreign = [name for name, value in refused.items() if value is not None] + ["--set"] * bool(settings) + ["--audit"] * audit
        foreign += [] if usual else ["--sampling, --adjacency"]
        if foreign:
            raise ConfigurationError(
                f"{foreign[0]} is for recipes: with records of your own all settings follow from public numbers"
            )
        common: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "seed": seed if reproducible is None else reproducible,
            "reproducible": reproducible is not None,
            "device": usable_device(device),
            "budget": budget_file,
            "validation_fraction": validation_fraction,
            "output": output,
            "as_json": as_json,
        }
        if table is not None:
            if features != "auto":
                raise ConfigurationError("--features is for images")
            form = CsvForm(separator, decimal, encoding)
            train_table(table, target=target, schema=schema, without=without, test=test, form=form, **common)
        elif images is not None:
            if target is not None or schema is not None or without or CsvForm(separator, decimal, encoding) != CsvForm():
                raise ConfigurationError(
                    "--target, --schema, --without, --separator, --decimal and --encoding are for tables: --csv FILE"
                )
            train_images(images, test=test, features=features, **common)
        return
    own = [name for name, value in {"--test": test, "--target": target, "--schema": schema, "--without": without}.items() if value]
    own += [] if CsvForm(separator, decimal, encoding) == CsvForm() else ["--separator, --decimal, --encoding"]
    if own:
        raise ConfigurationError(f"{own[0]} is for records of your own (--images, --csv); the recipe {recipe!r} brings its dataset")
    asked = {"epsilon": epsilon, "delta": delta, "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    chosen = configured(recipe, settings, **asked, validation_fraction=validation_fraction)
    if reproducible is not None and seed is not None:
        raise ConfigurationError("--reproducible SEED is the seed of everything: leave --seed out")
    chosen_seed = seed if reproducible is None else reproducible
    if chosen_seed is not None and chosen_seed >= 2**63:
        raise ConfigurationError(f"--{'seed' if reproducible is None else 'reproducible'} must be below 2^63")
    if audit and not usual:
        raise ConfigurationError("--audit is for Poisson samples and a record more or less: leave --sampling and --adjacency out")
    _check_files(checkpoint, resume, output)
    from lipdp.privacy.budget import open_budget

    account = open_budget(budget_file)
    place = usable_device(device)
    size, audited = training_size(dataset_info(chosen.dataset), validation_fraction), None
    if audit:  # one that is refuted ends here
        with console(stderr=True).status("auditing the plan") as status:
            how: dict[str, Any] = {"seconds": 60.0, "progress": status.update, "strict": True}
            audited = audit_recipe(chosen, epsilon, noise_multiplier, dataset_size=size, **how)
    from rich.text import Text

    from lipdp import recipes
    from lipdp.training import ProgressBar

    out = console()
    callbacks: list[Callback] = [ProgressBar(console(stderr=True))]
    with joined(place) as (ranks, place):
        if not as_json and ranks.is_first:
            given = "".join(f", {key}={value}" for key, value in chosen.options.items())
            several = f", {ranks.count} processes" if ranks.count > 1 else ""
            out.print(
                Text(chosen.name, "bold"),
                f": {chosen.model} on {size:,} records of {chosen.dataset}{given}; {place}{several}",
                sep="",
            )
            callbacks.insert(0, _plan_printer(out))
        try:
            result = recipes.train(
                chosen,
                epsilon=epsilon,
                noise_multiplier=noise_multiplier,
                seed=shared_seed(chosen_seed, ranks),
                reproducible=reproducible is not None,
                device=place,
                root=data,
                validation_fraction=validation_fraction,
                callbacks=callbacks,
                microbatch_size=microbatch_size,
                checkpoint=checkpoint,
                resume=resume,
                budget=account,
                **drawn,
            )
        except KeyboardInterrupt as error:
            saved = checkpoint is not None and checkpoint.exists()
            raise Interrupted(_how_to_resume(checkpoint) if saved else "", getattr(error, "signal", signal.SIGINT)) from None
    if not ranks.is_first:
        return
    report = _report(result, chosen, validation_fraction, place) | ({"processes": ranks.count} if ranks.count > 1 else {})
    if account is not None:
        report["budget"] = {"path": str(account.path), "spent": account.spent, "remaining": account.remaining}
    if audited is not None:
        report["audit"] = audited.to_dict()
    if output is not None:
        decided: dict[str, float | str | None] = {
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            **asked,
            "validation_fraction": validation_fraction,
        }
        if not usual:
            decided |= {"sampling": sampling, "largest_batch": largest_batch, "adjacency": adjacency}
        if reproducible is not None:
            decided["reproducible"] = "SEED"
        command = again([chosen.name], decided, [word for setting in settings or () for word in ("--set", setting)])
        command += " --audit" * audit
        report["files"] = _save(result, report, output, command, chosen, data, validation_fraction)
    if as_json:
        print_json(report)
        return
    promise = guarantee(result.epsilon, result.delta)
    area = f", AUROC [bold]{100 * report['auroc']:.1f}%[/bold]" if "auroc" in report else ""
    out.print(
        f"{report['evaluated_on']} accuracy [bold]{100 * result.accuracy:.1f}%[/bold]{area} with ({promise}), "
        f"{result.steps:,} steps in {duration(report['seconds'])}, {result.method}",
        markup=True,
        soft_wrap=True,
    )
    if account is not None:
        out.print(f"budget of {account.dataset}: ε = {upwards(account.spent)} of {brief(account.epsilon)} spent")
    if not result.private:
        out.print(REPRODUCIBLE, style="bold red", soft_wrap=True)
    if audited is not None:
        bound = audited.epsilon
        out.print(
            f"audited: nothing refutes the plan; one step leaks ε ≥ {downwards(bound.epsilon)} of {upwards(bound.claimed)}",
            soft_wrap=True,
        )
    if output is not None:
        out.print(f"saved {', '.join(report['files'])} in {output}", soft_wrap=True)


def _plan_printer(out: Console) -> Callback:
    """Prints the plan before the first step, and where the run continues if it does."""
    from lipdp.training import Callback
    from lipdp.training.callbacks import Run

    class ShowPlan(Callback):
        def on_start(self, run: Run) -> None:
            print_plan(out, run.engine.plan)
            if run.engine.steps:
                done = f"resumed after {run.engine.steps:,} of {run.engine.plan.steps:,} steps"
                out.print(f"{done}, with ε = {upwards(run.engine.epsilon)} spent", soft_wrap=True)

    return ShowPlan()


def _how_to_resume(checkpoint: Path | None) -> str:
    """The command that continues the run."""
    words = ["lipdp", *sys.argv[1:], *([] if "--resume" in sys.argv else ["--resume"])]
    return f"the same command with --resume continues from '{checkpoint}': {shlex.join(words)}"


def _report(result: Result, recipe: Recipe, validation_fraction: float | None, device: str) -> dict[str, Any]:
    return {
        **result.summary(),
        # Of the whole run, also where this call only resumed it.
        "seconds": max(result.seconds, result.history.seconds),
        "dataset": recipe.dataset,
        "model": recipe.model,
        "evaluated_on": "test" if validation_fraction is None else "validation",
        "noise_multiplier": result.plan.noise_multiplier,
        "batch_size": result.plan.batch_size,
        "epochs": result.plan.epochs,
        "learning_rate": recipe.learning_rate,
        "adjacency": result.plan.adjacency,
        "accountant": result.plan.accountant,
        "sampling": result.plan.sampling,
        "device": device,
    }


def _check_files(checkpoint: Path | None, resume: bool, output: Path | None) -> None:
    """Before anything is spent: nothing will be overwritten, and there is a place for the results."""
    if resume and checkpoint is None:
        raise ConfigurationError("--resume needs --checkpoint FILE, the file to continue from")
    if resume and checkpoint is not None and not checkpoint.exists():
        warnings.warn(f"there is no checkpoint at '{checkpoint}': the run starts from the beginning", LipdpWarning, stacklevel=2)
    if output is None:
        return
    make_run_folder(output, resume=resume)


def _save(
    result: Result, report: dict[str, Any], folder: Path, command: str, recipe: Recipe, root: Path | None, fraction: float | None
) -> list[str]:
    """The folder of a run: the model, its weights by themselves, and what is published; the names of the files."""
    import torch

    from lipdp import data
    from lipdp.report import About, evaluate_run, this_environment, write_run
    from lipdp.report.run import MODEL, WEIGHTS
    from lipdp.saved import save_model

    torch.save({name: tensor.cpu() for name, tensor in result.model.state_dict().items()}, folder / WEIGHTS)
    written = [WEIGHTS]
    try:
        save_model(result.model, folder / MODEL)
        written.append(MODEL)
    except ConfigurationError:  # made with options that are no plain data: its weights are all there is to keep
        pass
    learn, test, info = data.load(recipe.dataset, root=root)
    judged = test if fraction is None else data.split(learn, fraction)[1]
    predictor = result.model if recipe.views is None else data.TestTimeAverage(result.model, recipe.views)
    found = f"the settings of the recipe {recipe.name} (what a search for them read of these records is not covered)"
    about = About(
        command=command,
        environment=this_environment(str(next(result.model.parameters()).device)),
        public=(f"{found}: {recipe.provenance}",) if recipe.provenance else (),
        evaluation=evaluate_run(predictor, judged, info.class_names, part="test" if fraction is None else "validation"),
    )
    return [*written, *write_run(folder, result.plan, result.history, report, about)]
