"""What rounding in the passes through a network can add to its bounds: a third pass over the graph, with the lengths of all sums.

Bounds are proved in exact arithmetic. Computed, an activation y = f(x) is off by at most ε times its bound, and so is a cotangent.
With γ_n = n·u/(1 − n·u), for sums of n terms in any order,

* a dense layer W (p×d): |fl(Wx) − Wx| ≤ γ_d·|W||x|, and ‖|W|‖₂ ≤ √min(p, d)·‖W‖₂, so ε = γ_d·√min(p, d); going back the sums have p
  terms. The same for a convolution whose norm is counted (√m·‖K‖₂, each number being read m times); √k more, for k taps, where a
  finer norm is used;
* products of two activations are bounded by Frobenius norms, which don't change under |·|: ε = γ_n;
* norms, means, softmax, attention: γ_n with n the entries they run over, at most those of an example;
* element by element: a few units in the last place.

Along a path these add up (more exactly: 1 + ε multiply). Where several activations are added up the largest excess counts, where
they are multiplied their sum. A layer that projects on a ball starts anew; so does a clip that cuts off cotangents. It does not
matter *which* activations rounding leads to: bounds hold for all of them, and an excess of their norm is what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from lipdp.bounds.calculus import find_function_rule, find_module_rule, rounds_like, times
from lipdp.bounds.propagate import Forward, as_bound

# Roundings of an elementwise function: the library's own (a few units in the last place) and the products around it.
_ELEMENTWISE = 16
# Squares that a norm adds up before it goes on in float64.
_NORM = 256
_SINGLE = 2.0**-24


@dataclass(frozen=True)
class Units:
    """u of the three kinds of arithmetic in a pass.

    Attributes:
        sums: of accumulators.
        factors: of what enters products: 2⁻¹¹ for TF32; 0 where it is not rounded.
        each: of elementwise operations and of results.
    """

    sums: float
    factors: float
    each: float

    @classmethod
    def of(cls, roundoff: float) -> Units:
        """Of an arithmetic whose products have this unit: float64, float32, TF32 (tensor cores cut off their sums) or bfloat16."""
        if roundoff <= _SINGLE:
            return cls(roundoff, 0.0, roundoff)
        return cls(4 * _SINGLE, roundoff, roundoff if roundoff > 2.0**-10 else _SINGLE)

    def excess(self, terms: float, spread: float = 1.0) -> float:
        """ε of sums of ``terms`` products, of which ``spread`` is ‖|W|‖/‖W‖ at most; ∞ where they are too long to say."""
        length = terms * self.sums
        gamma = length / (1 - length) if length < 1 else math.inf
        return spread * (gamma + 4 * self.factors) + 2 * self.each


@dataclass(frozen=True)
class _Sums:
    """How long the sums of an operation are, forward and back; 0: nothing is computed."""

    forward: float
    back: float
    spread: float = 1.0
    multiplies: bool = False  # activations with each other, so that its gains follow their norms
    anew: bool = False  # its output is brought into a ball


class _Graph(Protocol):
    @property
    def modules(self) -> Mapping[str, torch.nn.Module]: ...

    @property
    def constants(self) -> Mapping[fx.Node, Any]: ...


def passes_excess(
    traced: _Graph, forward: Forward, final: fx.Node, cotangents: Mapping[fx.Node, float], *, follows_norm: bool
) -> Callable[[Units], float]:
    """Units of the arithmetic → log(1 + ε) of the parameter whose Δ rounding in the passes can exceed the most.

    ``follows_norm``: whether the loss's constant depends on the norm of the outputs.
    """
    sums = {node: _sums_of(node, traced, forward) for node in forward.transfers}

    def excess(units: Units) -> float:
        ahead = _forward(forward, sums, units)
        outputs = as_bound(forward.bounds[final]).size
        loss = 2 * units.excess(outputs + _ELEMENTWISE) + (ahead.get(final, 0.0) if follows_norm else 0.0)
        return _backward(traced, forward, sums, units, final, loss, ahead, cotangents)

    return excess


def forward_error(traced: _Graph, forward: Forward, gains: Mapping[fx.Node, float], unit: float, *, entering: float = 0.0) -> float:
    """How far the computed outputs are from the exact ones, in norm, for all inputs that the bounds hold for.

    An operation adds ε times the size of what it computes, its own bound or that of its terms where they cancel, and what it adds
    reaches the outputs through the gain behind it: Σ ε·X·G. Here ε = u·(4 + 2·√n) for sums of n terms: their roundings taken as
    independent (Higham and Mary 2019), where :func:`passes_excess` takes them as adversarial. So it is an estimate on the large
    side, not a proof.

    Args:
        traced: the program.
        forward: its bounds, for inputs of some norm.
        gains: G at every node for a cotangent of 1, nothing clipped.
        unit: u.
        entering: how far the input itself may be off.
    """
    total = 0.0
    for node in forward.transfers:
        own = _sums_of(node, traced, forward)
        if own.forward and gains.get(node, 0.0) > 0:
            terms = zip(forward.sources[node], forward.transfers[node].gains, strict=True)
            reading = sum(times(gain, as_bound(forward.bounds[source]).norm) for source, gain in terms)
            size = as_bound(forward.bounds[node]).norm
            size = max(size, reading) if math.isfinite(reading) and not own.anew else size
            total += unit * (4 + 2 * math.sqrt(own.forward)) * times(size, gains[node])
    source = next((node for node in gains if node.op == "placeholder"), None)
    return total + (times(entering, gains[source]) if source is not None and entering else 0.0)


def _forward(forward: Forward, sums: Mapping[fx.Node, _Sums], units: Units) -> dict[fx.Node, float]:
    logs: dict[fx.Node, float] = {}
    for node, own in sums.items():
        entering = [logs.get(source, 0.0) for source in forward.sources[node]]
        before = 0.0 if own.anew else sum(entering) if own.multiplies else max(entering, default=0.0)
        logs[node] = before + (math.log1p(units.excess(own.forward, own.spread)) if own.forward else 0.0)
    return logs


def _backward(
    traced: _Graph,
    forward: Forward,
    sums: Mapping[fx.Node, _Sums],
    units: Units,
    final: fx.Node,
    loss: float,
    ahead: Mapping[fx.Node, float],
    cotangents: Mapping[fx.Node, float],
) -> float:
    reaching, worst = {final: math.log1p(loss)}, 0.0
    for node in reversed(list(forward.transfers)):
        if node not in reaching or not cotangents.get(node, 0.0) > 0:
            continue
        transfer, own, entering = forward.transfers[node], sums[node], [ahead.get(s, 0.0) for s in forward.sources[node]]
        if transfer.parameters:
            positions = max(1, as_bound(forward.bounds[node]).size)
            of_sum = math.log1p(units.excess(_ELEMENTWISE + positions))
            worst = max(worst, reaching[node] + max(entering, default=0.0) + of_sum)
        step = math.log1p(units.excess(own.back, own.spread)) if own.back else 0.0
        for source, gain in zip(forward.sources[node], transfer.gains, strict=True):
            cut = math.isfinite(transfer.clip) and transfer.clip <= gain * cotangents[node] and not _adapts(traced, node)
            passed = (0.0 if cut else reaching[node] + (sum(entering) if own.multiplies else 0.0)) + step
            reaching[source] = max(reaching.get(source, 0.0), passed)
    return worst


def _adapts(traced: _Graph, node: fx.Node) -> bool:
    """Whether the norm that this layer clips to changes during a run, and may stop cutting anything off."""
    return node.op == "call_module" and bool(getattr(traced.modules[str(node.target)], "adaptive", False))


_MOVING = {"where", "masked_fill", "amax", "amin", "maximum", "minimum"}


def _sums_of(node: fx.Node, traced: _Graph, forward: Forward) -> _Sums:
    module = traced.modules[str(node.target)] if node.op == "call_module" else None
    rule = find_function_rule(node.target) if module is None else find_module_rule(module)
    rounds = "moves" if rule is None else rounds_like(rule)
    inputs = [as_bound(forward.bounds[source]) for source in forward.sources[node]]
    entries = max([as_bound(forward.bounds[node]).size, *(x.size for x in inputs)])
    if rounds == "moves":
        return _Sums(0, _repeats(node, forward))
    if rounds == "each":
        return _Sums(_ELEMENTWISE, _ELEMENTWISE)
    if rounds == "ball":
        return _Sums(_NORM + _ELEMENTWISE, entries + _ELEMENTWISE, 4.0, anew=bool(getattr(module, "norm", None)))
    if rounds == "arithmetic":
        return _arithmetic(node, inputs, entries)
    weight = _weight(node, module, traced)
    if weight is not None:
        groups: Any = getattr(module, "groups", 1) if module is not None else node.kwargs.get("groups", 1)
        return _weighted(weight, int(groups), transposed="ranspose" in str(type(module)), counted=rounds == "counted")
    window = _window(module)
    if window:
        return _Sums(window + _ELEMENTWISE, window + _ELEMENTWISE)
    return _Sums(entries + _ELEMENTWISE, entries + _ELEMENTWISE, 4.0, multiplies=len(inputs) > 1)


def _repeats(node: fx.Node, forward: Forward) -> float:
    """Going back, a number that was copied gets the sum of its copies' cotangents."""
    before = sum(as_bound(forward.bounds[source]).size for source in forward.sources[node])
    after = as_bound(forward.bounds[node]).size
    return after // max(1, before) if after > before else 0


def _arithmetic(node: fx.Node, inputs: list[Any], entries: int) -> _Sums:
    name = getattr(node.target, "__name__", str(node.target))
    if name in _MOVING:
        return _Sums(0, _ELEMENTWISE)
    if name in ("matmul", "bmm"):
        return _Sums(inputs[0].shape[-1] + 1, entries, multiplies=True)
    if name in ("mean", "sum"):
        return _Sums(entries + _ELEMENTWISE, _ELEMENTWISE)
    # Broadcast operands get sums of cotangents, at most of a whole example's.
    smallest = min((x.size for x in inputs), default=entries)
    return _Sums(_ELEMENTWISE, _ELEMENTWISE + entries // max(1, smallest), multiplies="mul" in name and len(inputs) > 1)


def _weight(node: fx.Node, module: torch.nn.Module | None, traced: _Graph) -> torch.Tensor | None:
    """The matrix or kernel that an operation multiplies by: the largest that it has."""
    if module is None:
        given = [traced.constants.get(argument) for argument in node.all_input_nodes]
    elif isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return None
    else:
        given = [*module.parameters(), *module.buffers()]
    matrices = [value for value in given if isinstance(value, torch.Tensor) and value.ndim >= 2]
    return max(matrices, key=torch.Tensor.numel, default=None)


def _weighted(weight: torch.Tensor, groups: int, *, transposed: bool, counted: bool) -> _Sums:
    """``counted``: the norm of a convolution is √m·‖K‖₂, each number being read m times, which holds for |K| as well."""
    taps, p, d = math.prod(weight.shape[2:]), max(1, weight.shape[0] // groups), math.prod(weight.shape[1:])
    ahead, back = (p * taps, d) if transposed else (d, p * taps)
    return _Sums(ahead + 1, back + 1, math.sqrt((1 if counted else taps) * max(1, min(p, d))))


def _window(module: torch.nn.Module | None) -> int:
    size = getattr(module, "kernel_size", None)
    return 0 if size is None else math.prod(size) if isinstance(size, tuple) else int(size) ** 3
