"""Layers that bound what passes: activations going forward, cotangents going back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Literal

import torch

from lipdp._checks import positive
from lipdp._numerics import wide
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.clipping.follow import rows_first
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering, narrowed, widened

# Entries whose squares are added up in float32, at most; longer sums are continued in float64.
_SHORT = 256


def example_norms(x: torch.Tensor) -> torch.Tensor:
    """‖x_i‖₂ of each example, shaped to broadcast against x; in float32 or better, off by 2⁻¹⁶ at most whatever its length."""
    single = x.to(torch.promote_types(x.dtype, torch.float32))
    flat = single.reshape(x.shape[0], math.prod(x.shape[1:]))
    if flat.shape[1] > _SHORT and flat.dtype != torch.float64:
        whole = flat.shape[1] // _SHORT * _SHORT
        parts = torch.linalg.vector_norm(flat[:, :whole].reshape(len(flat), -1, _SHORT), dim=2)
        if whole < flat.shape[1]:  # an empty rest would have no place in memory, and so be nobody's that clipping could follow
            parts = torch.cat([parts, torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)], 1)
        flat = parts.to(wide(x))
    norms: torch.Tensor = torch.linalg.vector_norm(flat, dim=1)
    return norms.to(single.dtype).reshape(-1, *([1] * (x.ndim - 1)))


def to_ball(x: torch.Tensor, radius: float) -> torch.Tensor:
    """x·min(1, radius/‖x‖) per example: the projection on the ball, which is 1-Lipschitz."""
    return (x * (radius / example_norms(x).clamp_min(radius))).to(x.dtype)


def to_floored_sphere(x: torch.Tensor, radius: float, floor: float) -> torch.Tensor:
    """x·radius/max(‖x‖, floor) per example: radius/floor times the projection on the ball of radius ``floor``."""
    return (x * (radius / example_norms(x).clamp_min(floor))).to(x.dtype)


def to_sphere(x: torch.Tensor, radius: float) -> torch.Tensor:
    """x·radius/‖x‖ per example; 0 stays 0."""
    # Squares of very small entries underflow, and a norm that is too small gives an output that is too long: scale first.
    single = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = single.detach().abs().amax(dim=tuple(range(1, x.ndim)), keepdim=True)
    scaled = single / largest.where(largest > 0, 1.0)
    return (scaled * (radius / example_norms(scaled).clamp_min(1.0))).to(x.dtype)


class _ClipCotangent(torch.autograd.Function):
    """Identity going forward; going back each example's cotangent is scaled into the ball of radius ``max_norm``, or onto it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, max_norm: float, normalise: bool, norms: list[torch.Tensor] | None) -> torch.Tensor:
        ctx.settings = max_norm, normalise, norms
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        max_norm, normalise, norms = ctx.settings
        cotangent = grads[0]
        if norms is not None:
            norms.append(example_norms(cotangent).flatten())
        clipped = to_sphere(cotangent, max_norm) if normalise else to_ball(cotangent, max_norm)
        return clipped, None, None, None


def clip_cotangent(
    x: torch.Tensor, max_norm: float, normalise: bool = False, norms: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """x, with the cotangent that comes back through it clipped (or normalised) per example; its norms are put into ``norms``."""
    rows_first(x)
    return _ClipCotangent.apply(x, max_norm, normalise, norms)  # type: ignore[no-any-return,no-untyped-call]


class BoundedInput(torch.nn.Module):
    """Bounds the input: X₀ = ``norm``. It also tells the calculus the input's shape, so it usually comes first.

    ``norm`` is a public constant. Never read it off the private data without accounting for it.

    Args:
        shape: shape of one example, without the batch dimension.
        norm: radius of the ball or sphere.
        mode: "ball" scales longer inputs down to ``norm`` (1-Lipschitz, so certificates pass through it); "sphere" scales
            every input to exactly ``norm`` (0 stays 0), which makes the bounds of the first layers tight. The sphere is not
            Lipschitz near 0; :func:`lipdp.certify` accounts for that. "floor" scales to ``norm`` the inputs whose norm is at
            least ``floor``, and shorter ones by the same factor as those: norm/floor-Lipschitz.
        floor: for mode "floor".
    """

    real_input = True  # whole numbers (pixels) are converted before they come here

    def __init__(
        self,
        shape: Sequence[int],
        norm: float = 1.0,
        mode: Literal["ball", "sphere", "floor"] = "ball",
        *,
        floor: float | None = None,
    ) -> None:
        super().__init__()
        sizes = (shape,) if isinstance(shape, Integral) else tuple(shape) if isinstance(shape, Sequence) else ()
        if not sizes or any(isinstance(size, bool) or not isinstance(size, Integral) or size <= 0 for size in sizes):
            raise ConfigurationError(
                f"BoundedInput needs the shape of one example, of positive sizes, such as (3, 32, 32); not {shape!r}"
            )
        self.input_shape = tuple(map(int, sizes))
        self.norm = positive("BoundedInput norm", norm)
        if mode not in ("ball", "sphere", "floor"):
            raise ConfigurationError(f"BoundedInput mode must be 'ball', 'sphere' or 'floor', not {mode!r}")
        if (floor is None) != (mode != "floor"):
            raise ConfigurationError("BoundedInput takes floor= with mode='floor', and only with it")
        self.mode = mode
        self.floor = None if floor is None else positive("BoundedInput floor", floor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale each example into the ball, or onto the sphere."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise DataError(
                f"BoundedInput expects examples of shape {self.input_shape} behind the batch dimension; got a tensor of shape "
                f"{tuple(x.shape)}{': x[None] is a batch of one' if tuple(x.shape) == self.input_shape else ''}"
            )
        if self.mode == "ball":
            return to_ball(x, self.norm)
        if self.floor is not None:
            return to_floored_sphere(x, self.norm, self.floor)
        return to_sphere(x, self.norm)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        floor = "" if self.floor is None else f", floor={self.floor:g}"
        return f"{self.input_shape}, norm={self.norm:g}, mode={self.mode!r}{floor}"


@rule(BoundedInput, rounds="ball")
def _bounded_input(layer: BoundedInput, call: Call) -> Transfer:
    """‖y‖ ≤ norm by construction. The ball's projection is 1-Lipschitz; the sphere's is not Lipschitz at 0 (gain ∞).

    x·r/max(‖x‖, c) is r/c times the ball's projection of radius c, so r/c-Lipschitz.
    """
    x = call.inputs[0]
    if layer.mode == "ball":
        return Transfer(Bound(min(x.norm, layer.norm), x.shape, x.row_norm, x.max_abs))
    if layer.floor is not None:
        gain = layer.norm / layer.floor
        return Transfer(Bound(min(times(gain, x.norm), layer.norm), x.shape), (gain,))
    return Transfer(
        Bound(layer.norm, x.shape),
        (math.inf,),
        why_infinite="scaling to the sphere is not Lipschitz near 0; use mode='ball'",
    )


class ClipGradient(torch.nn.Module):
    """Identity forward; backward, each example's cotangent is clipped to norm ``max_norm``: G ← min(G, max_norm).

    Put behind the last layer it clips the loss gradient: with C below the loss's constant L every Δ, and with it the noise,
    shrinks by C/L. The gradient is then that of another (still per-example) direction field; certificates are not affected.

    Args:
        max_norm: C. A public constant; with ``adaptive``, where it starts.
        normalise: bring every cotangent to norm *exactly* C (0 stays 0): G ← C. Confident examples then weigh as much as the
            others, and the bounds of the layers below are nearly reached.
        adaptive: C follows a private quantile of the cotangents' norms during the run; how is ``lipdp.Clipping(adaptive=…)``.
    """

    def __init__(self, max_norm: float, *, normalise: bool = False, adaptive: bool = False) -> None:
        super().__init__()
        self.max_norm = positive("ClipGradient max_norm", max_norm)
        self.normalise, self.adaptive = bool(normalise), bool(adaptive)
        self._norms: list[torch.Tensor] | None = None

    @contextmanager
    def observed(self) -> Iterator[list[torch.Tensor]]:
        """Collects the norms of the cotangents that pass, one tensor (rows,) for each backward pass. They are private."""
        norms: list[torch.Tensor] = []
        self._norms = norms
        try:
            yield norms
        finally:
            self._norms = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return clip_cotangent(x, self.max_norm, self.normalise, self._norms)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        flags = "".join(f", {name}=True" for name in ("normalise", "adaptive") if getattr(self, name))
        return f"max_norm={self.max_norm:g}{flags}"


@rule(ClipGradient, rounds="ball")
def _clip_gradient(layer: ClipGradient, call: Call) -> Transfer:
    """‖clipped‖ ≤ min(G, C). Normalising also lengthens: ‖·‖ = C whatever G > 0 was; going forward it stays the identity."""
    return Transfer(call.inputs[0], clip=layer.max_norm, normalises=layer.normalise)


class Boundary(torch.nn.Module):
    """Projects activations on the ball of radius ``norm`` going forward, clips cotangents at ``cotangent`` going back.

    Between two boundaries *any* layer has a proved Δ, constrained weights or not: its input is bounded by the first one's
    ``norm``, its cotangent by the second one's ``cotangent``. ``None`` leaves that direction as it is.

    The clip applies to the cotangent of this layer's *input*, so it also covers the projection's own Jacobian.

    Args:
        norm: radius r of the ball.
        cotangent: C.
        floor: scale activations of this norm or more to *exactly* ``norm``, and shorter ones by the same factor as those:
            x·r/max(‖x‖, floor), which is r/floor-Lipschitz. The bounds of the layer behind it are then reached, at any scale of
            what comes in; a clip further down keeps the factor r/floor away from the Δ of layers below it.
    """

    def __init__(self, norm: float | None = None, cotangent: float | None = None, *, floor: float | None = None) -> None:
        super().__init__()
        if norm is None and cotangent is None:
            raise ConfigurationError("Boundary() bounds nothing: give norm=, cotangent=, or both")
        if floor is not None and norm is None:
            raise ConfigurationError("Boundary takes floor= with norm=, and only with it")
        self.norm = None if norm is None else positive("Boundary norm", norm)
        self.cotangent = None if cotangent is None else positive("Boundary cotangent", cotangent)
        self.floor = None if floor is None else positive("Boundary floor", floor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project, and mark the place where cotangents are clipped."""
        if self.cotangent is not None:
            x = clip_cotangent(x, self.cotangent)
        if self.norm is None:
            return x
        return to_ball(x, self.norm) if self.floor is None else to_floored_sphere(x, self.norm, self.floor)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"norm={self.norm}, cotangent={self.cotangent}" + ("" if self.floor is None else f", floor={self.floor:g}")


@rule(Boundary, rounds="ball")
def _boundary(layer: Boundary, call: Call) -> Transfer:
    x = call.inputs[0]
    clip = math.inf if layer.cotangent is None else layer.cotangent
    if layer.norm is not None and layer.floor is not None:
        gain = layer.norm / layer.floor
        return Transfer(Bound(min(times(gain, x.norm), layer.norm), x.shape), (gain,), clip=clip)
    norm = x.norm if layer.norm is None else min(x.norm, layer.norm)
    return Transfer(Bound(norm, x.shape, x.row_norm, x.max_abs), clip=clip)


def _plain_norms(x: torch.Tensor, rank: int) -> torch.Tensor:
    """‖x_i‖ of each example, shaped to broadcast against a tensor of ``rank`` dimensions."""
    norms = torch.linalg.vector_norm(torch.flatten(x, 1), dim=1)
    return torch.reshape(norms, (-1, *([1] * (rank - 1))))


def _plain_ball(site: Site, radius: float, floor: float | None) -> torch.Tensor:
    """x·radius/max(‖x‖, floor), where the ball's floor is its radius."""
    factor = radius / torch.clamp_min(_plain_norms(widened(site), len(site.shape) + 1), radius if floor is None else floor)
    return narrowed(site.x * factor, site)


@lowering(BoundedInput)
def _plain_input(layer: BoundedInput, site: Site) -> torch.Tensor:
    if layer.mode != "sphere":
        return _plain_ball(site, layer.norm, layer.floor)
    rank = len(site.shape) + 1
    wide = widened(site)
    largest = torch.amax(torch.abs(wide), dim=tuple(range(1, rank)), keepdim=True)
    scaled = wide / torch.where(largest > 0, largest, 1.0)
    return narrowed(scaled * (layer.norm / torch.clamp_min(_plain_norms(scaled, rank), 1.0)), site)


@lowering(ClipGradient)
def _plain_clip(layer: ClipGradient, site: Site) -> torch.Tensor:
    """Going forward it is the identity."""
    return site.x


@lowering(Boundary)
def _plain_boundary(layer: Boundary, site: Site) -> torch.Tensor:
    return site.x if layer.norm is None else _plain_ball(site, layer.norm, layer.floor)
