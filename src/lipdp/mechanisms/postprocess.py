"""From what was released to the answer: free in privacy, and where a good part of the accuracy comes from.

Under the public distribution of datasets, the best answer to an observation o is E[q(x) | o] for squared loss, and in general
the v that minimises E[L(x, q(x), v) | o]. On datasets x_1 … x_M drawn from the distribution, both are weighted averages with
weights P(o | x_j), which are known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Array, Range, check_weights, read
from lipdp.mechanisms.problem import Loss, Problem, response_loss

M = TypeVar("M", bound=torch.nn.Module)

_ANSWERS = 1201  # answers tried, where the loss has no closed form: they contain the midpoints of every grid that experts use
_NOTHING = 1e-30
_STRIDE = 12  # … every 12th of them where the released value is continuous, and interpolation follows


@dataclass(frozen=True, eq=False)
class Sample:
    """Datasets that decoders are fitted to, with what is computed from them only once."""

    t: Tensor
    truth: Tensor
    loss: Loss

    @classmethod
    def of(cls, problem: Problem, t: Tensor) -> Sample:
        """Unit datasets and their true answers."""
        return cls(t, problem.query(t), problem.loss)

    def first(self, count: int) -> Sample:
        """Some of them."""
        return Sample(self.t[:count], self.truth[:count], self.loss)

    @cached_property
    def answers(self) -> Tensor:
        """The answers tried, (V,)."""
        return torch.linspace(0, 1, _ANSWERS, dtype=self.t.dtype)

    @cached_property
    def costs(self) -> Tensor:
        """What each of them costs on each dataset, (V, M): counts, so float32 is exact."""
        parts = [response_loss(self.loss, *part).float() for part in self._split(4000)]
        return torch.cat(parts).T.contiguous()

    @cached_property
    def few(self) -> tuple[Tensor, Tensor]:
        """Every 12th answer with its costs."""
        return self.answers[::_STRIDE], self.costs[::_STRIDE].contiguous()

    def _split(self, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for t, truth in zip(torch.split(self.t, rows), torch.split(self.truth, rows), strict=True):
            yield t, truth, self.answers.expand(t.shape[0], -1)


def best_responses(weights: Tensor, sample: Sample, coarse: bool = False) -> Tensor:
    """The best answer for each of R observations, from weights P(o_r | x_j) of shape (M, R), as (R,)."""
    if sample.loss == "squared":
        total = weights.sum(0)
        made = (weights * sample.truth[:, None]).sum(0) / total.clamp(min=1e-300)
        return torch.where(total > 1e-300, made, sample.truth.mean())
    answers, costs = sample.few if coarse else (sample.answers, sample.costs)
    scaled = weights / weights.amax(0).clamp(min=1e-300)  # the largest is 1, so float32 does not lose them all;
    scaled = torch.where(scaled > _NOTHING, scaled, 0.0).float()  # what it would hold as subnormals slows it down tenfold
    return answers[(costs @ scaled).argmin(0)]


@dataclass(frozen=True)
class Table:
    """Answers at the points of a grid over the released vector (one or two coordinates), interpolated linearly between."""

    axes: tuple[Tensor, ...]
    values: Tensor

    def check(self, dimension: int) -> None:
        """There is an axis for each coordinate of what is released, increasing, and an answer at each point of their grid."""
        sizes = tuple(axis.shape[0] if axis.ndim == 1 else 0 for axis in self.axes)
        if len(sizes) != dimension or dimension not in (1, 2) or min(sizes) < 2 or tuple(self.values.shape) != sizes:
            raise ConfigurationError(
                f"a table of {tuple(self.values.shape)} answers over axes {sizes} is none for {dimension} numbers."
            )
        if any(bool((axis.diff() <= 0).any()) for axis in self.axes):
            raise ConfigurationError("the axes of a table of answers have to be increasing.")

    def __call__(self, released: Tensor) -> Tensor:
        """Answers (batch,) to released vectors (batch, m)."""
        first, part = self._place(released[:, 0], self.axes[0])
        if len(self.axes) == 1:
            return torch.lerp(self.values[first], self.values[first + 1], part)
        second, other = self._place(released[:, 1], self.axes[1])
        low = torch.lerp(self.values[first, second], self.values[first, second + 1], other)
        high = torch.lerp(self.values[first + 1, second], self.values[first + 1, second + 1], other)
        return torch.lerp(low, high, part)

    @staticmethod
    def _place(value: Tensor, axis: Tensor) -> tuple[Tensor, Tensor]:
        inside = value.clamp(float(axis[0]), float(axis[-1])).contiguous()
        place = (torch.searchsorted(axis, inside, right=True) - 1).clamp(0, axis.shape[0] - 2)
        return place, (inside - axis[place]) / (axis[place + 1] - axis[place])

    def state(self) -> dict[str, Any]:
        """As tensors."""
        return {"kind": "table", "axes": list(self.axes), "values": self.values}


def tabulate(likelihoods: list[tuple[Tensor, Tensor]], sample: Sample) -> Table:
    """The best answers over a grid, from (axis (R,), P(axis value | x_j) (M, R)) of each coordinate (independent noises)."""
    axes = tuple(axis for axis, _ in likelihoods)
    if len(likelihoods) == 1:
        return Table(axes, best_responses(likelihoods[0][1], sample, coarse=True))
    (_, a), (_, b) = likelihoods
    if sample.loss == "squared":  # separable: two matrix products
        total, truth = a.T @ b, sample.truth
        values = torch.where(total > 1e-200, ((a * truth[:, None]).T @ b) / total.clamp(min=1e-200), truth.mean())
        return Table(axes, values)
    rows = [best_responses(a[:, [r]] * b, sample, coarse=True) for r in range(a.shape[1])]
    return Table(axes, torch.stack(rows))


class Network(torch.nn.Module):
    """An unconstrained network: standardise, two hidden layers of SiLU, and an affine map to the answers' range."""

    centre: Tensor
    spread: Tensor
    offset: Tensor
    gain: Tensor

    def __init__(self, inputs: int, outputs: int = 1, width: int = 64) -> None:
        super().__init__()
        self.sizes = (inputs, outputs, width)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(inputs, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, outputs),
        )
        for name, size, value in (
            ("centre", inputs, 0.0),
            ("spread", inputs, 1.0),
            ("offset", outputs, 0.0),
            ("gain", outputs, 1.0),
        ):
            self.register_buffer(name, torch.full((size,), value))

    def check(self, dimension: int) -> None:
        """It takes what is released."""
        if self.sizes[0] != dimension:
            raise ConfigurationError(f"a network for {self.sizes[0]} numbers can't decode {dimension}.")

    def raw(self, released: Tensor) -> Tensor:
        """Answers (batch, outputs), not yet limited to [0, 1]."""
        made: Tensor = self.body((released - self.centre) / self.spread)
        return self.offset + self.gain * made

    def answers(self, released: Tensor) -> Tensor:
        """Answers (batch, outputs) in [0, 1]."""
        with torch.no_grad():
            return self.raw(released.to(self.centre.dtype)).clamp(0, 1).to(torch.float64)

    def forward(self, released: Tensor) -> Tensor:
        """The first answer, (batch,)."""
        return self.answers(released)[:, 0]

    def state(self) -> dict[str, Any]:
        """As tensors."""
        return {"kind": "network", "weights": dict(self.state_dict())}


@dataclass(frozen=True)
class Plain:
    """One released number as it is, limited to what the query can be, plus a shift that a belief may add (unit scale).

    Where there is no shift, nothing is assumed: noise, and a projection onto a convex set that holds the truth.
    """

    most: float
    shift: Table | None = None

    def check(self, dimension: int) -> None:
        """One number, and a shift for one number."""
        read(Annotated[float, Range(above=0, most=1)], self.most, "a plain answer's largest value")
        if dimension != 1:
            raise ConfigurationError(f"a plain answer is for one number, not {dimension}.")
        if self.shift is not None:
            self.shift.check(1)

    def __call__(self, released: Tensor) -> Tensor:
        """Answers (batch,)."""
        base = released[:, 0].clamp(0.0, self.most)
        return base if self.shift is None else (base + self.shift(released)).clamp(0.0, self.most)

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {"kind": "plain", "most": self.most, "shift": None if self.shift is None else self.shift.state()}


Decoder = Table | Network | Plain


@dataclass(frozen=True)
class TableState:
    """A :class:`Table` in a file."""

    kind: Literal["table"]
    axes: tuple[Annotated[Tensor, Array(1, torch.float64)], ...]
    values: Any

    def build(self) -> Table:
        """The decoder."""
        values = read(Annotated[Tensor, Array(max(len(self.axes), 1), torch.float64)], self.values, "a table's values")
        return Table(self.axes, values)


@dataclass(frozen=True)
class PlainState:
    """A :class:`Plain` in a file."""

    kind: Literal["plain"]
    most: Annotated[float, Range(above=0, most=1)]
    shift: TableState | None

    def build(self) -> Plain:
        """The decoder."""
        return Plain(self.most, None if self.shift is None else self.shift.build())


@dataclass(frozen=True)
class NetworkState:
    """A :class:`Network` in a file: how large it is, its weights say."""

    kind: Literal["network"]
    weights: dict[str, Any]

    def build(self) -> Network:
        """The decoder."""
        first, centre, offset = (length(self.weights, name) for name in ("body.0.weight", "centre", "offset"))
        made = Network(centre, offset, first)
        return load_weights(made, self.weights, "the decoder").eval()


def length(weights: dict[str, Any], name: str, dimension: int = 0) -> int:
    """The size of a tensor along a dimension; 1 where there is no such tensor, which :func:`load_weights` will then say."""
    found = weights.get(name)
    size = found.shape[dimension] if isinstance(found, Tensor) and found.ndim > dimension and found.numel() else 1
    return read(Annotated[int, Range(least=1, most=2**16)], size, f"the size of {name!r} in a mechanism's network")  # type: ignore[no-any-return]


def load_weights(module: M, weights: dict[str, Any], where: str) -> M:
    """The module with these weights, if they are its own and finite; in float64 where they are."""
    wide = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in weights.values())
    made = module.double() if wide else module.float()
    check_weights(made.state_dict(), weights, f"the weights of {where}")
    made.load_state_dict(weights)
    return made.requires_grad_(False)
