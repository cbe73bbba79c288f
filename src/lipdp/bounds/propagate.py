"""The two passes over the graph: X forward, by the rule of each operation, and G backward, by their gains.

Parameters that several layers share, or that share memory, need bounds that hold for the one tensor there is. Layers that have no
rule are refused, with what to do about them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from lipdp.bounds.calculus import (
    Bound,
    Call,
    ParameterRef,
    Shape,
    Transfer,
    find_function_rule,
    find_module_rule,
    has_rule,
    rule_class,
    times,
)
from lipdp.errors import LipdpError, UnsupportedError
from lipdp.program import Program, describe, trace

# Operations that only rearrange, so that the batch's size may be among their arguments, as in x.view(x.shape[0], -1).
_TAKES_SIZES = {"view", "reshape", "unflatten", "expand", torch.reshape, torch.unflatten}


@dataclass
class Forward:
    """What the forward pass finds at every node."""

    bounds: dict[fx.Node, Bound | tuple[Bound, ...]]
    transfers: dict[fx.Node, Transfer]
    sources: dict[fx.Node, list[fx.Node]]  # the activations a node reads, in order of appearance


def program_of(model: torch.nn.Module, input_shape: Shape | None = None) -> Program:
    """The program of ``model``, whose operations are those that have rules.

    Args:
        model: any module that torch.fx can trace.
        input_shape: shape of one example; by default that of the model's :class:`~lipdp.nn.BoundedInput`, and an error without one.
    """

    def refuse(where: str, module: torch.nn.Module) -> LipdpError | None:
        return no_rule(where, module) if way_out(module) and not has_rule(module) else None

    return trace(model, input_shape, rule_class, refuse)


def forward_pass(program: Program, input_norm: float) -> Forward:
    """X at every node, by the rule of its operation."""
    state = Forward({}, {}, {})
    names = program.names
    derived: set[fx.Node] = set()  # constants computed from a trainable parameter
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node in program.constants:
            own = program.modules[str(node.target)].parameters() if node.op == "call_module" else ()
            trained = any(p.requires_grad for p in own)
            if trained or (node.op != "get_attr" and any(_is_trainable(program, s, names, derived) for s in node.all_input_nodes)):
                derived.add(node)
            continue
        shapes = program.shapes[node]
        if node.op == "placeholder":
            state.bounds[node] = Bound(input_norm, shapes[0])
            continue
        if _is_tuple_item(node, state):
            _take_item(node, state)
            continue
        sources: list[fx.Node] = []
        resolve = partial(_resolve, program, state, names, derived, sources, node)
        args = tuple(fx.map_arg(argument, resolve) for argument in node.args)
        kwargs = {key: fx.map_arg(argument, resolve) for key, argument in node.kwargs.items()}
        inputs = tuple(as_bound(state.bounds[source]) for source in sources)
        call = Call(describe(node, program.modules), args, kwargs, inputs, shapes)
        state.transfers[node] = _apply_rule(program, node, call)
        state.sources[node] = sources
        state.bounds[node] = state.transfers[node].output
    return state


def _is_trainable(program: Program, node: fx.Node, names: Mapping[int, str], derived: set[fx.Node]) -> bool:
    return node in derived or (node.op == "get_attr" and id(program.constants.get(node)) in names)


def _resolve(
    program: Program,
    state: Forward,
    names: Mapping[int, str],
    derived: set[fx.Node],
    sources: list[fx.Node],
    user: fx.Node,
    node: fx.Node,
) -> Any:
    """What an argument of ``user`` is for its rule: a bound (and then it is one of its sources), a parameter, or a constant."""
    if node in state.bounds:
        sources.append(node)
        return state.bounds[node]
    if node in derived:
        raise UnsupportedError(
            f"{describe(user, program.modules)} uses something computed from a trainable parameter "
            f"({describe(node, program.modules)}); how steep that computation is, nothing says. Use the parameter as it "
            "is, or put the computation into a module with a rule."
        )
    value = program.constants[node]
    if node in program.varying and user.target not in _TAKES_SIZES:
        raise UnsupportedError(
            f"{describe(user, program.modules)} uses a number that depends on how many examples the batch has "
            f"({describe(node, program.modules)}): one example's influence would depend on the others. Use fixed numbers."
        )
    if isinstance(value, torch.Tensor) and id(value) in names:
        return ParameterRef(names[id(value)], value)
    return value


def as_bound(value: Bound | tuple[Bound, ...]) -> Bound:
    """One bound for all the parts of a split."""
    if isinstance(value, tuple):
        return Bound(math.sqrt(sum(part.norm**2 for part in value)), (sum(part.size for part in value),))
    return value


def _is_tuple_item(node: fx.Node, state: Forward) -> bool:
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(state.bounds.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None, tuple)
    )


def _take_item(node: fx.Node, state: Forward) -> None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    parts = state.bounds[source]
    assert isinstance(parts, tuple)
    if not isinstance(index, int):
        raise UnsupportedError(f"slicing the tuple that '{source.name}' returns is not supported: take one item at a time")
    state.bounds[node] = parts[index]
    state.transfers[node] = Transfer(parts[index])
    state.sources[node] = [source]


def _apply_rule(program: Program, node: fx.Node, call: Call) -> Transfer:
    try:
        transfer = _find_and_apply(program, node, call)
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


def _find_and_apply(program: Program, node: fx.Node, call: Call) -> Transfer:
    if node.op != "call_module":
        function_rule = find_function_rule(node.target)
        if function_rule is None:
            raise UnsupportedError(
                f"{call.where} has no rule, so nothing bounds it. Put it into a module with a rule (lipdp.bounds.rule), give "
                "the function one (lipdp.bounds.rule_for_function), or use a clipping method for this model."
            )
        return function_rule(call)
    module = program.modules[str(node.target)]
    module_rule = find_module_rule(module)
    if module_rule is None:
        raise no_rule(call.where, module)
    for part in module.modules():
        _refuse_odd_settings(call.where, part)
    transfer = module_rule(module, call)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    missing = trainable - set(transfer.parameters)
    if missing:
        raise UnsupportedError(
            f"the rule of {call.where} says nothing of the parameter(s) {', '.join(sorted(missing))}: a rule must bound every "
            "trainable parameter of its layer."
        )
    return transfer


# Settings of our own layers that are radii and the like.
_LENGTHS = {"norm", "bias_norm", "bound", "eps", "scale", "floor", "low", "high", "max_norm"}


def _refuse_odd_settings(where: str, layer: torch.nn.Module) -> None:
    """Numbers that no constructor would have taken were set later: rules rely on them."""
    ours, own, weight = type(layer).__module__.startswith("lipdp."), vars(layer), layer._parameters.get("weight")
    for name, value in own.items():
        odd = isinstance(value, float) and math.isnan(value)
        if odd or (ours and name in _LENGTHS and isinstance(value, int | float) and value < 0):
            raise UnsupportedError(
                f"{where} has {name} = {value!r}, for which no bound holds. Make the layer with the number you want."
            )
    sizes = {name: own[name] for name in _SIZES if name in own} if weight is not None else {}
    if weight is not None and any(not _fits(weight, name, value, own) for name, value in sizes.items()):
        raise UnsupportedError(
            f"{where} has a weight of shape {tuple(weight.shape)}, which is not that of its settings ({sizes}): bounds would be "
            "those of another layer. Make it with the sizes you want."
        )


_SIZES = {"in_features": 1, "out_features": 0, "num_embeddings": 0, "embedding_dim": 1, "in_channels": 1, "out_channels": 0}


def _fits(weight: torch.Tensor, name: str, value: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a size is that of the weight; of transposed convolutions the two change places, of several groups one is a part.

    Convolutions may keep something else in its place, of other dimensions than a kernel, that kernels are made of.
    """
    dim, groups = _SIZES[name], settings.get("groups", 1)
    if settings.get("transposed", False):
        dim = 1 - dim
    dims = 2 + len(settings["kernel_size"]) if name.endswith("channels") else 2
    return weight.ndim != dims or weight.shape[dim] * (groups if dim == 1 else 1) == value


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


def backward_pass(
    program: Program,
    forward: Forward,
    final: fx.Node,
    constant: float,
    clip: bool,
    limits: Mapping[str, float] | None = None,
) -> dict[fx.Node, float]:
    """G at every node: a node consumed several times gets the sum of its consumers' contributions.

    With ``clip`` the limits that layers put on cotangents count; ``limits`` replaces those of some modules, by name.
    """
    replaced = limits or {}
    cotangents: defaultdict[fx.Node, _Cotangent] = defaultdict(_Cotangent)
    cotangents[final].whole = constant
    for node in reversed(list(program.graph.nodes)):
        if node not in forward.transfers or node not in cotangents:
            continue
        transfer, reaching = forward.transfers[node], cotangents[node].total
        if _is_tuple_item(node, forward):
            source, parts = forward.sources[node][0], forward.bounds[forward.sources[node][0]]
            assert isinstance(parts, tuple)
            index = int(node.args[1]) % len(parts)
            cotangents[source].parts[index] = cotangents[source].parts.get(index, 0.0) + reaching
            continue
        limit = math.inf
        if clip:
            limit = replaced.get(str(node.target), transfer.clip) if node.op == "call_module" else transfer.clip
        for source, gain in zip(forward.sources[node], transfer.gains, strict=True):
            through = math.inf if clip and transfer.normalises and reaching > 0 else times(gain, reaching)
            cotangents[source].whole += min(through, limit)
    return {node: cotangent.total for node, cotangent in cotangents.items()}


def refuse_ties(program: Program) -> None:
    """Refuse a weight that lives in two different sets, and tensors that overlap in memory.

    A constrained layer brings its weights back into its own set after every step. If two layers with different sets own one tensor,
    projecting on the second leaves the first set again, so neither bound holds. Layers of the same class and settings have the same
    set. Two tensors in the same memory are one tensor under two names: a projection or a step on one moves the other.
    """
    owners: dict[int, list[tuple[str, torch.nn.Module]]] = {}
    for name, module in program.modules.items():
        for local, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((f"{name}.{local}" if name else local, module))
    for sharing in owners.values():
        constrained = [(name, module) for name, module in sharing if hasattr(module, "project_")]
        for name, module in constrained[1:]:
            first, other = constrained[0]
            local = name.rpartition(".")[2]
            if _set_of(module, local) != _set_of(other, local) or first.rpartition(".")[2] != local:
                raise UnsupportedError(
                    f"'{first}' ({type(other).__name__}) and '{name}' ({type(module).__name__}) are one parameter in two different "
                    "constraint sets: bringing it into the second leaves the first, and its bound does not hold. Tie layers of "
                    "the same class and settings, or do not tie them."
                )
    _refuse_overlaps(program)


def _set_of(module: torch.nn.Module, local: str) -> tuple[type, str]:
    """What the set of a parameter follows from: the class and its settings; a bias says nothing of the weight beside it."""
    settings = module.extra_repr()
    return type(module), settings if local == "bias" else re.sub(r"bias(_norm)?=[^,]*(, )?", "", settings)


def _refuse_overlaps(program: Program) -> None:
    places: list[tuple[int, int, str, bool]] = []
    seen: set[int] = set()
    for name, tensor in (*program.model.named_parameters(), *program.model.named_buffers()):
        if id(tensor) in seen or tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_meta:
            continue
        seen.add(id(tensor))
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        places.append((start, start + extent * tensor.element_size(), name, tensor.requires_grad))
        if tensor.requires_grad and tensor.numel() > extent:
            raise UnsupportedError(
                f"parameter '{name}' uses some of its memory several times (an expanded view): one entry's gradient is the sum of "
                "several. Make it contiguous: torch.nn.Parameter(tensor.clone())."
            )
    places.sort()
    reach, before, trained = 0, "", False
    for start, end, name, requires_grad in places:
        if start < reach and (trained or requires_grad):
            raise UnsupportedError(
                f"'{before}' and '{name}' share memory, but are different tensors: a step or projection on one moves the other "
                "behind the bounds' back. Use one parameter in both places, or clone one of them."
            )
        if end > reach:
            reach, before, trained = end, name, requires_grad


_RECURRENT = (
    "A recurrence multiplies the cotangent by its weights at every step, so not even lipdp.nn.Boundary around it bounds its "
    "gradients. Train such a model with method='bookkeeping' (or another clipping method), which takes RNN, LSTM and GRU as they "
    "are; or put lipdp.nn.TransformerBlock or SpectralConv1d in its place"
)
_WAYS_OUT: tuple[tuple[type[torch.nn.Module] | tuple[type[torch.nn.Module], ...], str], ...] = (
    (
        torch.nn.MultiheadAttention,
        "Dot-product attention on unbounded tokens with unconstrained projections has no Lipschitz constant: use "
        "lipdp.nn.LipschitzAttention(embed_dim, num_heads, tokens=…), as lipdp.convert does",
    ),
    (
        (torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder),
        "Its attention has no Lipschitz constant: use lipdp.nn.TransformerBlock(embed_dim, num_heads, tokens=…), as lipdp.convert "
        "does",
    ),
    ((torch.nn.RNNBase, torch.nn.RNNCellBase), _RECURRENT),
)


def way_out(module: torch.nn.Module) -> str:
    """Why nothing bounds this kind of layer and what to use, or an empty text where there is nothing particular to say."""
    return next((text for classes, text in _WAYS_OUT if isinstance(module, classes)), "")


def no_rule(where: str, module: torch.nn.Module) -> UnsupportedError:
    """The error for a layer without a rule."""
    particular = way_out(module)
    return UnsupportedError(
        f"{where} has no rule, so nothing bounds it. {particular + '. Otherwise: r' if particular else 'R'}eplace it by a layer of "
        "lipdp.nn, register a rule for its class (lipdp.bounds.rule), or use a clipping method for this model."
    )
