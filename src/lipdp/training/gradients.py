"""The query: the sum over the sampled examples of their gradients, parameter by parameter.

And how many examples stay below the clipping norm: the second half of adaptive clipping's query.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lipdp._backward import gradients
from lipdp._checks import no_gradient
from lipdp._numerics import arithmetic, wide
from lipdp.errors import DataError, UnsupportedError
from lipdp.losses import Loss
from lipdp.nn import ClipGradient
from lipdp.privacy.quantile import COUNT_SENSITIVITY
from lipdp.training.batches import Rows, microbatches, only_finite
from lipdp.training.query import Microbatch, Turn
from lipdp.training.seats import Copies


def centred_count(norms: torch.Tensor, clip: float, mask: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Σ_i (b_i − ½), with b_i the share of example i's copies whose norm is at most C; masked examples do not count.

    b_i lies in [0, 1], so one example moves the sum by at most ½. A norm that is not finite counts as above.
    """
    below = (norms <= clip).to(torch.float64).reshape(-1, copies).mean(1)
    return torch.where(mask, below - COUNT_SENSITIVITY, torch.zeros_like(below)).sum()


class LayerCounts:
    """Counts at ClipGradient layers, over the microbatches of one step."""

    def __init__(self, layers: Mapping[str, ClipGradient]) -> None:
        self.layers = layers
        self.totals: dict[str, torch.Tensor] = {}
        self._norms: dict[str, list[torch.Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, the layers note the norms that pass them."""
        with ExitStack() as stack:
            self._norms = {name: stack.enter_context(layer.observed()) for name, layer in self.layers.items()}
            yield

    def collect(self, mask: torch.Tensor, copies: int) -> None:
        """Take in what one backward pass of a microbatch showed."""
        for name, norms in self._norms.items():
            if len(norms) > 1:
                raise UnsupportedError(
                    f"the adaptive ClipGradient '{name}' is used {len(norms)} times in one pass; which of its cotangents should "
                    "the quantile be of? Use a layer of its own at each place."
                )
            if norms:
                count = centred_count(norms[0], self.layers[name].max_norm, mask, copies)
                self.totals[name] = self.totals[name] + count if name in self.totals else count
            norms.clear()

    def discard(self) -> None:
        """Forget norms that are not to be counted (of a pass that is made a second time)."""
        for norms in self._norms.values():
            norms.clear()


Part = tuple[dict[str, torch.Tensor], torch.Tensor, list[torch.Tensor]]
"""The sums over a microbatch in float64, whether all of them are finite, and digests of what was seen on the way, if any."""
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Part]


@dataclass(frozen=True)
class Sums:
    """Gradient sums that may still be computed on a device.

    Attributes:
        values: by parameter. A recording's own memory: to be used before the next sum is computed.
        fine: whether all of them are finite.
        again: the sums without the rows that are not, where ``fine`` turns out to be false.
        seen: digests that were computed beside them.
    """

    values: dict[str, torch.Tensor]
    fine: torch.Tensor
    again: Callable[[], dict[str, torch.Tensor]]
    seen: list[torch.Tensor]


def gradient_sum(
    model: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
    parameters: Mapping[str, torch.Tensor],
    inputs: torch.Tensor | Rows,
    targets: torch.Tensor,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """:func:`pending_sum`, waited for."""
    sums = pending_sum(model, loss, parameters, inputs, targets, **settings)
    return sums.values if bool(sums.fine) else sums.again()


def pending_sum(
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
    begun: Microbatch | None = None,
    seats: torch.Tensor | None = None,
    turn: Turn | None = None,
) -> Sums:
    """Σ_i ∂loss_i/∂θ for each parameter θ: a sum, never a mean, in float64.

    With ``copies``, loss_i is the mean over the example's K copies; they go through the network as rows of their own, whose
    gradients are summed and divided by K at the end, so that layers that clip cotangents see each copy's own. Rows whose
    contribution is not finite are left out; the others stay at their places, so that no other is affected. ``dtypes`` are what
    inputs and targets are converted to. ``counts`` notes norms on the way. ``replayed`` stands for :func:`microbatch_sum` with the
    same model, loss and parameters; ``begun`` is the one microbatch, where it is there already. ``seats``: where records sit.
    ``turn``: which microbatches are computed, and how their sums are added up; they may be whole numbers then.
    """
    own = turn or Turn()

    def run(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Part:
        return microbatch_sum(model, loss, parameters, x, y, mask) if replayed is None else replayed(x, y, mask)

    many = copies or Copies()
    size = max(1, microbatch_size // many.count)

    def summed(each: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Part], begun: Microbatch | None) -> Part:
        total: Part | None = None
        if begun is None:
            parts = microbatches(inputs, targets, size, device, dtypes, seats, check=False, turn=own)
        else:
            parts = iter([begun])
            own.begin(0)  # if what was begun was in vain, its draws are made anew
        for number, (x, y, mask) in enumerate(parts):
            if number == 1 and total is not None:  # the first may lie in a recording's memory
                total = {name: value.clone() for name, value in total[0].items()}, total[1].clone(), [t.clone() for t in total[2]]
            with arithmetic(precision, device):
                part = each(many.rows(x), many.repeat(y), many.repeat(mask))
            if own.units is not None:
                part = own.summand({name: value / many.count for name, value in part[0].items()}), *part[1:]
            total = part if total is None else _added(total, part)
            if counts is not None:
                counts.discard() if each is not run else counts.collect(mask, many.count)
        if total is None:
            zeros = own.summand({name: zeros_like_sum(p) for name, p in parameters.items()})
            total = zeros, torch.ones((), dtype=torch.bool, device=device), []
        if many.count > 1 and own.units is None:
            for value in total[0].values():
                value /= many.count
        return total

    values, fine, seen = summed(run, begun)
    return Sums(values, fine, lambda: summed(lambda x, y, mask: _finite_part(run, x, y, mask), None)[0], seen)


def zeros_like_sum(parameter: torch.Tensor) -> torch.Tensor:
    """A zero of the parameter's shape to add gradients to, in float64."""
    return torch.zeros_like(parameter, dtype=wide(parameter), requires_grad=False)


def microbatch_sum(
    model: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
    parameters: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
) -> Part:
    """Σ_i ∂loss_i/∂θ over the rows of ``mask``, and whether it is finite; 0 for a parameter that the loss does not depend on.

    Rows that are not finite do not count. The sums over rows are those of :mod:`lipdp._sums`, whatever the layers are.
    """
    x, y, mask = only_finite(x, y, mask)
    outputs = model(x)
    del x  # a copy, perhaps: nobody needs it any more
    values = loss(outputs, y)
    if values.shape != mask.shape:
        raise DataError(
            f"the loss returned shape {tuple(values.shape)} for {len(mask)} examples; it must give one value per example "
            "(reduction='none')"
        )
    total = torch.where(mask, values, torch.zeros_like(values)).sum()
    if not total.requires_grad:
        raise no_gradient()
    gradient_of = gradients(total, list(parameters.values()), len(mask))
    sums = {
        name: zeros_like_sum(p) if g is None else g.detach().to(wide(p))
        for (name, p), g in zip(parameters.items(), gradient_of, strict=True)
    }
    return sums, _are_all_finite([g for g in sums.values() if g.numel()], mask.device), []


def _are_all_finite(sums: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether all entries are, on the device. A sum that is finite has finite terms; one that is not may just have overflowed."""
    if device.type != "cpu":
        largest = torch._foreach_norm(list(sums), float("inf"))
        return torch.isfinite(torch.stack(largest)).all() if largest else torch.ones((), dtype=torch.bool, device=device)
    return torch.tensor(all(math.isfinite(g.sum()) or math.isfinite(g.abs().amax()) for g in sums))


def _added(total: Part, part: Part) -> Part:
    torch._foreach_add_(list(total[0].values()), list(part[0].values()))
    return total[0], total[1] & part[1], [*total[2], *(seen.clone() for seen in part[2])]


def _finite_part(run: Backward, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Part:
    """Without the rows whose gradient overflows: each is tried by itself, all the others masked."""
    whole = run(x, y, mask)
    if bool(whole[1]):
        return whole
    good = torch.zeros_like(mask)
    for row in torch.nonzero(mask).flatten().tolist():
        alone = torch.zeros_like(mask)
        alone[row] = True
        good[row] = bool(run(_only(x, alone), _only(y, alone), alone)[1])
    return run(_only(x, good), _only(y, good), good)


def _only(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of the other rows: 0·inf would be NaN."""
    return rows.masked_fill(~chosen.reshape(-1, *[1] * (rows.ndim - 1)), 0)
