"""Parameters that modules add, multiply by, expand or join by hand (class tokens, positions, scales): a copy for each example.

In the place of p (…) the forward pass of a batch of B examples is given its B equal copies (B, 1, …, 1, …), with as many ones as
let it meet the examples in the first dimension; of p = (1, …), as class tokens and positions are, the one row becomes B. The
gradient in copy i is that of example i: nothing is evaluated twice, and what is measured is what the batch has computed.

Which shape is the right one is tried on the module's own arguments, with two and with three examples and with other contents: it
gives what the module gave. That alone would not do (the mean over all copies is that of one). It is only used where the self-check
(:mod:`lipdp.clipping.verify`) finds each example's gradient to be that of the example alone; where it does not, or no shape fits
(``p.norm()``, ``F.layer_norm(x, shape, p)``), the module is evaluated again for each example (:mod:`lipdp.clipping.fallback`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lipdp.clipping.norm_rules import find_norm_rule, find_watched_forward

__all__ = ["ROW", "Spreading", "copies_for_all", "spreadable", "swapped"]

ROW = -1
_CANDIDATES = (ROW, 0, 1, 2, 3)

Ones = dict[str, int]
"""By own parameter: ones between the examples and the parameter's dimensions; ``ROW``: its one row for all becomes theirs."""


def copies_for_all(parameter: torch.Tensor, ones: int, batch: int) -> torch.Tensor:
    """The parameter once for each example, as a tensor of its own in the graph."""
    rest = parameter.shape[1:] if ones == ROW else (*[1] * ones, *parameter.shape)
    start = parameter if ones == ROW else parameter.reshape(1, *rest)
    return start.expand(batch, *rest).clone()


@contextmanager
def swapped(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within the block, a module's own parameters are these tensors."""
    kept = {local: module._parameters[local] for local in tensors}
    try:
        module._parameters.update(tensors)  # type: ignore[arg-type]
        yield
    finally:
        module._parameters.update(kept)


def spreadable(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules without a rule, with trainable parameters of their own and none in lists, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
        and not any(isinstance(part, torch.nn.ParameterList | torch.nn.ParameterDict) for part in (module, *module.children()))
        and not isinstance(module, torch.jit.ScriptModule)
        and find_norm_rule(module) is None
        and find_watched_forward(module) is None
    }


class Spreading:
    """Finds, while a model runs on a few examples without gradients, which modules' own parameters can be spread, and how.

    Args:
        modules: candidates, by name.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._left = {
            name: {
                local: [ones for ones in _CANDIDATES if ones != ROW or (p.ndim and p.shape[0] == 1)]
                for local, p in module.named_parameters(recurse=False)
                if p.requires_grad
            }
            for name, module in modules.items()
        }
        self._called: set[str] = set()
        self._trying = False

    @contextmanager
    def looking(self, batch: int) -> Iterator[None]:
        """Within the block, the model is run on this many examples."""
        handles = [
            module.register_forward_hook(self._hook(name, batch), with_kwargs=True, prepend=True)
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def fitting(self) -> dict[str, Ones]:
        """Modules all of whose parameters can be spread."""
        return {
            name: {local: ones[0] for local, ones in left.items()}
            for name, left in self._left.items()
            if name in self._called and all(left.values())
        }

    def _hook(self, name: str, batch: int) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            left = self._left[name]
            if self._trying or not all(left.values()):
                return
            self._called.add(name)
            self._trying = True
            try:
                for local in left:
                    left[local] = [ones for ones in left[local] if self._same(module, {local: ones}, batch, args, kwargs, output)]
                if all(left.values()) and not self._same(module, {p: o[0] for p, o in left.items()}, batch, args, kwargs, output):
                    left.update({local: [] for local in left})
            finally:
                self._trying = False

        return hook

    @staticmethod
    def _same(module: torch.nn.Module, ones: Ones, batch: int, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether the module gives the same with a copy for each example."""
        own = dict(module.named_parameters(recurse=False))
        copies = {local: copies_for_all(own[local], number, batch) for local, number in ones.items()}
        try:
            with swapped(module, copies):
                again = module.forward(*args, **kwargs)
        except Exception:  # whatever it raises, it can't be given copies
            return False
        one, other = ([leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (again, output))
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True) if one.is_floating_point() else torch.equal(one, other)
