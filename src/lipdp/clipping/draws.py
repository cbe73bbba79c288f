"""Random numbers that a module draws in its forward pass (dropout, paths that are left out), kept to be used once more.

A module that is evaluated again for each example (:mod:`lipdp.clipping.fallback`) must see the random numbers that it had in the
batch, each example its own. While it runs on the batch, :class:`Drawn` keeps every draw: of a dropout the factors that it
multiplies by. When one example is evaluated, :class:`Redrawn` hands its part of each draw out, in the same order. Nothing random is
drawn a second time, so that what is measured, what is summed up and what the batch has computed are one and the same execution.

Whose numbers are whose: a draw of shape (…, B·r, …) where one example alone would draw (…, r, …) has r rows for each of the B
examples; one of the same shape is everybody's. That a guess is right shows when outputs are compared. Settings of a draw that an
example by itself would not have (a probability computed from the batch) are refused. Whatever draws its numbers in
other ways (recurrent layers' own dropout, alpha dropout) is not seen here, and refused there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lipdp.clipping.layouts import Place

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_OF_SIZE = {torch.rand, torch.randn, torch.randint}
_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like}
_BERNOULLI = {torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_}
_IN_PLACE = {
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.exponential_,
    torch.Tensor.random_,
    torch.Tensor.geometric_,
}

Kind = tuple[Any, ...]
"""The function that draws, and its settings: a probability that was computed from a batch is none that one example has."""


class _Draws(TorchFunctionMode):
    """Whatever is random below goes through :meth:`draw`."""

    def draw(self, kind: Kind, shape: torch.Size, numbers: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Random numbers of this kind and shape, which ``numbers`` would draw anew."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention and _dropout_of(args, kwargs) > 0:
            return self._attention(*args, **kwargs)
        if func in _BERNOULLI:
            return self._bernoulli(func, *args, **kwargs)
        if func in _OF_SIZE:
            size, others = _size(args, kwargs)
            return self.draw((func, *others), size, lambda: func(*args, **kwargs))
        if func in _LIKE:
            return self.draw((func, *args[1:]), args[0].shape, lambda: func(*args, **kwargs))
        if func in _IN_PLACE:
            like, settings = args[0], (*args[1:], *kwargs.items())
            return like.copy_(self.draw((func, *settings), like.shape, lambda: func(torch.empty_like(like), *args[1:], **kwargs)))
        return func(*args, **kwargs)

    def _dropout(
        self, func: Any, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            unchanged: torch.Tensor = func(input, p, training, inplace)
            return unchanged
        factors = self.draw((func, p), input.shape, lambda: func(torch.ones_like(input), p, True))
        return input.mul_(factors) if inplace else input * factors

    def _bernoulli(self, func: Any, input: torch.Tensor, p: Any = None, **kwargs: Any) -> torch.Tensor:
        """1 where a uniform number is below the probability. That may be computed from the example: so it is compared anew."""
        likely = torch.as_tensor(input if p is None and func is not torch.Tensor.bernoulli_ else 0.5 if p is None else p)
        like = torch.empty_like(input, dtype=torch.get_default_dtype(), device=input.device)
        uniform = self.draw((torch.rand_like,), input.shape, lambda: torch.rand_like(like))
        ones = (uniform < likely.to(uniform.device)).to(input.dtype)
        return input.copy_(ones) if func is torch.Tensor.bernoulli_ else ones

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """softmax(QKᵀ·scale + mask), dropped out, times V: in matrix products, as the fused one shows no factors."""
        if enable_gqa:
            key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = _weights(scores, attn_mask)
        factors = self.draw((F.dropout, dropout_p), weights.shape, lambda: F.dropout(torch.ones_like(weights), dropout_p))
        return weights * factors @ value


def _weights(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The softmax over what a mask leaves; where it leaves nothing, zero, as torch has it."""
    if mask is None:
        return torch.softmax(scores, -1)
    blocked = ~mask if mask.dtype == torch.bool else mask == -math.inf
    nothing = blocked.all(-1, keepdim=True)
    scores = scores if mask.dtype == torch.bool else scores + mask.masked_fill(blocked, 0.0)
    return torch.softmax(scores.masked_fill(blocked & ~nothing, -math.inf), -1).masked_fill(nothing, 0.0)


def _dropout_of(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    return float(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def _size(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Size, tuple[Any, ...]]:
    """The size that ``torch.rand(2, 3)``, ``torch.rand((2, 3))`` or ``torch.randint(5, (2, 3))`` is asked for, and what else."""
    if "size" in kwargs:
        return torch.Size(kwargs["size"]), tuple(args)
    sizes = [part for part in args if isinstance(part, Sequence)]
    if not sizes:
        return torch.Size(args), ()
    return torch.Size(sizes[0]), tuple(part for part in args if not isinstance(part, Sequence))


class Drawn(_Draws):
    """Within the block, random numbers are drawn as ever, and kept.

    Attributes:
        numbers: the draws, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[tuple[Kind, torch.Tensor]] = []

    def draw(self, kind: Kind, shape: torch.Size, numbers: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Draw, and keep a copy: the numbers may be written into."""
        value = numbers()
        self.numbers.append((kind, value.detach().clone()))
        return value


class Redrawn(_Draws):
    """Within the block, one example has the numbers that it had in the batch.

    Args:
        numbers: the draws of the batch.
        batch: its number of examples.
        example: which of them (a tensor without dimensions, which ``vmap`` may run through).
    """

    def __init__(self, numbers: Sequence[tuple[Kind, torch.Tensor]], batch: int, example: torch.Tensor) -> None:
        super().__init__()
        self._left, self._batch, self._example = list(reversed(numbers)), batch, example

    def draw(self, kind: Kind, shape: torch.Size, numbers: Callable[[], torch.Tensor]) -> torch.Tensor:
        """This example's part of what was drawn for the batch at this point, if that was the same kind of draw."""
        if not self._left:
            raise RuntimeError("for one example more random numbers are drawn than for the batch")
        kind_before, drawn = self._left.pop()
        if kind_before != kind:
            raise RuntimeError(f"random numbers of {kind_before} for a batch, and of {kind} for one example")
        if drawn.shape == shape:
            return drawn.clone()
        place = _place(drawn.shape, shape, self._batch)
        if place is None:
            raise RuntimeError(f"random numbers of shape {tuple(drawn.shape)} for a batch, and {tuple(shape)} for one example")
        return place.by_example(drawn, self._batch).index_select(0, self._example.reshape(1)).squeeze(0)

    def check_finished(self) -> None:
        """Raise if the batch has drawn more."""
        if self._left:
            raise RuntimeError("for one example fewer random numbers are drawn than for the batch")


def _place(whole: torch.Size, alone: torch.Size, batch: int) -> Place | None:
    """Where the examples are in a draw, by the shape that one of them draws alone."""
    if len(whole) != len(alone):
        return None
    different = [dim for dim, (all_rows, rows) in enumerate(zip(whole, alone, strict=True)) if all_rows != rows]
    if len(different) != 1 or whole[different[0]] != batch * alone[different[0]]:
        return None
    return Place(different[0], alone[different[0]])
