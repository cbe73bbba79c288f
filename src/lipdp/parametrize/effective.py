"""Where autograd stops: at the effective weight W = π(θ) of a reparametrised layer, whose gradient is bounded and noised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from lipdp.errors import UnsupportedError

__all__ = ["Reparametrised", "effective_leaves", "pull_back"]

Map = Callable[[torch.Tensor], torch.Tensor]


class Reparametrised:
    """Mixin of modules that compute with W = π(θ) instead of their parameter θ.

    ``forward`` asks for ``self.effective("weight")``. Outside private training that is π(θ), differentiable as usual. While the
    engine sums gradients it is a leaf that holds π(θ)'s value, the same one for the whole step.
    """

    def maps(self) -> Mapping[str, Map]:
        """Own parameter's name → π. Empty where the layer's constraint is a projection."""
        return {}

    def effective(self, name: str) -> torch.Tensor:
        """W: the engine's leaf while there is one, else π(θ), or θ itself where it has no map."""
        leaf: torch.Tensor | None = self.__dict__.get("_effective_leaves", {}).get(name)
        if leaf is not None:
            return leaf
        theta: torch.Tensor = getattr(self, name)
        pi = self.maps().get(name)
        return theta if pi is None else pi(theta)


def _reparametrised(model: torch.nn.Module) -> Iterator[tuple[str, Reparametrised, str, Map]]:
    """(qualified name, module, local name, π) of every reparametrised trainable parameter; refuses one with another path."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for prefix, module in model.named_modules():
        if not isinstance(module, Reparametrised):
            continue
        for local, pi in module.maps().items():
            parameter = module.get_parameter(local)  # type: ignore[attr-defined]
            name = f"{prefix}.{local}" if prefix else local
            if owners[id(parameter)] > 1:
                raise UnsupportedError(
                    f"the reparametrised weight '{name}' is shared with another layer: it has a path to the data besides its map, "
                    "so its gradient is not bounded. Use a projection (lipdp.parametrize.Bjorck), or do not share it."
                )
            if parameter.requires_grad:
                yield name, module, local, pi


@contextmanager
def effective_leaves(model: torch.nn.Module, *, differentiable: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block every reparametrised layer computes with a leaf W = π(θ); the leaves, by θ's qualified name.

    With ``differentiable`` they are no leaves but π(θ) with its graph, computed once: for analyses that follow W back to θ.

    Args:
        model: whose reparametrised layers are given the leaves, and lose them again at the end of the block.
        differentiable: keep the graph from θ to W.
    """
    leaves: dict[str, torch.Tensor] = {}
    touched: list[Reparametrised] = []
    try:
        for name, module, local, pi in _reparametrised(model):
            with torch.set_grad_enabled(differentiable):
                weight = pi(module.get_parameter(local))  # type: ignore[attr-defined]
            leaves[name] = weight if differentiable else weight.detach().requires_grad_()
            module.__dict__.setdefault("_effective_leaves", {})[local] = leaves[name]
            touched.append(module)
        yield leaves
    finally:
        for module in touched:
            module.__dict__.pop("_effective_leaves", None)


def pull_back(model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of θ from (noised) gradients of W: the vector–Jacobian product of π; other gradients unchanged.

    Args:
        model: whose θ have not changed since W was computed: π's Jacobian is taken at their present values.
        gradients: by the parameter's qualified name; for a reparametrised one of W's shape.
    """
    result = dict(gradients)
    for name, module, local, pi in _reparametrised(model):
        if name not in gradients:
            continue
        theta = module.get_parameter(local)  # type: ignore[attr-defined]
        with torch.enable_grad():
            weight = pi(theta)
            (result[name],) = torch.autograd.grad(weight, theta, gradients[name].to(weight.dtype))
    return result
