"""``lipdp plan`` and ``lipdp bounds``: what a run would do, and why its sensitivities hold. Neither reads data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from lipdp.cli import options
from lipdp.cli.output import console, number, print_json, print_plan, table
from lipdp.cli.settings import DEFAULT_EPSILON, budget, configured, dataset_info, training_size

__all__ = ["BOUNDS_EXAMPLE", "PLAN_EXAMPLE", "bounds", "plan"]

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
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan there as JSON.", rich_help_panel="Output")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """The privacy plan of a run: its sensitivities, noise, length and cost, before any data is read."""
    epsilon, noise_multiplier = budget(epsilon, noise_multiplier, epochs=epochs)
    chosen = configured(
        recipe,
        settings,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        validation_fraction=validation_fraction,
        epsilon=epsilon,
    )
    from lipdp import recipes

    info = dataset_info(chosen.dataset)
    size = training_size(info, validation_fraction)
    made = recipes.prepare(chosen, info, epsilon=epsilon, noise_multiplier=noise_multiplier, dataset_size=size).plan
    if output is not None:
        output.write_text(made.to_json() + "\n", encoding="utf-8")
    if as_json:
        print_json(json.loads(made.to_json()))
        return
    out = console()
    print_plan(out, made)
    if output is not None:
        out.print(f"written to {output}", markup=False, soft_wrap=True)


def bounds(recipe: options.RecipeName, settings: options.Settings = None, as_json: options.Json = False) -> None:
    """The calculus of bounds, layer by layer: X forward, G backward, Δ for each parameter."""
    chosen = configured(recipe, settings)
    from rich.markup import escape

    from lipdp import recipes
    from lipdp.bounds import analyse

    # Any noise will do: the plan is not looked at, the model and the loss are those of `lipdp train`. Statistics need a budget.
    epsilon, noise = (None, 1.0) if chosen.statistics_budget is None else (DEFAULT_EPSILON, None)
    ready = recipes.prepare(chosen, dataset_info(chosen.dataset), epsilon=epsilon, noise_multiplier=noise)
    found = analyse(ready.model, ready.loss)
    total = ready.plan.sensitivity
    if as_json:
        layers = [dataclasses.asdict(row) for row in found.layers]
        parameters = [dataclasses.asdict(row) for row in found.parameters]
        print_json(
            {
                "recipe": chosen.name,
                "sensitivity": total,
                "loss_lipschitz": found.loss_lipschitz,
                "output_norm": found.output.norm,
                "lipschitz": found.lipschitz,
                "layers": layers,
                "parameters": parameters,
            }
        )
        return
    out = console()
    out.print(f"[bold]{chosen.name}[/bold]: {escape(str(ready.loss))}, Lipschitz constant {number(found.loss_lipschitz)}")
    out.print(
        table(
            ("operation", "output", "X", "G"),
            [(row.where, "×".join(map(str, row.output)), number(row.norm), number(row.cotangent)) for row in found.layers],
            right=("X", "G"),
        )
    )
    out.print(
        table(
            ("parameter", "X", "G", "Δ", "uses", "size"),
            [
                (row.name, *map(number, (row.input_norm, row.cotangent_norm, row.sensitivity)), str(row.uses), f"{row.size:,}")
                for row in found.parameters
            ],
            right=("X", "G", "Δ", "uses", "size"),
        )
    )
    out.print(f"one example's whole gradient: at most {number(total)}")
    out.print(
        "[dim]X: bound on what leaves an operation (for a parameter, on what reaches it); G: on its cotangent; Δ: on one "
        "example's gradient, for every input, every target and all weights inside their constraints.[/dim]"
    )
