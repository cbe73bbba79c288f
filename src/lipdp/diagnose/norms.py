"""True gradients of every example: their norms parameter by parameter, their sum, and what went into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipdp.clipping import clip_batch
from lipdp.clipping.restored import left_as_it_was
from lipdp.errors import DataError
from lipdp.parametrize import effective_leaves

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
# Clipped to this, nothing is clipped.
_NO_CLIP = 1e30


@dataclass
class Measured:
    """What was measured on a batch; all of it private.

    Attributes:
        norms: parameter → ‖g_i‖ of each example, (batch,).
        sums: parameter → Σ_i g_i.
        inputs: module → norm of the activation that entered it, (batch,) (the largest of its uses).
        cotangents: module → norm of the cotangent that came back to its output, (batch,) (the largest of its uses).
    """

    norms: dict[str, Tensor]
    sums: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)

    def joined(self, other: Measured) -> Measured:
        """Two batches as one."""

        def both(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: torch.cat([a[name], b[name]]) for name in a if name in b}

        return Measured(
            both(self.norms, other.norms),
            {name: total + other.sums[name] for name, total in self.sums.items()},
            both(self.inputs, other.inputs),
            both(self.cotangents, other.cotangents),
        )


def measure_gradients(model: torch.nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor, *, one_by_one: bool = False) -> Measured:
    """Per-example gradient norms of every trainable parameter.

    They are those of what the calculus bounds and the engine noises: of the *effective* weight W = π(θ) in reparametrised layers.

    Args:
        model: in the mode it is in.
        loss: one value per example.
        x: inputs, batch first.
        y: targets.
        one_by_one: one backward pass for each example: slow, and the plain definition. By default the norms come from
            :mod:`lipdp.clipping`, which needs one pass for all (and is used wherever no layer is reparametrised).

    What the model puts somewhere meanwhile is put back: it may be trained on.
    """
    with left_as_it_was(model, loss):
        return _measured(model, loss, x, y, one_by_one)


def _measured(model: torch.nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor, one_by_one: bool) -> Measured:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), effective_leaves(model) as leaves:
        wanted = {**parameters, **leaves}
        with _watched(model, len(x)) as measured:
            gradients = _gradients(model, loss, x, y, wanted)
        measured.sums = gradients
        if one_by_one or leaves:
            rows = [_gradients(model, loss, x[i : i + 1], y[i : i + 1], wanted) for i in range(len(x))]
            measured.norms = {name: torch.stack([row[name].norm() for row in rows]).double() for name in wanted}
    if not measured.norms:
        clipped = clip_batch(model, loss, x, y, dict.fromkeys(parameters, _NO_CLIP), style="per_group")
        names = [group.name for group in clipped.groups]
        measured.norms = {name: clipped.norms[:, names.index(name)].detach().double() for name in parameters}
    return measured


def _gradients(model: torch.nn.Module, loss: PerExampleLoss, x: Tensor, y: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    values = loss(model(x), y)
    if values.shape != (len(x),):
        raise DataError(
            f"the loss returned shape {tuple(values.shape)} for {len(x)} examples; it must give one value per example "
            "(reduction='none')"
        )
    gradients = torch.autograd.grad(values.sum(), list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient.detach()
        for (name, tensor), gradient in zip(wanted.items(), gradients, strict=True)
    }


@contextmanager
def _watched(model: torch.nn.Module, batch: int) -> Iterator[Measured]:
    """Notes the norms of what enters the layers that have parameters, and of the cotangents that come back to them."""
    measured = Measured({}, {})

    def note(into: dict[str, Tensor], name: str, value: object) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0 and len(value) == batch:
            norms = torch.linalg.vector_norm(value.detach().double().reshape(batch, -1), dim=1)
            into[name] = torch.maximum(into[name], norms) if name in into else norms

    def watch(name: str) -> Callable[[torch.nn.Module, tuple[object, ...], object], None]:
        def hook(module: torch.nn.Module, arguments: tuple[object, ...], output: object) -> None:
            for argument in arguments[:1]:
                note(measured.inputs, name, argument)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda cotangent: note(measured.cotangents, name, cotangent))  # type: ignore[no-untyped-call]

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    try:
        yield measured
    finally:
        for handle in handles:
            handle.remove()
