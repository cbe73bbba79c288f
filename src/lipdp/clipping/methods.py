"""The methods: five ways to the same clipped gradient.

With g_i the gradient of example i and ν_i = min(1, C/‖g_i‖), all of them return Σ_i ν_i·g_i.

==============  =====================================================================================================
naive           one backward pass per example (nxBP)
multiloss       one forward pass, one backward pass per example's loss
reweight        norms from layer inputs and cotangents, then a second backward pass of Σ_i ν_i·loss_i (ReweightGP)
ghost           the same, with every norm in the Gram form, nothing materialised
bookkeeping     one backward pass: inputs and cotangents are kept, and Σ_i ν_i·g_i is formed from them directly
auto            bookkeeping: the fastest, and what it releases is made of the very numbers that it measured
==============  =====================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lipdp.clipping.arithmetic import HALF, no_autocast
from lipdp.clipping.capture import recording
from lipdp.clipping.contribution import Contribution, Form
from lipdp.clipping.loops import Loops, PerExampleLoss, loss_values, sum_dtype, zeros
from lipdp.clipping.styles import Clip, Group, MaxNorm, Style, clip_factors, clipping_groups
from lipdp.clipping.supported import check_supported
from lipdp.clipping.verify import verify_once
from lipdp.errors import ConfigurationError, DataError

__all__ = ["Clipped", "Method", "clip_batch", "clipped_gradients", "per_example_norms"]

Method = Literal["naive", "multiloss", "reweight", "ghost", "bookkeeping", "auto"]
_TWO_PASSES = ("reweight", "ghost")


@dataclass(frozen=True)
class Clipped:
    """What clipping a batch gives. Only ``sums``, noised, may be released: norms and factors are private."""

    sums: dict[str, torch.Tensor]  # Σ_i ν_i·g_i by parameter name
    norms: torch.Tensor  # ‖g_i‖ (batch, groups)
    factors: torch.Tensor  # ν_i (batch, groups); 0 for an example that is left out
    groups: tuple[Group, ...]


def per_example_norms(
    model: torch.nn.Module, loss: PerExampleLoss, x: torch.Tensor, y: torch.Tensor, *, form: Form = "auto"
) -> torch.Tensor:
    """‖g_i‖₂ of each example's whole gradient (batch,), without materialising gradients where that is dearer.

    Example:
        >>> import torch, lipdp.clipping
        >>> model = torch.nn.Linear(3, 2)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> lipdp.clipping.per_example_norms(model, loss, torch.randn(5, 3), torch.zeros(5, dtype=torch.long)).shape
        torch.Size([5])
    """
    _known("form", form, Form)
    parameters = _trainable(model)
    _check_batch(model, x, y)
    if len(x) == 0:
        return zeros(next(iter(parameters.values()))).new_zeros(0)
    with _eager(model):
        verify_once(model, loss, x, y)
        with torch.enable_grad(), recording(model, len(x)) as recorded:
            total = loss_values(loss, model(x), y).sum()
            contributions = recorded.contributions(total)
        return _group_norms(contributions, clipping_groups(parameters, 1.0), x, form)[:, 0]


def clipped_gradients(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: torch.Tensor,
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
) -> dict[str, torch.Tensor]:
    """Σ_i ν_i·g_i with ν_i = min(1, C/‖g_i‖): the *sum* of the clipped per-example gradients, by parameter name.

    Args:
        model: any model whose examples don't mix; in the mode it is in.
        loss: ``loss(outputs, targets)`` with one value per example (``reduction="none"``).
        x: inputs, batch first.
        y: targets.
        max_norm: C; or C_g by group (see ``style``).
        method: how; every method gives the same result. "bookkeeping" is the fastest.
        mask: (batch,) of booleans; False leaves an example out.
        clip: "clip": ν = min(1, C/‖g‖); "automatic": ν = C/(‖g‖ + γ), which normalises.
        form: how norms of layers with several positions are computed: "materialise", "gram", "auto": the cheaper by a cost
            model, "measure": the quicker, timed once per shape.
        style: "flat": one norm for all parameters; "per_layer", "per_group": one for each group, clipped to C/√groups or to
            the group's own C_g, so the whole has norm ≤ √ΣC_g² (:func:`clipping_groups`).
        groups: for "per_group": prefixes of parameter names.
        stability: γ of "automatic".

    An example whose gradient is not finite is left out.
    """
    return clip_batch(
        model,
        loss,
        x,
        y,
        max_norm,
        method,
        mask=mask,
        clip=clip,
        form=form,
        style=style,
        groups=groups,
        stability=stability,
    ).sums


def clip_batch(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: torch.Tensor,
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
) -> Clipped:
    """:func:`clipped_gradients` with the norms and factors behind it, e.g. for adaptive clipping (which must account for them)."""
    for name, value, known in (("method", method, Method), ("clip", clip, Clip), ("form", form, Form)):
        _known(name, value, known)
    if not (math.isfinite(stability) and stability > 0):
        raise ConfigurationError(f"stability must be a positive number, not {stability!r}")
    parameters = _trainable(model)
    made = clipping_groups(parameters, max_norm, style, groups)
    _check_batch(model, x, y)
    keep = _kept(mask, x)
    if method in _TWO_PASSES:
        _check_two_passes(method, parameters, style, x.device)
    if len(x) == 0:
        nothing = zeros(next(iter(parameters.values()))).new_zeros(0, len(made))
        return Clipped({name: zeros(p) for name, p in parameters.items()}, nothing, nothing, made)
    with _eager(model):
        if method != "naive":
            verify_once(model, loss, x, y, reweighted=method in _TWO_PASSES)
        if method in ("naive", "multiloss"):
            loops = Loops(model, loss, parameters, made, clip, stability)
            return Clipped(*(loops.naive if method == "naive" else loops.multiloss)(x, y, keep), made)
        return _Fast(model, loss, parameters, made, clip, stability, "gram" if method == "ghost" else form).run(
            x, y, keep, method in _TWO_PASSES
        )


@dataclass
class _Fast:
    """Reweight, ghost and bookkeeping: norms without gradients."""

    model: torch.nn.Module
    loss: PerExampleLoss
    parameters: Mapping[str, torch.nn.Parameter]
    groups: tuple[Group, ...]
    clip: Clip
    stability: float
    form: Form

    def run(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, two_passes: bool) -> Clipped:
        """One pass, and a second one if asked for."""
        sums: dict[str, torch.Tensor] = {}
        with torch.enable_grad(), recording(self.model, len(x)) as recorded:
            losses = loss_values(self.loss, self.model(x), y)
            contributions = recorded.contributions(losses.sum(), two_passes)
            norms = _group_norms(contributions, self.groups, x, self.form)
            factors = clip_factors(norms, self.groups, keep, self.clip, self.stability)
            dropped = ~torch.isfinite(norms).all(1)
            if two_passes and not bool(dropped.any()):
                weighted = (losses * factors[:, 0].to(losses.dtype)).sum()
                found = torch.autograd.grad(weighted, list(self.parameters.values()), allow_unused=True)
                sums = {
                    name: zeros(p) if g is None else g.to(sum_dtype(p))
                    for (name, p), g in zip(self.parameters.items(), found, strict=True)
                }
                return Clipped(sums, norms, factors, self.groups)
        if two_passes:
            return self._without(x, y, keep, dropped, norms)
        self._add(sums, contributions, factors, dropped)
        return Clipped(sums, norms, factors, self.groups)

    def _add(
        self,
        sums: dict[str, torch.Tensor],
        contributions: Mapping[str, Contribution],
        factors: torch.Tensor,
        dropped: torch.Tensor,
    ) -> None:
        capturing = dropped.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        clean = capturing or torch.compiler.is_compiling() or bool(dropped.any())
        number = {name: k for k, group in enumerate(self.groups) for name in group.parameters}
        with torch.no_grad(), no_autocast(factors.device):
            for name, parameter in self.parameters.items():
                contribution = contributions.get(name)
                if contribution is None:  # it does not reach the loss
                    sums[name] = zeros(parameter)
                    continue
                part = contribution.without(dropped) if clean else contribution
                sums[name] = part.weighted_sum(factors[:, number[name]]).to(sum_dtype(parameter))

    def _without(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, dropped: torch.Tensor, norms: torch.Tensor) -> Clipped:
        """A second backward pass with an example that is not finite in it would be NaN (0·inf): the batch again, without it."""
        rest = torch.nonzero(~dropped).flatten()
        sums = {name: zeros(p) for name, p in self.parameters.items()}
        factors = torch.zeros_like(norms)
        if len(rest):
            again = self.run(x[rest], y[rest], keep[rest], True)
            sums, norms = again.sums, norms.clone()
            norms[rest], factors[rest] = again.norms, again.factors
        return Clipped(sums, norms, factors, self.groups)


def _known(name: str, value: str, known: object) -> None:
    if value not in get_args(known):
        raise ConfigurationError(f"{name}={value!r} is not known; choose one of {', '.join(get_args(known))}")


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigurationError(f"{type(model).__name__} has no trainable parameters")
    return parameters


def _check_batch(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    check_supported(model)
    if len(x) != len(y):
        raise DataError(f"{len(x)} inputs but {len(y)} targets")


def _kept(mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if mask is None:
        return torch.ones(len(x), dtype=torch.bool, device=x.device)
    if mask.shape != (len(x),) or mask.dtype != torch.bool:
        raise DataError(f"mask must be ({len(x)},) of booleans, not {tuple(mask.shape)} of {mask.dtype}")
    return mask.to(x.device)


def _check_two_passes(method: str, parameters: Mapping[str, torch.Tensor], style: Style, device: torch.device) -> None:
    if style != "flat":
        raise ConfigurationError(
            f"method={method!r} reweights the losses, which scales an example's whole gradient: it only clips style='flat'. Use "
            "method='bookkeeping'."
        )
    if torch.is_autocast_enabled(device.type) or any(p.dtype in HALF for p in parameters.values()):
        raise ConfigurationError(
            f"method={method!r} lets autograd add up the gradients, in half precision here: the rounding of the whole sum is not "
            "bounded by any example's C. Use method='bookkeeping', which adds up in float32."
        )


def _group_norms(contributions: Mapping[str, Contribution], groups: Sequence[Group], x: torch.Tensor, form: Form) -> torch.Tensor:
    """(batch, groups)."""
    with torch.no_grad(), no_autocast(x.device):
        found = {name: part.squared_norms(form) for name, part in contributions.items()}
        like = next(iter(found.values())) if found else torch.zeros(len(x), device=x.device)
        columns = []
        for group in groups:
            parts = [found[name] for name in group.parameters if name in found]
            columns.append(torch.stack(parts).sum(0).sqrt() if parts else torch.zeros_like(like))
        return torch.stack(columns, 1)


@contextmanager
def _eager(model: torch.nn.Module) -> Iterator[None]:
    """A compiled model is run uncompiled: a compiled graph shows nothing of its layers."""
    compiled = any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())
    if compiled and not torch.compiler.is_compiling():
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
