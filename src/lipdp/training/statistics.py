"""Statistics for :class:`lipdp.nn.Standardize`: what reaches that layer, summed over all records, noised once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from lipdp import nn
from lipdp.data.augment import Augmentation, is_fixed
from lipdp.errors import ConfigurationError
from lipdp.privacy.moments import Moments, private_moments
from lipdp.privacy.randomness import Stream
from lipdp.program import Program
from lipdp.program.dtypes import Types
from lipdp.training.batches import gather_tensors, rows_at_once, slices

__all__ = ["find_standardize", "release_moments"]


def find_standardize(model: torch.nn.Module) -> nn.Standardize:
    """The model's one Standardize layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Standardize)]
    if len(layers) != 1:
        raise ConfigurationError(
            f"statistics are released for one lipdp.nn.Standardize layer; this model has {len(layers)}. "
            + (
                "Put one into it, or leave statistics_budget out."
                if not layers
                else "Statistics behind another would need its own first."
            )
        )
    return layers[0]


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
        mean_share=layer.mean_share,
        generator=draw,
        copies=True,
        device=device,
    )
