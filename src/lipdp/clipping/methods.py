"""The methods: five ways to the same clipped gradient.

With g_i the gradient of example i and ν_i = min(1, C/‖g_i‖), all of them return Σ_i ν_i·g_i.

==============  =====================================================================================================
naive           one backward pass per example (nxBP)
multiloss       one forward pass, one backward pass per example's loss
reweight        norms from layer inputs and cotangents, then a second backward pass of Σ_i ν_i·loss_i (ReweightGP)
ghost           the same, with every norm in the Gram form, nothing materialised
bookkeeping     one backward pass: inputs and cotangents are kept, and Σ_i ν_i·g_i is formed from them directly
==============  =====================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch

from lipdp.clipping.capture import check_supported, recording
from lipdp.clipping.contribution import Contribution, Form
from lipdp.clipping.verify import verify_once
from lipdp.errors import ConfigurationError, DataError

__all__ = ["Clip", "Method", "clipped_gradients", "per_example_norms"]

Method = Literal["naive", "multiloss", "reweight", "ghost", "bookkeeping"]
Clip = Literal["clip", "automatic"]
PerExampleLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Automatic clipping divides by ‖g‖ + γ; γ keeps small gradients small.
_STABILITY = 0.01


def per_example_norms(
    model: torch.nn.Module, loss: PerExampleLoss, x: torch.Tensor, y: torch.Tensor, *, form: Form = "auto"
) -> torch.Tensor:
    """‖g_i‖₂ of each example's whole gradient (batch,), without materialising gradients where that is dearer.

    Example:
        >>> import torch, lipdp
        >>> model = torch.nn.Linear(3, 2)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> lipdp.clipping.per_example_norms(model, loss, torch.randn(5, 3), torch.zeros(5, dtype=torch.long)).shape
        torch.Size([5])
    """
    parameters = _trainable(model)
    check_supported(model)
    if len(x) == 0:
        return next(iter(parameters.values())).new_zeros(0)
    verify_once(model, loss, x, y)
    contributions, _ = _norm_pass(model, loss, x, y, retain_graph=False)
    return _norms(contributions, len(x), form, x.device)


def clipped_gradients(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: torch.Tensor,
    y: torch.Tensor,
    max_norm: float,
    method: Method = "bookkeeping",
    *,
    mask: torch.Tensor | None = None,
    clip: Clip = "clip",
    form: Form = "auto",
) -> dict[str, torch.Tensor]:
    """Σ_i ν_i·g_i with ν_i = min(1, C/‖g_i‖): the *sum* of the clipped per-example gradients, by parameter name.

    Args:
        model: any model whose examples don't mix; in the mode it is in.
        loss: ``loss(outputs, targets)`` with one value per example (``reduction="none"``).
        x: inputs, batch first.
        y: targets.
        max_norm: C.
        method: how; every method gives the same result. "bookkeeping" is the fastest.
        mask: (batch,) of booleans; False leaves an example out.
        clip: "clip": ν = min(1, C/‖g‖); "automatic": ν = C/(‖g‖ + 0.01), which normalises.
        form: how norms of layers with several positions are computed: "materialise", "gram", or "auto": the cheaper.

    An example whose gradient is not finite is left out.
    """
    if not (isinstance(max_norm, int | float) and math.isfinite(max_norm) and max_norm > 0):
        raise ConfigurationError(f"max_norm must be a positive finite number, not {max_norm!r}")
    if method not in get_args(Method):
        raise ConfigurationError(f"method={method!r} is not known; choose one of {', '.join(get_args(Method))}")
    if clip not in get_args(Clip):
        raise ConfigurationError(f"clip={clip!r} is not known; choose one of {', '.join(get_args(Clip))}")
    parameters = _trainable(model)
    check_supported(model)
    if len(x) != len(y):
        raise DataError(f"{len(x)} inputs but {len(y)} targets")
    if len(x) == 0:
        return {name: _zeros(p) for name, p in parameters.items()}
    keep = torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else mask
    if method == "naive":
        return _naive(model, loss, parameters, x, y, max_norm, keep, clip)
    if method == "multiloss":
        return _multiloss(model, loss, parameters, x, y, max_norm, keep, clip)
    verify_once(model, loss, x, y)
    two_passes = method in ("reweight", "ghost")
    contributions, losses = _norm_pass(model, loss, x, y, retain_graph=two_passes)
    norms = _norms(contributions, len(x), "gram" if method == "ghost" else form, x.device)
    factors = _factors(norms, max_norm, keep, clip)
    result = {name: _zeros(p) for name, p in parameters.items()}
    if two_passes:
        weighted = torch.where(factors > 0, losses * factors.to(losses.dtype), torch.zeros_like(losses)).sum()
        gradients = torch.autograd.grad(weighted, list(parameters.values()), allow_unused=True)
        result.update({name: g.to(result[name].dtype) for name, g in zip(parameters, gradients, strict=True) if g is not None})
        return result
    for name, contribution in contributions.items():
        result[name] = contribution.weighted_sum(factors)
    return result


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigurationError(f"{type(model).__name__} has no trainable parameters")
    return parameters


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)


def _values(loss: PerExampleLoss, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    values = loss(outputs, targets)
    if values.shape != (len(targets),):
        raise DataError(
            f"the loss returned shape {tuple(values.shape)} for {len(targets)} examples; it must give one value per example "
            "(reduction='none')"
        )
    return values


def _norm_pass(
    model: torch.nn.Module, loss: PerExampleLoss, x: torch.Tensor, y: torch.Tensor, *, retain_graph: bool
) -> tuple[Mapping[str, Contribution], torch.Tensor]:
    with torch.enable_grad():
        with recording(model, len(x)) as recorded:
            outputs = model(x)
        losses = _values(loss, outputs, y)
        return recorded.contributions(losses.sum(), retain_graph), losses


def _norms(contributions: Mapping[str, Contribution], batch: int, form: Form, device: torch.device) -> torch.Tensor:
    if not contributions:
        return torch.zeros(batch, device=device)
    return torch.stack([part.squared_norms(form) for part in contributions.values()]).sum(0).sqrt()


def _factors(norms: torch.Tensor, max_norm: float, keep: torch.Tensor, clip: Clip) -> torch.Tensor:
    """ν_i; 0 for examples that are masked or not finite."""
    factors = max_norm / (norms + _STABILITY) if clip == "automatic" else (max_norm / norms).clamp_max(1.0)
    return torch.where(torch.isfinite(norms) & keep, factors, torch.zeros_like(factors))


def _add_clipped(sums: dict[str, torch.Tensor], gradients: Mapping[str, torch.Tensor | None], max_norm: float, clip: Clip) -> None:
    found = {name: g.to(sums[name].dtype) for name, g in gradients.items() if g is not None}
    if not found:
        return
    norm = torch.stack([g.square().sum() for g in found.values()]).sum().sqrt()
    factor = _factors(norm.reshape(1), max_norm, torch.ones(1, dtype=torch.bool, device=norm.device), clip)[0]
    if float(factor) > 0:
        for name, gradient in found.items():
            sums[name] += factor * gradient


def _naive(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    parameters: Mapping[str, torch.nn.Parameter],
    x: torch.Tensor,
    y: torch.Tensor,
    max_norm: float,
    keep: torch.Tensor,
    clip: Clip,
) -> dict[str, torch.Tensor]:
    sums = {name: _zeros(p) for name, p in parameters.items()}
    for i in torch.nonzero(keep).flatten().tolist():
        with torch.enable_grad():
            value = _values(loss, model(x[i : i + 1]), y[i : i + 1]).sum()
            gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        _add_clipped(sums, dict(zip(parameters, gradients, strict=True)), max_norm, clip)
    return sums


def _multiloss(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    parameters: Mapping[str, torch.nn.Parameter],
    x: torch.Tensor,
    y: torch.Tensor,
    max_norm: float,
    keep: torch.Tensor,
    clip: Clip,
) -> dict[str, torch.Tensor]:
    sums = {name: _zeros(p) for name, p in parameters.items()}
    with torch.enable_grad():
        values = _values(loss, model(x), y)
    for i in torch.nonzero(keep).flatten().tolist():
        gradients = torch.autograd.grad(values[i], list(parameters.values()), retain_graph=True, allow_unused=True)
        _add_clipped(sums, dict(zip(parameters, gradients, strict=True)), max_norm, clip)
    return sums
