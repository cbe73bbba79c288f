"""Preprocessing of whole datasets, once, before training: each example by itself, by fixed public functions, so for free.

The same functions are layers (:class:`lipdp.nn.BoundedInput`, :mod:`lipdp.data.colour`). As layers they are part of the model:
they are exported with it and certificates are in the units of the raw input. As preprocessing they run once, not in every step;
the model still has to start with a BoundedInput, for that is where the bound is proved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp._checks import whole
from lipdp.errors import ConfigurationError, DataError
from lipdp.nn.boundary import BoundedInput

__all__ = ["Projection", "map_inputs", "project_inputs", "require_finite"]


Mode = Literal["ball", "sphere"]


def project_inputs(x: Tensor, norm: float = 1.0, mode: Mode = "ball") -> Tensor:
    """Each example of a batch (batch, *shape) brought into the ball of radius ``norm``, or onto its sphere (0 stays 0).

    Args:
        x: examples along the first dimension; an example's norm is taken over all its entries.
        norm: the radius, above 0.
        mode: "ball" only shortens what is longer than ``norm``; "sphere" gives every example but 0 that length.
    """
    if mode not in ("ball", "sphere"):
        raise ConfigurationError(f"mode is {mode!r}: choose ball or sphere.")
    if x.ndim < 2:
        raise DataError(
            f"a batch of examples has the shape (batch, *shape), not {tuple(x.shape)}; one example: Projection(norm)(x)"
        )
    projected: Tensor = BoundedInput(tuple(x.shape[1:]), norm=norm, mode=mode)(x)
    return projected


class Projection:
    """The same for one example at a time: a transform for datasets that take one, as torchvision's do.

    Args:
        norm: the radius, above 0.
        mode: "ball" only shortens what is longer than ``norm``; "sphere" gives every example but 0 that length.
    """

    def __init__(self, norm: float = 1.0, mode: Mode = "ball") -> None:
        self.norm, self.mode = norm, mode
        project_inputs(torch.zeros(1, 1), norm, mode)  # refuse wrong arguments now, not at the first example

    def __call__(self, example: Tensor) -> Tensor:
        """Project."""
        return project_inputs(example.reshape(1, -1), self.norm, self.mode).reshape(example.shape)

    def __repr__(self) -> str:
        return f"Projection(norm={self.norm:g}, mode={self.mode!r})"


def map_inputs(
    dataset: TensorDataset,
    function: Callable[[Tensor], Tensor],
    *,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
) -> TensorDataset:
    """A new dataset whose inputs are ``function`` of the old ones', computed in batches; targets are shared.

    ``function`` takes (batch, *shape) and must treat each example by itself. That is *checked* on the first examples: what mixes
    examples (a mean over the dataset, say) is a statistic of the data, and has to be paid for.

    Args:
        dataset: its first tensor holds the inputs; the other tensors stay as they are.
        function: from (batch, *shape) to (batch, *another shape), fixed and public.
        batch_size: examples that are computed together.
        device: where to compute, by default where the inputs are; outputs end up with the inputs.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from lipdp.data import map_inputs, rgb_to_yuv
        >>> images = TensorDataset(torch.rand(10, 3, 4, 4), torch.zeros(10))
        >>> map_inputs(images, rgb_to_yuv).tensors[0].shape
        torch.Size([10, 3, 4, 4])
    """
    if not isinstance(dataset, TensorDataset) or not dataset.tensors:
        raise ConfigurationError(f"map_inputs takes a TensorDataset of inputs and targets, not {type(dataset).__name__}")
    inputs, *rest = dataset.tensors
    with torch.no_grad():
        parts = [function(part.to(device)).to(inputs.device) for part in torch.split(inputs, whole("batch_size", batch_size))]
    outputs = torch.cat(parts)
    if len(outputs) != len(inputs):
        raise DataError(f"the function made {len(outputs)} examples of {len(inputs)}; it has to keep their number and order")
    _refuse_mixing(inputs, outputs, function, device)
    return TensorDataset(outputs, *rest)


def _refuse_mixing(
    inputs: Tensor, outputs: Tensor, function: Callable[[Tensor], Tensor], device: torch.device | str | None
) -> None:
    for index in range(min(3, len(inputs))):
        with torch.no_grad():
            alone = function(inputs[index : index + 1].to(device)).to(outputs.device)[0]
        together = outputs[index]
        if outputs.is_floating_point():
            scale = float(together.abs().max()) if together.numel() else 0.0
            # Matrix products round differently in batches of another size.
            same = torch.allclose(alone, together, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)
        else:
            same = torch.equal(alone, together)
        if not same:
            raise DataError(
                f"example {index} comes out differently alone than with the others: the function mixes examples (or is random), so "
                "its result is a statistic of the data. Use a function of each example, or pay for the statistic "
                "(lipdp.privacy.private_moments)."
            )


def require_finite(dataset: TensorDataset) -> None:
    """Raise a `DataError` if a floating tensor of the dataset holds a NaN or an infinity.

    No bound on a gradient holds for such an example, so it has to be refused rather than trained on.

    Args:
        dataset: all of its floating tensors are looked at, targets too.
    """
    if not isinstance(dataset, TensorDataset):
        raise ConfigurationError(
            f"require_finite takes a torch.utils.data.TensorDataset, not a {type(dataset).__name__}: put the examples in tensors."
        )
    bad = torch.zeros(len(dataset), dtype=torch.bool)
    for tensor in dataset.tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            for start in range(0, len(tensor), _CHUNK):
                part = tensor[start : start + _CHUNK]
                finite = torch.isfinite(part).reshape(len(part), -1).all(dim=1)
                bad[start : start + _CHUNK] |= ~finite.cpu()
    if count := int(bad.sum()):
        raise DataError(
            f"{count} of {len(dataset)} examples contain a NaN or an infinity, the first at index "
            f"{int(bad.nonzero()[0])}: no sensitivity bound holds for them. Remove or repair them first."
        )
