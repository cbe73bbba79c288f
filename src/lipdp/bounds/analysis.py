"""Backpropagation for bounds: X forward over the graph, G backward, Δ for each parameter."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from lipdp._numerics import unit_roundoff
from lipdp.bounds.calculus import Bound, Shape, times
from lipdp.bounds.propagate import Forward, as_bound, backward_pass, forward_pass, program_of, refuse_ties
from lipdp.bounds.rounding import Units, passes_excess
from lipdp.errors import ConfigurationError, UnboundedError, UnsupportedError
from lipdp.program import Program, check_program, describe


class LipschitzLoss(Protocol):
    """What the calculus asks of a loss: how steep it is per example, given the number of outputs and their norm."""

    def lipschitz_for(self, outputs: int, norm: float = math.inf, *, positions: int = 1) -> float:
        """Bound on ‖∂loss/∂outputs‖₂ of one example."""
        ...


@dataclass(frozen=True)
class ParameterBound:
    """One parameter's row: Δ = Σ over its uses of factor·G.

    ``size`` is the number of entries of what is noised: the parameter's own, or those of the effective weight of a
    reparametrised layer.

    Attributes:
        name: qualified, as in ``model.named_parameters()``.
        sensitivity: Δ, a bound on the L2 norm of one example's gradient, in exact arithmetic.
        input_norm: the largest X that enters an operation which uses the parameter.
        cotangent_norm: the largest G that reaches the output of such an operation.
        size: number of entries of what is noised.
        uses: how many operations use it; where none does, Δ is 0.
    """

    name: str
    sensitivity: float
    input_norm: float
    cotangent_norm: float
    size: int
    uses: int


@dataclass(frozen=True)
class LayerBound:
    """One operation's row: the bounds X on its output and G on its output's cotangent.

    ``row_norm`` and ``max_abs`` are the finer bounds of :class:`Bound` (∞: none); ``exact`` says that some input and weights
    reach the operation's bounds; ``note`` which bound was used where there is a choice.
    """

    where: str
    output: Shape
    norm: float
    cotangent: float
    row_norm: float = math.inf
    max_abs: float = math.inf
    exact: bool = False
    note: str = ""


@dataclass(frozen=True)
class Analysis:
    """All that the calculus says of a model under a loss.

    Attributes:
        parameters: a row for every trainable parameter, in the model's order.
        layers: a row for every operation, in the order of execution.
        output: bound on the network's output.
        loss_lipschitz: the loss's constant L, where G starts.
        lipschitz: ℓ of the map from the network's *input* (before any bounding layer) to its output, with cotangent
            clipping left out: what certificates need.
        operations: number of tensor operations, forward and backward.
        roundoff: u of the model's coarsest floating-point type.
        program: what was analysed, as a function: the only thing that may run under these bounds.
        excess: log of what rounding in the passes can multiply a Δ by, from the units of the arithmetic.
        at_limits: Δ of every parameter if some :class:`lipdp.nn.ClipGradient`, by module name, had another ``max_norm``.
        convolution_notes: what :func:`convolution_notes` says of the model.
    """

    parameters: tuple[ParameterBound, ...]
    layers: tuple[LayerBound, ...]
    output: Bound
    loss_lipschitz: float
    lipschitz: float
    operations: int
    roundoff: float
    program: Program = field(repr=False, compare=False)
    excess: Callable[[Units], float] = field(repr=False, compare=False)
    at_limits: Callable[[Mapping[str, float]], dict[str, float]] = field(repr=False, compare=False)
    convolution_notes: Callable[[], tuple[ConvolutionNote, ...]] = field(repr=False, compare=False)

    @property
    def sensitivities(self) -> dict[str, float]:
        """Qualified parameter name → Δ, in exact arithmetic."""
        return {row.name: row.sensitivity for row in self.parameters}

    def slack(self, roundoff: float | None = None) -> float:
        """What rounding in the passes can multiply bounds by that are proved in exact arithmetic; see :mod:`lipdp.bounds.rounding`.

        The sum over the records of a batch is not in it: that is :func:`lipdp._sums.sum_slack`.
        """
        return math.exp(self.excess(Units.of(self.roundoff if roundoff is None else max(roundoff, self.roundoff))))


def analyse(
    model: torch.nn.Module,
    loss: LipschitzLoss | float,
    *,
    input_shape: Shape | None = None,
    input_norm: float = math.inf,
    check: bool = True,
) -> Analysis:
    """Run the calculus over ``model``, as it is now (each layer in its own training or evaluation mode).

    Args:
        model: any module that torch.fx can trace, of layers and functions that have rules.
        loss: a loss of :mod:`lipdp.losses`, or its Lipschitz constant as a number.
        input_shape: shape of one example; needed only when no :class:`lipdp.nn.BoundedInput` declares it.
        input_norm: bound on ‖input‖₂ that the caller vouches for. By default the input is unbounded, and it is the
            model's first layer that bounds it.
        check: raise :class:`~lipdp.errors.UnboundedError` if some parameter's Δ is infinite.
    """
    program = program_of(model, input_shape)
    refuse_ties(program)
    forward = forward_pass(program, input_norm)
    output_node = next(node for node in program.graph.nodes if node.op == "output")
    final = output_node.args[0]
    if not isinstance(final, fx.Node) or not isinstance(forward.bounds.get(final), Bound):
        raise UnsupportedError(
            f"{type(model).__name__}.forward returns something that is not one tensor computed from its input; the calculus "
            "handles models with one output tensor."
        )
    output = forward.bounds[final]
    assert isinstance(output, Bound)
    constant = _loss_constant(loss, output)
    cotangents = backward_pass(program, forward, final, constant, clip=True)
    rows = _parameter_rows(program, forward, cotangents)
    if check:
        _refuse_infinite(program, forward, cotangents, rows, output, constant)
    unclipped = backward_pass(program, forward, final, 1.0, clip=False)
    source = next(node for node in program.graph.nodes if node.op == "placeholder")
    layers = tuple(
        LayerBound(
            describe(node, program.modules),
            value.shape,
            value.norm,
            cotangents.get(node, 0.0),
            value.row_norm,
            value.max_abs,
            forward.transfers[node].exact,
            forward.transfers[node].note,
        )
        for node, value in forward.bounds.items()
        if isinstance(value, Bound) and node.op != "placeholder"
    )

    def at_limits(limits: Mapping[str, float]) -> dict[str, float]:
        seen = {str(node.target) for node in forward.transfers if node.op == "call_module"}
        hidden = sorted(limits.keys() - seen)
        if hidden:
            # Its limit would change and the bounds would not: under another name, or inside a layer with a rule of its own.
            raise UnsupportedError(
                f"the clipping layer '{hidden[0]}' can't change during a run: the calculus does not see it under that name. Use it "
                "once, under one name, outside of layers that have a rule of their own."
            )
        changed = backward_pass(program, forward, final, constant, clip=True, limits=limits)
        return {row.name: row.sensitivity for row in _parameter_rows(program, forward, changed)}

    check_program(program)  # behind the rules, which know better why something is refused
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return Analysis(
        parameters=rows,
        layers=layers,
        output=output,
        loss_lipschitz=constant,
        lipschitz=unclipped.get(source, 0.0),
        operations=2 * len(layers) + 1,
        roundoff=max(unit_roundoff(dtype) for dtype in dtypes),
        program=program,
        excess=passes_excess(program, forward, final, cotangents, follows_norm=_follows_norm(loss, output, constant)),
        at_limits=at_limits,
        convolution_notes=partial(_notes, program, forward),
    )


def sensitivities(model: torch.nn.Module, loss: LipschitzLoss | float, *, input_shape: Shape | None = None) -> dict[str, float]:
    """Per-example bound Δ on the gradient norm of every trainable parameter, by qualified name. No data are needed.

    ``‖∂loss(model(x), y)/∂θ‖₂ ≤ Δ_θ`` for every input x, every target y and every value of the weights inside their
    constraints (:func:`lipdp.parametrize.project_` keeps them there). The figures are those of exact arithmetic;
    :func:`lipdp.plan` adds a slack for rounding.

    Args:
        model: with layers that have rules.
        loss: a loss of :mod:`lipdp.losses`, or its Lipschitz constant.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.

    Example:
        >>> import lipdp
        >>> from lipdp import nn, losses
        >>> model = nn.Sequential(nn.BoundedInput((4,), norm=1.0), nn.SpectralLinear(4, 3, bias=False))
        >>> {name: round(bound, 6) for name, bound in lipdp.sensitivities(model, losses.CrossEntropy()).items()}
        {'1.weight': 1.414214}
    """
    return analyse(model, loss, input_shape=input_shape).sensitivities


def _loss_constant(loss: LipschitzLoss | float, output: Bound) -> float:
    if isinstance(loss, int | float):
        constant = float(loss)
    elif hasattr(loss, "lipschitz_for"):
        outputs = output.shape[0] if output.shape else 1
        constant = float(loss.lipschitz_for(outputs, output.norm, positions=max(1, output.size // max(1, outputs))))
    else:
        raise ConfigurationError(
            f"a loss of type {type(loss).__name__} does not say how steep it is. Use one of lipdp.losses (lipdp.losses.as_loss "
            "turns torch's into them), or give its Lipschitz constant per example as a number."
        )
    if not constant >= 0:  # also catches NaN
        raise ConfigurationError(f"the loss's Lipschitz constant must be a number in [0, inf], not {constant}")
    return constant


def _follows_norm(loss: LipschitzLoss | float, output: Bound, constant: float) -> bool:
    """Whether outputs that are longer than the bound would make the loss's constant larger."""
    if isinstance(loss, int | float) or not math.isfinite(output.norm):
        return False
    return _loss_constant(loss, dataclasses.replace(output, norm=2 * output.norm, row_norm=math.inf, max_abs=math.inf)) > constant


def _parameter_rows(program: Program, forward: Forward, cotangents: Mapping[fx.Node, float]) -> tuple[ParameterBound, ...]:
    names = program.names
    trainable = [p for p in program.model.parameters() if p.requires_grad]
    rows = {names[id(p)]: ParameterBound(names[id(p)], 0.0, 0.0, 0.0, p.numel(), 0) for p in trainable}
    for node, transfer in forward.transfers.items():
        reaching = cotangents.get(node, 0.0)
        for local, factor in transfer.parameters.items():
            if node.op == "call_module":
                parameter = program.modules[str(node.target)].get_parameter(local)
                if not parameter.requires_grad:
                    continue
                name = names[id(parameter)]
            else:
                name = local
            row = rows[name]
            incoming = max((as_bound(forward.bounds[s]).norm for s in forward.sources[node]), default=0.0)
            rows[name] = ParameterBound(
                name,
                row.sensitivity + (times(factor, reaching) if reaching > 0 else 0.0),
                max(row.input_norm, incoming),
                max(row.cotangent_norm, reaching),
                transfer.sizes.get(local, row.size),
                row.uses + 1,
            )
    return tuple(rows.values())


def _refuse_infinite(
    program: Program,
    forward: Forward,
    cotangents: Mapping[fx.Node, float],
    rows: tuple[ParameterBound, ...],
    output: Bound,
    constant: float,
) -> None:
    infinite = [row for row in rows if not math.isfinite(row.sensitivity)]
    if not infinite:
        return
    row = infinite[0]
    more = f" (and {len(infinite) - 1} more)" if len(infinite) > 1 else ""
    head = f"the sensitivity of parameter '{row.name}'{more} is infinite: "
    if not math.isfinite(constant):
        raise UnboundedError(
            f"{head}the loss has no finite Lipschitz constant for outputs of norm {output.norm}. Use a Lipschitz loss of "
            "lipdp.losses (CrossEntropy, HKR, MAE …), bound the outputs (lipdp.nn.Boundary(norm=…)), or clip the loss gradient "
            "with lipdp.nn.ClipGradient as the last layer."
        )
    if not math.isfinite(row.cotangent_norm):
        culprit = _first_infinite_gain(program, forward, cotangents)
        raise UnboundedError(
            f"{head}the cotangent that reaches it is unbounded, because of {culprit}. Ways out: a constrained layer in its "
            "place (lipdp.nn.SpectralLinear, SpectralConv2d …); lipdp.nn.Boundary(cotangent=…) or ClipGradient in front of it; "
            "or a clipping method for this model."
        )
    culprit = _first_infinite_norm(program, forward)
    raise UnboundedError(
        f"{head}the activations that reach it are unbounded, because of {culprit}. Ways out: lipdp.nn.BoundedInput as the first "
        "layer; a constrained layer in its place; lipdp.nn.Boundary(norm=…) behind it; or a clipping method for this model."
    )


def _first_infinite_norm(program: Program, forward: Forward) -> str:
    for node, transfer in forward.transfers.items():
        inputs = [as_bound(forward.bounds[source]).norm for source in forward.sources[node]]
        if all(map(math.isfinite, inputs)) and not math.isfinite(as_bound(transfer.output).norm):
            return describe(node, program.modules) + (f": {transfer.why_infinite}" if transfer.why_infinite else "")
        if (
            not program.input_dtype.is_floating_point
            and transfer.why_infinite
            and not math.isfinite(as_bound(transfer.output).norm)
        ):
            return f"{describe(node, program.modules)}: {transfer.why_infinite}"  # it reads token ids, which have no norm
    return "the model's input, whose norm nothing bounds"


def _first_infinite_gain(program: Program, forward: Forward, cotangents: Mapping[fx.Node, float]) -> str:
    for node in reversed(forward.transfers):
        transfer = forward.transfers[node]
        if math.isfinite(cotangents.get(node, 0.0)) and not all(map(math.isfinite, transfer.gains)):
            return describe(node, program.modules) + (f": {transfer.why_infinite}" if transfer.why_infinite else "")
    return "an operation behind it"


_CONVOLUTION = torch.nn.modules.conv._ConvNd


@dataclass(frozen=True)
class ConvolutionNote:
    """Which bound of a convolution's operator norm the calculus used, and what the norm is at least with its present weights.

    Attributes:
        layer: qualified name of the layer.
        bound: ℓ as used (∞ for weights that are trained without a constraint).
        found: a lower estimate of the norm now, by Lanczos' iteration on inputs of the size the layer gets.
        how: which bound it is.
    """

    layer: str
    bound: float
    found: float
    how: str

    @property
    def tightness(self) -> float:
        """found ÷ bound: 1 is sharp; 0 where the bound is infinite."""
        return self.found / self.bound if 0 < self.bound < math.inf else 0.0

    def __str__(self) -> str:
        if math.isinf(self.bound):
            return f"norm unbounded (trained without a constraint); {self.found:.3g} now"
        return f"{self.how or 'norm as certified'}; norm now {self.found:.3g} of at most {self.bound:.3g}, {self.tightness:.0%}"


def lower_norm(layer: torch.nn.Module, shape: Shape, iterations: int = 5, *, bound: float = math.inf) -> float:
    """A lower estimate of the operator norm of an affine layer on inputs of this shape: Lanczos' iteration, in float32.

    Of all combinations v of w, JᵀJw, (JᵀJ)²w, …, with w drawn at random, the one of the largest ‖Jv‖/‖v‖, which is ‖J‖ at most: the
    root of the largest eigenvalue of JᵀJ in an orthonormal basis of them, a tridiagonal matrix. It approaches from below, faster
    than the powers by themselves; so it supports no guarantee, and tells how much of a bound is used. Where ``bound`` is
    reached to a thousandth, there is nothing more to find.
    """
    work = copy.deepcopy(layer).to(torch.float32).requires_grad_(False)
    device = next(work.parameters()).device
    vector = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    if isinstance(work, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d) and "bias" in work._parameters:
        work.bias = None
    with torch.no_grad():
        still = 0.0 if getattr(work, "bias", 0) is None else work(torch.zeros_like(vector))
    basis: list[torch.Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    with torch.enable_grad():
        for left in reversed(range(iterations)):
            length = float(torch.linalg.vector_norm(vector))
            if basis and length <= 1e-6 * diagonal[0]:  # the basis spans all that there is
                break
            beside.append(length)
            vector = (vector / max(length, 1e-30)).detach().requires_grad_()
            basis.append(vector.detach())
            image = work(vector) - still
            diagonal.append(float(torch.linalg.vector_norm(image.detach())) ** 2)
            if diagonal[-1] >= (0.999 * bound) ** 2:
                break
            if left:
                (vector,) = torch.autograd.grad(image, vector, image.detach())
                known = torch.stack(basis).flatten(1)
                for _ in range(2):  # then what rounding left of them is gone too
                    vector = vector - (known.T @ (known @ vector.flatten())).view_as(vector)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for place, value in enumerate(beside[1:]):
        matrix[place, place + 1] = matrix[place + 1, place] = value
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(matrix)[-1])))


def convolution_notes(model: torch.nn.Module, *, input_shape: Shape | None = None) -> tuple[ConvolutionNote, ...]:
    """A note for every convolution of ``model``, in the order of execution; see :class:`ConvolutionNote`.

    Args:
        model: as for :func:`~lipdp.bounds.analyse`.
        input_shape: shape of one example; by default that of the model's :class:`~lipdp.nn.BoundedInput`.

    Example:
        >>> import torch
        >>> from lipdp import nn
        >>> from lipdp.bounds import convolution_notes
        >>> _ = torch.manual_seed(0)
        >>> layer = nn.SpectralConv2d(4, 4, 3, padding=1, bias=False)
        >>> (note,) = convolution_notes(nn.Sequential(nn.BoundedInput((4, 8, 8)), layer))
        >>> note.layer, note.bound, 0.3 < note.tightness < 0.95
        ('1', 1.0, True)
    """
    if not any(isinstance(module, _CONVOLUTION) for module in model.modules()):
        return ()
    program = program_of(model, input_shape)
    return _notes(program, forward_pass(program, math.inf))


def _notes(program: Program, forward: Forward) -> tuple[ConvolutionNote, ...]:
    notes: dict[str, ConvolutionNote] = {}
    for node, transfer in forward.transfers.items():
        layer: Any = program.modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, _CONVOLUTION) and str(node.target) not in notes:
            shape = program.shapes[forward.sources[node][0]][0]
            bound = transfer.gains[0]
            notes[str(node.target)] = ConvolutionNote(str(node.target), bound, lower_norm(layer, shape, bound=bound), transfer.note)
    return tuple(notes.values())
