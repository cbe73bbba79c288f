"""A self-check before norms are trusted: on a few examples, are they what the naive loop finds?

Norms are computed from what layers show. A parameter that is used behind its layer's back (``h @ self.embedding.weight.T``), a
dimension that is not the batch, examples that influence each other: each would make the norms too small without a sound, and
the guarantee with them. All of them show up here, at the cost of a few single-example passes, once per model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lipdp.clipping.capture import recording
from lipdp.errors import UnsupportedError

__all__ = ["verify", "verify_once"]

_EXAMPLES = 3
_verified: weakref.WeakKeyDictionary[torch.nn.Module, set[Any]] = weakref.WeakKeyDictionary()


def _signature(model: torch.nn.Module, x: torch.Tensor) -> Any:
    trained = tuple((name, id(p)) for name, p in model.named_parameters() if p.requires_grad)
    return tuple(x.shape[1:]), x.dtype, trained, tuple(id(module) for module in model.modules())


def verify_once(model: torch.nn.Module, loss: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> None:
    """:func:`verify`, unless this model was verified for inputs of this shape."""
    signature = _signature(model, x)
    if signature not in _verified.setdefault(model, set()):
        verify(model, loss, x, y)
        _verified[model].add(signature)


def verify(model: torch.nn.Module, loss: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> None:
    """Compare each parameter's per-example gradients with those of single-example passes, in evaluation mode (no dropout)."""
    # Two examples at least, so that mixing shows; a single one is compared with itself twice over.
    rows = torch.arange(max(2, min(_EXAMPLES, len(x))), device=x.device) % len(x)
    inputs, targets = x[rows], y[rows]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad():
            with recording(model, len(inputs)) as recorded:
                outputs = model(inputs)
            parts = recorded.contributions(loss(outputs, targets).sum())
            found = {name: part.materialise() for name, part in parts.items()}
            for i in range(len(inputs)):
                value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
                single = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
                for name, gradient in zip(parameters, single, strict=True):
                    _compare(name, i, gradient, found.get(name))
    finally:
        for module, mode in modes:
            module.training = mode


def _compare(name: str, example: int, expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
    if expected is None and found is None:
        return
    a = torch.zeros(()) if expected is None else expected.detach().double()
    b = torch.zeros(()) if found is None else found[example].detach().double()
    if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
        return  # an example without a finite gradient is dropped anyway
    tolerance = 0.05 if (expected is not None and expected.dtype in (torch.float16, torch.bfloat16)) else 1e-3
    scale = max(float(a.norm()), float(b.norm()))
    if float((a - b).norm()) > tolerance * scale + 1e-6:
        raise UnsupportedError(
            f"the per-example gradient of '{name}' as seen from its layer differs from that of the example alone. Either the "
            "parameter is also used outside its own layer's forward (e.g. a tied weight used by hand: call the layer instead), or "
            "some layer mixes the examples of a batch, or its first dimension is not the batch (use batch_first=True)."
        )
