"""Fixed random ReLU features: a linear head on them is a kernel machine, and still has only one layer to train.

A linear head cuts the space of features by planes. On random ReLUs it has the arc-cosine kernel (Cho & Saul 2009) in place of the
inner product, in which classes that no plane parts come apart. They are drawn from a public seed, so they cost no privacy.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.lowering import Site, lowering

__all__ = ["RandomReLU"]

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
        return torch.cat([self._rectified(part, part.dtype) for part in parts])

    def _rectified(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """In torch functions alone, so that it can be exported too."""
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


@lowering(RandomReLU)
def _plain_random_relu(layer: RandomReLU, site: Site) -> torch.Tensor:
    return layer._rectified(site.x, site.dtype)
