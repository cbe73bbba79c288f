"""Fixed features that make a linear head a kernel machine, which still has only one layer to train; and columns for tables.

*Random ReLUs.* A linear head cuts the space of features by planes. On random ReLUs it has the arc-cosine kernel (Cho & Saul 2009)
in place of the inner product, in which classes that no plane parts come apart. They are drawn from a public seed, so they cost no
privacy.

*Landmarks*: kernel values at fixed points, whitened for standard normal rows, for small tables. *Random Fourier features*: the
Gaussian kernel. *Asinh* and *Constant* prepare the columns of a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from lipdp._checks import positive, whole
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import as_computed, lowering

_ROUNDS = 2  # of signs and a Hadamard matrix; what a dense random matrix gives is the same to within the noise of experiments
_ROUNDING = 1 + 1e-5
_ENTRIES_ON_CPU, _ENTRIES_ELSEWHERE = 2**17, 2**27


class RandomReLU(torch.nn.Module):
    """``y_b = (max(0, Q_b·x) − norm/√(2πp)) / √B`` for B random rotations Q_b of x, padded with zeros to p = 2^k entries.

    Q = H·S·H·S' with random signs S, S' and H the Hadamard matrix divided by √p: a rotation, so ‖Q_b·x‖ = ‖x‖, that is computed
    in some 4p√p operations instead of p². For an x of norm ``norm`` in a random direction, an entry of Qx is about normal with
    variance norm²/p, and its positive part has mean norm/√(2πp): what is taken off is a public constant, not a statistic.

    Inner products are those of the arc-cosine kernel, up to its mean: ⟨y, y'⟩ ≈ (sin θ + (π − θ)·cos θ − 1)/2π for unit vectors
    at angle θ.

    Its constants: rotations and max(0, ·) bring points no further apart, and the B parts count 1/B each in squares, so ℓ = 1.
    |max(0, t) − c| ≤ max(|t|, c), so ‖y‖² ≤ ‖x‖² + p·c² = ‖x‖² + norm²/2π.

    Args:
        features: entries of x.
        blocks: B; B·p features come out.
        norm: of x.
        seed: of the signs; public.
    """

    signs: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def __init__(self, features: int, *, blocks: int = 2, norm: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if features < 1 or blocks < 1 or not (math.isfinite(norm) and norm > 0):
            raise ConfigurationError(
                f"RandomReLU needs at least one feature, one block and a positive norm, not {features!r}, {blocks!r} and {norm!r}"
            )
        self.features, self.blocks, self.norm, self.seed = features, blocks, float(norm), seed
        self.padded = 2 ** math.ceil(math.log2(features)) if features > 1 else 1
        self.output_features = blocks * self.padded
        self.mean = self.norm / math.sqrt(2 * math.pi * self.padded)
        self.input_shape, self.output_shape = (features,), (self.output_features,)
        draw = torch.Generator().manual_seed(seed)
        rows = 2 ** (int(math.log2(self.padded)) // 2)
        dtype = torch.get_default_dtype()
        signs = 2 * torch.randint(0, 2, (blocks, _ROUNDS, self.padded), generator=draw) - 1
        self.register_buffer("signs", signs.to(dtype), persistent=False)
        self.register_buffer("left", _hadamard(rows).to(dtype), persistent=False)
        self.register_buffer("right", _hadamard(self.padded // rows).to(dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, blocks·p)."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise DataError(f"RandomReLU expects {self.features} features, got a tensor of shape {tuple(x.shape)}")
        # A few rows at a time: on a processor what stays in its cache.
        entries = _ENTRIES_ON_CPU if x.device.type == "cpu" else _ENTRIES_ELSEWHERE
        parts = torch.split(x, max(1, entries // self.output_features))
        return torch.cat([self.computed(part, part.dtype) for part in parts])

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        signs, left, right = (buffer.to(dtype) for buffer in (self.signs, self.left, self.right))
        length = 1 / math.sqrt(self.padded)
        z = torch.unsqueeze(F.pad(x, (0, self.padded - self.features)), 1)
        for number in range(_ROUNDS):
            # H of size a·b is the Kronecker product of those of sizes a and b.
            turned = torch.reshape(z * signs[:, number], (-1, self.blocks, len(left), len(right)))
            z = torch.reshape(torch.matmul(torch.matmul(left, turned), right), (-1, self.blocks, self.padded)) * length
        return torch.flatten(torch.relu(z) - self.mean, 1) * (1 / math.sqrt(self.blocks))

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.features}, blocks={self.blocks}, norm={self.norm:g}, seed={self.seed}"


def _hadamard(size: int) -> torch.Tensor:
    """The symmetric Hadamard matrix of a power of two: entries ±1, its own inverse times the size."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


@rule(RandomReLU)
def _random_relu(layer: RandomReLU, call: Call) -> Transfer:
    """The constants of the class's description. Both hold for any input, whatever its norm."""
    x = call.inputs[0]
    norm = math.hypot(x.norm, layer.norm / math.sqrt(2 * math.pi)) * _ROUNDING
    return Transfer(Bound(norm, call.output_shape), (_ROUNDING,), exact=False)


# Kernel values at fixed points, whitened for standard normal rows: features of public make for small tables.

_ROWS = 8000  # drawn to learn what standard normal rows look like


class Landmarks(torch.nn.Module):
    """``y = M(k(x) − c)`` with k_j(x) = Π_i 1/(1 + (x_i − z_ji)²/s²) and M = (Σ + ρ·tr(Σ)·I)^(−1/2): fixed, none of it private.

    The landmarks z_j are drawn from N(0, I), and c and Σ are mean and covariance of k(x) for x ~ N(0, I): for columns that come
    standardised, what can be known of them without looking. A linear layer behind it is a kernel machine on m points (Williams &
    Seeger, 2001), with features that are centred and whitened at no cost. Unwhitened, most of a row's norm, which the noise is
    scaled to, lies in a few directions; what tells the classes apart may lie in any. The kernel is a product of Cauchy kernels,
    whose long tails still tell rows apart that are far from all landmarks.

    Args:
        features: columns that come in.
        outputs: m, the number of landmarks.
        scale: s, the kernel's width.
        ridge: ρ: directions with less than this share of the variance are not whitened but left small.
        seed: of the landmarks, and of the rows that c and Σ are estimated from. It is public: it protects nothing.
    """

    points: torch.Tensor
    centre: torch.Tensor
    whitener: torch.Tensor

    def __init__(self, features: int, outputs: int, scale: float = 3.0, ridge: float = 1e-4, seed: int = 0) -> None:
        super().__init__()
        if features < 1 or outputs < 1 or not all(math.isfinite(value) and value > 0 for value in (scale, ridge)):
            raise ConfigurationError(
                f"Landmarks can't make {outputs!r} features of {features!r} columns at scale {scale!r} with ridge {ridge!r}"
            )
        self.features, self.outputs, self.scale, self.ridge = int(features), int(outputs), float(scale), float(ridge)
        self.seed = int(seed)
        draw = torch.Generator().manual_seed(self.seed)
        points = torch.randn(self.outputs, self.features, generator=draw, dtype=torch.float64)
        values = _cauchy(torch.randn(_ROWS, self.features, generator=draw, dtype=torch.float64), points, self.scale)
        centre = values.mean(0)
        covariance = (values - centre).T @ (values - centre) / _ROWS
        sizes, directions = torch.linalg.eigh(covariance)
        sizes = sizes.clamp_min(0.0)
        whitener = (directions * (sizes + self.ridge * sizes.sum()).rsqrt()) @ directions.T
        for name, value in (("points", points), ("centre", centre), ("whitener", whitener)):
            self.register_buffer(name, value.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, m)."""
        if x.ndim != 2 or x.shape[1] != self.features:
            raise DataError(f"Landmarks expects (batch, {self.features}), not a tensor of shape {tuple(x.shape)}")
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        values = _cauchy(x, self.points.to(dtype), self.scale)
        return F.linear(values - self.centre.to(dtype), self.whitener.to(dtype))

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.features}, {self.outputs}, scale={self.scale:g}, ridge={self.ridge:g}, seed={self.seed}"


def _cauchy(x: torch.Tensor, points: torch.Tensor, scale: float) -> torch.Tensor:
    """k_j(x), one column at a time: never more than (batch, m) numbers. Through logarithms, so that no product overflows."""
    total = torch.log1p(((x[:, :1] - points[:, 0]) / scale).square())
    for column in range(1, points.shape[1]):
        total = total + torch.log1p(((x[:, column : column + 1] - points[:, column]) / scale).square())
    return torch.exp(-total)


@rule(Landmarks)
def _landmarks(layer: Landmarks, call: Call) -> Transfer:
    """k_j lies in [0, 1], so ‖k − c‖² ≤ Σ max(c_j, 1 − c_j)².

    With t_i = (x_i − z_i)/s and v_i = log(1 + t_i²), k = e^(−V) for V = Σ v_i, and

        ‖∇k_j‖ = (2/s)·k·√(Σ t_i²/(1 + t_i²)²) ≤ (2/s)·e^(−V)·√V ≤ √(2/e)/s,

    for t²/(1 + t²)² = e^(−v)·(1 − e^(−v)) ≤ v, and √V·e^(−V) is largest at V = ½. So k(x) has the gain √(2m/e)/s at most, and both
    bounds are multiplied by ‖M‖₂. Reached by one landmark of many columns.
    """
    size = float(np.linalg.norm(layer.whitener.double().cpu().numpy(), 2)) * (1 + 1e-9)
    centre = layer.centre.double().cpu()
    reach = float(torch.maximum(centre.abs(), (1 - centre).abs()).norm()) * (1 + 1e-6)
    return Transfer(
        Bound(size * reach, call.output_shape), (size * math.sqrt(2 * layer.outputs / math.e) / layer.scale,), exact=False
    )


class Asinh(torch.nn.Module):
    """``y = asinh(x/a)``, entry by entry: linear up to about a, logarithmic beyond, odd. For columns of very different sizes.

    Args:
        level: a, a public constant.
    """

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = positive("Asinh level", level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Draw large entries in."""
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        return torch.asinh(x / self.level)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"level={self.level:g}"


@rule(Asinh)
def _asinh(layer: Asinh, call: Call) -> Transfer:
    """The derivative 1/√(a² + x²) is at most 1/a, reached at 0, and |asinh(x/a)| ≤ |x|/a entry by entry."""
    x, gain = call.inputs[0], 1 / layer.level
    peak = x.max_abs if math.isinf(x.max_abs) else math.asinh(x.max_abs * gain)
    return Transfer(Bound(times(gain, x.norm), x.shape, max_abs=peak), (gain,))


class Constant(torch.nn.Module):
    """Appends a column of one fixed value: the bias of the layer behind it, inside that layer's bound.

    Args:
        features: columns that come in.
        value: of the new one.
    """

    def __init__(self, features: int, value: float = 1.0) -> None:
        super().__init__()
        self.features, self.value = whole("Constant features", features), positive("Constant value", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, features + 1)."""
        if x.ndim != 2 or x.shape[1] != self.features:
            raise DataError(f"Constant expects (batch, {self.features}), not a tensor of shape {tuple(x.shape)}")
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        return F.pad(x, (0, 1), value=self.value)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.features}, value={self.value:g}"


@rule(Constant)
def _constant(layer: Constant, call: Call) -> Transfer:
    """‖(x, c)‖ = √(‖x‖² + c²); the derivative is that of the identity."""
    return Transfer(Bound(math.hypot(call.inputs[0].norm, layer.value), call.output_shape))


class RandomFourier(torch.nn.Module):
    """``y = √(2/D)·cos(Wx + b)``, W ~ N(0, 1/s²), b ~ U[0, 2π]: fixed, so nothing of it has to be private.

    ⟨y(x), y(x')⟩ estimates the Gaussian kernel exp(−‖x − x'‖²/2s²) (Rahimi & Recht, 2007), so a linear layer behind it is a kernel
    machine: curved boundaries for the price, in noise, of a linear model on vectors of norm about 1.

    Args:
        features: columns that come in.
        outputs: D.
        scale: s, the kernel's width; a sequence of several splits the outputs among them.
        seed: of W and b. It is public: it protects nothing.
        each: how many columns, drawn at random, each output reads (the others' weights are 0); ``None`` for all. A few make
            the kernel a sum over small groups of columns, as trees of that depth are: better where few columns interact.
    """

    weight: torch.Tensor
    phase: torch.Tensor

    def __init__(
        self, features: int, outputs: int, scale: float | Sequence[float] = 1.0, seed: int = 0, *, each: int | None = None
    ) -> None:
        super().__init__()
        scales = (scale,) if isinstance(scale, int | float) else tuple(scale)
        if features < 1 or outputs < len(scales) or not scales or not all(math.isfinite(s) and s > 0 for s in scales):
            raise ConfigurationError(f"RandomFourier can't make {outputs!r} features of {features!r} columns at scale {scale!r}")
        if each is not None and not 1 <= each <= features:
            raise ConfigurationError(f"RandomFourier: each output reads 1 to {features} columns, not {each!r}")
        self.features, self.outputs, self.scales, self.seed, self.each = int(features), int(outputs), scales, int(seed), each
        draw = torch.Generator().manual_seed(self.seed)
        widths = torch.tensor([scales[i * len(scales) // outputs] for i in range(outputs)], dtype=torch.float64)
        weight = torch.randn(outputs, features, generator=draw, dtype=torch.float64) / widths[:, None]
        phase = 2 * math.pi * torch.rand(outputs, generator=draw, dtype=torch.float64)
        if each is not None:
            read = torch.rand(outputs, features, generator=draw, dtype=torch.float64).argsort(dim=1)[:, :each]
            weight = torch.zeros_like(weight).scatter(1, read, weight.gather(1, read))
        self.register_buffer("weight", weight.float())
        self.register_buffer("phase", phase.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) → (batch, D)."""
        if x.ndim != 2 or x.shape[1] != self.features:
            raise DataError(f"RandomFourier expects (batch, {self.features}), not a tensor of shape {tuple(x.shape)}")
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        return math.sqrt(2 / self.outputs) * torch.cos(F.linear(x, self.weight.to(dtype), self.phase.to(dtype)))

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        reads = "" if self.each is None else f", each={self.each}"
        return f"{self.features}, {self.outputs}, scale={', '.join(f'{s:g}' for s in self.scales)}, seed={self.seed}{reads}"


@rule(RandomFourier)
def _random_fourier(layer: RandomFourier, call: Call) -> Transfer:
    """D entries in ±√(2/D): ‖y‖ ≤ √2, whatever comes in. |cos'| ≤ 1, so the gain is at most √(2/D)·‖W‖₂ ≤ √(2/D)·‖W‖_F."""
    peak = math.sqrt(2 / layer.outputs)
    gain = peak * float(np.linalg.norm(layer.weight.double().cpu().numpy(), 2)) * (1 + 1e-9)
    return Transfer(Bound(math.sqrt(2.0), call.output_shape, max_abs=peak), (times(gain, 1.0),), exact=False)


lowering(RandomReLU, Landmarks, Asinh, Constant, RandomFourier)(as_computed)
