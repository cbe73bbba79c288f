"""Reweight, ghost and bookkeeping: norms from what layers read and the cotangents of what they write.

:meth:`Fast.compute` waits for nothing on the device, so that it can be recorded as a CUDA graph (:mod:`lipdp.clipping.captured`).
It goes ahead as if every gradient were finite. Where one is not, 0·inf = NaN has spoiled the sums; a flag says so, and
:meth:`Fast.repair` does that batch again without it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lipdp.clipping import kernels
from lipdp.clipping.arithmetic import no_autocast
from lipdp.clipping.capture import recording
from lipdp.clipping.contribution import Contribution, Form, rounding_matters
from lipdp.clipping.loops import PerExampleLoss, loss_values, sum_dtype, zeros
from lipdp.clipping.styles import Clip, Group, clip_factors
from lipdp.graphs import Staged, through

__all__ = ["Computed", "Fast", "finished", "group_norms", "squared_norms"]

Sums = dict[str, torch.Tensor]


class Computed(NamedTuple):
    """Sums by parameter name, norms and factors (batch, groups), and whether some gradient is not finite, which spoils the sums."""

    sums: Sums
    norms: torch.Tensor
    factors: torch.Tensor
    spoiled: torch.Tensor


def finished(stages: Staged[Computed]) -> Computed:
    """Through both stages at once."""
    return through(stages, lambda spoiled: None)


@dataclass
class Fast:
    """Σ_i ν_i·g_i without the g_i."""

    model: torch.nn.Module
    loss: PerExampleLoss
    parameters: Mapping[str, torch.nn.Parameter]
    groups: tuple[Group, ...]
    clip: Clip
    stability: float
    form: Form
    two_passes: bool
    copies: int = 1

    def compute(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor) -> Staged[Computed]:
        """One pass, and a second one for the methods that reweight; no waiting.

        In two stages: whether a gradient is not finite is yielded before the sums are computed, so that it can be read meanwhile.
        """
        return self._compute(x, y, keep, bounds, clean=False)

    def repair(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor, norms: torch.Tensor) -> Computed:
        """The batch again, for one that holds examples whose gradients are not finite: they are left out.

        That takes more memory than the batch did. Where there is none, it is done in halves.
        """
        try:
            return self._repair(x, y, keep, bounds, norms)
        except torch.OutOfMemoryError:
            if len(keep) < 2:
                raise
        gc.collect()  # only here can the tensors of the attempt go: the exception held on to them
        middle = len(keep) // 2
        rows = middle * self.copies
        one = self.repair(x[:rows], y[:rows], keep[:middle], bounds, norms[:middle])
        other = self.repair(x[rows:], y[rows:], keep[middle:], bounds, norms[middle:])
        sums = {name: total + other.sums[name] for name, total in one.sums.items()}
        return Computed(sums, torch.cat([one.norms, other.norms]), torch.cat([one.factors, other.factors]), one.spoiled)

    def _repair(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor, norms: torch.Tensor) -> Computed:
        if not self.two_passes:
            return finished(self._compute(x, y, keep, bounds, clean=True))
        # A second backward pass with such an example in it would be NaN again: the rest of the batch by itself.
        dropped = ~torch.isfinite(norms).all(1)
        rest = torch.nonzero(~dropped).flatten()
        if len(rest) == 0:
            return Computed({name: zeros(p) for name, p in self.parameters.items()}, norms, torch.zeros_like(norms), dropped.any())
        rows = torch.nonzero(~dropped.repeat_interleave(self.copies)).flatten()
        again = finished(self._compute(x[rows], y[rows], keep[rest], bounds, clean=False))
        if bool(again.spoiled):
            again = self.repair(x[rows], y[rows], keep[rest], bounds, again.norms)
        norms, factors = norms.clone(), torch.zeros_like(norms)
        norms[rest], factors[rest] = again.norms, again.factors
        return Computed(again.sums, norms, factors, dropped.any())

    def _compute(
        self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor, *, clean: bool
    ) -> Staged[Computed]:
        sums: Sums | None = None
        with torch.enable_grad(), recording(self.model, len(x), self.copies) as recorded:
            losses = loss_values(self.loss, self.model(x), y, self.copies)
            token = rounding_matters.set(self.two_passes)
            try:
                contributions = recorded.contributions(losses.sum(), self.two_passes)
            finally:
                rounding_matters.reset(token)
            norms, factors, spoiled = self._measure(contributions, len(losses), keep, bounds)
            if self.two_passes:
                yield spoiled
                sums = self._second_pass((losses * factors[:, 0].to(losses.dtype)).sum())
        if sums is None:
            yield spoiled
            if clean:
                dropped = ~torch.isfinite(norms).all(1)
                contributions = {name: part.without(dropped) for name, part in contributions.items()}
            sums = self._weighted_sums(contributions, factors)
        return Computed(sums, norms, factors, spoiled)

    def _measure(
        self, contributions: Mapping[str, Contribution], batch: int, keep: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norms and factors (batch, groups), and whether a norm is not finite."""
        found = squared_norms(contributions, keep.device, self.form, as_released=not self.two_passes)
        if len(self.groups) == 1 and found and kernels.available(*found.values()):
            with torch.no_grad():
                norms, factors, spoiled = kernels.clip_factors(
                    torch.stack(list(found.values())),
                    keep,
                    bounds.float(),
                    automatic=self.clip == "automatic",
                    stability=self.stability,
                )
            return norms[:, None], factors[:, None], spoiled
        norms = group_norms(found, self.groups, batch, keep.device)
        factors = clip_factors(norms, bounds.to(norms.dtype), keep, self.clip, self.stability)
        return norms, factors, ~torch.isfinite(norms).all()

    def _second_pass(self, weighted: torch.Tensor) -> Sums:
        found = torch.autograd.grad(weighted, list(self.parameters.values()), allow_unused=True)
        return {
            name: zeros(p) if g is None else g.to(sum_dtype(p)) for (name, p), g in zip(self.parameters.items(), found, strict=True)
        }

    def _weighted_sums(self, contributions: dict[str, Contribution], factors: torch.Tensor) -> Sums:
        """Uses up the contributions: what only one of them holds is free for the next sum."""
        sums: Sums = {}
        number = {name: k for k, group in enumerate(self.groups) for name in group.parameters}
        with torch.no_grad(), no_autocast(factors.device):
            for name, parameter in self.parameters.items():
                part = contributions.pop(name, None)  # None: the parameter does not reach the loss
                found = zeros(parameter) if part is None else part.weighted_sum(factors[:, number[name]])
                sums[name] = found.to(sum_dtype(parameter))
        return sums


def squared_norms(
    contributions: Mapping[str, Contribution], device: torch.device, form: Form, *, as_released: bool = False
) -> dict[str, torch.Tensor]:
    """(batch,) for each parameter that reaches the loss.

    ``as_released``: of the gradients as weighted sums of the contributions have them, not as a backward pass might.
    """
    with torch.no_grad(), no_autocast(device):
        return {
            name: part.squared_norms_as_released(form) if as_released else part.squared_norms(form)
            for name, part in contributions.items()
        }


def group_norms(found: Mapping[str, torch.Tensor], groups: Sequence[Group], batch: int, device: torch.device) -> torch.Tensor:
    """(batch, groups): squared norms by parameter, added up group by group."""
    with torch.no_grad():
        if not found:
            return torch.zeros(batch, len(groups), device=device)
        if len(groups) == 1:
            return torch.stack(list(found.values())).sum(0).sqrt()[:, None]
        like = next(iter(found.values()))
        columns = []
        for group in groups:
            parts = [found[name] for name in group.parameters if name in found]
            columns.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(like))
        return torch.stack(columns, 1).sqrt()
