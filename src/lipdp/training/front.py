"""Fixed layers in front of the trained ones: applied to each record once, instead of at every step.

A model T∘P with nothing to train in P has the same gradients on x as T has on P(x). P treats records one by one, so neighbouring
datasets stay neighbours, and T's steps on the stored P(x) are the steps of the whole model: the same sampling, the same sums, the
same noise. The proof does not rest on what is stored: T begins with a layer that brings every row back into the ball that P's
outputs lie in by the calculus. On rows that P did make, it changes nothing but rounding.

Where P takes statistics of the data (a Standardize), it is applied in two stages: what lies before that layer, which is public;
then, when its statistics have been released from the stored rows, the rest. Fixed copies of an example (mirrors, shifts) are made
before the first stage, and stored with it. The first stage can be kept on disk.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lipdp import nn
from lipdp.bounds import Bound, Call, Transfer, analyse, rule
from lipdp.data.augment import Augmentation, is_fixed
from lipdp.errors import ConfigurationError
from lipdp.features.front import Front, cache_file, fixed_layers, read_outputs, rows_through, write_outputs
from lipdp.graphs import is_large
from lipdp.nn.boundary import example_norms
from lipdp.privacy.randomness import Stream
from lipdp.program.dtypes import Types
from lipdp.training.batches import check_dataset, gather_tensors, rows_at_once
from lipdp.training.seats import choose_seats

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
class _Stage:
    """Fixed layers that were applied, and what they were made of."""

    front: Front
    settings: str
    values: list[torch.Tensor]

    @property
    def is_as_it_was(self) -> bool:
        settings, values = _content(self.front.layers)
        return settings == self.settings and all(map(torch.equal, values, self.values))


@dataclass(frozen=True)
class Settled:
    """A model cut in two where its training begins.

    Attributes:
        rest: T, on outputs of P: the model's own layers under the names that they have there, behind a bound on the input.
        dataset: P(x) of every record, with its target; of every copy of it, where there are copies.
        shape: of one row.
    """

    rest: torch.nn.Sequential
    dataset: TensorDataset
    shape: tuple[int, ...]
    stages: tuple[_Stage, ...]

    def check(self) -> None:
        """Refuses layers that are no longer those that the rows were made with."""
        if not all(stage.is_as_it_was for stage in self.stages):
            raise ConfigurationError(
                "a layer in front of the first trained one has changed since engine.settle() applied it to the data: the stored "
                "rows are not its outputs any more. Make a new engine, and settle again."
            )

    def rows_of(self, dataset: Any) -> TensorDataset:
        """P(x) of other records (a validation set), without copies."""
        for stage in self.stages:
            dataset = _stored(dataclasses.replace(stage.front, copies=None), dataset, None, in_place=False)
        assert isinstance(dataset, TensorDataset)
        return dataset


def applicable_layers(model: torch.nn.Module, settled: Settled | None, *, waiting: bool) -> int:
    """How many layers at the front of what is trained can be applied now, beyond the bound on stored rows."""
    layers = model if settled is None else settled.rest
    count = fixed_layers(layers, waiting=waiting)
    return 0 if settled is not None and count == 1 and _INPUT in layers._modules else count


def settle(
    model: torch.nn.Module,
    dataset: Any,
    *,
    input_shape: tuple[int, ...] | None,
    device: torch.device,
    before: Settled | None = None,
    waiting: bool = False,
    copies: Augmentation | None = None,
    in_place: bool = False,
    seats: int | None = None,
    draw: Stream | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Settled:
    """Apply the fixed layers of the model, or of what is left of it, to every record.

    Args:
        model: a Sequential on ``device``.
        dataset: records of ``input_shape``; after a first stage, its outputs.
        input_shape: shape of one example, as the plan has it.
        device: where to compute. The result is kept where the dataset's inputs are.
        before: the first stage, if this is the second.
        waiting: the model's Standardize has no statistics yet: what lies before it is applied.
        copies: the augmentation, which must be fixed: each record becomes (copies, *shape).
        in_place: put the result over the dataset's inputs where it fits, instead of needing the memory for both.
        seats: how many seats there are for the records (:mod:`lipdp.training.seats`), a public number; as many as records, if None.
        draw: for seating them. ``None``: in their order.
        cache: a folder for the outputs; not for what rests on released statistics, which are another run's another time.
    """
    part: Any = model if before is None else before.rest
    count = applicable_layers(model, before, waiting=waiting)
    layers = list(part._modules.items())  # named_children() leaves out a layer that comes a second time
    if count == 0:
        raise ConfigurationError(_why_nothing(layers, before, waiting))
    if copies is not None and not is_fixed(copies):
        raise ConfigurationError(
            f"{copies!r} makes copies of what enters the model anew in every step: its outputs can't be stored once. Take fixed "
            "copies (lipdp.data.Shifts, Flip, PrecomputedCopies), or leave settle out."
        )
    fixed = torch.nn.Sequential(OrderedDict(layers[:count]))
    analysis = analyse(fixed, 1.0, input_shape=input_shape, check=False)
    bound = analysis.output
    front = Front(fixed, analysis.program, Types(part), device, copies, bound.norm * (1 - _MARGIN), math.prod(bound.shape))
    size = check_dataset(dataset)
    places = torch.arange(size) if draw is None else choose_seats(size, seats or size, draw)
    stored = _stored(front, dataset, places, in_place=in_place, cache=cache)
    shape = tuple(bound.shape)
    # What works in place must not get the stored rows themselves.
    in_place_later = any(getattr(module, "inplace", False) for _, layer in layers[count:] for module in layer.modules())
    kind = nn.BoundedInput if in_place_later else _StoredInput
    inside = [] if math.isinf(bound.norm) else [(_INPUT, kind(shape, norm=bound.norm))]
    rest = torch.nn.Sequential(OrderedDict([*inside, *layers[count:]]))
    stage = _Stage(front, *_content(fixed, copy=True))
    return Settled(rest, stored, shape, (*(() if before is None else before.stages), stage))


def _why_nothing(layers: list[tuple[str, Any]], before: Settled | None, waiting: bool) -> str:
    if waiting:
        return "release the statistics before you settle: the layer that gets them is not fixed until then, and comes first"
    if before is not None:
        return "this run is settled already: its steps are on the dataset that engine.settle() gave"
    return f"nothing in this model is fixed: its first layer, '{layers[0][0]}', is trained, random or clips"


def _content(fixed: torch.nn.Module, copy: bool = False) -> tuple[str, list[torch.Tensor]]:
    tensors = [*fixed.parameters(), *fixed.buffers()]
    return str(fixed), [tensor.detach().clone() for tensor in tensors] if copy else tensors


def _stored(
    front: Front, dataset: Any, places: torch.Tensor | None, *, in_place: bool, cache: str | os.PathLike[str] | None = None
) -> TensorDataset:
    """The front's outputs for every record: from the cache, or computed."""
    size = check_dataset(dataset)
    if cache is not None and not isinstance(dataset, TensorDataset):
        raise ConfigurationError(
            "a cache of the front's outputs needs the data as a torch.utils.data.TensorDataset of (inputs, targets)"
        )
    file = None if cache is None else cache_file(cache, front, dataset.tensors[0])
    outputs = None if file is None else read_outputs(file, size)
    if outputs is not None:
        inputs, targets = dataset.tensors
        return TensorDataset(outputs.to(inputs.device), targets)

    def storage(inputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if in_place and isinstance(dataset, TensorDataset):
            own = dataset.tensors[0]
            if own.dtype == y.dtype and own[0].numel() == y[0].numel() and own.is_contiguous():
                return own.view(size, *y.shape[1:])
        return torch.empty((size, *y.shape[1:]), dtype=y.dtype, device=inputs.device)

    seats = torch.arange(size) if places is None else places
    rows = rows_through(front.layers, rows_at_once(front.count * front.entries, front.device), front.device, front.count)
    outputs, targets = front.apply(lambda numbers: gather_tensors(dataset, numbers), seats, min(rows, len(seats)), storage)
    if file is not None:
        write_outputs(outputs.cpu(), file)
    return TensorDataset(outputs, targets)
