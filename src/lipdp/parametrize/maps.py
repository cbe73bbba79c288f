"""Parametrisations θ ↦ W = π(θ) of matrices with ‖W‖₂ ≤ 1, as an alternative to projecting W back after every step.

And where autograd stops: at W, whose gradient is bounded and noised.

**Why they are admissible.** Gradients taken *through* π have no useful bound: its Jacobian can be as large as 1/s_min(θ) or
more. But they are not needed. The engine computes W once per step, lets autograd stop there, bounds and noises ∂L/∂W as for any
other weight, and only then multiplies the *noised* gradient by π's transposed Jacobian: post-processing of a private quantity,
free whatever that Jacobian is. Conditions: π uses parameters and public randomness only; one W serves the whole step; θ has no
other path to the data.

These maps take θ of the same shape (…, rows, columns) as W, so a layer can switch between them; maps of whole convolutions, whose θ
has another shape, are in :mod:`lipdp.parametrize.convolution`. The result is divided by its certified norm where that
exceeds 1 (the divisor is a constant for the gradient).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lipdp._numerics import unit_roundoff
from lipdp.bounds.operator_norm import certified_norm
from lipdp.errors import ConfigurationError, UnsupportedError


def _tall(theta: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """θ with at least as many rows as columns, and whether it had to be transposed."""
    if theta.shape[-2] < theta.shape[-1]:
        return theta.transpose(-1, -2), True
    return theta, False


class Parametrisation(ABC):
    """A differentiable map from any finite θ to matrices of operator norm at most 1."""

    @abstractmethod
    def orthogonal(self, tall: torch.Tensor) -> torch.Tensor:
        """π for a tall θ (rows ≥ columns): (nearly) orthonormal columns."""

    @abstractmethod
    def start(self, tall: torch.Tensor) -> torch.Tensor:
        """θ to begin with, from a tall matrix of orthonormal columns; π(θ) need not be that matrix."""

    def frame(self, theta: torch.Tensor) -> torch.Tensor:
        """Orthonormal columns, or rows where there are fewer of them; not yet certified."""
        tall, transposed = _tall(theta)
        matrix = self.orthogonal(tall)
        return matrix.transpose(-1, -2) if transposed else matrix

    def weight(self, theta: torch.Tensor) -> torch.Tensor:
        """W = π(θ), differentiable in θ, with ‖W‖₂ ≤ 1 in θ's own dtype."""
        matrix = self.frame(theta)
        norm = certified_norm(matrix)
        if not bool(torch.isfinite(norm).all()):
            raise ConfigurationError(f"{self} gives a weight that is not finite: training has diverged. Lower the learning rate.")
        # Rounding to θ's dtype moves W by at most u√r‖W‖₂ (see constraint.normalise_certified); the rest is for the division.
        margin = 1 + (min(matrix.shape[-2:]) ** 0.5 + 4) * unit_roundoff(theta.dtype)
        divisor = (norm * margin).clamp_min(1.0)[..., None, None]
        result: torch.Tensor = (matrix / divisor.to(matrix.dtype)).to(theta.dtype)
        return result

    def initial(self, matrix: torch.Tensor) -> torch.Tensor:
        """θ to begin with, of ``matrix``'s shape."""
        tall, transposed = _tall(matrix)
        theta = self.start(tall)
        return theta.transpose(-1, -2).contiguous() if transposed else theta


@dataclass(frozen=True)
class DifferentiableBjorck(Parametrisation):
    """Björck iterations W ← 1.5W − 0.5WWᵀW from θ scaled to norm ≤ 1; differentiated through.

    Attributes:
        iterations: how many steps, always. With fewer, W stays further from orthogonal, and ‖W‖₂ ≤ 1 all the same.
    """

    iterations: int = 12

    def orthogonal(self, tall: torch.Tensor) -> torch.Tensor:
        """A fixed number of iterations."""
        work = tall / certified_norm(tall, squarings=5).clamp_min(1e-12)[..., None, None].to(tall.dtype)
        for _ in range(self.iterations):
            work = 1.5 * work - 0.5 * work @ (work.transpose(-1, -2) @ work)
        return work

    def start(self, tall: torch.Tensor) -> torch.Tensor:
        """Orthonormal columns are a fixed point."""
        return tall.clone()


@dataclass(frozen=True)
class Polar(Parametrisation):
    """The polar factor by the Newton–Schulz iteration of order five, W ← W(15I − 10A + 3A²)/8 with A = WᵀW.

    Each step maps a singular value s to s(15 − 10s² + 3s⁴)/8: within [0, 1] for s in [0, 1], with cubic convergence to 1.

    Attributes:
        iterations: how many steps, always. With fewer, W stays further from orthogonal, and ‖W‖₂ ≤ 1 all the same.
    """

    iterations: int = 8

    def orthogonal(self, tall: torch.Tensor) -> torch.Tensor:
        """A fixed number of iterations."""
        work = tall / certified_norm(tall, squarings=5).clamp_min(1e-12)[..., None, None].to(tall.dtype)
        for _ in range(self.iterations):
            gram = work.transpose(-1, -2) @ work
            work = (15 * work - 10 * work @ gram + 3 * work @ (gram @ gram)) / 8
        return work

    def start(self, tall: torch.Tensor) -> torch.Tensor:
        """Orthonormal columns are a fixed point."""
        return tall.clone()


def cayley(tall: torch.Tensor) -> torch.Tensor:
    """The Cayley transform of tall matrices [U; V], real or complex: see :class:`Cayley`."""
    columns = tall.shape[-1]
    u, v = tall[..., :columns, :], tall[..., columns:, :]
    eye = torch.eye(columns, dtype=tall.dtype, device=tall.device)
    a = u - u.mH + v.mH @ v
    inverse = torch.linalg.inv(eye + a)
    return torch.cat([inverse @ (eye - a), -2 * v @ inverse], dim=-2)


@dataclass(frozen=True)
class Cayley(Parametrisation):
    """The Cayley transform: with θ = [U; V] and A = U − Uᵀ + VᵀV, W = [(I+A)⁻¹(I−A); −2V(I+A)⁻¹].

    I + A is always invertible (its symmetric part I + VᵀV is at least I), and WᵀW = I exactly.
    """

    def orthogonal(self, tall: torch.Tensor) -> torch.Tensor:
        """Solve, in float64: an inverse in float32 loses too much where θ is large."""
        return cayley(tall.to(torch.float64))

    def start(self, tall: torch.Tensor) -> torch.Tensor:
        """Any θ gives orthonormal columns; a random one of moderate size starts away from the identity."""
        return tall.clone()


@dataclass(frozen=True)
class MatrixExp(Parametrisation):
    """W = exp(S)[:, :columns] of the skew-symmetric S = [[U−Uᵀ, −Vᵀ], [V, 0]] with θ = [U; V]."""

    def orthogonal(self, tall: torch.Tensor) -> torch.Tensor:
        """exp of a skew-symmetric matrix is orthogonal."""
        rows, columns = tall.shape[-2:]
        wide = tall.to(torch.float64)
        skew = wide.new_zeros(*tall.shape[:-2], rows, rows)
        lower = torch.cat([torch.zeros_like(wide[..., :columns, :]), wide[..., columns:, :]], dim=-2)
        square = wide[..., :columns, :]
        skew[..., :columns, :columns] = square - square.transpose(-1, -2)
        skew = (
            skew
            + torch.nn.functional.pad(lower, (0, rows - columns))
            - torch.nn.functional.pad(lower.transpose(-1, -2), (0, 0, 0, rows - columns))
        )
        rotation: torch.Tensor = torch.linalg.matrix_exp(skew)
        return rotation[..., :, :columns]

    def start(self, tall: torch.Tensor) -> torch.Tensor:
        """Any θ gives orthonormal columns."""
        return tall.clone()


@dataclass(frozen=True)
class Householder(Parametrisation):
    """W = H₁H₂…H_c·I[:, :c] with the reflections H_j = I − 2v_jv_jᵀ/‖v_j‖², v_j the columns of θ."""

    def orthogonal(self, tall: torch.Tensor) -> torch.Tensor:
        """Reflections applied from the last to the first."""
        wide = tall.to(torch.float64)
        rows, columns = tall.shape[-2:]
        result = torch.eye(rows, columns, dtype=wide.dtype, device=wide.device).expand(*tall.shape[:-2], rows, columns)
        for j in reversed(range(columns)):
            v = wide[..., :, j : j + 1]
            squared = v.square().sum(-2, keepdim=True).clamp_min(1e-24)
            result = result - 2 * v @ (v.transpose(-1, -2) @ result) / squared
        return result

    def start(self, tall: torch.Tensor) -> torch.Tensor:
        """Any θ gives orthonormal columns."""
        return tall.clone()


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
