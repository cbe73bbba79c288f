"""Watching a forward pass: what goes into each layer that has trainable parameters, and where its cotangent will appear."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lipdp.clipping.contribution import Contribution, combine
from lipdp.clipping.fallback import per_example_fallback
from lipdp.clipping.registry import Contributions, find_norm_rule, find_refusal
from lipdp.clipping.twins import find_twin
from lipdp.errors import UnsupportedError

__all__ = ["Recording", "check_supported", "recording"]


@dataclass
class _Tap:
    """One use of one layer: the place in the graph whose cotangent is wanted, and what to do with it."""

    owner: str
    edge: GradientEdge
    make: Contributions
    watched: list[tuple[torch.Tensor, int]]  # inputs with their version: writing into them later would spoil the gradient


@dataclass
class Recording:
    """The taps of one forward pass."""

    batch: int
    names: dict[int, str]
    owners: dict[str, torch.nn.Module] = field(default_factory=dict)
    taps: list[_Tap] = field(default_factory=list)

    def add(self, module: torch.nn.Module, owner: str, output: torch.Tensor, make: Contributions, inputs: tuple[Any, ...]) -> None:
        """Note a use of ``module`` whose output is ``output``."""
        if not (isinstance(output, torch.Tensor) and output.requires_grad):
            return
        tensors = [part for part in inputs if isinstance(part, torch.Tensor)]
        for part in (*tensors, output):
            if part.ndim == 0 or part.shape[0] != self.batch:
                raise UnsupportedError(
                    f"layer '{owner}' ({type(module).__name__}) sees a tensor of shape {tuple(part.shape)}, whose first dimension "
                    f"is not the batch of {self.batch}: whose gradient is whose can't be told. Keep dimension 0 for the examples "
                    "(batch_first=True)."
                )
        self.taps.append(_Tap(owner, get_gradient_edge(output), make, [(part, part._version) for part in tensors]))

    def contributions(self, total: torch.Tensor, retain_graph: bool = False) -> dict[str, Contribution]:
        """Per-example gradients by parameter name, factored: one backward pass that computes no parameter's gradient."""
        if not self.taps:
            return {}
        edges = [tap.edge for tap in self.taps]
        cotangents: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            total, edges, retain_graph=retain_graph, allow_unused=True
        )
        parts: dict[str, list[Contribution]] = {}
        for tap, cotangent in zip(self.taps, cotangents, strict=True):
            if cotangent is None:
                continue  # the layer's output does not reach the loss
            if any(part._version != version for part, version in tap.watched):
                raise UnsupportedError(
                    f"the input of layer '{tap.owner}' is overwritten in place after the layer has read it, so its gradient can't "
                    "be told. Use operations that are not in place."
                )
            for local, contribution in tap.make(cotangent).items():
                name = self.names.get(id(self.owners[tap.owner].get_parameter(local)))
                if name is not None:
                    parts.setdefault(name, []).append(contribution)
        return {name: combine(found) for name, found in parts.items()}


def _owns_trainable(module: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def check_supported(model: torch.nn.Module) -> None:
    """Refuse, by name and with the fix, what can't be trained by per-example clipping."""
    for name, module in model.named_modules():
        why = find_refusal(module)
        if why is not None:
            raise UnsupportedError(f"layer '{name}' ({type(module).__name__}) can't be trained by clipping: {why}")
        if torch.nn.utils.parametrize.is_parametrized(module):
            raise UnsupportedError(
                f"layer '{name}' uses torch.nn.utils.parametrize; per-example gradients through it are not supported. Remove the "
                "parametrisation (torch.nn.utils.parametrize.remove_parametrizations)."
            )


@contextmanager
def recording(model: torch.nn.Module, batch: int) -> Iterator[Recording]:
    """Within the block, a forward pass of ``model`` is recorded. The model itself is the same afterwards."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    made = Recording(batch, names)
    handles: list[Any] = []
    patched: list[torch.nn.Module] = []
    try:
        for name, module in model.named_modules():
            if not _owns_trainable(module) and find_twin(module) is None:
                continue
            made.owners[name] = module
            twin = find_twin(module)
            if twin is not None:
                module.forward = types.MethodType(twin(made, name), module)
                patched.append(module)
            elif _owns_trainable(module):
                handles.append(module.register_forward_hook(_hook(made, name), with_kwargs=True))
        yield made
    finally:
        for handle in handles:
            handle.remove()
        for module in patched:
            del module.forward  # the instance's; the class's shows again


def _hook(made: Recording, owner: str) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        rule = find_norm_rule(module)
        if kwargs and rule is not None:
            args, kwargs = inspect.signature(module.forward).bind(*args, **kwargs).args, {}
        if rule is None or not isinstance(output, torch.Tensor):
            for part, make in per_example_fallback(module, args, kwargs, output):
                made.add(module, owner, part, make, args)
            return
        made.add(module, owner, output, rule(module, args, output), args)

    return hook
