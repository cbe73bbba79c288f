"""Reweight, ghost and bookkeeping: norms and sums from what layers read and the cotangents of what they write, in one pass.

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

from lipdp._numerics import wide
from lipdp.clipping.arithmetic import no_autocast
from lipdp.clipping.capture import recording
from lipdp.clipping.contribution import Contribution, Form
from lipdp.clipping.loops import PerExampleLoss, loss_values, zeros
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
    copies: int = 1

    def compute(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor) -> Staged[Computed]:
        """One pass; no waiting.

        In two stages: whether a gradient is not finite is yielded before the sums are computed, so that it can be read meanwhile.
        """
        return self._compute(x, y, keep, bounds, clean=False)

    def repair(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor) -> Computed:
        """The batch again, for one that holds examples whose gradients are not finite: they are left out.

        That takes more memory than the batch did. Where there is none, it is done in halves.
        """
        try:
            return self._repair(x, y, keep, bounds)
        except torch.OutOfMemoryError:
            if len(keep) < 2:
                raise
        gc.collect()  # only here can the tensors of the attempt go: the exception held on to them
        middle = len(keep) // 2
        rows = middle * self.copies
        one = self.repair(x[:rows], y[:rows], keep[:middle], bounds)
        other = self.repair(x[rows:], y[rows:], keep[middle:], bounds)
        sums = {name: total + other.sums[name] for name, total in one.sums.items()}
        return Computed(sums, torch.cat([one.norms, other.norms]), torch.cat([one.factors, other.factors]), one.spoiled)

    def _repair(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor) -> Computed:
        return finished(self._compute(x, y, keep, bounds, clean=True))

    def _compute(
        self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor, *, clean: bool
    ) -> Staged[Computed]:
        with torch.enable_grad(), recording(self.model, len(x), self.copies) as recorded:
            losses = loss_values(self.loss, self.model(x), y, self.copies)
            contributions = recorded.contributions(losses.sum())
        norms, factors, spoiled = self._measure(contributions, len(losses), keep, bounds)
        yield spoiled
        if clean:
            dropped = ~torch.isfinite(norms).all(1)
            contributions = {name: part.without(dropped) for name, part in contributions.items()}
        return Computed(self._weighted_sums(contributions, factors), norms, factors, spoiled)

    def _measure(
        self, contributions: Mapping[str, Contribution], batch: int, keep: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norms and factors (batch, groups), and whether a norm is not finite."""
        found = squared_norms(contributions, keep.device, self.form, as_released=True)
        norms = group_norms(found, self.groups, batch, keep.device)
        factors = clip_factors(norms, bounds.to(norms.dtype), keep, self.clip, self.stability)
        return norms, factors, ~torch.isfinite(norms).all()

    def _weighted_sums(self, contributions: dict[str, Contribution], factors: torch.Tensor) -> Sums:
        """Uses up the contributions: what only one of them holds is free for the next sum."""
        sums: Sums = {}
        number = {name: k for k, group in enumerate(self.groups) for name in group.parameters}
        with torch.no_grad(), no_autocast(factors.device):
            for name, parameter in self.parameters.items():
                part = contributions.pop(name, None)  # None: the parameter does not reach the loss
                sums[name] = zeros(parameter) if part is None else part.weighted_sum(factors[:, number[name]]).to(wide(parameter))
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
            return torch.zeros(batch, len(groups), device=device, dtype=torch.float64 if device.type != "mps" else torch.float32)
        if len(groups) == 1:
            return torch.stack(list(found.values())).sum(0).sqrt()[:, None]
        like = next(iter(found.values()))
        columns = []
        for group in groups:
            parts = [found[name] for name in group.parameters if name in found]
            columns.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(like))
        return torch.stack(columns, 1).sqrt()
