"""Sorting of channel pairs and L2-norm pooling as one function: each activation is read once going forward and once going back.

``y = √(Σ_window s(x + b)² + ε)``, with s the sorting of neighbouring channels, the pooling or both. As layers of their own they
write and keep half a dozen tensors of the input's size; here what is kept is the input and the (smaller) result. Going back,

    ∂/∂x = (g/y)·x, where the two of a pair trade g/y if they were sorted the other way round; 0 where y = 0.

On CUDA it is one Triton kernel each way, in channels-last memory, where a pair of channels is adjacent. Elsewhere it is torch's
operations on the same formula. Rounding: as many operations as the layers have, or fewer, so the slack counted for those covers it:
a window's sum and root going forward; a quotient and a product going back.

**A pass over a proved program** lets neighbouring layers run as one function. The graph, its bounds and its digest stay those of
the layers; only what is *called* changes. A layer says by :func:`stage` what it does to pairs of channels and to windows. A sorting
layer and the pooling layer that alone reads it become one function; the other stages one each. Convolutions on CUDA get their
images in channels-last memory, in which pairs are neighbours. :func:`lipdp.program.check_program` compares the result with the
module, so what was fused wrongly is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch.nn import functional as F

from lipdp._kernels import Kernels
from lipdp._sums import row_sums

_TILE = 2048  # numbers of a block: output pixels × channels × pixels of a window
_CHANNELS = 128  # of a block at most
_COPIED = 2**22  # numbers that are put in another order in memory at a time
_TYPES = (torch.float32, torch.float64)


class Pooling(NamedTuple):
    """Windows that lie side by side, and the ε under the root."""

    height: int
    width: int
    eps: float


def sorted_pool(x: torch.Tensor, *, sort: bool, pool: Pooling | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Pairs of channels of x (+ b) sorted, largest first; then the norm of each window.

    Args:
        x: (batch, channels, …): images, or rows without a pool.
        sort: whether to sort; channels are then even in number.
        pool: the windows; ``None``: no pooling.
        bias: added to every channel first.
    """
    result: torch.Tensor = _SortedPool.apply(x, bias, sort, pool)  # type: ignore[no-untyped-call]
    return result


class _SortedPool(torch.autograd.Function):
    """Keeps the input and the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, sort: bool, pool: Pooling | None) -> torch.Tensor:
        y = (_forward_kernel if available(x) else _forward)(x, bias, sort, pool)
        ctx.save_for_backward(x, bias, y if pool else None)
        ctx.settings = sort, pool
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (x, bias, y), (sort, pool), (g,) = ctx.saved_tensors, ctx.settings, cotangents
        if torch.is_grad_enabled():  # somebody wants gradients of gradients
            passed = _differentiably(x, bias, sort, pool, g)
        else:
            passed = (_backward_kernel if available(x) else _backward)(x, bias, y, g, sort, pool)
        of_bias = None
        if bias is not None and ctx.needs_input_grad[1]:
            dims = [0, *range(2, x.ndim)]
            of_bias = passed.sum(dims) if torch.is_grad_enabled() else row_sums(passed, dims).to(bias.dtype)
        return passed if ctx.needs_input_grad[0] else None, of_bias, None, None


# ---------------------------------------------------------------------- torch's operations


def _shifted(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias.reshape(-1, *[1] * (x.ndim - 2))


def _pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.unflatten(1, (-1, 2)).unbind(2)  # type: ignore[no-untyped-call]
    return first, second


def _goes_by_pixels(x: torch.Tensor) -> bool:
    """Whether windows are fastest taken pixel by pixel: on a processor, unless channels lie last."""
    return x.device.type == "cpu" and x.is_contiguous() and x.dtype in (torch.float32, torch.float64)


def _pixels(x: torch.Tensor, pool: Pooling) -> list[torch.Tensor]:
    """The first pixel of all windows, the second one, …: views of x."""
    high, wide = (size // step * step for size, step in zip(x.shape[2:], pool[:2], strict=True))
    return [x[:, :, i : high : pool.height, j : wide : pool.width] for i in range(pool.height) for j in range(pool.width)]


def _forward(x: torch.Tensor, bias: torch.Tensor | None, sort: bool, pool: Pooling | None) -> torch.Tensor:
    value = _shifted(x, bias)
    if sort:
        a, b = _pairs(value)
        value = torch.empty_like(value)
        larger, smaller = _pairs(value)
        torch.maximum(a, b, out=larger)
        torch.minimum(a, b, out=smaller)
    if pool is None:
        return value.clone() if value is x else value
    if _goes_by_pixels(value):
        first, *others = _pixels(value, pool)
        squares = first.square()
        for pixel in others:
            squares.add_(pixel.square())  # in the order and with the roundings of the pool over squares: the same bits
    else:
        squares = F.avg_pool2d(value.square() if value is x else value.square_(), (pool.height, pool.width), divisor_override=1)
    return squares.add_(pool.eps).sqrt_()


def _backward(
    x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor | None, g: torch.Tensor, sort: bool, pool: Pooling | None
) -> torch.Tensor:
    value = _shifted(x, bias)
    if pool is not None:
        assert y is not None
        g = torch.where(y == 0, 0.0, g / y)
        g = _spread(g, x, pool)
    if sort:
        a, b = _pairs(value)
        weight = (a >= b).to(x.dtype)
        of_larger, of_smaller = _pairs(g)
        passed = torch.empty_like(value)
        to_a, to_b = _pairs(passed)
        torch.lerp(of_smaller, of_larger, weight, out=to_a)  # exact at weights 0 and 1, and vectorised on a processor
        torch.lerp(of_larger, of_smaller, weight, out=to_b)
        g = passed
    return g * value if pool is not None and not sort else g.mul_(value) if pool is not None else g


def _spread(g: torch.Tensor, x: torch.Tensor, pool: Pooling) -> torch.Tensor:
    """Each window's number at all of its pixels; 0 at those that no window covers."""
    if _goes_by_pixels(x) and not (torch.is_grad_enabled() and g.requires_grad):
        covered = all(size % step == 0 for size, step in zip(x.shape[2:], pool[:2], strict=True))
        spread = torch.empty_like(x) if covered else torch.zeros_like(x)
        for pixel in _pixels(spread, pool):
            pixel.copy_(g)
        return spread
    wide = F.interpolate(g, scale_factor=(pool.height, pool.width), mode="nearest")
    missing = [have - covered for have, covered in zip(x.shape[2:], wide.shape[2:], strict=True)]
    return F.pad(wide, (0, missing[1], 0, missing[0])) if any(missing) else wide


def _differentiably(x: torch.Tensor, bias: torch.Tensor | None, sort: bool, pool: Pooling | None, g: torch.Tensor) -> torch.Tensor:
    """The same cotangent as a function of x and g that autograd can follow."""
    value = _shifted(x, bias)
    larger = None
    if sort:
        a, b = _pairs(value)
        larger = a >= b
        value_sorted = torch.stack((torch.where(larger, a, b), torch.where(larger, b, a)), 2).flatten(1, 2)
    else:
        value_sorted = value
    if pool is not None:
        squares = F.avg_pool2d(value_sorted.square(), (pool.height, pool.width), divisor_override=1)
        g = _spread(g / (squares + pool.eps).sqrt(), x, pool) * value_sorted
    if larger is None:
        return g
    of_larger, of_smaller = _pairs(g)
    return torch.stack((torch.where(larger, of_larger, of_smaller), torch.where(larger, of_smaller, of_larger)), 2).flatten(1, 2)


# ---------------------------------------------------------------------- kernels


def _right(device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    x = _by_channel(torch.randn(3, 6, 5, 7, device=device, generator=generator))
    bias = torch.randn(6, device=device, generator=generator)
    for sort, pool in ((True, Pooling(2, 2, 1e-12)), (True, None), (False, Pooling(2, 3, 1e-6))):
        for shift in (None, bias):
            y, expected = _forward_kernel(x, shift, sort, pool), _forward(x, shift, sort, pool)
            g = torch.randn(y.shape, device=device, generator=generator)
            passed, wanted = (f(x, shift, expected, g, sort, pool) for f in (_backward_kernel, _backward))
            if not (torch.allclose(y, expected, rtol=1e-5) and torch.allclose(passed, wanted, rtol=1e-5)):
                return False
    return True


_KERNELS = Kernels("lipdp._pairs_triton", "sorting and pooling", _right)


def available(x: torch.Tensor) -> bool:
    """Whether the kernels can be used on this tensor."""
    return x.dtype in _TYPES and _KERNELS.on(x.device)


def _by_channel(x: torch.Tensor) -> torch.Tensor:
    """In memory such that neighbouring channels are neighbours."""
    if x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous() if x.ndim == 2 else x.movedim(1, -1).contiguous().movedim(-1, 1)


def _launch(kernel: Any, tensors: tuple[torch.Tensor | None, ...], x: torch.Tensor, sort: bool, pool: Pooling | None) -> None:
    height, width = (x.shape[2], x.shape[3]) if x.ndim == 4 else (1, x[0, 0].numel())
    window = pool or Pooling(1, 1, 0.0)
    rows, columns = height // window.height, width // window.width
    count, channels = len(x) * rows * columns, x.shape[1]
    if count == 0 or channels == 0:
        return
    tile_c = max(2, min(_CHANNELS, 1 << (channels - 1).bit_length()))
    tile_p = 1 << max(0, (_TILE // tile_c // (window.height * window.width)).bit_length() - 1)
    grid = (-(-count // tile_p), -(-channels // tile_c))
    settings = {"KH": window.height, "KW": window.width, "SORT": sort, "NORM": pool is not None, "BIAS": tensors[1] is not None}
    scalars = (channels, height, width, rows, columns, count)
    given = [x if tensor is None else tensor for tensor in tensors]
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        if kernel is _KERNELS.module.forward:
            kernel[grid](*given, *scalars, window.eps, **settings, P=tile_p, C=tile_c)
        else:
            kernel[grid](*given, *scalars, **settings, P=tile_p, C=tile_c)


def _forward_kernel(x: torch.Tensor, bias: torch.Tensor | None, sort: bool, pool: Pooling | None) -> torch.Tensor:
    rows = max(1, len(x))
    if x.ndim == 4:
        window = pool or Pooling(1, 1, 0.0)
        size = (len(x), x.shape[1], x.shape[2] // window.height, x.shape[3] // window.width)
        y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        if not x.is_contiguous(memory_format=torch.channels_last):  # it is copied, a part at a time: memory for three of it is much
            rows = max(1, _COPIED // max(1, x[:1].numel()))
    else:
        x = _by_channel(x)
        y = torch.empty_like(x)
    for first in range(0, len(x), rows):
        part = _by_channel(x[first : first + rows])
        _launch(_KERNELS.module.forward, (part, bias, y[first : first + rows]), part, sort, pool)
    return y


def _backward_kernel(
    x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor | None, g: torch.Tensor, sort: bool, pool: Pooling | None
) -> torch.Tensor:
    x = _by_channel(x)
    covered = pool is None or (x.shape[2] % pool.height == 0 and x.shape[3] % pool.width == 0)
    passed = torch.empty_like(x) if covered else torch.zeros_like(x)
    _launch(_KERNELS.module.backward, (x, bias, y, _by_channel(g), passed), x, sort, pool)
    return passed


L = TypeVar("L", bound=torch.nn.Module)


@dataclass(frozen=True)
class Stage:
    """What a layer does, in the words of :func:`lipdp._pairs.sorted_pool`.

    Attributes:
        dim: along which pairs are sorted; ``None``: they are not.
        pool: the windows whose norms are taken; ``None``: none.
    """

    dim: int | None = None
    pool: Pooling | None = None


@dataclass(frozen=True)
class Fused:
    """One call for the nodes ``inside`` it; it reads what the first of them reads, and gives what the last gives."""

    function: Callable[[torch.Tensor], torch.Tensor]
    source: fx.Node
    inside: tuple[fx.Node, ...]


_stages: dict[type[torch.nn.Module], Callable[[Any], Stage | None]] = {}


def stage(*classes: type[L]) -> Callable[[Callable[[L], Stage | None]], Callable[[L], Stage | None]]:
    """Registers for exactly these classes what a layer's forward is, or that it is no stage as it is set."""

    def register(function: Callable[[L], Stage | None]) -> Callable[[L], Stage | None]:
        for cls in classes:
            _stages[cls] = function
        return function

    return register


def fusions(
    graph: fx.Graph,
    layer_of: Callable[[fx.Node], tuple[torch.nn.Module, type[torch.nn.Module]] | None],
    ranks: Mapping[fx.Node, int],
) -> dict[fx.Node, Fused]:
    """By its last node, every call that stands for one layer or for two.

    Args:
        graph: the program's.
        layer_of: a node's layer and the class that it runs as; ``None`` for other operations.
        ranks: dimensions of each activation, the batch's included.
    """
    fused: dict[fx.Node, Fused] = {}
    for node in graph.nodes:
        own = _stage_of(node, layer_of)
        if own is None or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            continue
        source, rank = node.args[0], ranks.get(node.args[0], 0)
        before = fused.get(source)
        if (
            own.pool is not None
            and before is not None
            and len(source.users) == 1
            and rank == 4
            and _sorts_channels(source, layer_of)
        ):
            del fused[source]
            fused[node] = Fused(partial(sorted_pool, sort=True, pool=own.pool), before.source, (*before.inside, node))
        elif own.pool is not None and rank == 4:
            fused[node] = Fused(partial(sorted_pool, sort=False, pool=own.pool), source, (node,))
        elif own.dim is not None and rank >= 2 and own.dim % rank in (1, rank - 1):
            function = partial(sorted_pool, sort=True) if own.dim % rank == 1 else _sort_features
            fused[node] = Fused(function, source, (node,))
    return fused


def _stage_of(node: fx.Node, layer_of: Callable[[fx.Node], tuple[torch.nn.Module, type[torch.nn.Module]] | None]) -> Stage | None:
    layer = layer_of(node)
    return None if layer is None or layer[1] not in _stages else _stages[layer[1]](layer[0])


def _sorts_channels(node: fx.Node, layer_of: Callable[[fx.Node], tuple[torch.nn.Module, type[torch.nn.Module]] | None]) -> bool:
    own = _stage_of(node, layer_of)
    return own is not None and own.pool is None and own.dim is not None and own.dim % 4 == 1


def _sort_features(x: torch.Tensor) -> torch.Tensor:
    """Pairs along the last dimension: those of rows."""
    return sorted_pool(x.reshape(-1, x.shape[-1]), sort=True).reshape(x.shape)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Images on CUDA with their channels side by side; all else as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.device.type == "cuda" and x.ndim == 4 else x
