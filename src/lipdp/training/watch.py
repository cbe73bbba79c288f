"""Bounds hold for the model that was analysed, with weights inside their sets. This notices when it no longer is that model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lipdp._deferred import deferred_checks
from lipdp.digest import content_digest, tensor_words
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.fingerprint import reachable_tensors
from lipdp.graphs import GraphedFunction, Watched
from lipdp.parametrize import Constrained

__all__ = ["ModelWatch", "Projection", "constant_state", "project_trained"]

_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


class ModelWatch:
    """Remembers a model's layers, modes, settings and values (and its loss's) at the moment its bounds were proved.

    Settings are all attributes of all modules, hooks and replaced methods among them (:mod:`lipdp.fingerprint`); values those of
    every tensor that can be reached from the modules, by a digest.
    """

    def __init__(self, model: torch.nn.Module, loss: Any = None) -> None:
        self.model = model
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._modes = [module.training for module in self._modules]
        self._structure = self._present_structure()
        self._watched = Watched(model, loss)
        self._settings = -1
        self._tensors: tuple[int, list[torch.Tensor]] = (-1, [])
        self.values: list[Any] = []
        self._words = _Replayed(model, self._digest_elsewhere)

    def restore_modes(self) -> None:
        """Training and evaluation modes as they were when the bounds were proved."""
        for module, mode in zip(self._modules, self._modes, strict=True):
            if module.training is not mode:
                module.training = mode

    def check_structure(self) -> None:
        """Layers and trained parameters may not change any more, and nothing may hook into all modules or into a gradient.

        If every module has the children it had, then by induction from the model itself its modules are those it had.
        """
        if not all(map(_same_items, self._structure, self._present_structure())):
            raise ConfigurationError(
                "layers or parameters of the model were replaced, frozen or unfrozen after the engine was made, and its bounds are "
                "those of the model before. Make a new plan and a new engine for the model as it is."
            )
        if any(_GLOBAL_HOOKS):
            raise ConfigurationError(
                "hooks on all modules are registered (torch.nn.modules.module.register_module_forward_hook and its like), which "
                "can change what every layer computes. Remove them; no step was taken."
            )
        for parameter in self._parameters:
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} has hooks, which can change its gradient behind the bound's "
                    "back. Remove them; no step was taken."
                )

    @property
    def changed(self) -> bool:
        """Whether some value or setting is not what :meth:`remember` saw."""
        self._settings = self._watched()
        return self._present_values() != self.values

    def remember(self) -> None:
        """The present values and settings are proved."""
        self._settings = self._watched()
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
        """The number of the settings, and digests of all tensors: one for those on the processor, one for each elsewhere."""
        if self._tensors[0] != self._settings:
            self._tensors = self._settings, reachable_tensors(*self._watched.objects)
        here = [t for t in self._tensors[1] if t.device.type == "cpu"]
        elsewhere = len(here) < len(self._tensors[1])
        return [self._settings, content_digest(*here), *(self._words().tolist() if elsewhere else [])]

    def _digest_elsewhere(self) -> torch.Tensor:
        return tensor_words([t for t in self._tensors[1] if t.device.type != "cpu"])


def _same_items(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return list(old) == list(new) and all(map(operator.is_, old.values(), new.values()))


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
def constant_state(model: torch.nn.Module) -> Iterator[None]:
    """A buffer or a frozen parameter that the forward pass updates would carry data out without noise."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    tensors = dict((*model.named_buffers(), *frozen))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    yield
    present = dict((*model.named_buffers(), *model.named_parameters()))
    # One wait for a device, not one for each tensor.
    differ = [_differs(present[name].detach(), kept) for name, kept in before.items()]
    device = next((flag.device for flag in differ if isinstance(flag, torch.Tensor)), torch.device("cpu"))
    waited = torch.stack([torch.as_tensor(flag, device=device) for flag in differ]).tolist() if device.type != "cpu" else differ
    changed = [name for name, flag in zip(before, waited, strict=True) if flag]
    with torch.no_grad():
        for name in changed:
            present[name].copy_(before[name])
    if changed:
        raise UnsupportedError(
            f"the forward pass changes '{changed[0]}': state that is updated from the data is a release that nothing accounts for. "
            "It was put back and no step was taken. Make it constant, or remove it."
        )


def _differs(present: torch.Tensor, before: torch.Tensor) -> torch.Tensor | bool:
    """Elsewhere than on a processor, a tensor that is still being computed."""
    if present.shape != before.shape or present.dtype != before.dtype or present.device != before.device:
        return True
    return not torch.equal(present, before) if before.device.type == "cpu" else (present != before).any()
