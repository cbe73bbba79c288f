"""Models that ``fully_shard`` (FSDP2) has divided among the ranks: their whole twin, and how numbers go between the two.

Proofs, projections, certificates and norm rules are of whole weights and of the layers as they were written; ``fully_shard`` leaves
parts of the weights, changes every layer's class and gathers the rest in hooks. So the engine computes with a *whole* copy of the
model, of the original classes and without those hooks, which is an ordinary model to all that is proved, watched and run. The user's
model keeps its shards: the optimiser, its state and averages work on them alone, each rank on its own. In a step weights are gathered,
the released gradient is cut to the shard, the optimiser steps there, the result is gathered, projected layer by layer as a whole,
and cut again. All ranks hold the same whole weights and the same released gradient (:mod:`lipdp.training.distributed`), so each can
cut its shard by itself; nothing is sent but the shards that are gathered.

What is written into the user's model between two steps is gathered with the rest and noticed as in any other model; its settings
(dropout's share, modes) are those that it had when the engine was made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lipdp.errors import UnsupportedError

__all__ = ["Shards", "local", "shard_like", "whole"]

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_API = "torch.distributed.fsdp"


def _is_dtensor(value: Any) -> bool:
    return any(kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed") for kind in type(value).__mro__)


def whole(value: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor (every rank has to ask for it); any other tensor as it is."""
    given: Any = value.detach()
    found: torch.Tensor = given.full_tensor() if _is_dtensor(value) else given
    return found


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    part: Any = value
    found: torch.Tensor = part.to_local() if _is_dtensor(value) else value
    return found


def shard_like(value: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same on all ranks, divided as ``template`` is; nothing is sent."""
    if not _is_dtensor(template) or _is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    like: Any = template
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


class Shards:
    """The user's model and what is computed with: the same object, unless ``fully_shard`` has divided it.

    Attributes:
        given: the user's model.
        model: what is proved and run: whole.
        divided: whether they are two.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.given = self.model = model
        units = [module for module in model.modules() if _unit(module)]
        self.divided = bool(units)
        self._units: list[Any] = units
        if self.divided:
            _check_units(units)
            self._reshard()
            self.model = _whole_twin(model)
        self.parameters: dict[str, torch.nn.Parameter] = {n: p for n, p in self.given.named_parameters() if p.requires_grad}
        """The trained ones, as the optimiser holds them."""
        self._pairs = list(zip(self.given.parameters(), self.model.parameters(), strict=True)) if self.divided else []

    def gather(self) -> None:
        """The user's weights into the whole model. Every rank has to."""
        if not self.divided:
            return
        self._reshard()
        with torch.no_grad():
            for shard, full in self._pairs:
                full.copy_(whole(shard))

    def scatter(self) -> None:
        """The whole model's weights into the user's."""
        if not self.divided:
            return
        self._reshard()
        with torch.no_grad():
            for shard, full in self._pairs:
                local(shard).copy_(local(shard_like(full.detach(), shard)))

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Hand the optimiser its gradients: of its own shard, in the parameter's type."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            parameter.grad = shard_like(gradient.to(parameter.dtype), parameter)

    def _reshard(self) -> None:
        """A forward pass of the user's leaves the outermost unit gathered; its parameters are others then."""
        for unit in self._units:
            unit.reshard()


def _unit(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" and kind.__module__.startswith(_API) for kind in type(module).__mro__)


def _check_units(units: list[Any]) -> None:
    for unit in units:
        policy = unit._get_fsdp_state()._mp_policy
        if policy.param_dtype is not None or policy.reduce_dtype is not None or policy.output_dtype is not None:
            raise UnsupportedError(
                "fully_shard was given a MixedPrecisionPolicy, which would cast weights and gradients in its own hooks: what is "
                "proved and run here is the model in the types of its parameters. Leave mp_policy out; plan(…, precision=…) or "
                "model.to(torch.bfloat16) before sharding say how to compute."
            )


def _original(unit: torch.nn.Module) -> type[torch.nn.Module]:
    """The class that fully_shard has put its own before."""
    kind: Any = type(unit)
    found: type[torch.nn.Module] = kind.__mro__[kind._orig_cls_mro_index]
    return found


def _whole_twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the original classes, without the hooks and marks of fully_shard, with whole weights and the model's own buffers."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(whole(parameter).clone(), requires_grad=parameter.requires_grad)
    with _undressed(model):
        return copy.deepcopy(model, memo)


@contextmanager
def _undressed(model: torch.nn.Module) -> Iterator[None]:
    """Within the block the model is what it was before fully_shard, but for its parameters."""
    kept: list[tuple[torch.nn.Module, type, dict[str, Any]]] = []
    try:
        for module in model.modules():
            kept.append((module, type(module), dict(vars(module))))
            own = vars(module)
            for name in [name for name in own if name in _MARKS or name.startswith("__composable_api_state_key")]:
                del own[name]
            _without_hooks(own)
            if _unit(module):
                module.__class__ = _original(module)
        yield
    finally:
        for module, kind, attributes in kept:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)


def _without_hooks(own: dict[str, Any]) -> None:
    """Those of fully_shard left out; dictionaries are replaced, not changed."""
    theirs: set[int] = set()
    for name, hooks in own.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            theirs |= {key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_API)}
    for name, hooks in list(own.items()):
        if "_hooks" in name and isinstance(hooks, dict) and theirs & hooks.keys():
            own[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in theirs)
