"""Which layers of a model show their gradients themselves, and which modules are evaluated again for the others.

A layer with a norm rule whose examples are where its rule expects them (:mod:`lipdp.clipping.layouts`) shows its own; so does one
whose parameters can be given to each example (:mod:`lipdp.clipping.spread`). Every other layer's gradients are those of a module
that is evaluated for one example at a time: itself, or the smallest one around it for which that is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from lipdp.clipping.fallback import own_parameters
from lipdp.clipping.layouts import Layouts
from lipdp.clipping.norm_rules import find_norm_rule, find_watched_forward

__all__ = ["Replayed", "TrainedLayers", "place_of_gradients", "replayed_modules", "take_larger", "trained_layers"]


@dataclass(frozen=True)
class TrainedLayers:
    """The layers of a model with trainable parameters of their own, and how these are called."""

    layers: tuple[tuple[str, torch.nn.Module], ...]
    names: dict[int, str]


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
    shows = by_rule or name in layouts.spread
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
