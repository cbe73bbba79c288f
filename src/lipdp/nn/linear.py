"""Dense layers whose operator norm is at most 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from lipdp._checks import positive
from lipdp.bounds import Call, Transfer, rule
from lipdp.bounds.operator_norm import is_contraction
from lipdp.bounds.rules_weighted import weighted_transfer
from lipdp.clipping.contribution import norm_rule, refuse
from lipdp.clipping.rules_layers import linear
from lipdp.errors import ConfigurationError
from lipdp.export import Site, lowering, placed
from lipdp.parametrize import Bjorck, Constrained, Constraint, ConvParametrisation, Parametrisation, Reparametrised
from lipdp.parametrize.constraint import AbsoluteSums, Frobenius, project_ball, project_columns
from lipdp.parametrize.maps import Map
from lipdp.twins import Decision, Where, keep_trained, twin


class BallBias(Constrained):
    """What layers share whose bias, where they have one, is kept in the ball of radius ``bias_norm``."""

    bias: Any
    bias_norm: float

    @property
    def bias_bound(self) -> float | None:
        """‖b‖ at most; ``None`` without a bias."""
        return None if getattr(self, "bias", None) is None else self.bias_norm

    def project_bias_(self) -> None:
        """Back to ‖b‖₂ ≤ bias_norm, of a bias that is there."""
        self.bias.copy_(project_ball(self.bias, self.bias_norm))

    def is_bias_inside(self) -> bool:
        """Whether projecting leaves every bit of it."""
        return self.bias_bound is None or torch.equal(self.bias, project_ball(self.bias, self.bias_norm))

    def bias_repr(self) -> str:
        """What is shown of it, behind torch's own arguments."""
        return "" if self.bias_bound is None else f", bias_norm={self.bias_norm:g}"


def orthogonal_(matrix: torch.Tensor) -> None:
    """A random (semi-)orthogonal matrix, in place; drawn in float32 at least, since torch has no QR for less."""
    with torch.no_grad():
        wide = matrix.new_empty(matrix.shape, dtype=torch.promote_types(matrix.dtype, torch.float32))
        matrix.copy_(torch.nn.init.orthogonal_(wide))


def checked_constraint(value: Any, *, convolution: bool = False) -> Any:
    """The constraint given, or the default; refuses what is neither a projection nor a parametrisation."""
    if value is None:
        return Bjorck()
    if isinstance(value, ConvParametrisation) and not convolution:
        raise ConfigurationError(
            f"constraint {value} parametrises whole convolutions. A dense layer takes a projection (lipdp.parametrize.Bjorck()) or "
            "a parametrisation of a matrix (Cayley(), MatrixExp() …)."
        )
    if not isinstance(value, Parametrisation | Constraint | ConvParametrisation):
        raise ConfigurationError(
            f"constraint must be a projection (lipdp.parametrize.Bjorck(), Spectral()) or a parametrisation (Cayley(), Polar() …; "
            f"AOC(), SOC() … for convolutions), not {value!r}"
        )
    return value


class SpectralLinear(Reparametrised, BallBias, torch.nn.Linear):
    """``y = Wx + b`` with ‖W‖₂ ≤ 1 and ‖b‖₂ ≤ ``bias_norm``.

    Bounds, at T positions (tokens): ``X_out = X + √T·bias_norm``, ``G_in = G``, ``Δ_W = G·X``, ``Δ_b = √T·G``.

    Args:
        in_features: size of each input.
        out_features: size of each output.
        bias: whether to add a bias.
        bias_norm: radius of the ball that the bias is kept in. It enters the activations' bound, so small is cheap.
        constraint: how ‖W‖₂ ≤ 1 is kept. A projection after every step: :class:`~lipdp.parametrize.Bjorck`, the default, makes W
            orthogonal, :class:`~lipdp.parametrize.Spectral` only scales it. Or a parametrisation W = π(θ) of the stored parameter θ
            (:class:`~lipdp.parametrize.Cayley`, ``MatrixExp``, ``Householder``, ``Polar``, ``DifferentiableBjorck``): Δ is then the
            bound on ∂L/∂W, which the engine noises and pulls back to θ.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bias_norm: float = 0.1,
        constraint: Constraint | Parametrisation | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = positive("bias_norm", bias_norm)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.constraint: Constraint | Parametrisation = checked_constraint(constraint)
        if isinstance(self.constraint, Parametrisation):
            with torch.no_grad():
                self.weight.copy_(self.constraint.initial(self.weight))
        self.project_()

    def reset_parameters(self) -> None:
        """A random (semi-)orthogonal matrix and a zero bias."""
        orthogonal_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def project_(self) -> None:
        """Back to ‖W‖₂ ≤ 1 and ‖b‖₂ ≤ bias_norm; a reparametrised weight needs no projection."""
        with torch.no_grad():
            if not isinstance(self.constraint, Parametrisation):
                self.weight.copy_(self.constraint.project(self.weight))
            if self.bias is not None:
                self.project_bias_()

    def is_inside(self) -> bool:
        """Whether ‖W‖₂ ≤ 1 by a certificate, and the bias is in its ball; a reparametrised weight only has to be finite."""
        if isinstance(self.constraint, Parametrisation):
            fine = bool(torch.isfinite(self.weight).all())
        else:
            fine = is_contraction(self.weight)
        return fine and self.is_bias_inside()

    def maps(self) -> dict[str, Map]:
        """π, where the constraint is a parametrisation."""
        return {"weight": self.constraint.weight} if isinstance(self.constraint, Parametrisation) else {}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Wx + b."""
        return F.linear(input, self.effective("weight"), self.bias)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{super().extra_repr()}{self.bias_repr()}, constraint={self.constraint}"


def _transfer(layer: SpectralLinear | L1Linear, call: Call, gain: float) -> Transfer:
    x = call.inputs[0]
    shape, positions = call.output_shape, x.positions()
    return weighted_transfer(x, shape, gain=gain, weight_factor=x.norm, bias=layer.bias_bound, positions=positions, rows=True)


@rule(SpectralLinear)
def _spectral_linear(layer: SpectralLinear, call: Call) -> Transfer:
    """‖Wx‖ ≤ ‖x‖ and ‖Wᵀδ‖ ≤ ‖δ‖ from ‖W‖₂ ≤ 1; the gradient Σ_t δ_t⊗x_t has the norm G·X at most."""
    return _transfer(layer, call, gain=1.0)


class FrobeniusLinear(SpectralLinear):
    """:class:`SpectralLinear` with ‖W‖_F ≤ 1: the cheapest certificate of ‖W‖₂ ≤ 1, tight for weights of rank one.

    Args:
        in_features: size of each input.
        out_features: size of each output.
        bias: whether to add a bias.
        bias_norm: radius of the ball that the bias is kept in, which enters the activations' bound.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bias_norm: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, bias_norm=bias_norm, constraint=Frobenius(), device=device, dtype=dtype)


class L1Linear(BallBias, torch.nn.Linear):
    """``y = Wx + b`` with ‖W‖₁→₁ ≤ 1 (absolute sums of columns): 1-Lipschitz in the L1 norm, what learned mechanisms need.

    What it means in L2, where cotangents are bounded: columns have ‖·‖₂ ≤ ‖·‖₁ ≤ 1, so ‖W‖₂ ≤ ‖W‖_F ≤ √in_features, which
    equal columns reach. With ``rows=True`` absolute sums of rows are kept at 1 too, and then ‖W‖₂ ≤ √(‖W‖₁‖W‖∞) ≤ 1.

    Bounds: ``X_out = ℓX + √T·bias_norm``, ``G_in = ℓG`` with ℓ = √in_features (1 with ``rows``), ``Δ_W = G·X``, ``Δ_b = √T·G``.

    Args:
        in_features: size of each input; √in_features is ℓ in L2 without ``rows``.
        out_features: size of each output.
        bias: whether to add a bias.
        rows: keep the absolute sums of rows at 1 too, for ℓ = 1 in L2.
        bias_norm: radius, in L2, of the ball that the bias is kept in.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rows: bool = False,
        bias_norm: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = positive("bias_norm", bias_norm)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.rows = rows
        self.project_()

    def project_(self) -> None:
        """Back to absolute sums ≤ 1 and ‖b‖₂ ≤ bias_norm."""
        with torch.no_grad():
            self.weight.copy_(AbsoluteSums().project(self.weight) if self.rows else project_columns(self.weight))
            if self.bias is not None:
                self.project_bias_()

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{super().extra_repr()}, rows={self.rows}{self.bias_repr()}"


@rule(L1Linear)
def _l1_linear(layer: L1Linear, call: Call) -> Transfer:
    """‖W‖₂² ≤ ‖W‖_F² = Σ_columns‖·‖₂² ≤ Σ‖·‖₁² ≤ in_features; with rows, ‖W‖₂ ≤ √(‖W‖₁‖W‖∞) ≤ 1. Δ_W = G·X as ever."""
    return _transfer(layer, call, gain=1.0 if layer.rows else layer.in_features**0.5)


norm_rule(SpectralLinear)(linear)


@refuse(SpectralLinear)
def reparametrised_refusal(layer: Reparametrised) -> str | None:
    """Why a layer whose weight is a map of the stored parameter can't be clipped."""
    if any(layer.get_parameter(name).requires_grad for name in layer.maps()):  # type: ignore[attr-defined]
        return (
            "its weight is reparametrised, and per-example gradients through the map are not supported. Train it with "
            "method='clipless', or use a projection (constraint=lipdp.parametrize.Bjorck())."
        )
    return None


@lowering(SpectralLinear, L1Linear)
def _plain_linear(layer: SpectralLinear | L1Linear, site: Site) -> torch.nn.Module:
    return placed(torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta"), layer)


@twin(torch.nn.Linear)
def _twin_of_linear(module: torch.nn.Linear, where: Where) -> Decision:
    bias = module.bias is not None
    like: Mapping[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
    return weighted_twin(SpectralLinear(module.in_features, module.out_features, bias, **like), module, where)


def weighted_twin(new: Any, module: torch.nn.Module, where: Where) -> Decision:
    """``new`` in the place of a layer with a weight and a bias of the same shapes."""
    notes = []
    old: Any = module
    outputs = module.out_features if isinstance(module, torch.nn.Linear) else old.out_channels
    positions = math.prod(where.output) // outputs
    if old.bias is not None and positions > 1:
        notes.append(f"its bias is added at {positions} places and costs √{positions}: bias=False is cheaper")
    if where.copy_weights:
        notes.append("weights copied and projected")
        with torch.no_grad():
            new.weight.copy_(old.weight)
            if old.bias is not None and new.bias is not None:
                new.bias.copy_(old.bias)
        new.project_()
    keep_trained(new, module)
    return Decision("replaced", new, "; ".join(notes))
