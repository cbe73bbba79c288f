"""Convolutions and linear maps of records that were just computed are not computed again: what makes comparing programs cheap.

A module and its program, at several numbers of records, do the same heavy operations to the same rows. torch's convolution and
linear map treat every row by itself, and their gradients towards weights are sums over rows; so an operation on rows that have gone
through it before, with the same weights, gives what it gave. That is all that is taken for granted here: rows and weights are
compared by value with copies, and every other operation is computed each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lipdp._numerics import same_entries

_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_LARGEST = 1 << 28
"""Bytes that may be kept."""
_HEAD = 8


@dataclass(eq=False)
class _Kept:
    """Rows that went through an operation; for a backward pass, the sums over the first few of them."""

    weights: list[torch.Tensor]
    rows: list[torch.Tensor]
    results: list[torch.Tensor]
    sums: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def find(self, weights: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], head: bytes) -> int | None:
        """Where these rows stand among the kept ones; ``head``: of the first of them."""
        count = rows[0].shape[0]
        for start, present in enumerate(self.heads[: len(self.heads) - count + 1]):
            pairs = zip(self.rows, rows, strict=True)
            if present == head and all(same_entries(kept[start : start + count], given) for kept, given in pairs):
                return start if all(map(same_entries, self.weights, weights)) else None
        return None

    @cached_property
    def heads(self) -> list[bytes]:
        """Of every row."""
        return _heads(self.rows[0])


def _heads(rows: torch.Tensor) -> list[bytes]:
    """The first numbers of each row: where they differ, nothing else has to be compared."""
    with torch._C.DisableTorchFunction():
        return [row.tobytes() for row in rows.detach().flatten(1)[:, :_HEAD].numpy()]


class Remembering(TorchFunctionMode):
    """Within the block, see the module's text. ``sizes``: how many records the batches have; the largest should come first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sorted(set(sizes))
        self._kept: dict[Any, list[_Kept]] = {}
        self._bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if _goes_by_rows(func, args, kwargs):
            x, weight, bias, *settings = (*args, None)[: max(3, len(args))]
            if not any(isinstance(value, str) for value in settings):
                return _Apply.apply(self, func, settings, x, weight, bias)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def forward(self, func: Any, settings: Any, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        """What the operation gives these rows."""
        key = (func, repr(settings), _form(x))
        (head,) = _heads(x[:1])
        for kept in self._kept.get(key, ()):
            start = kept.find(weights, [x], head)
            if start is not None:
                return kept.results[0][start : start + len(x)].clone()
        bias = weights[1] if len(weights) > 1 else None
        result: torch.Tensor = func(x, weights[0], bias, *settings)
        self._keep(key, _Kept([t.clone() for t in weights], [x.clone()], [result.clone()]))
        return result

    def backward(
        self, key: Any, weight: torch.Tensor, rows: list[torch.Tensor], compute: Callable[..., list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """The cotangent of the rows, and the sums over them; ``compute`` gives the one or the others."""
        key, count = (*key, _form(rows[0]), _form(rows[1])), len(rows[0])
        (head,) = _heads(rows[0][:1])
        for kept in self._kept.get(key, ()):
            start = kept.find([weight], rows, head)
            if start == 0 and count in kept.sums:
                return [kept.results[0][:count].clone(), *kept.sums[count]]
        ends = [0, *(self.sizes[:-1] if count == self.sizes[-1] else ()), count]
        (result,) = compute(*rows, towards_rows=True)
        sums: dict[int, list[torch.Tensor]] = {}
        for begin, end in pairwise(ends):
            parts = compute(*(t[begin:end] for t in rows), towards_rows=False)
            sums[end] = [a + b for a, b in zip(sums[begin], parts, strict=True)] if begin else parts
        self._keep(key, _Kept([weight.clone()], [t.clone() for t in rows], [result.clone()], sums))
        return [result, *sums[count]]

    def _keep(self, key: Any, kept: _Kept) -> None:
        tensors = [*kept.weights, *kept.rows, *kept.results, *(t for each in kept.sums.values() for t in each)]
        self._bytes += sum(t.nbytes for t in tensors)
        if self._bytes <= _LARGEST:
            self._kept.setdefault(key, []).append(kept)


class Repeating(TorchFunctionMode):
    """Within the block, without gradients: rows that are all the same go through a convolution or a linear map once.

    A batch of zeros, say, with which shapes are found.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if _goes_by_rows(func, args, kwargs) and not torch.is_grad_enabled() and len(args[0]) > 1:
            x = args[0]
            if all(same_entries(x[:1], x[row : row + 1]) for row in range(1, len(x))):
                result: torch.Tensor = func(x[:1], *args[1:])
                return result.expand(len(x), *result.shape[1:]).clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _goes_by_rows(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """A convolution or a linear map that treats each row of ordinary tensors by itself."""
    if kwargs or not (func in _CONVOLUTIONS or func is torch.nn.functional.linear) or not _plain(args):
        return False
    x, weight = args[:2]
    return bool(x.ndim == weight.ndim if func in _CONVOLUTIONS else x.ndim > 1)


def _plain(args: Sequence[Any]) -> bool:
    """Ordinary tensors on the processor, and nothing around that would change what is computed with them."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return (
        len(tensors) in (2, 3)
        and all(a is b for a, b in zip(tensors, args, strict=False))
        and all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in tensors)
        and len({t.dtype for t in tensors}) == 1
        and tensors[0].dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


def _form(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.shape[1:]


class _Apply(torch.autograd.Function):
    """A convolution or a linear map, with the gradients that torch gives it."""

    @staticmethod
    def forward(
        ctx: Any,
        memory: Remembering,
        func: Any,
        settings: list[Any],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = memory, func, settings
        return memory.forward(func, settings, x, [weight] if bias is None else [weight, bias])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        memory, func, settings = ctx.rest
        wanted = list(ctx.needs_input_grad[3:])

        def compute(cotangent: torch.Tensor, x: torch.Tensor, towards_rows: bool) -> list[torch.Tensor]:
            which = [wanted[0] and towards_rows, *(need and not towards_rows for need in wanted[1:])]
            towards, *others = _gradients(func, settings, cotangent, x, weight, which)
            return [towards] if towards_rows else others

        if torch.is_grad_enabled():  # somebody differentiates the gradient itself
            result, *sums = *compute(cotangent, x, True), *compute(cotangent, x, False)
        else:
            result, *sums = memory.backward((func, repr(settings), *wanted), weight, [cotangent, x], compute)
        given = iter(sums)
        return None, None, None, result if wanted[0] else None, *(next(given) if need else None for need in wanted[1:])


def _gradients(
    func: Any, settings: list[Any], cotangent: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
) -> list[torch.Tensor]:
    """Towards the rows (empty, if not wanted), and towards the weight and the bias that want one."""
    if func in _CONVOLUTIONS:
        size = _CONVOLUTIONS[func]
        stride, padding, dilation, groups = (settings + [1, 0, 1, 1][len(settings) :])[:4]
        each = [[v] * size if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
        backward = torch.ops.aten.convolution_backward
        found = backward(cotangent, x, weight, [len(weight)], *each, False, [0] * size, groups, wanted)
        towards, others = found[0], found[1:]
    else:
        rows, inputs = cotangent.flatten(0, -2), x.flatten(0, -2)
        towards = cotangent @ weight if wanted[0] else None
        others = (rows.T @ inputs if wanted[1] else None, rows.sum(0) if wanted[2] else None)
    return [cotangent.new_zeros(len(x), 0) if towards is None else towards, *(t for t in others if t is not None)]
