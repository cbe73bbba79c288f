"""Backpropagation for bounds: X forward over the graph, G backward, Δ for each parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from lipdp.bounds.bound import Bound, Shape, Transfer, times
from lipdp.bounds.operator_norm import unit_roundoff
from lipdp.bounds.registry import Call, ParameterRef, find_function_rule, find_module_rule
from lipdp.bounds.trace import Traced, describe, trace
from lipdp.errors import ConfigurationError, LipdpError, UnboundedError, UnsupportedError

__all__ = ["Analysis", "LayerBound", "LipschitzLoss", "ParameterBound", "analyse", "sensitivities"]


class LipschitzLoss(Protocol):
    """What the calculus asks of a loss: how steep it is per example, given the number of outputs and their norm."""

    def lipschitz_for(self, outputs: int, norm: float = math.inf, *, positions: int = 1) -> float:
        """Bound on ‖∂loss/∂outputs‖₂ of one example."""
        ...


@dataclass(frozen=True)
class ParameterBound:
    """One parameter's row: Δ = Σ over its uses of factor·G."""

    name: str
    sensitivity: float
    input_norm: float
    cotangent_norm: float
    size: int
    uses: int


@dataclass(frozen=True)
class LayerBound:
    """One operation's row: the bounds X on its output and G on its output's cotangent."""

    where: str
    output: Shape
    norm: float
    cotangent: float


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
        operations: number of tensor operations, forward and backward, for the rounding slack.
        roundoff: u of the model's coarsest floating-point type.
    """

    parameters: tuple[ParameterBound, ...]
    layers: tuple[LayerBound, ...]
    output: Bound
    loss_lipschitz: float
    lipschitz: float
    operations: int
    roundoff: float

    @property
    def sensitivities(self) -> dict[str, float]:
        """Qualified parameter name → Δ, in exact arithmetic."""
        return {row.name: row.sensitivity for row in self.parameters}

    def slack(self, roundoff: float | None = None) -> float:
        """(1+u)^operations: what rounding may add to bounds that are proved in exact arithmetic."""
        return (1.0 + (self.roundoff if roundoff is None else max(roundoff, self.roundoff))) ** self.operations


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
    traced = trace(model, input_shape)
    forward = _forward(traced, input_norm)
    output_node = next(node for node in traced.graph.nodes if node.op == "output")
    final = output_node.args[0]
    if not isinstance(final, fx.Node) or not isinstance(forward.bounds.get(final), Bound):
        raise UnsupportedError(
            f"{type(model).__name__}.forward returns something that is not one tensor computed from its input; the calculus "
            "handles models with one output tensor."
        )
    output = forward.bounds[final]
    assert isinstance(output, Bound)
    constant = _loss_constant(loss, output)
    cotangents = _backward(traced, forward, final, constant, clip=True)
    rows = _parameter_rows(traced, forward, cotangents)
    if check:
        _refuse_infinite(traced, forward, cotangents, rows, output, constant)
    unclipped = _backward(traced, forward, final, 1.0, clip=False)
    source = next(node for node in traced.graph.nodes if node.op == "placeholder")
    layers = tuple(
        LayerBound(describe(node, traced.modules), value.shape, value.norm, cotangents.get(node, 0.0))
        for node, value in forward.bounds.items()
        if isinstance(value, Bound) and node.op != "placeholder"
    )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return Analysis(
        parameters=rows,
        layers=layers,
        output=output,
        loss_lipschitz=constant,
        lipschitz=unclipped.get(source, 0.0),
        operations=2 * len(layers) + 1,
        roundoff=max(unit_roundoff(dtype) for dtype in dtypes),
    )


def sensitivities(model: torch.nn.Module, loss: LipschitzLoss | float, *, input_shape: Shape | None = None) -> dict[str, float]:
    """Per-example bound Δ on the gradient norm of every trainable parameter, by qualified name. No data are needed.

    ``‖∂loss(model(x), y)/∂θ‖₂ ≤ Δ_θ`` for every input x, every target y and every value of the weights inside their
    constraints (:func:`lipdp.parametrize.project_` keeps them there). The figures are those of exact arithmetic;
    :func:`lipdp.plan` adds a slack for rounding.

    Example:
        >>> import lipdp
        >>> from lipdp import nn, losses
        >>> model = nn.Sequential(nn.BoundedInput((4,), norm=1.0), nn.SpectralLinear(4, 3, bias=False))
        >>> {name: round(bound, 6) for name, bound in lipdp.sensitivities(model, losses.CrossEntropy()).items()}
        {'1.weight': 1.414214}
    """
    return analyse(model, loss, input_shape=input_shape).sensitivities


# Operations that only rearrange, so that the batch's size may be among their arguments, as in x.view(x.shape[0], -1).
_TAKES_SIZES = {"view", "reshape", "unflatten", torch.reshape, torch.unflatten}


@dataclass
class _Forward:
    bounds: dict[fx.Node, Bound | tuple[Bound, ...]]
    transfers: dict[fx.Node, Transfer]
    sources: dict[fx.Node, list[fx.Node]]  # the activations a node reads, in order of appearance


def _forward(traced: Traced, input_norm: float) -> _Forward:
    state = _Forward({}, {}, {})
    names = traced.names
    derived: set[fx.Node] = set()  # constants computed from a trainable parameter
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        if node in traced.constants:
            own = traced.modules[str(node.target)].parameters() if node.op == "call_module" else ()
            trained = any(p.requires_grad for p in own)
            if trained or (node.op != "get_attr" and any(_is_trainable(traced, s, names, derived) for s in node.all_input_nodes)):
                derived.add(node)
            continue
        shapes = traced.shapes[node]
        if node.op == "placeholder":
            state.bounds[node] = Bound(input_norm, shapes[0])
            continue
        if _is_tuple_item(node, state):
            _take_item(node, state)
            continue
        sources: list[fx.Node] = []
        resolve = _resolver(traced, state, names, derived, sources, node)
        args = tuple(fx.map_arg(argument, resolve) for argument in node.args)
        kwargs = {key: fx.map_arg(argument, resolve) for key, argument in node.kwargs.items()}
        inputs = tuple(_as_bound(state.bounds[source]) for source in sources)
        call = Call(describe(node, traced.modules), args, kwargs, inputs, shapes)
        state.transfers[node] = _apply_rule(traced, node, call)
        state.sources[node] = sources
        state.bounds[node] = state.transfers[node].output
    return state


def _is_trainable(traced: Traced, node: fx.Node, names: Mapping[int, str], derived: set[fx.Node]) -> bool:
    return node in derived or (node.op == "get_attr" and id(traced.constants.get(node)) in names)


def _resolver(
    traced: Traced,
    state: _Forward,
    names: Mapping[int, str],
    derived: set[fx.Node],
    sources: list[fx.Node],
    user: fx.Node,
) -> Callable[[fx.Node], Any]:
    def resolve(node: fx.Node) -> Any:
        if node in state.bounds:
            sources.append(node)
            return state.bounds[node]
        if node in derived:
            raise UnsupportedError(
                f"{describe(user, traced.modules)} uses something computed from a trainable parameter "
                f"({describe(node, traced.modules)}); how steep that computation is, nothing says. Use the parameter as it "
                "is, or put the computation into a module with a rule."
            )
        value = traced.constants[node]
        if node in traced.varying and user.target not in _TAKES_SIZES:
            raise UnsupportedError(
                f"{describe(user, traced.modules)} uses a number that depends on how many examples the batch has "
                f"({describe(node, traced.modules)}): one example's influence would depend on the others. Use fixed numbers."
            )
        if isinstance(value, torch.Tensor) and id(value) in names:
            return ParameterRef(names[id(value)], value)
        return value

    return resolve


def _as_bound(value: Bound | tuple[Bound, ...]) -> Bound:
    if isinstance(value, tuple):
        return Bound(math.sqrt(sum(part.norm**2 for part in value)), (sum(part.size for part in value),))
    return value


def _is_tuple_item(node: fx.Node, state: _Forward) -> bool:
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(state.bounds.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None, tuple)
    )


def _take_item(node: fx.Node, state: _Forward) -> None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    parts = state.bounds[source]
    assert isinstance(parts, tuple)
    if not isinstance(index, int):
        raise UnsupportedError(f"slicing the tuple that '{source.name}' returns is not supported: take one item at a time")
    state.bounds[node] = parts[index]
    state.transfers[node] = Transfer(parts[index])
    state.sources[node] = [source]


def _apply_rule(traced: Traced, node: fx.Node, call: Call) -> Transfer:
    try:
        transfer = _find_and_apply(traced, node, call)
    except LipdpError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{call.where}: its rule can't read these arguments ({type(error).__name__}: {error}). Write the call as in torch's "
            "documentation, activations first, or put it into a module with a rule (lipdp.bounds.rule)."
        ) from error
    if len(transfer.gains) != len(call.inputs):
        raise UnsupportedError(
            f"{call.where} reads {len(call.inputs)} activations and its rule bounds {len(transfer.gains)} of them. Pass "
            "activations as its first arguments, by position."
        )
    leaves = torch.utils._pytree.tree_leaves((call.args, dict(call.kwargs)), is_leaf=lambda leaf: isinstance(leaf, ParameterRef))
    for leaf in leaves:
        if isinstance(leaf, ParameterRef) and leaf.name not in transfer.parameters:
            raise UnsupportedError(
                f"the rule of {call.where} says nothing of the trainable parameter '{leaf.name}' that it is given. Put the "
                "computation into a module with a rule (lipdp.bounds.rule), or freeze the parameter."
            )
    return transfer


def _find_and_apply(traced: Traced, node: fx.Node, call: Call) -> Transfer:
    if node.op != "call_module":
        function_rule = find_function_rule(node.target)
        if function_rule is None:
            raise UnsupportedError(
                f"{call.where} has no rule, so nothing bounds it. Put it into a module with a rule (lipdp.bounds.rule), give "
                "the function one (lipdp.bounds.rule_for_function), or use a clipping method for this model."
            )
        return function_rule(call)
    module = traced.modules[str(node.target)]
    module_rule = find_module_rule(module)
    if module_rule is None:
        raise UnsupportedError(
            f"{call.where} has no rule, so nothing bounds it. Replace it by a layer of lipdp.nn, register a rule for its class "
            "(lipdp.bounds.rule), or use a clipping method for this model."
        )
    transfer = module_rule(module, call)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    missing = trainable - set(transfer.parameters)
    if missing:
        raise UnsupportedError(
            f"the rule of {call.where} says nothing of the parameter(s) {', '.join(sorted(missing))}: a rule must bound every "
            "trainable parameter of its layer."
        )
    return transfer


@dataclass
class _Cotangent:
    """G at one node: what its consumers send back, summed.

    Parts of a split (chunk, unbind) are disjoint pieces of one tensor, so their bounds combine as squares.
    """

    whole: float = 0.0
    parts: dict[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.whole + math.sqrt(sum(part**2 for part in self.parts.values()))


def _backward(traced: Traced, forward: _Forward, final: fx.Node, constant: float, clip: bool) -> dict[fx.Node, float]:
    """G at every node: a node consumed several times gets the sum of its consumers' contributions."""
    cotangents: defaultdict[fx.Node, _Cotangent] = defaultdict(_Cotangent)
    cotangents[final].whole = constant
    for node in reversed(list(traced.graph.nodes)):
        if node not in forward.transfers or node not in cotangents:
            continue
        transfer, reaching = forward.transfers[node], cotangents[node].total
        if _is_tuple_item(node, forward):
            source, parts = forward.sources[node][0], forward.bounds[forward.sources[node][0]]
            assert isinstance(parts, tuple)
            index = int(node.args[1]) % len(parts)
            cotangents[source].parts[index] = cotangents[source].parts.get(index, 0.0) + reaching
            continue
        limit = transfer.clip if clip else math.inf
        for source, gain in zip(forward.sources[node], transfer.gains, strict=True):
            cotangents[source].whole += min(times(gain, reaching), limit)
    return {node: cotangent.total for node, cotangent in cotangents.items()}


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


def _parameter_rows(traced: Traced, forward: _Forward, cotangents: Mapping[fx.Node, float]) -> tuple[ParameterBound, ...]:
    names = traced.names
    trainable = [p for p in traced.model.parameters() if p.requires_grad]
    rows = {names[id(p)]: ParameterBound(names[id(p)], 0.0, 0.0, 0.0, p.numel(), 0) for p in trainable}
    for node, transfer in forward.transfers.items():
        reaching = cotangents.get(node, 0.0)
        for local, factor in transfer.parameters.items():
            if node.op == "call_module":
                parameter = traced.modules[str(node.target)].get_parameter(local)
                if not parameter.requires_grad:
                    continue
                name = names[id(parameter)]
            else:
                name = local
            row = rows[name]
            incoming = max((_as_bound(forward.bounds[s]).norm for s in forward.sources[node]), default=0.0)
            rows[name] = ParameterBound(
                name,
                row.sensitivity + (times(factor, reaching) if reaching > 0 else 0.0),
                max(row.input_norm, incoming),
                max(row.cotangent_norm, reaching),
                row.size,
                row.uses + 1,
            )
    return tuple(rows.values())


def _refuse_infinite(
    traced: Traced,
    forward: _Forward,
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
        culprit = _first_infinite_gain(traced, forward, cotangents)
        raise UnboundedError(
            f"{head}the cotangent that reaches it is unbounded, because of {culprit}. Ways out: a constrained layer in its "
            "place (lipdp.nn.SpectralLinear, SpectralConv2d …); lipdp.nn.Boundary(cotangent=…) or ClipGradient in front of it; "
            "or a clipping method for this model."
        )
    culprit = _first_infinite_norm(traced, forward)
    raise UnboundedError(
        f"{head}the activations that reach it are unbounded, because of {culprit}. Ways out: lipdp.nn.BoundedInput as the first "
        "layer; a constrained layer in its place; lipdp.nn.Boundary(norm=…) behind it; or a clipping method for this model."
    )


def _first_infinite_norm(traced: Traced, forward: _Forward) -> str:
    for node, transfer in forward.transfers.items():
        inputs = [_as_bound(forward.bounds[source]).norm for source in forward.sources[node]]
        if all(map(math.isfinite, inputs)) and not math.isfinite(_as_bound(transfer.output).norm):
            return describe(node, traced.modules) + (f": {transfer.why_infinite}" if transfer.why_infinite else "")
    return "the model's input, whose norm nothing bounds"


def _first_infinite_gain(traced: Traced, forward: _Forward, cotangents: Mapping[fx.Node, float]) -> str:
    for node in reversed(forward.transfers):
        transfer = forward.transfers[node]
        if math.isfinite(cotangents.get(node, 0.0)) and not all(map(math.isfinite, transfer.gains)):
            return describe(node, traced.modules) + (f": {transfer.why_infinite}" if transfer.why_infinite else "")
    return "an operation behind it"
