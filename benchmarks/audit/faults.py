"""Faults planted into the release path, each for the length of a ``with`` block: what the audits have to see.

Nothing of this is in the library: functions are replaced from outside, behind the engine's back, as a bug in them would be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from lipdp.clipping import Clipper
from lipdp.training import clipped, methods, run, step_mechanism, watch

__all__ = ["FAULTS"]

_add_noise = step_mechanism.add_noise


@contextmanager
def noise_divided(by: float = 1.5) -> Iterator[None]:
    """Every deviation is smaller than planned."""

    def weaker(sums, stds, stream):
        return _add_noise(sums, {name: std / by for name, std in stds.items()}, stream)

    with patch.object(step_mechanism, "add_noise", weaker):
        yield


@contextmanager
def realised_batch_size() -> Iterator[None]:
    """What is released is divided by the number of records that happened to be in the batch."""
    sizes: dict[int, int] = {}

    def asking(original):
        def ask(self, parameters, batch, clips):
            sizes[id(self)] = len(batch.inputs)
            return original(self, parameters, batch, clips)

        return ask

    def dividing(original):
        def gradients(self, noised):
            factor = self.plan.batch_size / sizes[id(self)] if sizes[id(self)] else math.inf
            return original(self, {name: value * factor for name, value in noised.items()})

        return gradients

    kinds = (methods.ProvedQuery, clipped.ClippedQuery)
    patches = [patch.object(kind, "ask", asking(kind.ask)) for kind in kinds]
    patches += [patch.object(kind, "gradients", dividing(kind.gradients)) for kind in kinds]
    with patches[0], patches[1], patches[2], patches[3]:
        yield


@contextmanager
def no_root_m() -> Iterator[None]:
    """The kernel gradient of a 3×3 convolution is bounded without the factor √9."""
    from lipdp.nn import conv

    original = conv.weighted_transfer

    def smaller(x, output_shape, **options):
        return original(x, output_shape, **{**options, "weight_factor": options["weight_factor"] / 3})

    with patch.object(conv, "weighted_transfer", smaller):
        yield


@contextmanager
def no_projection() -> Iterator[None]:
    """Weights stay where the optimiser puts them."""
    with patch.object(watch.Projection, "__call__", lambda self: None):
        yield


@contextmanager
def shuffled() -> Iterator[None]:
    """Batches are cut from a random order, each record once in an epoch, and accounted as if they were Poisson samples."""
    left: dict[int, torch.Tensor] = {}

    def cut(size, rate, stream, sampling):
        count = max(1, math.floor(rate * size))  # two halves of an odd number leave one record out
        if len(left.get(size, ())) < count:
            left[size] = torch.randperm(size)
        chosen, left[size] = left[size][:count], left[size][count:]
        return chosen.sort().values

    with patch.object(run, "sample_indices", cut):
        yield


@contextmanager
def noise_reused() -> Iterator[None]:
    """Every second step gets the noise of the one before."""
    kept: dict[str, torch.Tensor] = {}

    def twice(sums, stds, stream):
        noised = _add_noise(sums, stds, stream)
        if kept and all(kept[name].shape == value.shape for name, value in sums.items() if name in kept):
            again = {name: sums[name] + kept[name] for name in sums}
            kept.clear()
            return again
        kept.update({name: noised[name] - sums[name] for name in sums})
        return noised

    with patch.object(step_mechanism, "add_noise", twice):
        yield


@contextmanager
def one_without_noise() -> Iterator[None]:
    """The last parameter is released as it is."""

    def forgetful(sums, stds, stream):
        noised = _add_noise(sums, stds, stream)
        last = list(noised)[-1]
        return {**noised, last: sums[last].to(noised[last].dtype)}

    with patch.object(step_mechanism, "add_noise", forgetful):
        yield


@contextmanager
def clipped_too_far(by: float = 1.5) -> Iterator[None]:
    """Examples are clipped to more than the norm that the noise is for."""
    original = Clipper.begin

    def wider(self, batch, max_norm, *number):
        larger = {name: by * value for name, value in max_norm.items()} if isinstance(max_norm, dict) else by * max_norm
        return original(self, batch, larger, *number)

    with patch.object(Clipper, "begin", wider):
        yield


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the kind of plan that it is planted into."""

    name: str
    plant: Callable[[], object]
    kind: str  # of the setting: "mlp", "conv", "clipping"


FAULTS = (
    Fault("noise divided by 1.5", noise_divided, "mlp"),
    Fault("noise divided by 1.5, clipping", noise_divided, "clipping"),
    Fault("sum divided by the realised batch size", realised_batch_size, "mlp"),
    Fault("no √m on a convolution", no_root_m, "conv"),
    Fault("projection skipped", no_projection, "mlp"),
    Fault("shuffling accounted as Poisson sampling", shuffled, "mlp"),
    Fault("noise reused over two steps", noise_reused, "mlp"),
    Fault("one parameter without noise", one_without_noise, "mlp"),
    Fault("clipping norm off by 1.5", clipped_too_far, "clipping"),
)
