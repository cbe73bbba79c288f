"""Bounds hold for the model that was analysed, with weights inside their sets. This notices when it no longer is that model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.graphs import GraphedFunction, Watched, deferred_checks
from lipdp.parametrize import Constrained

__all__ = ["ModelWatch", "Projection", "constant_buffers", "project_trained"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelWatch:
    """Remembers a model's layers, modes, settings and values at the moment its bounds were proved."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._modules = list(model.modules())
        self._modes = [module.training for module in self._modules]
        self._structure = self._present_structure()
        self._settings = ""
        self.values: list[Any] = []
        self._sums = _Replayed(model, self._sums_of_bits)

    def restore_modes(self) -> None:
        """Training and evaluation modes as they were when the bounds were proved."""
        for module, mode in zip(self._modules, self._modes, strict=True):
            if module.training is not mode:
                module.training = mode

    def check_structure(self) -> None:
        """Layers and trained parameters may not change any more.

        If every module has the children it had, then by induction from the model itself its modules are those it had.
        """
        if not all(map(_same_items, self._structure, self._present_structure())):
            raise ConfigurationError(
                "layers or parameters of the model were replaced, frozen or unfrozen after the engine was made, and its bounds are "
                "those of the model before. Make a new plan and a new engine for the model as it is."
            )

    @property
    def changed(self) -> bool:
        """Whether some value or setting is not what :meth:`remember` saw."""
        self._settings = str(self.model)
        return self._present_values() != self.values

    def remember(self) -> None:
        """The present values and settings are proved."""
        self._settings = str(self.model)
        self.values = self._present_values()

    def remember_values(self) -> None:
        """The present values are proved, and the settings that :attr:`changed` saw: what changed them since will be noticed."""
        self.values = self._present_values()

    def forget(self) -> None:
        """No values are proved until :meth:`remember`."""
        self.values = []

    def _present_structure(self) -> list[dict[str, Any]]:
        """Children and trained parameters of every module. The objects themselves: a number may be given to another one later."""
        trained = [{name: p for name, p in m._parameters.items() if p is not None and p.requires_grad} for m in self._modules]
        return [*(dict(module._modules) for module in self._modules), *trained]

    def _present_values(self) -> list[Any]:
        """Signs of the layers' settings and of all values: sums of their bits as whole numbers, exact on every device."""
        return [self._settings, *self._sums().tolist()]

    def _sums_of_bits(self) -> torch.Tensor:
        parameters = (p for module in self._modules for p in module._parameters.values() if p is not None)
        buffers = (b for module in self._modules for b in module._buffers.values() if b is not None)
        tensors = list(dict.fromkeys((*parameters, *buffers)))  # each once
        device = tensors[0].device
        return torch.stack([_sum_of_bits(t.detach()).to(device) for t in tensors])


def _same_items(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return list(old) == list(new) and all(map(operator.is_, old.values(), new.values()))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bits as whole numbers, added modulo 2^64; as words of 64 bits, which need no conversion, where the size allows."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.reshape(-1)
    even = flat.numel() * flat.element_size() % 8 == 0 and flat.data_ptr() % 8 == 0
    return flat.view(torch.int64 if even else _WORDS[flat.element_size()]).sum()


class _Replayed:
    """A function of nothing but the model's tensors, replayed as a CUDA graph where it lives on such a device."""

    def __init__(self, model: torch.nn.Module, function: Callable[[], Any]) -> None:
        self.model = model
        self._function = function
        self._graphed: GraphedFunction[Any] = GraphedFunction(lambda tick: function(), state=Watched(model))
        self._tick: torch.Tensor | None = None

    def __call__(self) -> Any:
        first = next(self.model.parameters(), None)
        if first is not None and first.device.type != "cuda":
            return self._function()
        devices = {t.device for t in (*self.model.parameters(), *self.model.buffers())}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            return self._function()
        (device,) = devices
        if self._tick is None or self._tick.device != device:
            self._tick = torch.zeros((), device=device)  # a recording is told its device by an input
        return self._graphed(self._tick)


class Projection:
    """:func:`project_trained` after every step: on CUDA as one graph, checked once at its end.

    Weights have moved by one step, so what a projection has to do is known beforehand but for exceptions. It is done taking for
    granted that there is none; if there was one, its result is not used, and the weights are projected the careful way.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._constrained = any(isinstance(module, Constrained) for module in model.modules())
        self._replayed = _Replayed(model, self._hopeful)

    def __call__(self) -> None:
        """Bring the trained weights back into their sets, in place."""
        if not self._constrained:
            return
        if not self._parameters or self._parameters[0].device.type != "cuda":
            project_trained(self.model)
            return
        fine, projected = self._replayed()
        if bool(fine):
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, projected)
        else:
            project_trained(self.model)

    def _hopeful(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Whether all went well, and the projected weights; the model's own are as they were."""
        kept = [p.detach().clone() for p in self._parameters]
        with deferred_checks() as conditions:
            project_trained(self.model)
        projected = [p.detach().clone() for p in self._parameters]
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, kept)
        fine = torch.stack(conditions).all() if conditions else torch.ones((), dtype=torch.bool, device=kept[0].device)
        return fine, projected


def project_trained(model: torch.nn.Module) -> None:
    """As :func:`lipdp.parametrize.project_`, but frozen weights, which have not moved, stay as they are to the last bit."""
    with torch.no_grad():
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if isinstance(module, Constrained) and any(p.requires_grad for p in own):
                frozen = [(p, p.clone()) for p in own if not p.requires_grad]
                module.project_()
                for parameter, kept in frozen:
                    parameter.copy_(kept)


@contextmanager
def constant_buffers(model: torch.nn.Module) -> Iterator[None]:
    """A buffer that the forward pass updates would carry data out without noise."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    after = dict(model.named_buffers())
    # One wait for a device, not one for each buffer.
    differ = [_differs(after[name], kept) for name, kept in before.items()]
    device = next((flag.device for flag in differ if isinstance(flag, torch.Tensor)), torch.device("cpu"))
    waited = torch.stack([torch.as_tensor(flag, device=device) for flag in differ]).tolist() if device.type != "cpu" else differ
    changed = [name for name, flag in zip(before, waited, strict=True) if flag]
    for name in changed:
        after[name].copy_(before[name])
    if changed:
        raise UnsupportedError(
            f"the forward pass changes the buffer '{changed[0]}': state that is updated from the data is a release that nothing "
            "accounts for. It was put back and no step was taken. Make it constant, or remove it."
        )


def _differs(present: torch.Tensor, before: torch.Tensor) -> torch.Tensor | bool:
    """Elsewhere than on a processor, a tensor that is still being computed."""
    if present.shape != before.shape or present.dtype != before.dtype or present.device != before.device:
        return True
    return not torch.equal(present, before) if before.device.type == "cpu" else (present != before).any()
