"""``lipdp epsilon``, ``lipdp calibrate`` and ``lipdp budget``: privacy accounting without a model, and a dataset's account."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._texts import NEIGHBOURS, brief, downwards, guarantee, table, upwards
from lipdp.cli import options
from lipdp.cli.output import check_new_file, console, print_fields, print_json
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.privacy import Budget

EPSILON_EXAMPLE = """Example: lipdp epsilon --noise-multiplier 1.1 --sampling-rate 0.01 --steps 1000 --delta 1e-5

Example: lipdp epsilon --noise-multiplier 1.1 --batch-size 600 --dataset-size 60000 --epochs 10 --delta 1e-5"""
CALIBRATE_EXAMPLE = """Example: lipdp calibrate --epsilon 3 --delta 1e-5 --sampling-rate 0.01 --steps 1000

Example: lipdp calibrate --epsilon 3 --delta 1e-5 --batch-size 600 --dataset-size 60000 --noise-multiplier 1.1"""

BatchSize = Annotated[int | None, typer.Option(help="b, with --dataset-size: instead of the sampling rate.")]


def epsilon(
    noise_multiplier: Annotated[float, typer.Option(help="σ: noise std ÷ sensitivity.", show_default=False)],
    delta: options.RequiredDelta,
    sampling_rate: options.SamplingRate = None,
    batch_size: BatchSize = None,
    dataset_size: options.DatasetSize = None,
    steps: options.RunSteps = None,
    epochs: options.RunEpochs = None,
    accountant: options.Accountant = "pld",
    adjacency: options.Adjacency = "add_remove",
    as_json: options.Json = False,
) -> None:
    """The ε that a run spends at a given δ."""
    q = _rate(sampling_rate, batch_size, dataset_size)
    length = _length(steps, epochs, q)
    if length is None:
        raise ConfigurationError("give the length of the run: --steps or --epochs")
    _print_cost(noise_multiplier, q, length, delta, {"accountant": accountant, "adjacency": adjacency}, None, as_json)


def calibrate(
    epsilon: Annotated[float, typer.Option(help="ε of the whole run, an upper limit.", show_default=False)],
    delta: options.RequiredDelta,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Instead of a length: find the largest number of steps with this noise.")
    ] = None,
    sampling_rate: options.SamplingRate = None,
    batch_size: BatchSize = None,
    dataset_size: options.DatasetSize = None,
    steps: options.RunSteps = None,
    epochs: options.RunEpochs = None,
    accountant: options.Accountant = "pld",
    adjacency: options.Adjacency = "add_remove",
    as_json: options.Json = False,
) -> None:
    """The smallest noise multiplier for a budget and a length, or the largest number of steps for a budget and a noise."""
    q = _rate(sampling_rate, batch_size, dataset_size)
    length = _length(steps, epochs, q)
    if (length is None) == (noise_multiplier is None):
        raise ConfigurationError(
            "give either a length (--steps or --epochs), to find the noise, or --noise-multiplier, to find the length"
        )
    from lipdp import privacy

    how = {"accountant": accountant, "adjacency": adjacency}
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "sampling_rate": q, **how}
    if noise_multiplier is None:
        assert length is not None
        noise_multiplier = privacy.calibrate_noise(steps=length, **budget)
    else:
        length = privacy.max_steps(noise_multiplier=noise_multiplier, **budget)
    _print_cost(noise_multiplier, q, length, delta, how, epsilon, as_json)


def _print_cost(sigma: float, q: float, steps: int, delta: float, how: dict[str, Any], target: float | None, as_json: bool) -> None:
    """What a run costs at δ, by the accountant and for the neighbours that ``how`` says."""
    from lipdp import privacy

    cost = privacy.epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps, delta=delta, **how)
    if as_json:
        asked = {} if target is None else {"target_epsilon": target}
        run = {"noise_multiplier": sigma, "sampling_rate": q, "steps": steps, "epochs": steps * q}
        print_json({"epsilon": cost, "delta": delta, **run, **asked, **how})
        return
    # The noise, rounded up in its last digit, still keeps the promise.
    shown = f"{sigma:g}" if target is None else f"{math.ceil(sigma * 1e5) / 1e5:.5f}"
    print_fields(
        console(),
        (
            ("guarantee", f"({guarantee(cost, delta)}) for {NEIGHBOURS[how['adjacency']]} ({how['accountant'].upper()})"),
            ("noise", f"multiplier {shown}"),
            ("run", f"{steps:,} steps at sampling rate {q:.4g} ({steps * q:.4g} epochs)"),
        ),
    )


def _rate(sampling_rate: float | None, batch_size: int | None, dataset_size: int | None) -> float:
    """q, from itself or from b/N."""
    if (sampling_rate is None) == (batch_size is None and dataset_size is None):
        raise ConfigurationError("give either --sampling-rate, or both --batch-size and --dataset-size")
    if sampling_rate is not None:
        return sampling_rate
    if batch_size is None or dataset_size is None:
        raise ConfigurationError("--batch-size and --dataset-size belong together: the sampling rate is their quotient")
    if not 0 < batch_size <= dataset_size:
        raise ConfigurationError(f"--batch-size {batch_size} must lie between 1 and --dataset-size {dataset_size}")
    return batch_size / dataset_size


def _length(steps: int | None, epochs: float | None, q: float) -> int | None:
    """T, from itself or as ⌈epochs/q⌉, as a plan does; None where neither is given."""
    if steps is not None and epochs is not None:
        raise ConfigurationError("give either --steps or --epochs, not both")
    if epochs is None:
        return steps
    if not (math.isfinite(epochs) and epochs > 0):
        raise ConfigurationError(f"--epochs must be positive, not {epochs!r}")
    if not 0 < q <= 1:
        raise ConfigurationError(f"--sampling-rate must lie above 0 and at most at 1, not {q!r}")
    return math.ceil(epochs / q - 1e-9)


app = typer.Typer(
    name="budget", no_args_is_help=True, help="The privacy budget of a dataset: one file, charged by all that is released."
)

CREATE_EXAMPLE = "Example: lipdp budget create survey.budget --epsilon 3 --delta 1e-6 --dataset survey"
SHOW_EXAMPLE = "Example: lipdp budget show survey.budget"
CHECK_EXAMPLE = "Example: lipdp budget check survey.budget --json"
EXPORT_EXAMPLE = "Example: lipdp budget export survey.budget --output survey.json"

File = Annotated[Path, typer.Argument(help="The budget's file; FILE.head beside it belongs to it.", show_default=False)]


@app.command(epilog=CREATE_EXAMPLE)
def create(
    file: File,
    epsilon: Annotated[float, typer.Option(help="ε that may be spent on the dataset in all, for all time.", show_default=False)],
    delta: Annotated[float, typer.Option(help="δ of all of it, well below 1/N. 0: pure ε-DP releases only.", show_default=False)],
    dataset: Annotated[str, typer.Option(help="A name for the data.", show_default=False)],
    adjacency: options.Adjacency = "add_remove",
    as_json: options.Json = False,
) -> None:
    """Begin the budget of a dataset. It is not changed afterwards."""
    from lipdp.privacy import Budget

    if file.exists():
        raise ConfigurationError(f"'{file}' exists: a budget is begun once. `lipdp budget show {file}` shows what it has left.")
    _show(Budget(file, epsilon=epsilon, delta=delta, dataset=dataset, adjacency=adjacency), as_json)  # type: ignore[arg-type]


@app.command(epilog=SHOW_EXAMPLE)
def show(file: File, as_json: options.Json = False) -> None:
    """What a dataset's budget is, what was charged, what is left."""
    budget = _open(file)
    _show(budget, as_json)
    if as_json:
        return
    entries, runs = _charges(budget), budget.runs()
    rows = [(entry["time"], entry["what"], _cost(entry, runs)) for entry in entries[-_SHOWN:]]
    if len(entries) > _SHOWN:
        console().print(f"the last {_SHOWN} of {len(entries)} entries; `lipdp budget export` has all", style="dim")
    if rows:
        console().print(table(("when", "what", "cost"), rows))


@app.command(epilog=CHECK_EXAMPLE)
def check(file: File, as_json: options.Json = False) -> None:
    """Read all of the file, and refuse it (exit code 2) where it is not what was written, or holds more than it may (3)."""
    from lipdp.errors import BudgetError

    budget = _open(file)
    budget.check()
    spent = budget.spent
    if spent > budget.epsilon:
        raise BudgetError(
            f"'{file}' holds charges of epsilon {upwards(spent, 6)}, above its {brief(budget.epsilon)}: this should not be "
            "possible."
        )
    if as_json:
        print_json({"path": str(file), "whole": True, "entries": len(budget.entries()), "spent": spent, "epsilon": budget.epsilon})
        return
    console().print(
        f"'{file}' is whole: {len(budget.entries())} entries, ε = {upwards(spent)} of {brief(budget.epsilon)} spent", soft_wrap=True
    )


@app.command(epilog=EXPORT_EXAMPLE)
def export(
    file: File,
    output: Annotated[Path | None, typer.Option(help="Where to write it.", show_default="stdout")] = None,
    as_json: options.Json = False,
) -> None:
    """All entries, and what they amount to as events of dp-accounting, as one JSON object: for auditors."""
    from lipdp.privacy.costs import to_data

    budget = _open(file)
    content = {
        **_summary(budget),
        "events": [{"event": to_data(event), "count": count} for event, count in budget.events()],
        "runs": budget.runs(),
        "entries": budget.entries(),
    }
    if output is None:
        print_json(content)
        return
    check_new_file(output, "--output")
    output.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print_json({**_summary(budget), "written": str(output)})
        return
    console().print(f"{len(content['entries'])} entries written to {output}", soft_wrap=True)


_SHOWN = 20


def _open(file: Path) -> Budget:
    from lipdp.privacy.budget import open_budget

    budget = open_budget(file)
    assert budget is not None
    return budget


def _summary(budget: Budget) -> dict[str, Any]:
    return {
        "path": str(budget.path),
        "dataset": budget.dataset,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "adjacency": budget.adjacency,
        "spent": budget.spent,
        "remaining": budget.remaining,
        "charges": len(_charges(budget)),
    }


def _charges(budget: Budget) -> list[dict[str, Any]]:
    """What was charged, oldest first; a run once, however often it was resumed."""
    charges: dict[Any, dict[str, Any]] = {}
    for number, entry in enumerate(budget.entries()):
        if entry["kind"] in ("charge", "run"):
            charges.setdefault(entry.get("run", number), entry)
    return list(charges.values())


def _show(budget: Budget, as_json: bool) -> None:
    if as_json:
        print_json(_summary(budget))
        return
    fields: Iterable[tuple[str, str]] = (
        ("dataset", budget.dataset),
        ("budget", f"({guarantee(budget.epsilon, budget.delta)}) for {NEIGHBOURS[budget.adjacency]}"),
        ("spent", f"ε = {upwards(budget.spent)}" if budget.spent else "nothing"),
        ("left", downwards(budget.remaining)),
        ("file", str(budget.path)),
    )
    print_fields(console(), fields)


def _cost(entry: dict[str, Any], runs: dict[str, dict[str, Any]]) -> str:
    if entry["kind"] == "run":
        run = runs[entry["run"]]
        state = "reserved" if run["reserved"] else f"{run['released']} released"
        return f"{run['steps']} steps, {state}"
    return ", ".join(_event(data) + (f" × {count}" if count > 1 else "") for data, count in entry["events"])


def _event(data: dict[str, Any]) -> str:
    from fractions import Fraction

    kind = data["type"]
    if kind in ("pure", "approximate"):
        delta = f", δ = {brief(float(Fraction(data['delta'])))}" if "delta" in data else ""
        return f"ε = {brief(float(Fraction(data['epsilon'])))}{delta}"
    values = {name: value for name, value in data.get("of", {}).items() if not isinstance(value, dict)}
    inner = [_event(value) for value in data.get("of", {}).values() if isinstance(value, dict)]
    shown = ", ".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in values.values())
    return f"{kind.removesuffix('DpEvent')}({', '.join([shown, *inner] if shown else inner)})"
