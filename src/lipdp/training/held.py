"""The state of a model while data pass through it: nothing of a batch may stay there, whatever ends the pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lipdp.errors import UnsupportedError
from lipdp.training.shards import local
from lipdp.training.watch import Flag, read_flags

__all__ = ["HeldState"]


class _Place(NamedTuple):
    """A parameter or buffer, by where it is kept."""

    name: str
    holder: dict[str, Any]
    key: str


class _Names(NamedTuple):
    """What a module called parameter, buffer or part when it was first seen."""

    prefix: str
    module: torch.nn.Module
    holder: dict[str, Any]
    known: frozenset[str]


class HeldState:
    """What a model's ``state_dict`` holds: a forward pass that writes to it would carry data out.

    Buffers and frozen parameters always; with ``trained`` also the weights, which the optimiser alone may move, for models whose
    own code runs in a step. No pass may give a module a new one either, but for buffers that are not persistent: they are in no
    ``state_dict``, and models keep tables of positions so. :meth:`same` says whether all is as it was, :meth:`refuse` puts back
    what is not, and raises. Within :meth:`held` it is put back whatever ends the block early: what refuses a model must not leave
    a record in it.
    """

    def __init__(self, model: torch.nn.Module, *, trained: bool) -> None:
        self._places: list[_Place] = []
        self._weights: list[_Place] = []
        self._names: list[_Names] = []
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            self._places += [_Place(prefix + key, module._buffers, key) for key, t in module._buffers.items() if t is not None]
            for key, parameter in module._parameters.items():
                if parameter is not None and (trained or not parameter.requires_grad):
                    listed = self._weights if parameter.requires_grad else self._places
                    listed.append(_Place(prefix + key, module._parameters, key))
            holders = (module._buffers, module._parameters, module._modules)
            self._names += [_Names(prefix, module, holder, frozenset(holder)) for holder in holders]
        self._kept: list[torch.Tensor] = []
        self._objects: list[torch.nn.Parameter] = []
        self._forms: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._kept_weights: dict[torch.device, torch.Tensor] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Remember the present values; they come back if the block raises."""
        self._kept = [place.holder[place.key].detach().clone() for place in self._places]
        self._objects = [place.holder[place.key] for place in self._weights]
        self._forms = [(local(weight.detach()).shape, weight.dtype, weight.device) for weight in self._objects]
        self._kept_weights = {device: _bytes(weights) for device, weights in self._by_device().items()}
        try:
            yield
        except BaseException:
            self._put_back(read_flags(self.same()))
            raise

    def same(self) -> list[Flag]:
        """Whether names, weights and each of the others are as they were; elsewhere than on a processor still being computed."""
        others = zip(self._places, self._kept, strict=True)
        return [not self._added(), self._are_weights_same(), *(_is_same(at.holder.get(at.key), kept) for at, kept in others)]

    def refuse(self, same: Sequence[bool]) -> None:
        """Put back what has changed, and raise."""
        if all(same):
            return
        changed = self._put_back(same)
        raise UnsupportedError(
            f"the forward pass changes '{changed[0]}': state that is updated from the data is a release that nothing accounts for. "
            "It was put back and no step was taken. Make it constant, or remove it."
        )

    def _added(self) -> list[tuple[_Names, str]]:
        """What modules have been given since, but buffers that are not persistent."""
        grown = [names for names in self._names if len(names.holder) != len(names.known) or names.holder.keys() != names.known]
        return [
            (names, key) for names in grown for key, value in names.holder.items()
            if key not in names.known and value is not None and not self._is_passing(names, key)
        ]  # fmt: skip

    @staticmethod
    def _is_passing(names: _Names, key: str) -> bool:
        return names.holder is names.module._buffers and key in names.module._non_persistent_buffers_set

    def _by_device(self) -> dict[torch.device, list[torch.Tensor]]:
        weights: dict[torch.device, list[torch.Tensor]] = {}
        for weight in self._objects:
            weights.setdefault(weight.device, []).append(weight)
        return weights

    def _are_weights_same(self) -> Flag:
        """One answer for all of them, by one comparison for a device."""
        present = [place.holder.get(place.key) for place in self._weights]
        if any(one is not other for one, other in zip(present, self._objects, strict=True)):
            return False
        now = {device: _bytes(weights) for device, weights in self._by_device().items()}
        if {device: flat.shape for device, flat in now.items()} != {
            device: flat.shape for device, flat in self._kept_weights.items()
        }:
            return False
        flags = [_is_same(flat, self._kept_weights[device]) for device, flat in now.items()]
        return flags[0] if len(flags) == 1 else all(read_flags(flags))  # of several devices: waited for

    def _unpacked(self) -> Iterator[tuple[_Place, torch.nn.Parameter, torch.Tensor]]:
        """The weights with what was kept of them, as tensors again."""
        rest = dict(self._kept_weights)
        for place, weight, (shape, dtype, device) in zip(self._weights, self._objects, self._forms, strict=True):
            length = math.prod(shape) * dtype.itemsize
            flat, rest[device] = rest[device][:length], rest[device][length:]
            yield place, weight, flat.clone().view(dtype).reshape(shape)

    def _put_back(self, same: Sequence[bool]) -> list[str]:
        """Put back what has changed; the names."""
        names_same, weights_same, *others = same
        changed = [at.name for at, fine in zip(self._places, others, strict=True) if not fine]
        with torch.no_grad():
            for names, key in [] if names_same else self._added():
                del names.holder[key]
                changed.insert(0, names.prefix + key)
            for at, kept, fine in zip(self._places, self._kept, others, strict=True):
                if not fine:
                    _restore(at, at.holder.get(at.key), kept)
            for at, weight, kept in [] if weights_same else self._unpacked():
                now = at.holder.get(at.key)
                if now is not weight or now.shape != kept.shape or bool((_bytes([now]) != _bytes([kept])).any()):
                    changed.append(at.name)
                    _restore(at, weight, kept)
        return changed


def _restore(at: _Place, present: torch.Tensor | None, kept: torch.Tensor) -> None:
    """Its values, in the object that was there where that can hold them."""
    if present is None:
        at.holder[at.key] = kept
        return
    here = local(present.detach())
    if (here.shape, here.dtype, here.device) == (kept.shape, kept.dtype, kept.device):
        here.copy_(kept)
    else:
        present.data = kept
    at.holder[at.key] = present


def _bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them in one row of bytes, so that what is no number is compared too."""
    return torch.cat([local(tensor.detach()).reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])


def _is_same(present: torch.Tensor | None, before: torch.Tensor) -> Flag:
    if present is None or present.shape != before.shape or present.dtype != before.dtype or present.device != before.device:
        return False
    return torch.equal(present, before) if before.device.type == "cpu" else (present.detach() == before).all()
