"""Bounds hold for the model that was analysed, with weights inside their sets. This notices when it no longer is that model."""

from __future__ import annotations

import functools
import operator
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from lipdp._numerics import deferred_checks, is_deferring
from lipdp.digest import Tag
from lipdp.errors import ConfigurationError
from lipdp.fingerprint import reachable_tensors, storages
from lipdp.graphs import Branches, GraphedFunction, Watched, copies
from lipdp.parametrize import Constrained
from lipdp.privacy import noise_cuda

Flag = bool | torch.Tensor
"""Whether something holds: known, or still being computed on a device."""
_KEY = secrets.token_bytes(32)  # of this process: nobody can aim at a collision

_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


class ModelWatch:
    """Remembers a model's layers, modes, settings and values (and its loss's) at the moment its bounds were proved.

    Settings are all attributes of all modules, hooks and replaced methods among them (:mod:`lipdp.fingerprint`); values those of
    every tensor that can be reached from the modules, by a digest; on a device it is one under ``key``. ``watched``: who numbers
    settings already.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Any = None,
        key: Callable[[], bytes] = lambda: _KEY,
        watched: Watched | None = None,
    ) -> None:
        self.model = model
        self._key = key
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._modes = [module.training for module in self._modules]
        self._structure = self._present_structure()
        self.watched = Watched(model, loss) if watched is None else watched
        self.settings = -1
        self._sound = -1  # how often something had changed when the structure was checked last
        self._reached = -1  # with which settings these were looked for
        self._on_host: list[torch.Tensor] = []
        self._on_device: list[torch.Tensor] = []
        self._here: list[Any] = []
        self._elsewhere: torch.Tensor | None = None
        self._words = _Replayed(self.digest_elsewhere, self.state)

    def restore_modes(self) -> None:
        """Training and evaluation modes as they were when the bounds were proved."""
        for module, mode in zip(self._modules, self._modes, strict=True):
            if module.training is not mode:
                module.training = mode

    def check_structure(self) -> None:
        """Layers and trained parameters may not change any more, and nothing may hook into all modules or into a gradient.

        If every module has the children it had, then by induction from the model itself its modules are those it had. Where the
        last comparison found all settings the same objects, children and parameters are among them.
        """
        if self.watched.looks != self._sound:
            if not all(map(_same_items, self._structure, self._present_structure())):
                raise ConfigurationError(
                    "layers or parameters of the model were replaced, frozen or unfrozen after the engine was made, and its bounds "
                    "are those of the model before. Make a new plan and a new engine for the model as it is."
                )
            self._sound = self.watched.looks
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
        """Whether some value or setting is not what :meth:`remember` saw; waits for the device."""
        return not bool(self.compare())

    def compare(self) -> Flag:
        """Whether all values and settings are what :meth:`remember` saw; for values elsewhere, still being computed there."""
        self.settings = self.watched()
        here, words = self._present_values()
        if here != self._here or (words is None) != (self._elsewhere is None):
            return False
        return True if words is None else self.compare_there(words)

    def compare_there(self, words: torch.Tensor) -> Flag:
        """Whether the values on a device are what :meth:`remember` saw. ``words``: :meth:`digest_elsewhere`.

        They are compared where they are, and nobody waits: the answer may be read later, as long as nothing is released before.
        """
        if self._elsewhere is None or words.shape != self._elsewhere.shape:
            return False
        return (words == self._elsewhere).all()

    def compare_here(self) -> bool:
        """Whether all that the host knows, settings and values on the processor, is what it was; digests of a device's are known.

        Settings that have changed are those of another model: a digest that was begun before is none of it, so they never pass.
        """
        before, self.settings = self.settings, self.watched()
        if before != self.settings or self._reached != self.settings:
            return False
        return self._digest_here() == self._here and self._elsewhere is not None

    def remember(self) -> None:
        """The present values and settings are proved."""
        self.settings = self.watched()
        self.remember_values()

    def remember_values(self, words: torch.Tensor | None = None) -> None:
        """The present values are proved, and the settings that :meth:`compare` saw: what changed them since will be noticed.

        ``words``: :meth:`digest_elsewhere`, where it is known already.
        """
        self._here, words = self._present_values(words)
        self._elsewhere = None if words is None else words.clone()  # a recording's result is overwritten by the next

    def state(self) -> Hashable:
        """What a recording of :meth:`digest_elsewhere` depends on."""
        return self.settings, self._key(), storages(self._on_device)

    def forget(self) -> None:
        """No values are proved until :meth:`remember`."""
        self._here = []

    def _present_structure(self) -> list[dict[str, Any]]:
        """Children and trained parameters of every module. The objects themselves: a number may be given to another one later."""
        trained = [{name: p for name, p in m._parameters.items() if p is not None and p.requires_grad} for m in self._modules]
        return [*(dict(module._modules) for module in self._modules), *trained]

    def _present_values(self, words: torch.Tensor | None = None) -> tuple[list[Any], torch.Tensor | None]:
        """:meth:`_digest_here`; and digests of the tensors elsewhere, still computed."""
        if self._reached != self.settings:
            everything = reachable_tensors(*self.watched.objects)
            self._on_host = [tensor for tensor in everything if tensor.device.type == "cpu"]
            self._on_device = [tensor for tensor in everything if tensor.device.type not in ("cpu", "meta")]
            self._reached = self.settings
        if words is None and self._on_device:
            words = self._words({tensor.device for tensor in self._on_device})
        return self._digest_here(), words

    def _digest_here(self) -> list[Any]:
        """The number of the settings (types, shapes and places are among them) and a digest of all entries on the processor, end to
        end, under a key of this process."""
        tag = Tag(_KEY)
        for tensor in self._on_host:
            tag.update(tensor)
        return [self.settings, tag.finish()]

    def digest_elsewhere(self, instead: Mapping[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Two words for all tensors of one kind, end to end; their shapes are among the settings.

        ``instead``: what will be in the place of some of them, by their id.
        """
        coming = instead or {}
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in self._on_device:
            present = coming.get(id(tensor), tensor).detach()
            plain = present if present.layout == torch.strided else present.to_dense()
            kinds.setdefault((tensor.device, tensor.dtype), []).append(plain.reshape(-1))
        joined = [torch.cat(parts) for parts in kinds.values()]
        first = joined[0].device
        if all(part.device == first for part in joined):
            return noise_cuda.words_of(joined, self._key())
        return torch.cat([noise_cuda.words_of([part], self._key()).to(first) for part in joined])


def _same_items(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return list(old) == list(new) and all(map(operator.is_, old.values(), new.values()))


class _Replayed:
    """A function of nothing but the model's tensors, replayed as a CUDA graph where all of them live on one such device.

    ``state`` says what it depends on: their storages, and the number of the model's settings.
    """

    def __init__(self, function: Callable[[], Any], state: Callable[[], Hashable]) -> None:
        self._function = function
        self._graphed: GraphedFunction[Any] = GraphedFunction(self._at, state=state)
        self._ticks: dict[torch.device, torch.Tensor] = {}

    def _at(self, tick: torch.Tensor) -> Any:
        return self._function()

    def __call__(self, devices: set[torch.device]) -> Any:
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            return self._function()
        (device,) = devices
        if device not in self._ticks:
            self._ticks[device] = torch.zeros((), device=device)  # a recording is told its device by an input
        return self._graphed(self._ticks[device])


class Projection:
    """:func:`project_trained` after every step: on CUDA as one graph, whose only check is read when the next one is asked.

    Nothing there depends on what is found: layers are projected by as many iterations as a step of training needs, with a
    certificate that holds whatever they lead to (:class:`lipdp.parametrize.Bjorck`). All that can fail is that weights are not
    finite. :attr:`fine` says so, on the device; who is about to release something reads it first.

    Args:
        model: the model.
        watch: whose settings it goes by, and for whom it computes the digest of what it leaves; by default it looks at the model's
            settings itself in every call.
    """

    def __init__(self, model: torch.nn.Module, watch: ModelWatch | None = None) -> None:
        self.model = model
        self.fine: Flag = True
        self.words: torch.Tensor | None = None
        self._watch = watch
        self._parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._constrained = any(isinstance(module, Constrained) for module in model.modules())
        self._watched = Watched(model)
        self._replayed = _Replayed(self._hopeful, self._state)

    def __call__(self) -> None:
        """Bring the trained weights back into their sets, in place."""
        self.fine, self.words = True, None
        if not self._constrained:
            return
        if not self._parameters or self._parameters[0].device.type != "cuda":
            project_trained(self.model)
            return
        self.fine, projected, self.words = self._replayed({p.device for p in self._parameters})
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, projected)

    def check(self) -> None:
        """Waits for the device, and raises where weights have diverged."""
        if not bool(self.fine):
            raise ConfigurationError(
                "a constrained weight is not finite: training has diverged, in the last step. Lower the learning rate; nothing was "
                "released since."
            )

    def _state(self) -> Hashable:
        if self._watch is None:
            return self._watched(), storages(self._parameters)
        return self._watch.state(), storages(self._parameters)

    def _hopeful(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        """Whether all weights are finite, the projected weights and a digest of all tensors with these; the model's own stay."""
        kept = copies(self._parameters)
        try:
            with deferred_checks() as conditions:
                project_trained(self.model)
            projected = copies(self._parameters)
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, kept)
        fine = conditions[0] if conditions else torch.ones((), dtype=torch.bool, device=kept[0].device)
        if self._watch is None or kept[0].device.type != "cuda":
            return fine, projected, None
        return fine, projected, self._watch.digest_elsewhere(dict(zip(map(id, self._parameters), projected, strict=True)))


def project_trained(model: torch.nn.Module) -> None:
    """As :func:`lipdp.parametrize.project_`, but frozen weights, which have not moved, stay as they are to the last bit.

    On CUDA layers that share no parameter are projected side by side, where nobody waits for them.
    """
    layers = [module for module in model.modules() if isinstance(module, Constrained)]
    own = [list(layer.parameters(recurse=False)) for layer in layers]
    with torch.no_grad():
        if not is_deferring():
            for layer, parameters in zip(layers, own, strict=True):
                _project(layer, parameters)
            return
        everything = [p for parameters in own for p in parameters]
        alone = bool(everything) and len(set(map(id, everything))) == len(everything)
        branches = Branches(everything[0].device if alone else torch.device("cpu"))
        for layer, parameters in zip(layers, own, strict=True):
            with branches.branch():
                _project(layer, parameters)
        branches.join()


def _project(layer: Constrained, parameters: Sequence[torch.Tensor]) -> None:
    """One layer, if some of its own parameters are trained."""
    frozen = [p for p in parameters if not p.requires_grad]
    if len(frozen) < len(parameters):
        kept = [p.clone() for p in frozen]
        layer.project_()
        for parameter, values in zip(frozen, kept, strict=True):
            parameter.copy_(values)


def read_flags(flags: Sequence[Flag]) -> list[bool]:
    """All of them as known: those on a device are waited for once, not one by one."""
    return ask_flags(flags)()


def ask_flags(flags: Sequence[Flag]) -> Callable[[], list[bool]]:
    """Begin to read them. What is returned waits for those on a device, and for nothing that is launched there in the meantime."""
    waiting = [flag for flag in flags if isinstance(flag, torch.Tensor)]
    if not waiting:
        return functools.partial(list, flags)
    first = waiting[0].device
    arrived = joined = torch.stack([flag if flag.device == first else flag.to(first) for flag in waiting])
    event: Any = None
    if joined.device.type == "cuda":
        arrived = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
        arrived.copy_(joined, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(joined.device))

    def read() -> list[bool]:
        if event is not None:
            event.synchronize()
        known = iter(arrived.tolist())
        return [next(known) if isinstance(flag, torch.Tensor) else flag for flag in flags]

    return read
