"""The state of a model while data pass through it: nothing of a batch may stay there, whatever ends the pass."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lipdp.digest import as_bytes, same_bits, same_bytes
from lipdp.errors import UnsupportedError
from lipdp.training.shards import local
from lipdp.training.watch import Flag, read_flags

_OWN = frozenset(("_version", "state_dict", "_save_to_state_dict", "get_extra_state"))


class _Place(NamedTuple):
    """A parameter or buffer, by where it is kept."""

    name: str
    holder: dict[str, Any]
    key: str


class _Names(NamedTuple):
    """What a module called parameter, buffer or part when it was first seen; names that stood for nothing yet are ``free``."""

    prefix: str
    module: torch.nn.Module
    holder: dict[Any, Any]
    known: frozenset[Any]
    free: frozenset[Any]


class HeldState:
    """What a model's ``state_dict`` holds: a forward pass that writes to it would carry data out.

    Buffers and frozen parameters always; with ``trained`` also the weights, which the optimiser alone may move, for models whose
    own code runs in a step. No pass may give a module a new one either, but for buffers that are not persistent: they are in no
    ``state_dict``, and models keep tables of positions so. Nor may a ``state_dict`` come to hold anything else
    (:func:`refuse_foreign_state`). :meth:`same` says whether all is as it was, :meth:`refuse` puts back
    what is not, and raises. What :meth:`hold` gives puts it back where something else ends the pass: what refuses a model must not
    leave a record in it.
    """

    def __init__(self, model: torch.nn.Module, *, trained: bool) -> None:
        self._model, self._own_code = model, trained
        self._foreign_before: set[str] = set()
        self._kept: list[torch.Tensor] = []
        self._objects: list[torch.nn.Parameter] = []
        self._forms: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._kept_weights: dict[_Kind, torch.Tensor] = {}
        self._find()

    def _find(self) -> None:
        """Where the model keeps what, and under which names."""
        self._places: list[_Place] = []
        self._weights: list[_Place] = []
        self._names: list[_Names] = []
        for name, module in self._model.named_modules():
            prefix = f"{name}." if name else ""
            self._places += [_Place(prefix + key, module._buffers, key) for key, t in module._buffers.items() if t is not None]
            for key, parameter in module._parameters.items():
                if parameter is not None and (self._own_code or not parameter.requires_grad):
                    listed = self._weights if parameter.requires_grad else self._places
                    listed.append(_Place(prefix + key, module._parameters, key))
            hooks = module._state_dict_hooks, module._state_dict_pre_hooks
            for holder in (module._buffers, module._parameters, module._modules, *hooks):
                known = _filled(holder)
                self._names.append(_Names(prefix, module, holder, known, frozenset(holder) - known))

    def hold(self) -> Callable[[], None]:
        """Remember the present values, of what the model has now; what it gives brings them back."""
        if self._renamed():
            self._find()
        self._foreign_before = set(_foreign_entries(self._model)) if self._own_code else set()
        self._kept = [place.holder[place.key].detach().clone() for place in self._places]
        self._objects = [place.holder[place.key] for place in self._weights]
        self._forms = [(local(weight.detach()).shape, weight.dtype, weight.device) for weight in self._objects]
        self._kept_weights = _bytes(self._objects)

        def put_back() -> None:
            self._put_back(read_flags(self.same()))

        return put_back

    def same(self) -> list[Flag]:
        """Whether names, weights and each of the others are as they were; elsewhere than on a processor still being computed."""
        others = zip(self._places, self._kept, strict=True)
        names = not self._added() and not self._foreign()
        return [names, self._are_weights_same(), *(_is_same(at.holder.get(at.key), kept) for at, kept in others)]

    def refuse(self, same: Sequence[bool]) -> None:
        """Put back what has changed, and raise."""
        if all(same):
            return
        changed = self._put_back(same)
        if self._foreign():
            refuse_foreign_state(self._model)
        raise UnsupportedError(
            f"the forward pass changes '{changed[0]}': state that is updated from the data is a release that nothing accounts for. "
            "It was put back and no step was taken. Make it constant, or remove it."
        )

    def _renamed(self) -> list[_Names]:
        """Where other names stand for something than did."""
        return [names for names in self._names if (names.holder or names.known) and _filled(names.holder) != names.known]

    def _added(self) -> list[tuple[_Names, Any]]:
        """What modules have been given since, but buffers that are not persistent."""
        return [
            (names, key) for names in self._renamed() for key, value in names.holder.items()
            if key not in names.known and value is not None and not self._is_passing(names, key)
        ]  # fmt: skip

    def _foreign(self) -> set[str]:
        """What the ``state_dict`` has come to hold besides parameters and buffers."""
        return set(_foreign_entries(self._model)) - self._foreign_before if self._own_code else set()

    @staticmethod
    def _is_passing(names: _Names, key: str) -> bool:
        return names.holder is names.module._buffers and key in names.module._non_persistent_buffers_set

    def _are_weights_same(self) -> Flag:
        """One answer for all of them, by one comparison for a type on a device."""
        present = [place.holder.get(place.key) for place in self._weights]
        if not all(map(operator.is_, present, self._objects)):
            return False
        now, kept = _bytes(self._objects), self._kept_weights
        if now.keys() != kept.keys():
            return False
        flags = [row.shape == kept[kind].shape and same_bytes(row, kept[kind]) for kind, row in now.items()]
        computed = [flag for flag in flags if isinstance(flag, torch.Tensor)]
        if computed and len(computed) == len(flags) and len({flag.device for flag in computed}) == 1:
            return torch.stack(computed).all()
        return all(read_flags(flags))  # of several devices: waited for

    def _unpacked(self) -> Iterator[tuple[_Place, torch.nn.Parameter, torch.Tensor]]:
        """The weights with what was kept of them, as tensors again."""
        rest = dict(self._kept_weights)
        for place, weight, (shape, dtype, device) in zip(self._weights, self._objects, self._forms, strict=True):
            length, kind = math.prod(shape) * dtype.itemsize, (device, dtype)
            flat, rest[kind] = rest[kind][:length], rest[kind][length:]
            yield place, weight, flat.clone().view(dtype).reshape(shape)

    def _put_back(self, same: Sequence[bool]) -> list[str]:
        """Put back what has changed; the names."""
        names_same, weights_same, *others = same
        changed = [at.name for at, fine in zip(self._places, others, strict=True) if not fine]
        with torch.no_grad():
            for names, key in [] if names_same else self._added():
                if key in names.free:
                    names.holder[key] = None
                else:
                    del names.holder[key]
                changed.insert(0, f"{names.prefix}{key}" if isinstance(key, str) else f"a hook of {names.prefix}state_dict")
            for at, kept, fine in zip(self._places, self._kept, others, strict=True):
                if not fine:
                    _restore(at, at.holder.get(at.key), kept)
            for at, weight, kept in [] if weights_same else self._unpacked():
                now = at.holder.get(at.key)
                if now is not weight or now.shape != kept.shape or not _is_same(now, kept):
                    changed.append(at.name)
                    _restore(at, weight, kept)
        return changed


def refuse_foreign_state(model: torch.nn.Module) -> None:
    """Refuse a model whose ``state_dict`` holds more than its parameters and buffers: nobody watches what else is in there.

    A state of its own (``get_extra_state``), a method or a hook may put records into it that a forward pass has kept.
    """
    found = _foreign_entries(model)
    if found:
        raise UnsupportedError(
            f"the state_dict of {type(model).__name__} holds '{found[0]}', which is neither a parameter nor a buffer: a "
            "get_extra_state, a hook or a method of its own puts it there, and could put records there that a forward pass has "
            "kept. Take that out before training; do not publish this state_dict."
        )


def _foreign_entries(model: torch.nn.Module) -> list[str]:
    """Names of what a ``state_dict`` holds besides parameters and buffers, where some module has changed how it is made."""
    if not any(map(_makes_own_state, model.modules())):
        return []
    known = {_identity(tensor) for tensor in (*model.parameters(), *model.buffers())}
    state = model.state_dict()
    found = [key for key, value in state.items() if not isinstance(value, torch.Tensor) or _identity(value) not in known]
    for name, module in model.named_modules():
        about = getattr(state, "_metadata", {}).get(name, {})
        if "_version" in vars(module) or about.keys() - {"version"}:
            found.append(f"{name}._metadata")
    return found


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    here = local(tensor.detach())
    return here.data_ptr(), here.shape, here.dtype


def _makes_own_state(module: torch.nn.Module) -> bool:
    own, kind, plain = module.__dict__, type(module), torch.nn.Module
    if own["_state_dict_hooks"] or own["_state_dict_pre_hooks"] or not _OWN.isdisjoint(own):
        return True
    return (
        kind.state_dict is not plain.state_dict
        or kind._save_to_state_dict is not plain._save_to_state_dict
        or kind.get_extra_state is not plain.get_extra_state
    )


def _restore(at: _Place, present: torch.Tensor | None, kept: torch.Tensor) -> None:
    """Its values, in the object that was there where that can hold them."""
    if present is None:
        at.holder[at.key] = kept
        return
    here = local(present.detach())
    if kept.layout != torch.strided:
        present = kept
    elif (here.shape, here.dtype, here.device, here.layout) == (kept.shape, kept.dtype, kept.device, kept.layout):
        here.copy_(kept)
    else:
        present.data = kept
    at.holder[at.key] = present


_Kind = tuple[torch.device, torch.dtype]


def _bytes(tensors: Sequence[torch.Tensor]) -> dict[_Kind, torch.Tensor]:
    """Those of a kind in one row of bytes, so that what is no number is compared too, and zeros with their signs."""
    kinds: dict[_Kind, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(local(tensor.detach()).reshape(-1))
    return {kind: as_bytes(torch.cat(parts)) for kind, parts in kinds.items()}


def _filled(holder: dict[Any, Any]) -> frozenset[Any]:
    """Names that stand for something: one that was registered as ``None`` and is given a tensor is a new one."""
    return frozenset(itertools.compress(holder, map(operator.is_not, holder.values(), itertools.repeat(None))))


def _is_same(present: torch.Tensor | None, before: torch.Tensor) -> Flag:
    if present is None:
        return False
    same = same_bits(present, before)
    return bool(same) if before.device.type == "cpu" else same
