"""The query: the sum over the sampled examples of their gradients, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from lipdp.errors import DataError
from lipdp.losses import Loss
from lipdp.training.batches import Rows, microbatches
from lipdp.training.clip_counts import LayerCounts
from lipdp.training.copies import Copies

__all__ = ["Backward", "arithmetic", "backward", "gradient_sum", "zeros_like_sum"]

Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor | None]]


@contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """Never compute more coarsely than the plan's slack covers: TF32 only where planned, bf16 autocast where planned."""
    with ExitStack() as stack:
        if device.type == "cuda":
            allow = precision in ("tf32", "bfloat16")
            before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
            stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", before[0])
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", before[1])
            torch.backends.cuda.matmul.allow_tf32 = allow
            torch.backends.cudnn.allow_tf32 = allow
        # Also switched off where it is not planned: the caller may be inside an autocast of his own.
        stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"))
        yield


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
) -> dict[str, torch.Tensor]:
    """Σ_i ∂loss_i/∂θ for each parameter θ: a sum, never a mean, in float32 or better.

    With ``copies``, loss_i is the mean over the example's K copies; they go through the network as rows of their own, whose
    gradients are summed and divided by K at the end, so that layers that clip cotangents see each copy's own. Rows whose
    contribution is not finite are left out (one by one, so that no other is affected). ``dtypes`` are what inputs and targets are
    converted to. ``counts`` notes norms on the way.
    ``replayed`` stands for :func:`backward` with the same model, loss and parameters.
    """
    many = copies or Copies()
    size = max(1, microbatch_size // many.count)
    sums = {name: zeros_like_sum(p) for name, p in parameters.items()}
    for x, y, mask in microbatches(inputs, targets, size, device, dtypes):
        with arithmetic(precision, device):
            rows = many.rows(x), many.repeat(y), many.repeat(mask)
            _accumulate(sums, backward(model, loss, parameters, *rows) if replayed is None else replayed(*rows))
        if counts is not None:
            counts.collect(mask, many.count)
    if not _all_finite(sums):
        sums = {name: zeros_like_sum(p) for name, p in parameters.items()}
        for x, y, mask in microbatches(inputs, targets, size, device, dtypes):
            with arithmetic(precision, device):
                _accumulate_finite(sums, model, loss, parameters, many.rows(x), many.repeat(y), many.repeat(mask))
            if counts is not None:
                counts.discard()  # they were counted in the first pass
    if many.count > 1:
        for total in sums.values():
            total /= many.count
    return sums


def zeros_like_sum(parameter: torch.Tensor) -> torch.Tensor:
    """A zero of the parameter's shape to add gradients to, in float32 or better."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)


def backward(
    model: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
    parameters: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, torch.Tensor | None]:
    """Σ_i ∂loss_i/∂θ over the rows of ``mask``; None for a parameter that the loss does not depend on."""
    values = loss(model(x), y)
    if values.shape != mask.shape:
        raise DataError(
            f"the loss returned shape {tuple(values.shape)} for {len(mask)} examples; it must give one value per example "
            "(reduction='none')"
        )
    total = torch.where(mask, values, torch.zeros_like(values)).sum()
    if not total.requires_grad:
        raise DataError("the loss does not depend on any trainable parameter")
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, gradients, strict=True))


def _accumulate(sums: dict[str, torch.Tensor], gradients: Mapping[str, torch.Tensor | None]) -> None:
    for name, gradient in gradients.items():
        if gradient is not None:
            sums[name] += gradient


def _all_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors.values()]).all())


def _accumulate_finite(
    sums: dict[str, torch.Tensor],
    model: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
    parameters: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    """The slow way, for a batch that holds an example whose gradient overflows: one example at a time."""
    whole = backward(model, loss, parameters, x, y, mask)
    if _all_finite({name: g for name, g in whole.items() if g is not None}):
        _accumulate(sums, whole)
        return
    for row in torch.nonzero(mask).flatten().tolist():
        alone = slice(row, row + 1)
        one = backward(model, loss, parameters, x[alone], y[alone], mask[alone])
        if _all_finite({name: g for name, g in one.items() if g is not None}):
            _accumulate(sums, one)
