"""``lipdp epsilon`` and ``lipdp calibrate``: privacy accounting without a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lipdp.cli import options
from lipdp.cli.output import NEIGHBOURS, console, guarantee, print_fields, print_json
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.privacy import Accountant, Adjacency

__all__ = ["CALIBRATE_EXAMPLE", "EPSILON_EXAMPLE", "calibrate", "epsilon"]

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
    _print(*_spent(noise_multiplier, q, length, delta, accountant, adjacency), None, as_json)


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

    analysis, neighbours = cast("Accountant", accountant), cast("Adjacency", adjacency)
    if noise_multiplier is None:
        assert length is not None
        noise_multiplier = privacy.calibrate_noise(
            epsilon=epsilon, delta=delta, sampling_rate=q, steps=length, accountant=analysis, adjacency=neighbours
        )
    else:
        length = privacy.max_steps(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            sampling_rate=q,
            accountant=analysis,
            adjacency=neighbours,
        )
    _print(*_spent(noise_multiplier, q, length, delta, accountant, adjacency), epsilon, as_json)


Figures = tuple[float, float, int, float, float, str, str]


def _spent(sigma: float, q: float, steps: int, delta: float, accountant: str, adjacency: str) -> Figures:
    from lipdp import privacy

    cost = privacy.epsilon(
        noise_multiplier=sigma,
        sampling_rate=q,
        steps=steps,
        delta=delta,
        accountant=cast("Accountant", accountant),
        adjacency=cast("Adjacency", adjacency),
    )
    return sigma, q, steps, cost, delta, accountant, adjacency


def _print(
    sigma: float,
    q: float,
    steps: int,
    cost: float,
    delta: float,
    accountant: str,
    adjacency: str,
    target: float | None,
    as_json: bool,
) -> None:
    if as_json:
        asked = {} if target is None else {"target_epsilon": target}
        run = {"noise_multiplier": sigma, "sampling_rate": q, "steps": steps, "epochs": steps * q}
        print_json({"epsilon": cost, "delta": delta, **run, **asked, "accountant": accountant, "adjacency": adjacency})
        return
    # The noise, rounded up in its last digit, still keeps the promise.
    shown = sigma if target is None else math.ceil(sigma * 1e5) / 1e5
    print_fields(
        console(),
        (
            ("guarantee", f"{guarantee(cost, delta)} for {NEIGHBOURS[adjacency]} ({accountant.upper()})"),
            ("noise", f"multiplier {shown:g}" if target is None else f"multiplier {shown:.5f}"),
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
