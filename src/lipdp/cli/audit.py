"""``lipdp audit``: attack a model's sensitivities, check a plan's release path, and guess at canaries. No data are read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp.cli import options
from lipdp.cli.options import check_budget, configured, dataset_info
from lipdp.cli.output import console, print_json
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.recipes import Recipe
    from lipdp.training import PrivacyPlan

__all__ = ["EXAMPLE", "REFUTED", "audit", "audit_recipe"]

EXAMPLE = """Example: lipdp audit digits --epsilon 4

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
        if ":" not in target:
            if plan is not None or lipschitz is not None:
                raise ConfigurationError("a recipe brings its own plan and loss: leave --plan and --lipschitz out")
            audit: Any = audit_recipe(
                configured(target, settings, epsilon=epsilon),
                epsilon,
                noise_multiplier,
                seconds=seconds,
                guesses=guesses,
                confidence=confidence,
                progress=status.update,
            )
        else:
            model, loss = _made(target, lipschitz)
            if plan is None:
                audit = audits.sensitivities(model, loss, seconds=seconds, input_shape=given, check=False)
            elif isinstance(loss, float):
                audit = audits.sensitivities(model, loss, _plan(plan), seconds=seconds, input_shape=given, check=False)
            else:
                audit = audits.check(
                    _plan(plan),
                    model,
                    loss,
                    seconds=seconds,
                    guesses=guesses,
                    confidence=confidence,
                    input_shape=given,
                    progress=status.update,
                )
    if as_json:
        print_json(audit.to_dict())
    else:
        console().print(str(audit), markup=False, soft_wrap=True)
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
