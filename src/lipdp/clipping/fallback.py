"""Modules without a norm rule: their own parameters' gradients by torch.func, one example at a time, vectorised.

This covers bare ``nn.Parameter``s in a module's forward (class tokens, positions, scales) and custom layers. It evaluates the
module again and holds batch × parameters numbers, for that module alone; a notice says so once.

Which inputs have one entry per example, and which are shared (masks, positions)? Shapes alone can mislead: a (T, T) mask in a
batch of T examples. So the outputs are compared: the split that is used is one that gives each example the output it had.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lipdp._numerics import HALF
from lipdp.clipping.contribution import Contribution, Dense, flat
from lipdp.clipping.registry import Contributions
from lipdp.errors import LipdpNotice, UnsupportedError
from lipdp.graphs import is_recording

__all__ = ["own_parameters", "per_example_fallback"]

_noticed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
# Ways that were found to give what a module gave, by module and shapes: nothing is tried while a CUDA graph is recorded.
_found: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, tuple[str, tuple[bool, ...]]]] = weakref.WeakKeyDictionary()


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A module's own parameters, those in its ParameterLists and ParameterDicts included; one entry for each name."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            own.update({f"{name}.{local}": p for local, p in own_parameters(child).items()})
    return own


def per_example_fallback(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, batch: int
) -> tuple[Any, list[tuple[torch.Tensor, Contributions]]]:
    """What to return in the output's place, and (output tensor, its contributions) for each tensor in it.

    Several outputs may be made of one another inside the module; copies of them have cotangents of their own. A view is copied
    too: written into in place, it would leave the graph. What each output was is kept, to be compared.
    """
    own = {name: p for name, p in own_parameters(module).items() if p.requires_grad}
    leaves, structure = tree_flatten(output)
    several = len(leaves) > 1
    leaves = [_separate(leaf, several) for leaf in leaves]
    tracked = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tracked:
        if not all(leaf is None or isinstance(leaf, torch.Tensor | int | float | str | bool) for leaf in leaves):
            raise UnsupportedError(
                f"{type(module).__name__} has parameters of its own, no norm rule, and returns {type(output).__name__}, in which "
                "no tensor can be found. Return tensors, tuples or dicts of them, or register a rule (lipdp.clipping.norm_rule)."
            )
        return output, []
    _notice(module, own)
    replay = _Replay(module, own, args, dict(kwargs), batch)
    return tree_unflatten(leaves, structure), [(leaves[k], replay.pulling(k, leaves[k].detach().clone())) for k in tracked]


def _separate(leaf: Any, several: bool) -> Any:
    needed = isinstance(leaf, torch.Tensor) and leaf.requires_grad and (several or leaf._base is not None)
    return leaf.clone() if needed else leaf


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
        self, module: torch.nn.Module, own: Mapping[str, torch.Tensor], args: Any, kwargs: dict[str, Any], batch: int
    ) -> None:
        self.module, self.batch = module, batch
        self.own = {name: p.detach() for name, p in own.items()}
        values, self.structure = tree_flatten((args, kwargs))
        self.values = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
        device = next(iter(self.own.values())).device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def pulling(self, which: int, output: torch.Tensor) -> Contributions:
        """Contributions by the output's ``which``-th tensor."""

        def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
            device, dtype, enabled = self.autocast
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                gradients = self._gradients(which, output, cotangent)
            return {name: Dense(gradient.detach()) for name, gradient in gradients.items()}

        return contributions

    def _splits(self) -> Iterator[tuple[bool, ...]]:
        """Which values to split by example: first all that have a batch dimension, then fewer and fewer."""
        candidates = [k for k, value in enumerate(self.values) if _has_rows(value, self.batch)]
        for size in range(len(candidates), 0, -1):
            for chosen in combinations(candidates[:6], min(size, 6)):
                yield tuple(k in chosen or k in candidates[6:] for k in range(len(self.values)))

    def _gradients(self, which: int, output: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
        key, known = (which, self._shapes()), _found.setdefault(self.module, {})
        if is_recording() and key in known:
            return self._unread(which, known[key], output, cotangent)
        trouble: Exception | None = None
        for split in self._splits():
            for name, run in self._ways.items():
                try:
                    outputs, gradients = run(which, split, cotangent)
                except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
                    trouble = error
                    continue
                if not bool(_off(outputs, output).any()):
                    known[key] = name, split
                    return gradients
                break
        raise UnsupportedError(
            f"{type(self.module).__name__} has no norm rule, and evaluating it for one example at a time does not give what it "
            "gave for the batch: it mixes examples, or has randomness inside (dropout), or its batch is not the first dimension of "
            "its inputs. Move its parameters into a small module of their own (e.g. one that adds positions), or register "
            f"a rule (lipdp.clipping.norm_rule).{f' The last attempt said: {trouble}' if trouble is not None else ''}"
        ) from trouble

    @property
    def _ways(self) -> dict[str, Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
        return {"vectorised": self._vectorised, "one by one": self._one_by_one}

    def _shapes(self) -> Hashable:
        return tuple(value.shape if isinstance(value, torch.Tensor) else type(value) for value in self.values)

    def _unread(
        self, which: int, way: tuple[str, tuple[bool, ...]], output: torch.Tensor, cotangent: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """As it was done before, comparing without reading: an example that differs gets NaN, and so is left out."""
        name, split = way
        outputs, gradients = self._ways[name](which, split, cotangent)
        off = _off(outputs, output)
        return {
            key: gradient.masked_fill(off.reshape(-1, *[1] * (gradient.ndim - 1)), float("nan"))
            for key, gradient in gradients.items()
        }

    def _one(self, which: int, split: tuple[bool, ...]) -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        def one(delta: torch.Tensor, values: list[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            rows = [value.unsqueeze(0) if alone else value for value, alone in zip(values, split, strict=True)]
            args, kwargs = tree_unflatten(rows, self.structure)
            buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}

            def run(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
                # Not tied: another use of the same parameter, in a layer below, has a tap of its own.
                result = functional_call(self.module, {**buffers, **parameters}, args, kwargs, tie_weights=False)
                found: torch.Tensor = tree_leaves(result)[which]
                return found

            output, pull = vjp(run, self.own)[:2]
            if output.shape[:1] != (1,):
                raise ValueError(f"one example gives an output of shape {tuple(output.shape)}")
            return output.squeeze(0), pull(delta.unsqueeze(0))[0]

        return one

    def _vectorised(
        self, which: int, split: tuple[bool, ...], cotangent: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        dims = [0 if alone else None for alone in split]
        result: tuple[torch.Tensor, dict[str, torch.Tensor]] = vmap(self._one(which, split), in_dims=(0, dims), randomness="error")(
            cotangent, self.values
        )
        return result

    def _one_by_one(
        self, which: int, split: tuple[bool, ...], cotangent: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """For modules that vmap can't handle (control flow that reads values)."""
        one = self._one(which, split)
        found = [
            one(cotangent[i], [value[i] if alone else value for value, alone in zip(self.values, split, strict=True)])
            for i in range(self.batch)
        ]
        stacked: tuple[torch.Tensor, dict[str, torch.Tensor]] = tree_map(lambda *parts: torch.stack(parts), found[0], *found[1:])
        return stacked


def _has_rows(value: Any, batch: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == batch


def _off(again: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Which examples (batch,) have another output than before; one without a finite output is dropped anyway."""
    if again.shape != before.shape:
        return torch.ones(len(before), dtype=torch.bool, device=before.device)
    tolerance = 0.05 if before.dtype in HALF else 1e-3
    a, b = flat(again.detach()).double(), flat(before).double()
    off: torch.Tensor = (a - b).norm(dim=1) > tolerance * b.norm(dim=1) + 1e-12
    return off & torch.isfinite(b).all(1)
