"""Watching a forward pass: what goes into each layer that has trainable parameters, and where its cotangent will appear."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from lipdp.clipping.arithmetic import no_autocast
from lipdp.clipping.combine import combine
from lipdp.clipping.contribution import Contribution
from lipdp.clipping.fallback import own_parameters, per_example_fallback
from lipdp.clipping.registry import Contributions, find_norm_rule
from lipdp.clipping.twins import find_twin
from lipdp.errors import DataError, UnsupportedError

__all__ = ["Recording", "recording"]

_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)


@dataclass
class _Tap:
    """One use of one layer: the place in the graph whose cotangent is wanted, and what to do with it."""

    owner: str
    edge: GradientEdge
    shape: torch.Size
    make: Contributions
    watched: list[tuple[torch.Tensor, int]]  # inputs with their version: writing into them later would spoil the gradient


@dataclass
class Recording:
    """The taps of one forward pass of ``batch`` rows, of which every ``copies`` make up one example."""

    batch: int
    names: dict[int, str]
    copies: int = 1
    owners: dict[str, torch.nn.Module] = field(default_factory=dict)
    taps: list[_Tap] = field(default_factory=list)
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
    ) -> None:
        """Note a use of ``module`` whose output is ``output``; ``batched`` says that all its inputs are batch first."""
        if not (self.open and isinstance(output, torch.Tensor) and output.requires_grad):
            return
        tensors = [part for part in inputs if isinstance(part, torch.Tensor)]
        for part in (*tensors, output) if batched else (output,):
            if part.ndim == 0 or part.shape[0] != self.batch:
                raise UnsupportedError(
                    f"layer '{owner}' ({type(module).__name__}) sees a tensor of shape {tuple(part.shape)}, whose first dimension "
                    f"is not the batch of {self.batch}: whose gradient is whose can't be told. Keep dimension 0 for the examples "
                    "(batch_first=True)."
                )
        edge = get_gradient_edge(private_base(output, tensors))
        self.taps.append(_Tap(owner, edge, output.shape, make, [(part, part._version) for part in tensors]))

    def contributions(self, total: torch.Tensor, retain_graph: bool = False) -> dict[str, Contribution]:
        """Per-example gradients by parameter name, factored: one backward pass that computes no parameter's gradient."""
        self.open = False
        if not total.requires_grad:
            raise DataError("the loss does not depend on any trainable parameter")
        if not self.taps:
            return {}
        try:
            cotangents: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                total, [tap.edge for tap in self.taps], retain_graph=retain_graph, allow_unused=True
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise UnsupportedError(
                    "the model uses torch.utils.checkpoint with use_reentrant=True, which hides its layers. Pass False."
                ) from error
            raise
        parts: dict[str, list[Contribution]] = {}
        with torch.no_grad(), no_autocast(total.device):
            for tap, cotangent in zip(self.taps, cotangents, strict=True):
                if cotangent is not None:  # else the layer's output does not reach the loss
                    self._collect(tap, cotangent.reshape(tap.shape), parts)
            return {name: combine(found) for name, found in parts.items()}

    def _collect(self, tap: _Tap, cotangent: torch.Tensor, parts: dict[str, list[Contribution]]) -> None:
        if any(part._version != version for part, version in tap.watched):
            raise UnsupportedError(
                f"the input of layer '{tap.owner}' is overwritten in place after the layer has read it, so its gradient can't "
                "be told. Use operations that are not in place."
            )
        owner = self.owners[tap.owner]
        for local, contribution in tap.make(cotangent).items():
            if contribution.batch != self.batch:
                raise UnsupportedError(
                    f"layer '{tap.owner}' ({type(owner).__name__}) mixes the examples of the batch, or its first dimension is not "
                    "the batch"
                )
            name = self.names.get(id(owner.get_parameter(local)))
            if name is not None:
                parts.setdefault(name, []).append(contribution if self.copies == 1 else contribution.merged(self.copies))


def private_base(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """``output``, or where it is a mere reshape of a tensor that nobody else has, that tensor.

    ``nn.Linear`` on (B, T, d) returns a view. If an activation then writes into it in place, autograd makes the view a new node,
    and the one seen here would belong to no graph: its cotangent would be missing, and the layer's gradient with it.
    """
    base = output._base
    if base is None:
        return output
    shared = any(part is base or part._base is base for part in inputs)
    plain = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous() and base.requires_grad
    return base if plain and not shared else output


def _owns_trainable(module: torch.nn.Module) -> bool:
    return not isinstance(module, _LISTS) and any(p.requires_grad for p in own_parameters(module).values())


@contextmanager
def recording(model: torch.nn.Module, batch: int, copies: int = 1) -> Iterator[Recording]:
    """Within the block, a forward pass of ``model`` on ``batch`` rows is recorded. The model itself is the same afterwards.

    The block must cover the backward passes too: layers that are evaluated again there (gradient checkpointing) must be what
    they were in the forward pass.
    """
    made = Recording(batch, {id(p): name for name, p in model.named_parameters() if p.requires_grad}, copies)
    handles: list[Any] = []
    patched: list[torch.nn.Module] = []
    try:
        for name, module in model.named_modules():
            if not _owns_trainable(module):
                continue
            made.owners[name] = module
            twin = find_twin(module)
            if twin is not None:
                module.forward = types.MethodType(twin(made, name), module)
                patched.append(module)
            else:
                # First of all hooks: what the user's own hooks make of the output is not the layer's output.
                handles.append(module.register_forward_hook(_hook(made, name), with_kwargs=True, prepend=True))
        yield made
    finally:
        made.open = False
        for handle in handles:
            handle.remove()
        for module in patched:
            del module.forward  # the instance's; the class's shows again


def _hook(made: Recording, owner: str) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not (made.open and torch.is_grad_enabled()):
            return None
        rule = find_norm_rule(module)
        if rule is None or not isinstance(output, torch.Tensor):
            replaced, taps = per_example_fallback(module, args, kwargs, output, made.batch)
            leaves = tree_leaves((args, kwargs))
            for part, make in taps:
                made.add(module, owner, part, make, leaves, batched=False)
            return replaced
        if kwargs:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        if output._base is not None and private_base(output, [part for part in args if isinstance(part, torch.Tensor)]) is output:
            output = output.clone()  # a view that could lose its place in the graph: see private_base
        batched = not isinstance(module, torch.nn.EmbeddingBag)  # its (tokens, offsets) form is not
        made.add(module, owner, output, rule(module, args, output), args, batched=batched)
        return output

    return hook
