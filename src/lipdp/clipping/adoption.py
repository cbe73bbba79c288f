"""Which layers of a model show their gradients themselves, and which modules are evaluated again for the others.

A layer with a norm rule whose examples are where its rule expects them (:mod:`lipdp.clipping.layouts`) shows its own; so does one
whose parameters can be given to each example (:mod:`lipdp.clipping.handed`), or are handed to functions that are known
(:mod:`lipdp.clipping.handed`). Every other layer's gradients are those of a module
that is evaluated for one example at a time: itself, or the smallest one around it for which that is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lipdp.behaviour import ClassBodies
from lipdp.clipping.contribution import NormRule, WatchedForward, find_norm_rule, find_refusal, find_watched_forward
from lipdp.clipping.fallback import own_parameters
from lipdp.clipping.layouts import Layouts, configs_of, generation
from lipdp.errors import UnsupportedError

_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_REPARAMETRISED = ("WeightNorm", "SpectralNorm")


class Shown(NamedTuple):
    """A layer that shows its gradients by a norm rule."""

    name: str
    module: torch.nn.Module
    rule: NormRule | None


@dataclass(eq=False)
class Ways:
    """How each trained layer of a model comes to show its gradients, as long as nothing about it changes.

    Attributes:
        shown: by their rules.
        watched: those whose forward is replaced by one that can be watched, with what makes it.
        handed: those whose uses of their own parameters show them.
        spread: those whose parameters are given to each example.
        replayed: modules that are evaluated again.
        owners: all of them by name.
        starts: of the names inside layers whose forward is watched: these call what their class does not.
        configs: settings that may say that a decoder keeps a cache.
    """

    shown: tuple[Shown, ...]
    watched: tuple[tuple[str, torch.nn.Module, WatchedForward], ...]
    handed: tuple[tuple[str, torch.nn.Module], ...]
    spread: tuple[tuple[str, torch.nn.Module], ...]
    replayed: Replayed
    owners: dict[str, torch.nn.Module]
    starts: tuple[str, ...]
    configs: tuple[Any, ...]

    def __post_init__(self) -> None:
        self.bodies = ClassBodies({type(module) for module in self.owners.values()})
        self._attributes = [frozenset(vars(layer.module)) for layer in self.shown]

    def check(self) -> None:
        """Raise if a rule that was used is not the layer's any more: what it computes was changed while the model ran."""
        own = [vars(layer.module).keys() for layer in self.shown]  # a method of its own would be a new name here
        if self.bodies.stand and own == self._attributes:
            return
        for name, module, rule in self.shown:
            if find_norm_rule(module) is not rule:
                raise UnsupportedError(f"layer '{name}' ({type(module).__name__}) has changed, or gives no tensor any more")


@dataclass(eq=False)
class TrainedLayers:
    """The layers of a model with trainable parameters of their own, and how these are called."""

    layers: tuple[tuple[str, torch.nn.Module], ...]
    names: dict[int, str]
    _known: tuple[Layouts | None, int, Ways] | None = field(default=None, init=False, repr=False)

    def ways(self, model: torch.nn.Module, layouts: Layouts | None) -> Ways:
        """How they show their gradients, with what is known of their dimensions."""
        known, number = self._known, generation(model)
        if known is None or known[0] is not layouts or known[1] != number or not known[2].bodies.stand:
            known = self._known = layouts, number, _ways_of(model, self, layouts)
        return known[2]


def trained_layers(model: torch.nn.Module) -> TrainedLayers:
    """What is to be watched; it stands until something about the model changes."""
    return TrainedLayers(
        tuple(
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, torch.nn.ParameterList | torch.nn.ParameterDict)
            and any(p.requires_grad for p in own_parameters(module).values())
        ),
        {id(p): name for name, p in model.named_parameters() if p.requires_grad},
    )


@dataclass
class Replayed:
    """Modules that are evaluated again for each example.

    Attributes:
        own: by the module's name: the parameters that it gives the gradients of, by their names inside.
        layers: names of the layers that these belong to.
    """

    own: dict[str, dict[str, torch.nn.Parameter]] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)


def _ways_of(model: torch.nn.Module, trained: TrainedLayers, layouts: Layouts | None) -> Ways:
    replayed = replayed_modules(model, trained, layouts)
    owners = {**dict(trained.layers), **{name: model.get_submodule(name) for name in replayed.own}}
    factories = {name: find_watched_forward(module) for name, module in owners.items()}
    known = Layouts() if layouts is None else layouts
    left = [(name, m) for name, m in trained.layers if name not in replayed.layers]
    rest = [(name, m) for name, m in left if name not in known.handed and name not in known.spread]
    return Ways(
        tuple(Shown(name, module, find_norm_rule(module)) for name, module in rest if factories[name] is None),
        tuple((name, module, factory) for name, module in rest if (factory := factories[name]) is not None),
        tuple((name, module) for name, module in left if name in known.handed),
        tuple((name, module) for name, module in left if name in known.spread and name not in known.handed),
        replayed,
        owners,
        tuple(f"{name}." if name else "" for name, factory in factories.items() if factory is not None),
        configs_of(model),
    )


def replayed_modules(model: torch.nn.Module, trained: TrainedLayers, layouts: Layouts | None) -> Replayed:
    """Those of this model, as far as its layouts are known."""
    replayed = Replayed()
    for name, module in trained.layers:
        around = place_of_gradients(model, name, module, layouts)
        if around is None:
            continue
        inside = name[len(around) :].removeprefix(".")
        own = {local: p for local, p in own_parameters(module).items() if p.requires_grad}
        replayed.own.setdefault(around, {}).update({f"{inside}.{local}" if inside else local: p for local, p in own.items()})
        replayed.layers.add(name)
    return replayed


def place_of_gradients(model: torch.nn.Module, name: str, module: torch.nn.Module, layouts: Layouts | None) -> str | None:
    """The module that is evaluated again for this layer's gradients; ``None``: the layer shows them itself."""
    watched = find_watched_forward(module) is not None
    ruled = watched or find_norm_rule(module) is not None
    risen = 0 if layouts is None else layouts.risen.get(name, 0)
    if layouts is None or not (layouts.calls.get(name) or risen):
        return None if ruled else name
    by_rule = ruled and (watched or isinstance(module, torch.nn.EmbeddingBag) or layouts.is_ordinary(name))
    shows = by_rule or name in layouts.spread or name in layouts.handed
    if shows and risen == 0:
        return None
    around = [other for other in _around(name) if not (ruled and other == name) and layouts.can_replay(other)]
    larger = [other for other in around if find_watched_forward(model.get_submodule(other)) is None]
    skipped = risen - 1 if shows else risen
    if skipped < len(larger):
        return larger[skipped]
    return None if ruled else name  # nothing fits: what is wrong shows where it is used


def take_larger(model: torch.nn.Module, parameters: Iterable[torch.Tensor], layouts: Layouts) -> bool:
    """Evaluate larger modules for the layers of these parameters from now on; False if there is none."""
    wanted = {id(p) for p in parameters}
    taken = False
    for name, module in trained_layers(model).layers:
        if any(id(p) in wanted for p in own_parameters(module).values()):
            taken = _take_larger(model, name, layouts) or taken
    return taken


def _take_larger(model: torch.nn.Module, name: str, layouts: Layouts) -> bool:
    module = model.get_submodule(name)
    before, risen = place_of_gradients(model, name, module, layouts), layouts.risen.get(name, 0)
    layouts.risen[name] = risen + 1
    after = place_of_gradients(model, name, module, layouts)
    if after is not None and after != before and (before is None or len(after) < len(before)):
        return True
    layouts.risen[name] = risen
    return False


def _around(name: str) -> Iterator[str]:
    """The layer and the modules around it, from the inside: "a.b.c", "a.b", "a", ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def check_supported(model: torch.nn.Module) -> None:
    """Raise :class:`~lipdp.errors.UnsupportedError` for the first thing that can't work.

    Args:
        model: its parameters and modules are looked at; nothing is run.
    """
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise UnsupportedError(f"parameter '{name}' is not initialised (a lazy module). Run one forward pass first.")
        if parameter.requires_grad and parameter.is_complex():
            raise UnsupportedError(
                f"parameter '{name}' is complex; norms and noise are defined for real ones. Use a real parameter of twice the size "
                "and torch.view_as_complex in forward."
            )
    for name, module in model.named_modules():
        why = refusal(module)
        if why is not None:
            raise UnsupportedError(f"layer '{name}' ({type(module).__name__}) can't be trained by clipping: {why}")


def refusal(module: torch.nn.Module) -> str | None:
    """Why this module can't be trained by clipping, if it can't."""
    if type(module).__name__ in _PARALLEL and type(module).__module__.startswith("torch."):
        return "it splits the batch or averages gradients over devices, before they are clipped. Pass the wrapped model (.module)."
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module does not show the inputs of its layers. Use the module it was scripted from."
    state = any(name.startswith("parametrizations.") for name, _ in module.named_buffers())
    if torch.nn.utils.parametrize.is_parametrized(module) and state:
        return (
            "its weight is computed by torch.nn.utils.parametrize with state of its own (spectral_norm), which changes whenever it "
            "is evaluated. Remove the parametrisation (torch.nn.utils.parametrize.remove_parametrizations)."
        )
    if any(type(hook).__name__ in _REPARAMETRISED for hook in module._forward_pre_hooks.values()):
        return (
            "its weight is recomputed from other parameters by a hook (weight_norm, spectral_norm). Remove it "
            "(torch.nn.utils.remove_weight_norm, remove_spectral_norm)."
        )
    return find_refusal(module)
