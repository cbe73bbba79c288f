"""The soundness harness: maximise what the calculus bounds, and compare.

Every layer of lipdp goes through it. For a model and a loss constant L, :func:`attack` looks for weights in their
constraint set, an input in its ball and a cotangent v of norm L at the output (an arbitrary loss of constant L) that make

* the gradient of one parameter (of the effective weight, where it is reparametrised), for one example,
* the activation at the output of one operation,
* one row (vector along the last dimension) or one entry of it, where the calculus bounds these too,
* the cotangent at the output of one operation, or at the network's input

as large as possible, in float64, by random search and by gradient ascent with restarts from structured starts (rank-one
and constant weights, constant images, impulses: where the exact rules are reached). Everything met on the way is recorded,
and no record may exceed its bound by more than a relative ``RTOL``. :class:`Report` also tells how tight each bound is, so
that a test can hold an exact rule to 99%: such a test fails if the bound is 2% too small *or* 2% too large.

    report = attack(nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3)), 1.0)   # raises if a bound is beaten
    assert report.tightness("parameter", "1.weight") > 0.99

:func:`impulse_jacobian` gives the dense Jacobian of a layer, for its largest singular value.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipdp import nn
from lipdp.bounds import analyse
from lipdp.parametrize import Constrained, effective_leaves, project_

RTOL = 1e-9
STARTS = ("random", "constant", "positive", "aligned", "impulse", "large", "inside")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One bounded quantity: the largest value that was met, and the bound on it."""

    kind: str  # "parameter", "activation", "cotangent", "input" (the cotangent at the network's input), "row" or "entry"
    name: str
    attack: float
    bound: float

    @property
    def tightness(self) -> float:
        """Attack ÷ bound; above 1 the bound is false."""
        return self.attack / self.bound if self.bound > 0 else (0.0 if self.attack == 0 else math.inf)

    @property
    def violated(self) -> bool:
        """Whether the bound is beaten by more than rounding."""
        return self.attack > self.bound * (1 + RTOL) + 1e-13


@dataclass(frozen=True)
class Report:
    """What an attack found, for every parameter and every operation."""

    rows: tuple[Row, ...]

    @property
    def violations(self) -> tuple[Row, ...]:
        """The rows whose bound is beaten."""
        return tuple(row for row in self.rows if row.violated)

    def tightness(self, kind: str, name: str | None = None) -> float:
        """The least tightness among the rows of this kind whose name contains ``name``; at least one must exist."""
        found = [row.tightness for row in self.rows if row.kind == kind and (name is None or name in row.name)]
        assert found, f"no row of kind {kind!r} and name {name!r} in\n{self}"
        return min(found)

    def __str__(self) -> str:
        lines = [f"{'kind':<11}{'name':<48}{'attack':>14}{'bound':>14}{'ratio':>9}"]
        lines += [f"{r.kind:<11}{r.name[:47]:<48}{r.attack:>14.6g}{r.bound:>14.6g}{r.tightness:>9.4f}" for r in self.rows]
        return "\n".join(lines)


def attack(
    model: torch.nn.Module,
    loss: Any = 1.0,
    *,
    input_shape: Shape | None = None,
    input_norm: float = math.inf,
    starts: Sequence[str] = STARTS,
    steps: int = 25,
    draws: int = 6,
    seed: int = 0,
    check: bool = True,
) -> Report:
    """Attack every bound that :func:`lipdp.bounds.analyse` gives for ``model`` under ``loss``.

    Args:
        model: left untouched; a float64 copy is attacked.
        loss: a loss of lipdp.losses or its constant L. The attack uses any cotangent of norm L.
        input_shape: shape of one example, where the model has no BoundedInput.
        input_norm: radius of the input's ball, where the model has no BoundedInput.
        starts: which structured starts gradient ascent begins from (see ``STARTS``).
        steps: ascent steps from each start.
        draws: random draws (no ascent) added to each start.
        seed: of all randomness.
        check: raise AssertionError on a violation.
    """
    generator = torch.Generator().manual_seed(seed)
    # Ascent needs second derivatives, which torch's fused attention kernels do not have.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(seed)
        target = _Target(copy.deepcopy(model).double(), loss, input_shape, input_norm)
        for number, start in enumerate(starts):
            for _ in range(draws):
                target.restart("random", generator)
                target.evaluate()
            target.restart(start, generator)
            target.verify_graph()
            target.ascend(steps, focus=number)
    report = Report(tuple(target.rows()))
    if check and report.violations:
        raise AssertionError(f"bounds are beaten: {[row.name for row in report.violations]}\n{report}")
    return report


class _Target:
    """A model under attack: its bounds, the point (weights, input, cotangent) reached, and the largest values met."""

    def __init__(self, model: torch.nn.Module, loss: Any, input_shape: Shape | None, input_norm: float) -> None:
        self.model = model
        project_(model)
        self.analysis = analyse(model, loss, input_shape=input_shape, input_norm=input_norm)
        self.constant = self.analysis.loss_lipschitz
        assert math.isfinite(self.constant), "attack needs a loss with a finite constant"
        traced = self.analysis.program
        self.graph = traced.graph
        self.operations = [_Operation(node, traced.model, traced.constants) for node in traced.graph.nodes]
        self.shape = next(shapes[0] for node, shapes in traced.shapes.items() if node.op == "placeholder")
        declared = [m.norm for m in model.modules() if isinstance(m, nn.BoundedInput)]
        self.radius = input_norm if math.isfinite(input_norm) else (declared[0] if declared else 10.0)
        self.bounded_by_layer = bool(declared) and not math.isfinite(input_norm)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.integer = not traced.input_dtype.is_floating_point
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)]
        self.vocabulary = min(tables, default=1)
        self.tokens = torch.zeros(1, *self.shape, dtype=torch.long)
        values = self._run(torch.zeros(1, *self.shape, dtype=torch.float64))
        self.nodes = [
            node
            for node, value in values.items()
            if node in traced.shapes and isinstance(value, Tensor) and node.op not in ("placeholder", "output")
        ]
        assert len(self.nodes) == len(self.analysis.layers), "the analysis and the graph list different operations"
        self.output_shape = tuple(values[self._final()].shape[1:])
        n = len(self.nodes)
        self.bounds = [row.sensitivity for row in self.analysis.parameters]
        self.bounds += [row.norm for row in self.analysis.layers] + [row.cotangent for row in self.analysis.layers]
        self.bounds.append(self.analysis.lipschitz * self.constant if self.analysis.lipschitz else 0.0)
        self.bounds += [row.row_norm for row in self.analysis.layers] + [row.max_abs for row in self.analysis.layers]
        self.kinds = ["parameter"] * len(self.parameters) + ["activation"] * n + ["cotangent"] * n + ["input"]
        self.kinds += ["row"] * n + ["entry"] * n
        where = [row.where for row in self.analysis.layers]
        self.names = [row.name for row in self.analysis.parameters] + where * 2 + ["input"] + where * 2
        assert list(self.parameters) == self.names[: len(self.parameters)]
        self.best = [0.0] * len(self.bounds)
        self.x = torch.zeros(1, *self.shape, dtype=torch.float64)
        self.v = torch.zeros(1, *self.output_shape, dtype=torch.float64)

    def _final(self) -> fx.Node:
        return next(node for node in self.graph.nodes if node.op == "output").args[0]  # type: ignore[return-value]

    def _run(self, x: Tensor) -> dict[fx.Node, Any]:
        values: dict[fx.Node, Any] = {}
        for operation in self.operations:
            values[operation.node] = operation(values, self.tokens if self.integer else x)
        return values

    def restart(self, start: str, generator: torch.Generator) -> None:
        """Put weights, input and cotangent at a structured or random start."""

        def normal(shape: Iterable[int]) -> Tensor:
            return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)

        with torch.no_grad():
            for parameter in self.parameters.values():
                noise = normal(parameter.shape)
                if start == "constant":
                    value = torch.ones_like(noise)
                elif start == "positive":
                    value = noise.abs()
                elif start == "aligned":  # rank one, first coordinates: layers of any width line up
                    value = torch.zeros_like(noise)
                    value.view(-1)[0] = 1.0
                elif start == "impulse":  # one input to one output, through the middle tap of a kernel
                    value = torch.zeros_like(noise)
                    value[(0, 0, *(size // 2 for size in noise.shape[2:]))[: noise.ndim]] = 1.0
                else:
                    value = noise * (1e3 if start == "large" else 1.0)
                parameter.copy_(value)
            project_(self.model)
        if start == "constant":
            self.x, self.v = torch.ones(1, *self.shape).double(), torch.ones(1, *self.output_shape).double()
        elif start == "positive":
            self.x, self.v = normal((1, *self.shape)).abs(), normal((1, *self.output_shape)).abs()
        elif start in ("aligned", "impulse"):
            self.x, self.v = (_impulse((1, *shape), start == "impulse") for shape in (self.shape, self.output_shape))
        else:
            self.x, self.v = normal((1, *self.shape)), normal((1, *self.output_shape))
        if self.integer:
            one = start in ("constant", "aligned", "impulse")
            size = (1,) if one else (1, *self.shape)
            drawn = torch.randint(self.vocabulary, size, generator=generator)
            self.tokens = torch.zeros_like(self.tokens) if one else drawn
        # On the sphere, well inside the ball, or beyond it where a BoundedInput has to bring the input back.
        beyond = 7.0 if self.bounded_by_layer else 1.0
        self.length = self.radius * {"large": beyond, "inside": 0.25}.get(start, 1.0)
        self._project_point()

    def _project_point(self) -> None:
        """The input on the sphere of the start's radius, the cotangent on the sphere of radius L."""
        self.x = self.x * (self.length / torch.linalg.vector_norm(self.x).clamp_min(1e-300))
        self.v = self.v * (self.constant / torch.linalg.vector_norm(self.v).clamp_min(1e-300))

    def _values(self, create_graph: bool) -> tuple[list[Tensor], list[Tensor]]:
        """All bounded quantities at the current point, and the leaves they depend on."""
        x, v = self.x.clone().requires_grad_(), self.v.clone().requires_grad_()
        leaves = [x, v, *self.parameters.values()]
        with effective_leaves(self.model, differentiable=True) as effective:
            values = self._run(x)
        tensors = [values[node] for node in self.nodes]
        output = values[self._final()]
        bounded = {**self.parameters, **effective}
        wanted = [*bounded.values(), *tensors, x]
        tracked = [t for t in wanted if t.requires_grad]
        gradients: dict[int, Tensor | None] = {}
        if output.requires_grad:
            found = torch.autograd.grad(output, tracked, v, create_graph=create_graph, allow_unused=True, materialize_grads=False)
            gradients = {id(t): g for t, g in zip(tracked, found, strict=True)}

        def norm(value: Tensor | None) -> Tensor:
            return torch.zeros((), dtype=torch.float64) if value is None else torch.linalg.vector_norm(value.double())

        cotangents = [norm(gradients.get(id(t))) for t in wanted]
        count = len(self.parameters)
        finer = [*map(_longest_row, tensors), *map(_largest_entry, tensors)]
        return [*cotangents[:count], *map(norm, tensors), *cotangents[count:], *finer], leaves

    def _record(self, values: Sequence[Tensor]) -> None:
        met = torch.stack([value.detach() for value in values]).tolist()
        self.best = [max(best, value) for best, value in zip(self.best, met, strict=True)]

    def evaluate(self) -> None:
        """Record the current point."""
        self._record(self._values(create_graph=False)[0])

    def ascend(self, steps: int, focus: int) -> None:
        """Gradient ascent: on all quantities at once (the sum of their logarithms), and in every other start on one."""
        finite = [
            i
            for i, (kind, bound) in enumerate(zip(self.kinds, self.bounds, strict=True))
            if 0 < bound < math.inf and kind not in ("row", "entry")
        ]
        if not finite:
            self.evaluate()
            return
        chosen = finite if focus % 2 == 0 else [finite[focus // 2 % len(finite)]]
        bounds = torch.tensor([self.bounds[i] for i in chosen], dtype=torch.float64)
        for step in range(steps):
            values, leaves = self._values(create_graph=True)
            self._record(values)
            objective = torch.log(torch.stack([values[i] for i in chosen]) / bounds + 1e-6).sum()
            if not objective.requires_grad:
                return
            directions = torch.autograd.grad(objective, leaves, allow_unused=True)
            rate = max(0.5 * 0.85**step, 0.03)
            with torch.no_grad():
                for number, (leaf, direction) in enumerate(zip(leaves, directions, strict=True)):
                    if direction is None or not 0 < float(size := torch.linalg.vector_norm(direction)) < math.inf:
                        continue
                    # Now and then the input and the cotangent jump: a step of power iteration, if the map is linear.
                    factor = 4.0 if number < 2 and step % 3 == 2 else rate
                    length = torch.linalg.vector_norm(leaf).clamp_min(1.0 if leaf.ndim < 2 else 0.1)
                    leaf.add_(direction * (factor * length / size))
                project_(self.model)
            self.x, self.v = leaves[0].detach(), leaves[1].detach()
            self._project_point()
        self.evaluate()

    def verify_graph(self) -> None:
        """The graph that is analysed computes what the model computes, and so do its gradients (random masks aside)."""
        if any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.training for m in self.model.modules()):
            return
        x = self.x.clone().requires_grad_()
        direct, through = self.model(self.tokens if self.integer else x), self._run(x)[self._final()]
        assert torch.equal(direct, through), "the traced graph computes something else than the model"
        if not direct.requires_grad:
            return
        leaves = [x, *self.parameters.values()]
        first = torch.autograd.grad(direct, leaves, self.v, allow_unused=True)
        second = torch.autograd.grad(through, leaves, self.v, allow_unused=True)
        for a, b in zip(first, second, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-14), "the graph has another gradient"

    def rows(self) -> Iterator[Row]:
        """The report's rows; quantities without a bound (infinite, legal as long as no Δ is) are left out."""
        for kind, name, best, bound in zip(self.kinds, self.names, self.best, self.bounds, strict=True):
            if math.isfinite(bound):
                yield Row(kind, name, best, bound)


class _Operation:
    """One node of a graph, ready to be run again and again: what torch.fx's interpreter does, without its bookkeeping."""

    def __init__(self, node: fx.Node, root: torch.nn.Module, constants: Mapping[fx.Node, Any]) -> None:
        self.node, self.root = node, root
        made_in_forward = node.op == "get_attr" and "_tensor_constant" in str(node.target)
        self.constant = constants[node] if made_in_forward else None
        self.module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        # A tensor of its own for every node, also where torch hands its input on (Identity, an item of a split): autograd then
        # tells what reaches this node from what reaches others.
        self.own = node not in constants and node.op not in ("placeholder", "output")

    def __call__(self, values: Mapping[fx.Node, Any], x: Tensor) -> Any:
        """The node's value, from those before it."""
        node, target = self.node, self.node.target
        if self.constant is not None:
            return self.constant
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":  # the one input; others have defaults
            value = args[0] if args else x
        elif node.op == "get_attr":
            value = functools.reduce(getattr, str(target).split("."), self.root)
        elif node.op == "output":
            return args[0]
        elif self.module is not None:
            value = self.module(*args, **kwargs)
        elif isinstance(target, str):
            value = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            value = target(*args, **kwargs)
        return value.view_as(value) if self.own and isinstance(value, Tensor) else value


def _longest_row(value: Tensor) -> Tensor:
    """The norm of the longest vector along the last dimension of the example."""
    rows = value[0].detach().double()
    return (torch.linalg.vector_norm(rows, dim=-1) if rows.ndim else rows.abs()).max()


def _largest_entry(value: Tensor) -> Tensor:
    return value.detach().double().abs().max()


def _impulse(shape: Shape, middle: bool) -> Tensor:
    value = torch.zeros(shape, dtype=torch.float64)
    value[(0, 0, *((size // 2 if middle else 0) for size in shape[2:]))[: len(shape)]] = 1.0
    return value


def impulse_jacobian(layer: torch.nn.Module, input_shape: Shape, at: Tensor | None = None) -> Tensor:
    """The dense Jacobian (outputs × inputs) of ``layer`` for one example, in float64.

    Without ``at`` the layer is affine and the Jacobian is its impulse response: the images of all basis vectors, less that
    of 0, in one batch. With ``at`` (one example) it is the Jacobian of autograd there.
    """
    layer = copy.deepcopy(layer).double()
    size = math.prod(input_shape)
    if at is None:
        with torch.no_grad():
            basis = torch.eye(size, dtype=torch.float64).reshape(size, *input_shape)
            return (layer(basis) - layer(torch.zeros(1, *input_shape, dtype=torch.float64))).reshape(size, -1).T
    x = at.double().reshape(1, *input_shape)
    return torch.autograd.functional.jacobian(layer, x).reshape(-1, size)  # type: ignore[no-any-return]


def largest_singular_value(matrix: Tensor) -> float:
    """‖matrix‖₂ by float64 SVD; its own error is below 1e-15·min(shape) relative."""
    return float(torch.linalg.svdvals(matrix.double())[0]) if matrix.numel() else 0.0


def noisy_steps(model: torch.nn.Module, steps: int = 25, noise: float = 0.05, seed: int = 0) -> None:
    """What training does to weights, without data: Gaussian steps on every trainable parameter, projected each time."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * noise
                    parameter.add_(step.to(parameter.dtype))
        project_(model)


def constrained_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of ``model`` whose weights live in a constraint set."""
    return [module for module in model.modules() if isinstance(module, Constrained)]
