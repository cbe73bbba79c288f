"""The query: the sum over the sampled examples of their gradients, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lipdp._backward import gradients
from lipdp._numerics import arithmetic, wide
from lipdp.errors import DataError
from lipdp.losses import Loss
from lipdp.training.batches import Rows, microbatches
from lipdp.training.clip_counts import LayerCounts
from lipdp.training.copies import Copies

__all__ = ["Backward", "backward", "gradient_sum", "zeros_like_sum"]

Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor | None]]


def gradient_sum(
    model: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
    parameters: Mapping[str, torch.Tensor],
    inputs: torch.Tensor | Rows,
    targets: torch.Tensor,
    *,
    microbatch_size: int,
    device: torch.device,
    precision: str = "float32",
    copies: Copies | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    counts: LayerCounts | None = None,
    replayed: Backward | None = None,
    seats: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Σ_i ∂loss_i/∂θ for each parameter θ: a sum, never a mean, in float64.

    With ``copies``, loss_i is the mean over the example's K copies; they go through the network as rows of their own, whose
    gradients are summed and divided by K at the end, so that layers that clip cotangents see each copy's own. Rows whose
    contribution is not finite are left out; the others stay at their places, so that no other is affected. ``dtypes`` are what
    inputs and targets are converted to. ``counts`` notes norms on the way. ``replayed`` stands for :func:`backward` with the same
    model, loss and parameters. ``seats``: where records sit.
    """

    def run(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Mapping[str, torch.Tensor | None]:
        return backward(model, loss, parameters, x, y, mask) if replayed is None else replayed(x, y, mask)

    many = copies or Copies()
    size = max(1, microbatch_size // many.count)
    sums = {name: zeros_like_sum(p) for name, p in parameters.items()}
    for x, y, mask in microbatches(inputs, targets, size, device, dtypes, seats):
        with arithmetic(precision, device):
            _accumulate(sums, run(many.rows(x), many.repeat(y), many.repeat(mask)))
        if counts is not None:
            counts.collect(mask, many.count)
    if not _all_finite(sums):
        sums = {name: zeros_like_sum(p) for name, p in parameters.items()}
        for x, y, mask in microbatches(inputs, targets, size, device, dtypes, seats):
            with arithmetic(precision, device):
                _accumulate(sums, _finite_part(run, many.rows(x), many.repeat(y), many.repeat(mask)))
            if counts is not None:
                counts.discard()  # they were counted in the first pass
    if many.count > 1:
        for total in sums.values():
            total /= many.count
    return sums


def zeros_like_sum(parameter: torch.Tensor) -> torch.Tensor:
    """A zero of the parameter's shape to add gradients to, in float64."""
    return torch.zeros_like(parameter, dtype=wide(parameter), requires_grad=False)


def backward(
    model: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
    parameters: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, torch.Tensor | None]:
    """Σ_i ∂loss_i/∂θ over the rows of ``mask``; None for a parameter that the loss does not depend on.

    The sums over rows are those of :mod:`lipdp._sums`, whatever the layers are.
    """
    values = loss(model(x), y)
    if values.shape != mask.shape:
        raise DataError(
            f"the loss returned shape {tuple(values.shape)} for {len(mask)} examples; it must give one value per example "
            "(reduction='none')"
        )
    total = torch.where(mask, values, torch.zeros_like(values)).sum()
    if not total.requires_grad:
        raise DataError("the loss does not depend on any trainable parameter")
    return dict(zip(parameters, gradients(total, list(parameters.values()), len(mask)), strict=True))


def _accumulate(sums: dict[str, torch.Tensor], found: Mapping[str, torch.Tensor | None]) -> None:
    for name, gradient in found.items():
        if gradient is not None:
            sums[name] += gradient


def _all_finite(tensors: Mapping[str, torch.Tensor | None]) -> bool:
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors.values() if tensor is not None]).all())


def _finite_part(run: Backward, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Mapping[str, torch.Tensor | None]:
    """Without the rows whose gradient overflows: each is tried by itself, all the others masked."""
    whole = run(x, y, mask)
    if _all_finite(whole):
        return whole
    good = torch.zeros_like(mask)
    for row in torch.nonzero(mask).flatten().tolist():
        alone = torch.zeros_like(mask)
        alone[row] = True
        good[row] = _all_finite(run(_only(x, alone), _only(y, alone), alone))
    return run(_only(x, good), _only(y, good), good)


def _only(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of the other rows: 0·inf would be NaN."""
    return rows.masked_fill(~chosen.reshape(-1, *[1] * (rows.ndim - 1)), 0)
