"""Fixed layers in front of the trained ones: applied to each record once, instead of at every step.

A model T∘P with nothing to train in P has the same gradients on x as T has on P(x). P treats records one by one, so neighbouring
datasets stay neighbours, and T's steps on the stored P(x) are the steps of the whole model: the same sampling, the same sums, the
same noise. The proof does not rest on what is stored: T begins with a layer that brings every row back into the ball that P's
outputs lie in by the calculus. On rows that P did make, it changes nothing but rounding.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import TensorDataset

from lipdp import nn
from lipdp.bounds import Bound, Call, Transfer, analyse, rule
from lipdp.data.augment import Augmentation, PrecomputedCopies
from lipdp.errors import ConfigurationError
from lipdp.graphs import is_large
from lipdp.nn.boundary import example_norms, to_ball
from lipdp.privacy.ledger import Ledger
from lipdp.privacy.randomness import Stream
from lipdp.program import Program
from lipdp.program.dtypes import Types
from lipdp.training.batches import check_dataset, gather, rows_at_once
from lipdp.training.plan import PrivacyPlan
from lipdp.training.planning import STATISTICS
from lipdp.training.seats import choose_seats

__all__ = ["Settled", "check_settling", "fixed_layers", "settle"]

_INPUT = "settled"  # name of the layer that bounds what T gets
# Rows are stored this much inside their ball, relative to its radius: then their norms, which are computed with an error of some
# 2^-23 whenever they are looked at, are found inside again.
_MARGIN = 2.0**-20


class _StoredInput(nn.BoundedInput):
    """The ball that P's outputs lie in. If all rows of a microbatch are found inside, it is passed on as it is, without a copy.

    A row inside is multiplied by exactly 1 otherwise, so what one example becomes does not depend on the others.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, where all its rows are inside; their projections elsewhere, and where asking would wait for a device."""
        ask = x.device.type == "cpu" or is_large(x)
        shaped = tuple(x.shape[1:]) == self.input_shape and ask and not x.is_inference()
        return x if shaped and _is_true(example_norms(x.detach()) <= self.norm) else super().forward(x)


@rule(_StoredInput, rounds="ball")
def _stored_input(layer: _StoredInput, call: Call) -> Transfer:
    """A projection on the ball: the identity inside, where the derivative is the identity too."""
    x = call.inputs[0]
    return Transfer(Bound(min(x.norm, layer.norm), x.shape, x.row_norm, x.max_abs))


def _is_true(condition: torch.Tensor) -> bool:
    """Whether it holds everywhere, as far as that can be told: under vmap there is nothing to read."""
    try:
        return bool(condition.all())
    except RuntimeError:
        return False


@dataclass(frozen=True)
class Settled:
    """A model cut in two where its training begins.

    Attributes:
        rest: T, on outputs of P: the model's own layers under the names that they have there, behind a bound on the input.
        dataset: P(x) of every record, with its target.
        shape: of one row.
    """

    rest: torch.nn.Sequential
    dataset: TensorDataset
    shape: tuple[int, ...]
    _fixed: torch.nn.Module
    _made_with: tuple[str, list[torch.Tensor]]

    def check(self) -> None:
        """Refuses layers that are no longer those that the rows were made with."""
        settings, values = _content(self._fixed)
        if settings != self._made_with[0] or not all(map(torch.equal, values, self._made_with[1])):
            raise ConfigurationError(
                "a layer in front of the first trained one has changed since engine.settle() applied it to the data: the stored "
                "rows are not its outputs any more. Make a new engine, and settle again."
            )


def check_settling(plan: PrivacyPlan, ledger: Ledger, augmentation: Augmentation | None, before: Settled | None) -> int | None:
    """Refuses a run that can't be settled, or not yet; how many copies each record holds, ``None`` where it is a single example."""
    if before is not None:
        raise ConfigurationError("this run is settled already: its steps are on the dataset that engine.settle() gave")
    if any(release.name == STATISTICS for release in plan.releases) and STATISTICS not in ledger.one_off:
        raise ConfigurationError("release the statistics before you settle: the layer that gets them is not fixed until then")
    if augmentation is not None and not isinstance(augmentation, PrecomputedCopies):
        raise ConfigurationError(
            f"{augmentation!r} makes copies of what enters the model, in every step: its outputs can't be stored once. Store the "
            "copies in the dataset (lipdp.data.PrecomputedCopies), or leave settle out."
        )
    return None if augmentation is None else augmentation.copies


def fixed_layers(model: torch.nn.Module) -> int:
    """How many layers at the front of a sequential model are fixed: nothing to train, nothing random, no cotangent clipped."""
    plain = isinstance(model, torch.nn.Sequential) and type(model).forward is torch.nn.Sequential.forward
    if not plain or model._forward_hooks or model._forward_pre_hooks:
        raise ConfigurationError(
            f"only a Sequential without hooks says where its fixed layers end, and {type(model).__name__} is none: put the fixed "
            "part and the trained part into one nn.Sequential"
        )
    assert isinstance(model, torch.nn.Sequential)
    count = 0
    for layer in model:
        if any(p.requires_grad for p in layer.parameters()) or any(map(_has_to_run, layer.modules())):
            break
        count += 1
    return count


def _has_to_run(module: torch.nn.Module) -> bool:
    random = isinstance(module, _DropoutNd) and module.training and module.p > 0
    return random or isinstance(module, nn.ClipGradient)


def settle(
    model: torch.nn.Module,
    dataset: Any,
    *,
    input_shape: tuple[int, ...] | None,
    device: torch.device,
    copies: int | None = None,
    in_place: bool = False,
    seats: int | None = None,
    draw: Stream | None = None,
) -> Settled:
    """Apply the model's fixed layers to every record.

    Args:
        model: a Sequential on ``device``, with its statistics released where it takes any.
        dataset: records of ``input_shape``, or of several copies each, (copies, *input_shape).
        input_shape: shape of one example, as the plan has it.
        device: where to compute. The result is kept where the dataset's inputs are.
        copies: how many copies a record holds; ``None``: records are single examples.
        in_place: put the result over the dataset's inputs where it fits, instead of needing the memory for both.
        seats: how many seats there are for the records (:mod:`lipdp.training.seats`), a public number; as many as records, if None.
        draw: for seating them. ``None``: in their order.
    """
    count = fixed_layers(model)
    assert isinstance(model, torch.nn.Sequential)
    layers = list(model._modules.items())  # named_children() leaves out a layer that comes a second time
    if count == 0:
        raise ConfigurationError(f"nothing in this model is fixed: its first layer, '{layers[0][0]}', is trained, random or clips")
    fixed = torch.nn.Sequential(OrderedDict(layers[:count]))
    analysis = analyse(fixed, 1.0, input_shape=input_shape, check=False)
    bound = analysis.output
    shape = tuple(bound.shape)
    rows = rows_at_once((copies or 1) * math.prod(shape), device)
    size = check_dataset(dataset)
    places = torch.arange(size) if draw is None else choose_seats(size, seats or size, draw)
    radius, rows = bound.norm * (1 - _MARGIN), min(rows, len(places))
    stored = _apply(analysis.program, Types(model), dataset, device, places, rows, copies, radius, in_place)
    # What works in place must not get the stored rows themselves.
    in_place_later = any(getattr(module, "inplace", False) for _, layer in layers[count:] for module in layer.modules())
    kind = nn.BoundedInput if in_place_later else _StoredInput
    inside = [] if math.isinf(bound.norm) else [(_INPUT, kind(shape, norm=bound.norm))]
    rest = torch.nn.Sequential(OrderedDict([*inside, *layers[count:]]))
    return Settled(rest, stored, shape, fixed, _content(fixed, copy=True))


def _content(fixed: torch.nn.Module, copy: bool = False) -> tuple[str, list[torch.Tensor]]:
    tensors = [*fixed.parameters(), *fixed.buffers()]
    return str(fixed), [tensor.detach().clone() for tensor in tensors] if copy else tensors


def _apply(
    fixed: Program,
    types: Types,
    dataset: Any,
    device: torch.device,
    places: torch.Tensor,
    rows: int,
    copies: int | None,
    radius: float,
    in_place: bool,
) -> TensorDataset:
    """``rows`` at once, always: what becomes of a record depends on its place, and on no other record."""
    stored: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    size = check_dataset(dataset)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for start in range(0, len(places), rows):
            part = places[start : start + rows]
            taken = torch.nonzero(part >= 0).flatten()
            if len(taken) == 0:
                continue
            numbers = part[taken[:1]].repeat(rows)
            numbers[taken] = part[taken]
            inputs, labels = gather(dataset, numbers)
            x = types.inputs(inputs.to(device))
            y = fixed(x.flatten(0, 1) if copies else x)
            y = y if math.isinf(radius) else to_ball(y, radius)
            y = y.unflatten(0, (len(x), copies)) if copies else y
            if stored is None or targets is None:
                stored = _storage(dataset, inputs, size, y, in_place)
                targets = labels.new_empty(size, *labels.shape[1:])
            stored[part[taken].to(stored.device)] = y[taken.to(y.device)].to(stored.device)
            targets[part[taken].to(targets.device)] = labels[taken.to(labels.device)]
    assert stored is not None
    assert targets is not None
    return TensorDataset(stored, targets)


def _storage(dataset: Any, inputs: torch.Tensor, size: int, y: torch.Tensor, in_place: bool) -> torch.Tensor:
    if in_place and isinstance(dataset, TensorDataset):
        own = dataset.tensors[0]
        if own.dtype == y.dtype and own[0].numel() == y[0].numel() and own.is_contiguous():
            return own.view(size, *y.shape[1:])
    return torch.empty((size, *y.shape[1:]), dtype=y.dtype, device=inputs.device)
