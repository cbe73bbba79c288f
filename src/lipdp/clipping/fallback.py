"""Modules without a norm rule: their own parameters' gradients by torch.func, one example at a time, vectorised.

This covers bare ``nn.Parameter``s in a module's forward (class tokens, positions, scales) and custom layers. It evaluates the
module again and holds batch × parameters numbers, for that module alone; a notice says so once.

Which inputs have one entry per example, and which are shared (masks, positions)? Shapes alone can mislead: a (T, T) mask in a
batch of T examples. So the outputs are compared: the split that is used is one that gives each example the output it had.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lipdp._checks import named
from lipdp._numerics import HALF, random_states, set_random_states
from lipdp.clipping.contribution import Contribution, Contributions, Dense, flat
from lipdp.clipping.draws import Kind, Redrawn
from lipdp.clipping.follow import Following
from lipdp.clipping.layouts import FIRST, Call, HiddenGradientError, Place, UnseenLayerError, Where
from lipdp.clipping.operations import At
from lipdp.clipping.past import NotApartError
from lipdp.clipping.restored import Before
from lipdp.errors import LipdpNotice, UnsupportedError
from lipdp.fingerprint import nothing_kept
from lipdp.graphs import is_capturing, is_recording

Split = tuple[Place | None, ...]
"""Where the examples are in each argument of a call; ``None``: all of it is every example's."""

_noticed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
# Ways that were found to give what a module gave, by module and shapes: nothing is tried while a CUDA graph is recorded.
_found: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, tuple[str, Split]]] = weakref.WeakKeyDictionary()


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A module's own parameters, those in its ParameterLists and ParameterDicts included; one entry for each name."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            own.update({f"{name}.{local}": p for local, p in own_parameters(child).items()})
    return own


@dataclass(frozen=True)
class ModuleCall:
    """A module's call on a batch: its arguments, what it gave, and the random numbers that it drew.

    ``plain``: parameters inside of which the batch has copies for each example, by name.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    numbers: Sequence[tuple[Kind, torch.Tensor]] = ()
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)


def per_example_fallback(
    called: ModuleCall,
    own: Mapping[str, torch.nn.Parameter],
    batch: int,
    known: Call | None = None,
    following: Following | None = None,
) -> tuple[Any, list[tuple[torch.Tensor, Contributions, Place]]]:
    """What to return in the output's place, and (output tensor, its contributions, its examples) for each tensor in it.

    Several outputs may be made of one another inside the module; copies of them have cotangents of their own. A view is copied
    too: written into in place, it would leave the graph. What each output was is kept, to be compared. An output that all examples
    use, (1, …), is repeated for each of them.

    Args:
        called: the module and its call.
        own: whose gradients are wanted, by their names in the module.
        batch: number of examples.
        known: where the examples are in all these, if that is known; else they are tried in the first dimensions.
        following: who knows whose numbers are whose.
    """
    module, output = called.module, called.output
    leaves, structure = tree_flatten(output)
    several = len(leaves) > 1
    places = _output_places(leaves, known)
    leaves = [_separate(leaf, several, batch if place is None else None) for leaf, place in zip(leaves, places, strict=True)]
    tracked = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tracked:
        if not all(leaf is None or isinstance(leaf, torch.Tensor | int | float | str | bool) for leaf in leaves):
            raise UnsupportedError(
                f"{type(module).__name__} has parameters of its own, no norm rule, and returns {type(output).__name__}, in which "
                "no tensor can be found. Return tensors, tuples or dicts of them, or register a rule (lipdp.clipping.norm_rule)."
            )
        return output, []
    _notice(module, own)
    replay = _Replay(called, own, batch, known, following)
    taps = [(leaves[k], replay.pulling(k, places[k] or FIRST, leaves[k]), places[k] or FIRST) for k in tracked]
    return tree_unflatten(leaves, structure), taps


def _output_places(leaves: list[Any], known: Call | None) -> list[Place | None]:
    """Where the examples are in each leaf; ``None``: it is one row that all use."""
    if known is None:
        return [FIRST] * len(leaves)
    wheres = iter(known.outputs)
    numbers = (isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves)
    return [_place(next(wheres)) if number else FIRST for number in numbers]


def _place(where: Where) -> Place | None:
    return where if isinstance(where, Place) else None


def _separate(leaf: Any, several: bool, repeated: int | None) -> Any:
    if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
        return leaf
    if repeated is not None:
        return leaf.expand(repeated, *leaf.shape[1:]).clone()
    return leaf.clone() if several or leaf._base is not None else leaf


def _notice(module: torch.nn.Module, own: Mapping[str, torch.Tensor]) -> None:
    if module in _noticed:
        return
    _noticed.add(module)
    size = sum(p.numel() for p in own.values())
    warnings.warn(
        f"{type(module).__name__} has no norm rule: the gradients of its {size:,} parameter(s) ({', '.join(own)}) are computed for "
        "every example by torch.func.",
        LipdpNotice,
        stacklevel=2,
    )


class _Replay:
    """One call of a module, to be evaluated again for each example alone."""

    def __init__(
        self,
        called: ModuleCall,
        own: Mapping[str, torch.Tensor],
        batch: int,
        known: Call | None,
        following: Following | None,
    ) -> None:
        self.module, self.numbers, self.plain = called.module, called.numbers, called.plain
        self.batch, self.known = batch, known
        self.own, self.parameters = {name: p.detach() for name, p in own.items()}, list(own.values())
        values, self.structure = tree_flatten((called.args, dict(called.kwargs)))
        self.following = following
        self.divided = self._divided(values)
        # Copies, where somebody follows: whatever else of this batch is touched when the module is evaluated again is not its own.
        self.values = [
            (value.detach() if following is None else following.copy(value)) if isinstance(value, torch.Tensor) else value
            for value in values
        ]
        device = next(iter(self.own.values())).device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def _divided(self, values: Sequence[Any]) -> set[int]:
        """Values in which there are examples, so that each must get its own part only."""
        if self.following is None:
            return set()
        name, places = type(self.module).__name__, iter(self.known.inputs) if self.known is not None else None
        found = set()
        for number, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                place = FIRST if places is None else _place(next(places))
                if place is not None and place.runs > 1 and self.following.state(value) not in (None, At(place.dim, place.runs)):
                    raise UnseenLayerError(
                        f"{name} sees several rows of each example, in an order that is not known", self.parameters
                    )
                self.following.own(value, None if place is None else At(place.dim, place.runs), f"what {name} sees")
                if self.following.state(value) is not None:
                    found.add(number)
        return found

    def pulling(self, which: int, place: Place, output: torch.Tensor) -> Contributions:
        """Contributions by the output's ``which``-th tensor, whose examples are at ``place``."""
        output = output.detach().clone() if self.following is None else self.following.copy(output)
        before = place.by_example(output, self.batch) if place.fits(output, self.batch) else output

        def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
            device, dtype, enabled = self.autocast
            if before is output:
                raise HiddenGradientError(self._why(None), self.parameters)
            # Attention by matrix products: fused kernels have no derivative in a bias under torch.func.
            attention = sdpa_kernel(SDPBackend.MATH)
            untouched = nullcontext() if self.following is None else self.following.untouched(cotangent)
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled), attention, untouched:
                gradients = self._gradients(which, before, place.by_example(cotangent, self.batch))
            return {name: Dense(gradient.detach()) for name, gradient in gradients.items()}

        return contributions

    def _splits(self) -> Iterator[Split]:
        """Where the examples may be in each value: where they are known to be; else first all that have a batch dimension, then
        fewer and fewer.
        """
        if self.known is not None:
            places = iter(self.known.inputs)
            yield tuple(_place(next(places)) if isinstance(value, torch.Tensor) else None for value in self.values)
            return
        candidates = [k for k, value in enumerate(self.values) if isinstance(value, torch.Tensor) and FIRST.fits(value, self.batch)]
        for size in range(len(candidates), 0, -1):
            for chosen in combinations(candidates[:6], min(size, 6)):
                split = [k in chosen or k in candidates[6:] for k in range(len(self.values))]
                if all(split[k] for k in self.divided):
                    yield tuple(FIRST if alone else None for alone in split)

    def _gradients(self, which: int, output: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
        key, known = (which, self._shapes()), _found.setdefault(self.module, {})
        if is_recording() and key in known:
            return self._unread(which, known[key], output, cotangent)
        trouble: Exception | None = None
        for split in self._splits():
            for name, run in self._ways.items():
                try:
                    outputs, gradients = run(which, split, cotangent)
                except NotApartError:
                    raise
                except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
                    trouble = error
                    continue
                if not bool(_off(outputs, output).any()):
                    known[key] = name, split
                    return gradients
                break
        raise HiddenGradientError(self._why(trouble), self.parameters) from trouble

    def _why(self, trouble: Exception | None) -> str:
        last = "" if trouble is None else f" The last attempt raised {named(trouble)}."
        return (
            f"{type(self.module).__name__} has no norm rule, and evaluating it for one example at a time does not give what it "
            "gave for the batch: it mixes the examples, or has randomness inside that can't be repeated, or its batch is not "
            "the first dimension of its inputs. Move its parameters into a small module of their own (one that adds positions), "
            f"or register a rule (lipdp.clipping.norm_rule).{last}"
        )

    @property
    def _ways(self) -> dict[str, Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
        return {"vectorised": self._vectorised, "one by one": self._one_by_one}

    def _shapes(self) -> Hashable:
        return tuple(value.shape if isinstance(value, torch.Tensor) else type(value) for value in self.values)

    def _unread(self, which: int, way: tuple[str, Split], output: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
        """As it was done before, comparing without reading: an example that differs gets NaN, and so is left out."""
        name, split = way
        outputs, gradients = self._ways[name](which, split, cotangent)
        off = _off(outputs, output)
        return {
            key: gradient.masked_fill(off.reshape(-1, *[1] * (gradient.ndim - 1)), float("nan"))
            for key, gradient in gradients.items()
        }

    @property
    def _examples(self) -> torch.Tensor:
        return torch.arange(self.batch, device=next(iter(self.own.values())).device)

    def _by_example(self, split: Split) -> list[Any]:
        """The values, of those that are split a part for each example."""
        pairs = zip(self.values, split, strict=True)
        return [value if place is None else place.by_example(value, self.batch) for value, place in pairs]

    def _one(self, which: int) -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        def one(delta: torch.Tensor, example: torch.Tensor, values: list[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            args, kwargs = tree_unflatten(values, self.structure)
            buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}

            def run(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
                # Not tied: another use of the same parameter, in a layer below, has a tap of its own.
                with nothing_kept(self.module), Redrawn(self.numbers, self.batch, example) as redrawn:
                    tensors = {**self.plain, **buffers, **parameters}
                    result = functional_call(self.module, tensors, args, kwargs, tie_weights=False)
                redrawn.check_finished()
                found: torch.Tensor = tree_leaves(result)[which]
                return found

            output, pull = vjp(run, self.own)[:2]
            if output.shape != delta.shape:
                raise ValueError(f"one example gives an output of shape {tuple(output.shape)}, not {tuple(delta.shape)}")
            return output, pull(delta)[0]

        return one

    def _vectorised(self, which: int, split: Split, cotangent: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        dims = [None if place is None else 0 for place in split]
        one = vmap(self._one(which), in_dims=(0, 0, dims), randomness="error")
        result: tuple[torch.Tensor, dict[str, torch.Tensor]] = one(cotangent, self._examples, self._by_example(split))
        return result

    def _one_by_one(self, which: int, split: Split, cotangent: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """For modules that vmap can't handle (control flow that reads values): what one example leaves reaches no other."""
        one, values, found = self._one(which), self._by_example(split), []
        # While a recording is made no value can be read.
        with _disable_current_modes():  # what is looked at, and put back, is no operation of the module
            alone = (
                nullcontext if is_capturing(cotangent.device) else functools.partial(_alone, Before(self.module), cotangent.device)
            )
        for i in range(self.batch):
            own = [value if place is None else value[i].clone() for value, place in zip(values, split, strict=True)]
            with alone():
                found.append(one(cotangent[i], self._examples[i], own))
        stacked: tuple[torch.Tensor, dict[str, torch.Tensor]] = tree_map(lambda *parts: torch.stack(parts), found[0], *found[1:])
        return stacked


@contextmanager
def _alone(before: Before, device: torch.device) -> Iterator[None]:
    """Within the block a module is evaluated for one example: what it has put somewhere, or drawn, is as it was behind it."""
    numbers = random_states(device)
    try:
        yield
    finally:
        with _disable_current_modes():
            set_random_states(numbers, device)
            before.put_back_all()


def _off(again: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Which examples (batch,) have another output than before; one without a finite output is dropped anyway."""
    if again.shape != before.shape:
        return torch.ones(len(before), dtype=torch.bool, device=before.device)
    tolerance = 0.05 if before.dtype in HALF else 1e-3
    a, b = flat(again.detach()).double(), flat(before).double()
    off: torch.Tensor = (a - b).norm(dim=1) > tolerance * b.norm(dim=1) + 1e-12
    return off & torch.isfinite(b).all(1)
