"""Backward passes that add up over records as :mod:`lipdp._sums` says, whatever layers they go through."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lipdp._sums import contracted, convolution_sums, row_sums

Handler = Callable[..., Any]
_aten = torch.ops.aten


class LongSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, a backward pass adds up over the rows of a microbatch as this module says, whatever layer it goes through.

    Results have the types that they would have had. Only sums over the first dimension are concerned, where the records are: those
    of ``rows`` terms, or of ``rows`` times as many as there are positions.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = max(1, rows)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _handlers.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(self, func, *args, **(kwargs or {}))

    def around(self, node: Any) -> tuple[Any, Any]:
        """Hooks that turn it on while ``node`` computes."""

        def on(cotangents: Any) -> None:
            self.__enter__()  # type: ignore[no-untyped-call]

        def off(passed_on: Any, cotangents: Any) -> None:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        return node.register_prehook(on), node.register_hook(off)

    def over_records(self, length: int) -> bool:
        """Whether a sum of so many terms may be one over records."""
        return length > 1 and length % self.rows == 0


# What only passes on or rearranges a record's own numbers, for all that shapes change.
_OWN = {
    f"{name}Backward0"
    for name in (
        "T",
        "Transpose",
        "Permute",
        "View",
        "ReshapeAlias",
        "UnsafeView",
        "Unsqueeze",
        "Squeeze",
        "Slice",
        "Select",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "Stack",
        "Cat",
        "AvgPool2D",
        "MaxPool2DWithIndices",
        "Clone",
    )
} | {"_SortedPoolBackward"}


def gradients(
    total: torch.Tensor, inputs: Sequence[torch.Tensor], rows: int, *, retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """:func:`torch.autograd.grad` of a sum over ``rows`` records, with :class:`LongSums` where sums over records can be.

    That is at every node of the graph which hands on cotangents of another shape than those that it gets. The mode is not left on
    for all of a pass, since autograd takes slower ways under it.
    """
    mode = LongSums(rows)
    handles = [handle for node in _nodes_that_sum(total) for handle in mode.around(node)]
    try:
        return torch.autograd.grad(total, inputs, retain_graph=retain_graph, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _nodes_that_sum(total: torch.Tensor) -> Iterator[Any]:
    start = total.grad_fn
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        assert node is not None
        own: list[Any] | None = None
        for following, number in node.next_functions:
            if following is None:
                continue
            if following not in seen:
                seen.add(following)
                waiting.append(following)
            if own is None:
                own = [] if node.name() in _OWN else list(map(_shape_of, node._input_metadata))
            if own and own.count(_shape_of(following._input_metadata[number])) < len(own):
                own = []  # once
                yield node


_shape_of = operator.attrgetter("shape")
_handlers: dict[Any, Handler] = {}


def _handles(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for function in functions:
            _handlers[function] = handler
        return handler

    return register


def _real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


@_handles(_aten.mm.default, _aten.bmm.default)
def _product(mode: LongSums, func: Any, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if not mode.over_records(a.shape[-1]) or kwargs:
        return func(a, b, **kwargs)  # type: ignore[no-any-return]
    return contracted(a.transpose(-1, -2), b).to(a.dtype) if _real(a) else _widened(func, a, b)


@_handles(_aten.addmm.default, _aten.baddbmm.default)
def _added_product(
    mode: LongSums,
    func: Any,
    base: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    **kwargs: Any,
) -> torch.Tensor:
    if not mode.over_records(a.shape[-1]) or kwargs:
        return func(base, a, b, beta=beta, alpha=alpha, **kwargs)  # type: ignore[no-any-return]
    product: torch.Tensor = _product(mode, _aten.mm.default if a.ndim == 2 else _aten.bmm.default, a, b)
    return base * beta + product * alpha


@_handles(_aten.mv.default)
def _matrix_vector(mode: LongSums, func: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _product(mode, _aten.mm.default, a, b[:, None])
    return product[:, 0]


@_handles(_aten.sum.dim_IntList)
def _sum(
    mode: LongSums, func: Any, x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, **kwargs: Any
) -> torch.Tensor:
    dims = sorted(d % max(1, x.ndim) for d in dim) if dim else list(range(x.ndim))
    if 0 not in dims or not _real(x) or kwargs or x.ndim == 0:
        return func(x, dim, keepdim, **kwargs)  # type: ignore[no-any-return]
    total = row_sums(x, dims).to(x.dtype)
    return total.reshape([1 if d in dims else n for d, n in enumerate(x.shape)]) if keepdim else total


@_handles(_aten.sum.default)
def _total(mode: LongSums, func: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if not _real(x) or kwargs or x.ndim == 0:
        return func(x, **kwargs)  # type: ignore[no-any-return]
    return row_sums(x, range(x.ndim)).to(x.dtype)


@_handles(_aten.convolution_backward.default)
def _convolution(
    mode: LongSums,
    func: Any,
    delta: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    biases: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    settings = (biases, stride, padding, dilation, transposed, output_padding, groups)
    if not _real(x):
        return _widened(func, delta, x, weight, *settings, mask)  # type: ignore[no-any-return]
    of_x = func(delta, x, weight, *settings, [True, False, False])[0] if mask[0] else None
    of_weight = of_bias = None
    if mask[1]:
        sums = convolution_sums(
            delta, x, weight.shape, stride, padding, dilation, groups, transposed=transposed, output_padding=output_padding
        )
        of_weight = sums.to(weight.dtype)
    if mask[2]:
        of_bias = row_sums(delta, [0, *range(2, delta.ndim)]).to(delta.dtype)
    return of_x, of_weight, of_bias


_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


def _widened(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The function in float64; results in the type of the first tensor."""
    first = next(arg for arg in args if isinstance(arg, torch.Tensor))

    def up(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(_WIDER.get(value.dtype, value.dtype)) if value.device.type != "mps" else value
        return value

    def down(value: Any) -> Any:
        return value.to(first.dtype) if isinstance(value, torch.Tensor) else value

    widened = func(*map(up, args), **{key: up(value) for key, value in kwargs.items()})
    return tuple(map(down, widened)) if isinstance(widened, tuple) else down(widened)


@_handles(
    _aten.dot.default,
    _aten.vdot.default,
    _aten.embedding_dense_backward.default,
    _aten._embedding_bag_backward.default,
    _aten._embedding_bag_dense_backward.default,
    _aten._trilinear.default,
    _aten.index_add.default,
    _aten.scatter_add.default,
    _aten.index_put.default,
)
def _scattered(mode: LongSums, func: Any, *args: Any, **kwargs: Any) -> Any:
    return _widened(func, *args, **kwargs)


_OUT_OF_PLACE = {
    _aten.index_add_.default: _aten.index_add.default,
    _aten.scatter_add_.default: _aten.scatter_add.default,
    _aten.index_put_.default: _aten.index_put.default,
    _aten._index_put_impl_.default: _aten.index_put.default,
}


@_handles(*_OUT_OF_PLACE)
def _scattered_in_place(mode: LongSums, func: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if func is _aten._index_put_impl_.default:
        args = args[:3]  # without what says that indices need no check
        kwargs.pop("unsafe", None)
    return target.copy_(_widened(_OUT_OF_PLACE[func], target, *args, **kwargs))


@_handles(
    _aten.native_layer_norm_backward.default,
    _aten.native_group_norm_backward.default,
    _aten.native_batch_norm_backward.default,
    _aten._fused_rms_norm_backward.default,
)
def _normalisation(mode: LongSums, func: Any, *args: Any) -> tuple[torch.Tensor | None, ...]:
    """The input's cotangent is a record's own; scales and shifts are sums over all of them."""
    *given, mask = args
    nothing = [False] * (len(mask) - 1)
    of_x = func(*given, [True, *nothing])[0] if mask[0] else None
    rest = _widened(func, *given, [False, *mask[1:]])[1:] if any(mask[1:]) else tuple(None for _ in nothing)
    return (of_x, *rest)
