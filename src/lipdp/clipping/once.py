"""A batch that is clipped once, or only measured, without a :class:`lipdp.clipping.Clipper` that is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lipdp.clipping.adoption import check_supported
from lipdp.clipping.batch import (
    Clip,
    Clipped,
    MaxNorm,
    Method,
    Style,
    check_choice,
    clipping_groups,
    eager,
    is_compiled,
    prepare,
    trainable,
    uncompiled,
)
from lipdp.clipping.clipper import Clipper, group_norms, shown_gradients, squared_norms
from lipdp.clipping.contribution import Contribution, Form
from lipdp.clipping.loops import PerExampleLoss
from lipdp.clipping.past import NotApartError
from lipdp.clipping.restored import left_as_it_was
from lipdp.clipping.verify import check_alone, seeing_all, verify_once
from lipdp.inputs import Inputs, device_of, rows_of
from lipdp.program.dtypes import Types


@uncompiled
def per_example_norms(
    model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor, *, form: Form = "auto", copies: int = 1
) -> torch.Tensor:
    """‖g_i‖₂ of each example's whole gradient (batch,), without materialising gradients where that is dearer.

    Args:
        model: as for :func:`clipped_gradients`, and so are the others.
        loss: one value per example.
        x: inputs, batch first.
        y: targets.
        form: how norms of layers with several positions are computed.
        copies: rows that make up one example.

    Example:
        >>> import torch, lipdp.clipping
        >>> model = torch.nn.Linear(3, 2)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> lipdp.clipping.per_example_norms(model, loss, torch.randn(5, 3), torch.zeros(5, dtype=torch.long)).shape
        torch.Size([5])
    """
    check_choice("form", form, Form)
    parameters = trainable(model)
    check_supported(model)
    types = Types(model, loss)
    batch = prepare(x, y, None, copies)
    x, targets = types.inputs(batch.x), types.targets(batch.y)
    rows, device = rows_of(x), device_of(x)
    own = _own_dtype(next(iter(parameters.values())))
    if rows == 0:
        return torch.zeros(0, dtype=own, device=device)
    with eager(is_compiled(model)):

        def shown() -> dict[str, Contribution]:
            verify_once(model, loss, x, targets)
            return shown_gradients(model, loss, x, targets, copies)

        try:
            with left_as_it_was(model, loss):
                contributions = seeing_all(model, x, shown)
        except NotApartError as error:
            check_alone(model, loss, x, targets, error.reason)
            return Clipper(model, loss, "naive", copies=copies)(x, targets, 1.0).norms[:, 0].to(own)
        squares = squared_norms(contributions, device, form)
        return group_norms(squares, clipping_groups(parameters, 1.0), rows // copies, device)[:, 0].to(own)


def clipped_gradients(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: Inputs,
    y: torch.Tensor,
    max_norm: MaxNorm,
    method: Method = "bookkeeping",
    *,
    mask: torch.Tensor | None = None,
    clip: Clip = "clip",
    form: Form = "auto",
    style: Style = "flat",
    groups: Sequence[str] | None = None,
    stability: float = 0.01,
    copies: int = 1,
) -> dict[str, torch.Tensor]:
    """Σ_i ν_i·g_i with ν_i = min(1, C/‖g_i‖): the *sum* of the clipped per-example gradients, by parameter name.

    Args:
        model: any model whose examples don't mix; in the mode it is in.
        loss: ``loss(outputs, targets)`` with one value per example (``reduction="none"``).
        x: inputs, batch first: a tensor; a tuple of tensors, the model's arguments; or a dict, its arguments by name. Numbers of
            another type than the model's are converted, token ids stay whole numbers. Of a ModelOutput the loss gets the logits.
        y: targets.
        max_norm: C; or C_g by group (see ``style``). A 0-dimensional tensor stays on its device.
        method: how; every method gives the same result. "bookkeeping" is the fastest.
        mask: (batch,) of booleans; False leaves an example out.
        clip: "clip": ν = min(1, C/‖g‖); "automatic": ν = C/(‖g‖ + γ), which normalises.
        form: how norms of layers with several positions are computed: "materialise", "gram", "auto": the cheaper by a cost
            model, "measure": the quicker, timed once per shape.
        style: "flat": one norm for all parameters; "per_layer", "per_group": one for each group, clipped to C/√groups or to
            the group's own C_g, so the whole has norm ≤ √ΣC_g² (:func:`clipping_groups`).
        groups: for "per_group": prefixes of parameter names.
        stability: γ of "automatic".
        copies: rows that make up one example (augmentation multiplicity): row i·copies+k of ``x`` is copy k of example i, its
            loss is the mean over them, and the gradient of that is clipped. ``y`` has a row for each example or for each row.

    An example whose gradient is not finite is left out. Sums are rounded to the parameters' type; those of :func:`clip_batch` are
    float64, and of thousands of examples should be noised as such.
    """
    clipper = Clipper(model, loss, method, clip=clip, form=form, style=style, groups=groups, stability=stability, copies=copies)
    sums = clipper(x, y, max_norm, mask=mask).sums
    own = {name: _own_dtype(p) for name, p in model.named_parameters()}
    return {name: total.to(own[name]) for name, total in sums.items()}


def clip_batch(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: Inputs,
    y: torch.Tensor,
    max_norm: MaxNorm,
    method: Method = "bookkeeping",
    *,
    mask: torch.Tensor | None = None,
    clip: Clip = "clip",
    form: Form = "auto",
    style: Style = "flat",
    groups: Sequence[str] | None = None,
    stability: float = 0.01,
    copies: int = 1,
) -> Clipped:
    """:func:`clipped_gradients` with the norms and factors behind it, e.g. for adaptive clipping (which must account for them).

    Args:
        model: any model whose examples don't mix; in the mode it is in.
        loss: ``loss(outputs, targets)`` with one value per example (``reduction="none"``).
        x: inputs, batch first: a tensor, a tuple of tensors or a dict of them.
        y: targets, a row for each example or for each row of ``x``.
        max_norm: C, or C_g by group.
        method: how; every method gives the same result.
        mask: (batch,) of booleans; False leaves an example out.
        clip: "clip": ν = min(1, C/‖g‖); "automatic": ν = C/(‖g‖ + γ).
        form: how norms of layers with several positions are computed.
        style: which parameters are clipped together: "flat", "per_layer" or "per_group".
        groups: for "per_group": prefixes of parameter names.
        stability: γ of "automatic", above 0.
        copies: rows that make up one example.
    """
    clipper = Clipper(model, loss, method, clip=clip, form=form, style=style, groups=groups, stability=stability, copies=copies)
    return clipper(x, y, max_norm, mask=mask)


def _own_dtype(parameter: torch.Tensor) -> torch.dtype:
    """A parameter's type, float32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)
