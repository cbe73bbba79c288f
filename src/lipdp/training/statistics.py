"""Statistics for :class:`lipdp.nn.Standardize`: what reaches that layer, summed over all records, noised once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy.moments import Moments, private_moments
from lipdp.training.batches import check_dataset, gather

__all__ = ["find_standardize", "release_moments"]


class _ReachedError(Exception):
    """Ends a forward pass at the layer whose input is wanted."""


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
    model: torch.nn.Module,
    layer: nn.Standardize,
    dataset: Any,
    *,
    multiplier: float,
    dataset_size: int,
    draw: torch.Generator,
    device: torch.device,
    rows: int,
    copies: int,
    shape: tuple[int, ...] | None,
) -> Moments:
    """Mean and variance of each channel of what reaches ``layer``, by one Gaussian mechanism of this multiplier.

    What lies in front of the layer is run as it is (a frozen feature extractor, or nothing). Where records hold several
    precomputed copies, a record's moments are the means of its copies'.
    """
    size = check_dataset(dataset)

    def features() -> Iterator[torch.Tensor]:
        for start in range(0, size, rows):
            inputs, _ = gather(dataset, torch.arange(start, min(start + rows, size)))
            stored = shape is not None and tuple(inputs.shape[1:]) == (copies, *shape)
            x = inputs.to(device)
            reached = _input_of(model, layer, x.flatten(0, 1) if stored else x)
            yield reached.reshape(len(inputs), copies if stored else 1, *reached.shape[1:])

    return private_moments(
        features(),
        radius=layer.radius,
        multiplier=multiplier,
        dataset_size=dataset_size,
        generator=draw,
        copies=True,
        device=device,
    )


def _input_of(model: torch.nn.Module, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    reached: list[torch.Tensor] = []

    def note(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        reached.append(inputs[0].detach())
        raise _ReachedError

    handle = layer.register_forward_pre_hook(note)
    try:
        with torch.no_grad():
            model(x)
    except _ReachedError:
        return reached[0]
    finally:
        handle.remove()
    raise DataError("the model's forward pass does not reach its Standardize layer")
