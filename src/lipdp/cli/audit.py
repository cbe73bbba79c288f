"""``lipdp audit`` and ``lipdp certify``: a plan attacked from outside before it is trusted, and a model's certified radii."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._texts import table
from lipdp.cli import options
from lipdp.cli.options import check_budget, configured, dataset_info, numbers
from lipdp.cli.output import console, print_json
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.recipes import Recipe
    from lipdp.training import PrivacyPlan

AUDIT_EXAMPLE = """Example: lipdp audit digits --epsilon 4

Example: lipdp audit model.py:make --plan plan.json --seconds 300 --json   (make() returns model, loss)"""

REFUTED = 4  # exit code


def audit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="FILE.py:FUNCTION, a function without arguments that returns (model, loss), or a model alone; or a recipe.",
            show_default=False,
        ),
    ],
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The plan to audit, as JSON. Without it, only sensitivities of a function are attacked."),
    ] = None,
    lipschitz: Annotated[
        float | None, typer.Option(help="The loss's Lipschitz constant, where the function returns a model alone.")
    ] = None,
    epsilon: options.Epsilon = None,
    noise_multiplier: options.NoiseMultiplier = None,
    settings: options.Settings = None,
    seconds: Annotated[float, typer.Option(help="About how long the attack and the guesses may take, together.")] = 120.0,
    guesses: Annotated[int, typer.Option(min=1, help="Guesses at canaries, if there is time.")] = 20_000,
    confidence: Annotated[float, typer.Option(help="Of each lower bound on ε.")] = 0.999,
    shape: Annotated[
        str | None, typer.Option("--input-shape", help="Shape of one example, e.g. 3,32,32, where no BoundedInput says it.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Audit a model and its plan from outside; exit code 4 where something refutes the guarantee."""
    from lipdp import audit as audits

    told = console(stderr=True)
    given = _shape(shape)
    with told.status("auditing") as status:
        how: dict[str, Any] = {"seconds": seconds, "guesses": guesses, "confidence": confidence, "progress": status.update}
        if ":" not in target:
            if plan is not None or lipschitz is not None:
                raise ConfigurationError("a recipe brings its own plan and loss: leave --plan and --lipschitz out")
            audit: Any = audit_recipe(configured(target, settings, epsilon=epsilon), epsilon, noise_multiplier, **how)
        else:
            model, loss = _made(target, lipschitz)
            promised = None if plan is None else _plan(plan)
            if promised is None or isinstance(loss, float):
                audit = audits.sensitivities(model, loss, promised, seconds=seconds, input_shape=given, check=False)
            else:
                audit = audits.check(promised, model, loss, input_shape=given, **how)
    if as_json:
        print_json(audit.to_dict())
    else:
        console().print(str(audit), soft_wrap=True)
    if audit.refuted:
        typer.echo("error: the audit refutes the guarantee", err=True)
        raise typer.Exit(REFUTED)


def audit_recipe(
    chosen: Recipe,
    epsilon: float | None,
    noise_multiplier: float | None,
    *,
    dataset_size: int | None = None,
    **how: Any,
) -> Any:
    """The full audit of the plan that a recipe would be trained with; ``how`` goes to :func:`lipdp.audit.check`."""
    from lipdp import audit as audits
    from lipdp import recipes

    check_budget(epsilon, noise_multiplier, epochs=None)
    info = dataset_info(chosen.dataset)
    ready = recipes.prepare(chosen, info, epsilon=epsilon, noise_multiplier=noise_multiplier, dataset_size=dataset_size)
    return audits.check(ready.plan, ready.model, ready.loss, **how)


def _made(target: str, lipschitz: float | None) -> tuple[Any, Any]:
    """What the function returns: a model and a loss, or a loss's constant."""
    path, _, name = target.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(f"there is no file '{file}': give FILE.py:FUNCTION, or the name of a recipe")
    spec = importlib.util.spec_from_file_location(f"lipdp_audited_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"'{file}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look there
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise ConfigurationError(f"'{file}' has no function '{name}'")
    from torch.nn import Module

    returned = make()
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Module):
        if lipschitz is not None:
            raise ConfigurationError(f"{name}() returns a loss: leave --lipschitz out")
        return returned
    if isinstance(returned, Module):
        if lipschitz is None:
            raise ConfigurationError(f"{name}() returns a model alone: let it return (model, loss), or give --lipschitz")
        return returned, float(lipschitz)
    raise ConfigurationError(f"{name}() must return a model and a loss, not {type(returned).__name__}")


def _plan(file: Path) -> PrivacyPlan:
    from lipdp.training import PrivacyPlan

    return PrivacyPlan.from_json(file.read_text(encoding="utf-8"))


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigurationError(f"--input-shape takes whole numbers with commas between them, e.g. 3,32,32, not {text!r}")
    return shape


CERTIFY_EXAMPLE = """Example: lipdp train digits --epsilon 3 --output run/ && lipdp certify run/

Example: lipdp certify model.lipdp --dataset mnist --radii 0,8,16,32,64 --examples 1000 --json"""


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
    asked = numbers("--radii", radii)
    import lipdp

    file, trained_on = _found(path)
    name = dataset or trained_on
    if dataset is None and name is not None and name not in lipdp.data.names():
        raise ConfigurationError(
            f"'{path}' was trained on records of your own, '{name}', and `lipdp certify` reads what `lipdp data` lists. In Python: "
            f"lipdp.certify(lipdp.load({str(file)!r}), inputs, labels), with inputs as the model takes them"
        )
    if name is None:
        raise ConfigurationError(f"'{path}' does not say what it was trained on: give --dataset, a name that `lipdp data` lists")
    import torch
    from torch.utils.data import Dataset, Subset

    from lipdp.training.batches import gather_tensors

    model = lipdp.load(file)
    _, test, info = lipdp.data.load(name, root=data)
    part: Dataset[Any] = Subset(test, range(min(len(test), examples or len(test))))
    x, y = gather_tensors(part, torch.arange(len(part)))  # type: ignore[arg-type]
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
        f"{file} on {len(x):,} test examples of {info.name}; L2 radii in the units of its inputs (pixels: [0, 1])",
        soft_wrap=True,
    )
    headers = ("radius", *columns)
    out.print(table(headers, rows, right=headers))
    out.print(f"median radius {float(certified.median()):.4g}")


def _found(path: Path) -> tuple[Path, str | None]:
    """The model's file, and the dataset that it was trained on where that is known."""
    from lipdp.report.run import MODEL, RESULT

    file, beside = (path / MODEL, path / RESULT) if path.is_dir() else (path, path.parent / RESULT)
    if not file.exists():
        hint = f"there is no {MODEL} in the folder '{path}'" if path.is_dir() else f"there is no file '{path}'"
        raise ConfigurationError(f"{hint}: `lipdp train RECIPE --output DIR` writes one, and so does lipdp.save_model")
    try:
        known = json.loads(beside.read_text(encoding="utf-8"))["dataset"] if file.name == MODEL else None
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    return file, known if isinstance(known, str) else None
