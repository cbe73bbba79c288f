"""Colour spaces: as functions, and as layers that know their Lipschitz constant, to stand in front of a BoundedInput.

A change of colours is fixed and public, so it costs no privacy. It matters for utility: bounds are tight for inputs whose norm
is near the bound, and some spaces have narrower norms than RGB (:func:`lipdp.data.norm_histogram` shows them).

=========== ===================================================================== ==================
space       what                                                                  Lipschitz constant
=========== ===================================================================== ==================
RGB         the identity                                                          1
StandardRGB ``(x − mean)/std`` by public constants (those of ImageNet)            1/min std = 4.464
Grayscale   luma of BT.601                                                        0.6686
YUV         luma, and the scaled differences of blue and red from it              ‖M‖₂ = 0.8571
YIQ         the same, with the two differences turned by 33°                      ‖M‖₂ = 0.8571
HSV         hue, saturation, value                                                ∞
=========== ===================================================================== ==================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from lipdp._checks import choose
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import DataError
from lipdp.nn.norms import Normalize

# Rec. ITU-R BT.601: the shares of red and blue in luma, and the ranges of U and V.
_RED, _BLUE = 0.299, 0.114
_U_MAX, _V_MAX = 0.436, 0.615
# The usual constants of ImageNet: public, and nobody's private images.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _luma() -> Tensor:
    return torch.tensor([[_RED, 1 - _RED - _BLUE, _BLUE]], dtype=torch.float64)


@cache
def _yuv() -> Tensor:
    """Y; U = U_max·(B − Y)/(1 − K_B); V = V_max·(R − Y)/(1 − K_R)."""
    y = _luma()[0]
    red, blue = torch.eye(3, dtype=torch.float64)[[0, 2]]
    return torch.stack([y, _U_MAX / (1 - _BLUE) * (blue - y), _V_MAX / (1 - _RED) * (red - y)])


@cache
def _yiq() -> Tensor:
    """Y; I and Q are V and U turned by 33°: I = V·cos 33° − U·sin 33°, Q = V·sin 33° + U·cos 33°."""
    y, u, v = _yuv()
    cos, sin = math.cos(math.radians(33)), math.sin(math.radians(33))
    return torch.stack([y, v * cos - u * sin, v * sin + u * cos])


def _check(x: Tensor, dim: int) -> None:
    # torch.fx traces with stand-ins that have no shape yet.
    if isinstance(x, Tensor) and (x.ndim <= (dim if dim >= 0 else -dim - 1) or x.shape[dim] != 3):
        raise DataError(f"colours need 3 channels (red, green, blue) along dimension {dim}; got a tensor of shape {tuple(x.shape)}")


def _mix(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    _check(x, dim)
    return torch.movedim(torch.movedim(x, dim, -1) @ matrix.to(x.device, x.dtype).T, -1, dim)


def rgb_to_grayscale(x: Tensor, dim: int = -3) -> Tensor:
    """Luma, 0.299R + 0.587G + 0.114B, as one channel along ``dim``.

    Args:
        x: any tensor with red, green and blue along ``dim``.
        dim: the dimension of the 3 channels; by default that of (…, 3, rows, columns).
    """
    return _mix(x, _luma(), dim)


def rgb_to_yuv(x: Tensor, dim: int = -3) -> Tensor:
    """Luma and two colour differences (BT.601).

    Args:
        x: any tensor with red, green and blue along ``dim``.
        dim: the dimension of the 3 channels; by default that of (…, 3, rows, columns).
    """
    return _mix(x, _yuv(), dim)


def rgb_to_yiq(x: Tensor, dim: int = -3) -> Tensor:
    """Luma, in-phase and quadrature colour differences (NTSC).

    Args:
        x: any tensor with red, green and blue along ``dim``.
        dim: the dimension of the 3 channels; by default that of (…, 3, rows, columns).
    """
    return _mix(x, _yiq(), dim)


def rgb_to_hsv(x: Tensor, dim: int = -3) -> Tensor:
    """Hue (in turns, [0, 1)), saturation and value of colours in [0, 1]; others are clamped there first.

    Args:
        x: any tensor with red, green and blue along ``dim``.
        dim: the dimension of the 3 channels; by default that of (…, 3, rows, columns).
    """
    _check(x, dim)
    return _hsv(x, dim)


def _hsv(x: Tensor, dim: int) -> Tensor:
    x = torch.clamp(x, 0, 1)
    red, green, blue = (torch.select(x, dim, channel) for channel in range(3))
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    divisor = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sixths = torch.where(
        value == red,
        torch.remainder((green - blue) / divisor, 6),
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    saturation = chroma / torch.where(value > 0, value, torch.ones_like(value))
    return torch.stack([torch.remainder(sixths / 6, 1), saturation, value], dim)


class _Declares(torch.nn.Module):
    """Colours are dimension 1 of a batch. ``input_shape`` need only be given where a BoundedInput behind has another one."""

    def __init__(self, input_shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.input_shape = None if input_shape is None else tuple(int(size) for size in input_shape)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return "" if self.input_shape is None else f"input_shape={self.input_shape}"


class RGB(torch.nn.Identity):
    """Red, green and blue as they are."""

    lipschitz = 1.0


class StandardRGB(Normalize):
    """``(x − mean)/std`` of each channel by public constants, by default ImageNet's. ℓ = 1/min std.

    Args:
        mean: one public number for each channel. One that is computed from private data has to be paid for.
        std: the same, each above 0; the smallest sets the Lipschitz constant.
    """

    def __init__(self, mean: Sequence[float] = _MEAN, std: Sequence[float] = _STD) -> None:
        super().__init__(mean, std)

    @property
    def lipschitz(self) -> float:
        """1/min std."""
        return float(1 / self.std.double().min())


class _LinearColour(_Declares):
    """``y = M·x`` at every position. ℓ = ‖M‖₂, exactly: positions don't mix, so the whole map has the norm of one block."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, input_shape: Sequence[int] | None = None) -> None:
        super().__init__(input_shape)
        self.register_buffer("matrix", matrix.to(torch.float32), persistent=False)

    @property
    def lipschitz(self) -> float:
        """‖M‖₂; singular values of a 3×3 matrix in float64 are right to 1e-14, and the bound carries more."""
        return float(torch.linalg.matrix_norm(self.matrix.double(), 2)) * (1 + 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the channels of each position."""
        return _mix(x, self.matrix, 1)


@rule(_LinearColour)
def _linear_colour(layer: _LinearColour, call: Call) -> Transfer:
    """‖y‖² = Σ_p‖M·x_p‖² ≤ ‖M‖₂²·‖x‖²; one entry is at most the largest absolute row sum times max|x|."""
    x = call.inputs[0]
    largest = float(layer.matrix.double().abs().sum(1).max()) * (1 + 1e-12)
    return Transfer(Bound(times(layer.lipschitz, x.norm), call.output_shape, max_abs=times(largest, x.max_abs)), (layer.lipschitz,))


class Grayscale(_LinearColour):
    """One channel of luma (BT.601). In front of a BoundedInput it needs ``input_shape=(3, rows, columns)``.

    Args:
        input_shape: of one example as it enters, in colours.
    """

    def __init__(self, input_shape: Sequence[int] | None = None) -> None:
        super().__init__(_luma(), input_shape)


class YUV(_LinearColour):
    """Luma and two colour differences (BT.601).

    Args:
        input_shape: of one example, (3, rows, columns); only needed where a BoundedInput behind it has another one.
    """

    def __init__(self, input_shape: Sequence[int] | None = None) -> None:
        super().__init__(_yuv(), input_shape)


class YIQ(_LinearColour):
    """Luma, in-phase and quadrature (NTSC).

    Args:
        input_shape: of one example, (3, rows, columns); only needed where a BoundedInput behind it has another one.
    """

    def __init__(self, input_shape: Sequence[int] | None = None) -> None:
        super().__init__(_yiq(), input_shape)


class HSV(_Declares):
    """Hue, saturation and value. Not Lipschitz, so no certificate passes through it; training does.

    Args:
        input_shape: of one example, (3, rows, columns); only needed where a BoundedInput behind it has another one.
    """

    lipschitz = math.inf

    def forward(self, x: Tensor) -> Tensor:
        """Convert; colours outside [0, 1] are clamped."""
        return rgb_to_hsv(x, 1)


@rule(HSV)
def _hsv_rule(layer: HSV, call: Call) -> Transfer:
    """All three are in [0, 1]. Hue jumps from 1 to 0 at red and takes every value around grey; saturation does around black."""
    why = "hue jumps at red and near grey, and saturation near black, so HSV is not Lipschitz; use YUV, YIQ or RGB"
    return Transfer(
        Bound(math.inf, call.output_shape, max_abs=1.0), (math.inf,), exact=False, why_infinite=why, note=f"not Lipschitz: {why}"
    )


COLOUR_SPACES = MappingProxyType(
    {"rgb": RGB, "standard_rgb": StandardRGB, "hsv": HSV, "yiq": YIQ, "yuv": YUV, "grayscale": Grayscale}
)


def colour_space(name: str) -> torch.nn.Module:
    """The layer of a colour space, by name.

    Args:
        name: a key of ``COLOUR_SPACES``: "rgb", "standard_rgb", "hsv", "yiq", "yuv" or "grayscale".

    Example:
        >>> from lipdp.data import colour_space
        >>> round(colour_space("grayscale").lipschitz, 3)
        0.669
    """
    layer: torch.nn.Module = COLOUR_SPACES[choose("colour space", name, COLOUR_SPACES)]()
    return layer
