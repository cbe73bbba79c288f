"""Statistics for :class:`lipdp.nn.Standardize`: what reaches that layer, summed over all records, noised once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from lipdp import nn
from lipdp.bounds import Analysis
from lipdp.data.augment import Augmentation, is_fixed
from lipdp.errors import ConfigurationError
from lipdp.privacy.moments import Moments, moment_stds, private_moments
from lipdp.privacy.randomness import Stream
from lipdp.program import Program
from lipdp.program.dtypes import Types
from lipdp.training.batches import gather_tensors, rows_at_once, slices

__all__ = ["describe_release", "find_standardize", "release_moments"]


def find_standardize(model: torch.nn.Module) -> nn.Standardize:
    """The model's one Standardize layer."""
    found = [module for module in model.modules() if isinstance(module, nn.Standardize)]
    if len(found) != 1:
        raise ConfigurationError(
            f"statistics are released for one lipdp.nn.Standardize layer; this model has {len(found)}. "
            + (
                "Put one into it, or leave statistics_budget out."
                if not found
                else "Statistics behind another would need its own first."
            )
        )
    return found[0]


def release_moments(
    program: Program,
    layer: nn.Standardize,
    dataset: Any,
    *,
    multiplier: float,
    dataset_size: int,
    draw: Stream,
    device: torch.device,
    rows: int,
    copies: Augmentation | None,
    shape: tuple[int, ...] | None,
) -> Moments:
    """Mean (and variance) of each channel of what reaches ``layer``, by one Gaussian mechanism of this multiplier.

    What lies in front of the layer is run as the program says (a frozen feature extractor, or nothing). A record's moments are the
    means of its copies', where the copies are fixed; where they are drawn in every step, they are those of the record itself.
    """
    fixed = copies if is_fixed(copies) else None
    entries, types = math.prod(gather_tensors(dataset, torch.arange(1))[0].shape), Types(program.model)
    front = program.reaching(layer)

    def features() -> Iterator[torch.Tensor]:
        for inputs, _ in slices(dataset, min(rows, rows_at_once(entries, device))):
            assert isinstance(inputs, torch.Tensor)
            x = types.inputs(inputs.to(device))
            with torch.no_grad():
                reached = front(x if fixed is None else fixed(x).flatten(0, 1))
            yield reached.reshape(len(inputs), 1 if fixed is None else fixed.copies, *reached.shape[1:])

    return private_moments(
        features(),
        radius=layer.radius,
        multiplier=multiplier,
        dataset_size=dataset_size,
        mean_share=_mean_share(layer),
        generator=draw,
        copies=True,
        device=device,
    )


def _mean_share(layer: nn.Standardize) -> float:
    return 1.0 if layer.moments == 1 else 0.5


def describe_release(model: torch.nn.Module, analysis: Analysis, multiplier: float, dataset_size: int) -> Iterator[tuple[str, str]]:
    """(layer, what will be released for it and with which noise): notes for a plan."""
    shapes = {row.where: row.output for row in analysis.layers}
    for name, layer in model.named_modules():
        shape = shapes.get(f"layer '{name}' ({type(layer).__name__})")
        if isinstance(layer, nn.Standardize) and shape is not None:
            stds = moment_stds(layer.radius, math.prod(shape[1:]), multiplier, _mean_share(layer), layer.channels)
            each = [f"{std / dataset_size:.3g} on each {what}" for what, std in zip(("mean", "mean square"), stds, strict=True)]
            yield name, f"statistics of {layer.channels} channels, released with noise {' and '.join(each[: layer.moments])}"
