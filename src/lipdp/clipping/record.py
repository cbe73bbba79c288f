"""Watching a forward pass: what goes into each layer that has trainable parameters, and where its cotangent will appear.

torch's ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and ``nn.MultiheadAttention`` run as one fused operation that shows no cotangents of
its parts. While a forward pass is recorded, such a module's forward is replaced by an equivalent one made of matrix products, which
can be watched (:func:`watched_forward`); afterwards the module is as it was. Parameters, names and state_dict are untouched
throughout.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from lipdp._checks import no_gradient
from lipdp._numerics import no_autocast
from lipdp.clipping.adoption import Shown, TrainedLayers, Ways, trained_layers
from lipdp.clipping.contribution import Contribution, Contributions, Dense, NormRule, is_at_once, watched_forward
from lipdp.clipping.draws import Drawn
from lipdp.clipping.fallback import ModuleCall, per_example_fallback
from lipdp.clipping.follow import Following
from lipdp.clipping.handed import Note, Use, copies_for_all, stand_ins, swapped
from lipdp.clipping.layouts import SECOND, Layouts, UnseenLayerError, without_caches
from lipdp.clipping.operations import At
from lipdp.clipping.uses import combine
from lipdp.errors import UnsupportedError

__all__ = [
    "Recording",
    "TrainedLayers",
    "leave_off",
    "recording",
    "trained_layers",
    "watched_forward",
]


FIRST_ROWS = At(0, 1)


@dataclass
class _Tap:
    """One use of one layer: the place in the graph whose cotangent is wanted, and what to do with it."""

    owner: str
    edge: GradientEdge
    shape: torch.Size
    make: Contributions
    watched: list[tuple[torch.Tensor, int]]  # inputs with their version: writing into them later would spoil the gradient
    at_once: bool = False  # made during the backward pass, see norm_rule
    made: Mapping[str, Contribution] | None = None

    def take(self, cotangent: torch.Tensor) -> None:
        """Make the contributions, once; what they don't hold themselves is let go."""
        for part, version in self.watched:
            if part._version != version:
                raise UnsupportedError(
                    f"the input of layer '{self.owner}' is overwritten in place after the layer has read it, so its gradient can't "
                    "be told. Use operations that are not in place."
                )
        with torch.no_grad(), no_autocast(cotangent.device):
            self.made = self.make(cotangent.reshape(self.shape))
        self.make, self.watched = _spent, []

    def hook(self) -> Any:
        """Takes the cotangent when the backward pass arrives: on a GPU that is in another thread, without context variables."""
        context = copy_context()

        def before(cotangents: tuple[torch.Tensor | None, ...]) -> None:
            cotangent = cotangents[self.edge.output_nr]
            if cotangent is not None:
                context.copy().run(self.take, cotangent)

        return self.edge.node.register_prehook(before)


def _spent(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
    raise AssertionError("the cotangent of a layer came twice")


@dataclass
class Recording:
    """The taps of one forward pass of ``batch`` rows, of which every ``copies`` make up one example."""

    batch: int
    names: dict[int, str]
    ways: Ways  # how layers show their gradients
    copies: int = 1
    replaced: dict[str, dict[str, torch.nn.Parameter]] = field(default_factory=dict)  # by layer: what copies or stand-ins are of
    taps: list[_Tap] = field(default_factory=list)
    following: Following | None = None  # who knows whose numbers are whose, where there are several records
    watching: Following | None = None  # who sees what the backward pass computes anew
    open: bool = True  # closed once the backward pass begins: layers that are evaluated again then are not further uses

    def add(
        self,
        module: torch.nn.Module,
        owner: str,
        output: torch.Tensor,
        make: Contributions,
        inputs: Sequence[Any],
        *,
        batched: bool = True,
        runs: int = 1,
        at_once: bool = False,
    ) -> None:
        """Note a use of ``module`` whose output is ``output``; ``batched`` says that all its inputs are batch first.

        With ``runs``, that many rows, one after another, belong to one example.
        """
        if not (self.open and isinstance(output, torch.Tensor) and output.requires_grad):
            return
        tensors = [part for part in inputs if isinstance(part, torch.Tensor)]
        for part in (*tensors, output) if batched else (output,):
            if part.ndim == 0 or part.shape[0] != self.batch * runs:
                raise UnsupportedError(
                    f"layer '{owner}' ({type(module).__name__}) sees a tensor of shape {tuple(part.shape)}, whose first dimension "
                    f"is not the batch of {self.batch}: whose gradient is whose can't be told. Keep dimension 0 for the examples "
                    "(batch_first=True)."
                )
        at = At(0, runs)
        if batched and runs > 1 and not all(self.lies(part, at) for part in tensors):
            raise UnseenLayerError(_ELSEWHERE.format(owner=owner, kind=type(module).__name__), module.parameters(recurse=False))
        if self.following is not None and batched:
            for part in tensors:
                self.following.own(part, at, f"what layer '{owner}' sees")
        self.tap(owner, output, make if runs == 1 else _merging(make, runs), tensors, at, at_once=at_once)

    def tap(
        self,
        owner: str,
        output: torch.Tensor,
        make: Contributions,
        inputs: Sequence[torch.Tensor],
        at: At = FIRST_ROWS,
        *,
        at_once: bool = False,
    ) -> None:
        """The same for an output of any layout: ``make`` knows whose cotangent is whose, if records are ``at`` these places."""
        if not (self.open and output.requires_grad):
            return
        if self.following is not None:
            self.following.belongs(output, at, f"what layer '{owner}' gives")
        edge = get_gradient_edge(private_base(output, inputs))
        self.taps.append(_Tap(owner, edge, output.shape, make, [(part, part._version) for part in inputs], at_once))

    def copies_of(self, owner: str, ones: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Copies of a layer's parameters for each example, watched."""
        own = dict(self.ways.owners[owner].named_parameters(recurse=False))
        self.replaced[owner] = {local: own[local] for local in ones}
        with torch.enable_grad():
            copies = {local: copies_for_all(own[local], number, self.batch) for local, number in ones.items()}
        for local, part in copies.items():
            if self.watching is not None:
                self.watching.declare(part, FIRST_ROWS)
            self.tap(owner, part, _as_they_are(local, (self.batch, *own[local].shape)), ())
        return copies

    def note_of(self, owner: str) -> Note:
        """What is told of every use of a layer's own parameters in a function; the use is watched."""
        module = self.ways.owners[owner]
        self.replaced[owner] = dict(module.named_parameters(recurse=False, remove_duplicate=False))

        def note(use: Use | None) -> torch.Tensor | None:
            if not (self.open and torch.is_grad_enabled()):
                return None
            runs = None if use is None else use.runs(self.batch)
            if use is None or runs is None or not self.lies(use.x, At(0, runs)):
                kind = type(module).__name__
                raise UnseenLayerError(_UNKNOWN_USE.format(owner=owner, kind=kind), self.replaced[owner].values())
            output = _of_its_own(use.output, [use.x])
            self.tap(owner, output, use.contributions(self.batch), [use.x] if use.keeps else [], At(0, runs), at_once=use.at_once)
            return output

        return note

    def lies(self, tensor: torch.Tensor, at: At) -> bool:
        """Whether the records are at this place in a tensor, or nowhere in it."""
        return self.following is None or self.following.state(tensor) in (None, at)

    def plain_inside(self, owner: str) -> dict[str, torch.Tensor]:
        """The parameters inside a module that something else stands for just now, by their names there."""
        start = f"{owner}." if owner else ""
        inside = ((name, own) for name, own in self.replaced.items() if name == owner or name.startswith(start))
        return {
            f"{name}.{local}".removeprefix(start).removeprefix("."): p.detach() for name, own in inside for local, p in own.items()
        }

    def contributions(self, total: torch.Tensor, retain_graph: bool = False) -> dict[str, Contribution]:
        """Per-example gradients by parameter name, factored: one backward pass that computes no parameter's gradient."""
        self.open = False
        self.ways.check()
        if not total.requires_grad:
            raise no_gradient()
        if not self.taps:
            return {}
        late, hooks = self._divided()
        try:
            with nullcontext() if self.watching is None else self.watching.going_back():
                cotangents: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                    total, [tap.edge for tap in late], retain_graph=retain_graph, allow_unused=True
                )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise UnsupportedError(
                    "the model uses torch.utils.checkpoint with use_reentrant=True, which hides its layers. Pass False."
                ) from error
            raise
        finally:
            for handle in hooks:
                handle.remove()
        for tap, cotangent in zip(late, cotangents, strict=True):
            if cotangent is not None:  # else the layer's output does not reach the loss
                tap.take(cotangent)
        parts: dict[str, list[Contribution]] = {}
        with torch.no_grad(), no_autocast(total.device):
            for tap in self.taps:
                self._collect(tap, parts)
            return {name: combine(found) for name, found in parts.items()}

    def _divided(self) -> tuple[list[_Tap], list[Any]]:
        """The taps whose cotangents the backward pass is asked for, and hooks for the others, which take theirs as they come.

        A hook is only called if the backward pass goes on from there: to a tap that it is asked for.
        """
        if not any(tap.at_once for tap in self.taps):
            return self.taps, []
        asked = {tap.edge.node for tap in self.taps if not tap.at_once}
        late, hooks = [], []
        for tap in self.taps:
            if tap.at_once and _leads_to(tap.edge.node, asked):
                hooks.append(tap.hook())
            else:
                late.append(tap)
        return late, hooks

    def _collect(self, tap: _Tap, parts: dict[str, list[Contribution]]) -> None:
        owner = self.ways.owners[tap.owner]
        for local, contribution in (tap.made or {}).items():
            if contribution.batch != self.batch:
                raise UnsupportedError(
                    f"layer '{tap.owner}' ({type(owner).__name__}) mixes the examples of the batch, or its first dimension is not "
                    "the batch"
                )
            replaced = self.replaced.get(tap.owner, {})
            name = self.names.get(id(replaced[local] if local in replaced else owner.get_parameter(local)))
            if name is not None:
                parts.setdefault(name, []).append(contribution if self.copies == 1 else contribution.merged(self.copies))
        tap.made = None  # they are the caller's now, to let go as soon as he can


def _leads_to(start: Node, goals: Set[Node]) -> bool:
    """Whether the backward pass goes from ``start`` on to one of ``goals``."""
    seen, waiting = {start}, [start]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following in goals:
                return True
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def private_base(output: torch.Tensor, inputs: Sequence[Any]) -> torch.Tensor:
    """``output``, or where it is a mere reshape of a tensor that nobody else has, that tensor.

    ``nn.Linear`` on (B, T, d) returns a view. If an activation then writes into it in place, autograd makes the view a new node,
    and the one seen here would belong to no graph: its cotangent would be missing, and the layer's gradient with it.
    """
    base = output._base
    if base is None:
        return output
    shared = any(part is base or getattr(part, "_base", None) is base for part in inputs)
    plain = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous() and base.requires_grad
    return base if plain and not shared else output


def _of_its_own(output: torch.Tensor, inputs: Sequence[Any]) -> torch.Tensor:
    """``output``; a copy, if it is a view that could lose its place in the graph: see :func:`private_base`."""
    return output.clone() if output._base is not None and private_base(output, inputs) is output else output


def _as_they_are(local: str, shape: tuple[int, ...]) -> Contributions:
    """The cotangents of a parameter's copies are its gradients."""
    return lambda cotangent: {local: Dense(cotangent.reshape(shape))}


def _merging(make: Contributions, runs: int) -> Contributions:
    """Every ``runs`` rows as one example."""
    return lambda cotangent: {name: part.merged(runs) for name, part in make(cotangent).items()}


@contextmanager
def recording(
    model: torch.nn.Module,
    batch: int,
    copies: int = 1,
    trained: TrainedLayers | None = None,
    layouts: Layouts | None = None,
    following: Following | None = None,
) -> Iterator[Recording]:
    """Within the block, a forward pass of ``model`` on ``batch`` rows is recorded. The model itself is the same afterwards.

    The block must cover the backward passes too: layers that are evaluated again there (gradient checkpointing) must be what
    they were in the forward pass.
    """
    leave_off(model)
    trained = trained_layers(model) if trained is None else trained
    ways = trained.ways(model, layouts)
    of_several = None if following is not None and following.records == 1 else following
    recorded = Recording(batch, trained.names, ways, copies, following=of_several, watching=following)
    with ExitStack() as stack:
        _begun[model] = stack
        stack.callback(setattr, recorded, "open", False)
        for name, module in ways.handed:
            stack.enter_context(stand_ins(module, recorded.note_of(name)))
        for name, module in ways.spread:
            assert layouts is not None
            stack.enter_context(swapped(module, recorded.copies_of(name, layouts.spread[name])))
        for name, module, factory in ways.watched:
            stack.enter_context(_patched(module, types.MethodType(factory(recorded, name), module)))
        for layer in ways.shown:  # first of all hooks: what the user's own hooks make of the output is not the layer's output
            hook = _hook(recorded, layer, layouts)
            stack.callback(layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True).remove)
        for name, own in ways.replayed.own.items():
            stack.enter_context(_patched(ways.owners[name], _replayed_forward(recorded, name, own, layouts)))
        stack.enter_context(without_caches(ways.configs))
        yield recorded


_begun: WeakKeyDictionary[torch.nn.Module, ExitStack] = WeakKeyDictionary()


def leave_off(model: torch.nn.Module) -> None:
    """End what an interrupted recording has left on the model: a block that a Ctrl-C has ended may not have been left in order."""
    stack = _begun.pop(model, None)
    if stack is not None:
        stack.close()


@contextmanager
def _patched(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block, this is the module's forward."""
    before = vars(module).get("forward")  # the instance's, if it has one
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's shows again
        if before is not None:
            module.forward = before


def _replayed_forward(recorded: Recording, owner: str, own: Mapping[str, torch.nn.Parameter], layouts: Layouts | None) -> Any:
    """The forward of a module that is evaluated again for each example, for these parameters, with its own random numbers."""
    module = recorded.ways.owners[owner]
    plain = module.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (recorded.open and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        with Drawn() as drawn:
            output = plain(*args, **kwargs)
        known = None if layouts is None else layouts.find(owner, args, kwargs, output, recorded.batch)
        called = ModuleCall(module, args, kwargs, output, drawn.numbers, recorded.plain_inside(owner))
        replaced, taps = per_example_fallback(called, own, recorded.batch, known, recorded.following)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for part, make, place in taps:
            recorded.tap(owner, part, make, leaves, At(place.dim, place.runs))
        return replaced

    return forward


_UNSEEN = (
    "layer '{owner}' ({kind}) is only called for some batches, and no module around it can be evaluated for one example at a time: "
    "whose gradient is whose can't be told. Call it for every batch, or use method='naive', which takes every example by itself."
)


def _hook(recorded: Recording, layer: Shown, layouts: Layouts | None) -> Any:
    owner, _, rule = layer

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not (recorded.open and torch.is_grad_enabled()):
            return None
        with torch._C.DisableTorchFunction():  # what is done here is ours
            if rule is None or not isinstance(output, torch.Tensor):
                raise UnsupportedError(f"layer '{owner}' ({type(module).__name__}) has changed, or gives no tensor any more")
            if layouts is not None and layouts.has_not_seen(owner) and not owner.startswith(recorded.ways.starts):
                raise UnseenLayerError(_UNSEEN.format(owner=owner, kind=type(module).__name__), module.parameters(recurse=False))
            known = None if layouts is None else layouts.find(owner, args, kwargs, output, recorded.batch)
            if kwargs:
                bound = inspect.signature(module.forward).bind(*args, **kwargs)
                bound.apply_defaults()
                args = bound.args
            output = _of_its_own(output, args)
            batched = not isinstance(module, torch.nn.EmbeddingBag)  # its (tokens, offsets) form is not
            if known is not None and known.shared:
                args, output = _repeated(args, output, recorded.batch)
            elif known is not None and known.place == SECOND:
                _tap_length_first(recorded, owner, module, rule, args, output)
                return output
            runs = known.place.runs if batched and known is not None and known.place is not None and known.place.dim == 0 else 1
            make = rule(module, args, output)
            recorded.add(module, owner, output, make, args, batched=batched, runs=runs, at_once=is_at_once(rule))
            return output

    return hook


def _repeated(args: tuple[Any, ...], output: torch.Tensor, batch: int) -> tuple[tuple[Any, ...], torch.Tensor]:
    """The one row that all examples use, once for each of them: each has a cotangent of its own."""
    given = tuple(part.expand(batch, *part.shape[1:]) if isinstance(part, torch.Tensor) else part for part in args)
    return given, output.expand(batch, *output.shape[1:]).clone()  # it may be written into


def _tap_length_first(
    recorded: Recording, owner: str, module: torch.nn.Module, rule: NormRule, args: tuple[Any, ...], output: torch.Tensor
) -> None:
    """A layer that sees (length, batch, …): its rule speaks of (batch, length, …)."""
    turned = tuple(part.transpose(0, 1) if isinstance(part, torch.Tensor) else part for part in args)
    make = rule(module, turned, output.transpose(0, 1))
    inputs = [part for part in args if isinstance(part, torch.Tensor)]
    if recorded.following is not None:
        for part in inputs:
            recorded.following.own(part, At(1, 1), f"what layer '{owner}' sees")
    recorded.tap(owner, output, lambda cotangent: make(cotangent.transpose(0, 1)), inputs, At(1, 1))


_UNKNOWN_USE = (
    "layer '{owner}' ({kind}) uses its parameters otherwise than when it was looked at, and no module around it can be evaluated "
    "for one example at a time: whose gradient is whose can't be told. Use them in the same way for every batch, or use "
    "method='naive', which takes every example by itself."
)
_ELSEWHERE = (
    "layer '{owner}' ({kind}) sees several rows of each example, which do not lie one after another in some batch, and no module "
    "around it can be evaluated for one example at a time: whose gradient is whose can't be told. Keep dimension 0 for the "
    "examples, or use method='naive', which takes every example by itself."
)
