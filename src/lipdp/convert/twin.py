"""The Lipschitz twin of an ordinary network: what a conversion decides, layer by layer, and what it did.

What becomes of a layer is what one of lipdp's layers registered for it (:mod:`lipdp.twins`), or why nothing does.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.nn import functional as F

from lipdp import nn
from lipdp.bounds import analyse
from lipdp.bounds.calculus import find_function_rule, has_rule
from lipdp.bounds.propagate import way_out
from lipdp.errors import ConfigurationError, LipdpError, UnsupportedError
from lipdp.export import Builder, Seen, record, token_dtype
from lipdp.program import describe, trace_graph
from lipdp.twins import Decision, Outcome, Where, find_twin, twin


@dataclass(frozen=True)
class Row:
    """One operation: where it is, what it was, what became of it, and why.

    Attributes:
        where: the module's name in the model, or which function of its forward.
        before: what it was; "" for a function that has no layer's name.
        outcome: "replaced", "kept", "removed" or "not converted".
        after: what stands there now, if it was replaced.
        note: why, or what to do.
    """

    where: str
    before: str
    outcome: Outcome
    after: str = ""
    note: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """Every replacement, and everything that could not be converted.

    Attributes:
        rows: in the order of execution. Operations that need no change (flatten, reshape, concatenation …) have none.
        bounded: whether every parameter of the twin has a finite sensitivity.
        verdict: that in words: the largest sensitivity, or the calculus's own message.
    """

    rows: tuple[Row, ...]
    bounded: bool
    verdict: str

    @property
    def unconverted(self) -> tuple[Row, ...]:
        """What could not be converted and stands in the twin as it was."""
        return tuple(row for row in self.rows if row.outcome == "not converted")

    def __str__(self) -> str:
        header = ("layer", "was", "", "now", "note")
        table = [header, *((row.where, row.before, row.outcome, row.after, row.note) for row in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
        lines.insert(1, "─" * max(map(len, lines)))
        return "\n".join((*lines, "", self.verdict))


@dataclass(frozen=True)
class Conversion:
    """The Lipschitz twin of a model, and the report of how it came about. Unpacks as ``twin, report = lipdp.convert(…)``.

    Attributes:
        model: the twin, in training mode; the model it was made of is left as it is.
        report: what became of each layer, and whether the twin is bounded.
    """

    model: torch.nn.Module
    report: ConversionReport

    def __iter__(self) -> Iterator[torch.nn.Module | ConversionReport]:
        return iter((self.model, self.report))


# Functions and methods, as the module that does the same. The module's arguments are those of the call, by name.
FUNCTIONS: dict[Any, Callable[..., torch.nn.Module]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"), lambda **_: torch.nn.ReLU()),
    F.relu6: lambda **_: torch.nn.ReLU6(),
    F.leaky_relu: lambda negative_slope=0.01, **_: torch.nn.LeakyReLU(negative_slope),
    F.elu: lambda alpha=1.0, **_: torch.nn.ELU(alpha),
    F.celu: lambda alpha=1.0, **_: torch.nn.CELU(alpha),
    F.selu: lambda **_: torch.nn.SELU(),
    F.gelu: lambda approximate="none", **_: torch.nn.GELU(approximate),
    F.silu: lambda **_: torch.nn.SiLU(),
    F.mish: lambda **_: torch.nn.Mish(),
    F.hardswish: lambda **_: torch.nn.Hardswish(),
    F.softplus: lambda beta=1, threshold=20, **_: torch.nn.Softplus(beta, threshold),
    F.max_pool2d: lambda kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False, **_: (
        torch.nn.MaxPool2d(kernel_size, stride or None, padding, dilation, return_indices, ceil_mode)
    ),
    F.avg_pool2d: lambda kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None, **_: (
        torch.nn.AvgPool2d(kernel_size, stride or None, padding, ceil_mode, count_include_pad, divisor_override)
    ),
    F.adaptive_avg_pool2d: lambda output_size, **_: torch.nn.AdaptiveAvgPool2d(output_size),
    F.adaptive_max_pool2d: lambda output_size, return_indices=False, **_: torch.nn.AdaptiveMaxPool2d(output_size, return_indices),
    F.dropout: lambda p=0.5, **_: torch.nn.Dropout(p),
    F.dropout2d: lambda p=0.5, **_: torch.nn.Dropout2d(p),
}


def decide(module: torch.nn.Module, where: Where) -> Decision | None:
    """What becomes of ``module``; ``None`` if it stays and there is nothing to say."""
    rule = find_twin(module)
    if rule is not None:
        return rule(module, where)
    trained = any(parameter.requires_grad for parameter in module.parameters())
    if not has_rule(module) and way_out(module):
        return Decision("not converted", module, way_out(module))
    if not has_rule(module):
        return Decision("not converted", module, "nothing bounds it: give its class a rule (lipdp.bounds.rule), or replace it")
    if trained and type(module).__module__.startswith("torch.nn"):
        return Decision("not converted", module, "its weights stay unconstrained: put lipdp.nn.Boundary around it, or replace it")
    return None


@twin(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
def _dropout(module: torch.nn.Dropout, where: Where) -> Decision:
    module.inplace = False
    if not 0 < module.p < 1:
        return Decision("removed", None, f"p={module.p:g}")
    return Decision("kept", module, f"it multiplies the sensitivities around it by {1 / (1 - module.p):.3g}: consider removing it")


@twin(torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.Sigmoid)
def _softmax(module: torch.nn.Module, where: Where) -> Decision | None:
    if where.last:
        return Decision("removed", None, "lipdp's losses take logits")
    if has_rule(module):
        return None
    return Decision("not converted", module, "nothing bounds it here: use torch.softmax, or give its class a rule")


_ADDITIONS = {torch.add, operator.add, operator.iadd, "add", "add_"}
_FINAL = {F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.sigmoid, F.sigmoid, "softmax", "log_softmax", "sigmoid"}
_FLAGS = {"need_weights", "average_attn_weights"}  # they change what attention returns, not what it computes
_LAST = (torch.nn.Linear, torch.nn.Embedding, torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.modules.conv._ConvTransposeNd)


def convert(
    model: torch.nn.Module,
    input_shape: Sequence[int],
    input_norm: float = 1.0,
    *,
    input_mode: Literal["ball", "sphere"] = "ball",
    copy_weights: bool = False,
) -> Conversion:
    """The Lipschitz twin of an ordinary network, and a report of every replacement and of what could not be converted.

    The graph of the model stays; what it is made of changes: dense layers and convolutions into spectral ones, ReLU and its
    like into GroupSort, max pooling into L2-norm pooling, average pooling into scaled average pooling, batch and other
    normalisation into centring, embeddings into tables with bounded rows, self-attention and transformer blocks
    into Lipschitz ones, ``x + f(x)`` into the average of the two, a softmax at the end into nothing (losses take
    logits), and a BoundedInput comes in front. Shapes do not change. ``model`` itself is left as it is.

    Args:
        model: any module that torch.fx can trace.
        input_shape: shape of one example.
        input_norm: norm of the BoundedInput.
        input_mode: its mode.
        copy_weights: start from the model's weights, projected into their sets, instead of fresh orthogonal ones. If they
            were trained on private data, their privacy cost comes on top.

    Returns:
        A :class:`Conversion`: ``.model``, in training mode, and ``.report``; print the latter. Where
        ``report.bounded`` is false some layer of the twin has no finite sensitivity, and the report names it.

    Example:
        >>> import torch, lipdp
        >>> from lipdp import losses
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3), torch.nn.Softmax(dim=1))
        >>> conversion = convert(net, (4,))
        >>> print(conversion.report)
        layer  was ...
        >>> sorted(lipdp.sensitivities(conversion.model, losses.CrossEntropy()))
        ['network.0.bias', 'network.0.weight', 'network.2.bias', 'network.2.weight']
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"convert takes a torch.nn.Module, not {type(model).__name__}")
    shape = tuple(int(size) for size in input_shape)
    front = nn.BoundedInput(shape, norm=input_norm, mode=input_mode)
    own = copy.deepcopy(model).eval()
    if type(own).__module__.startswith("torch.nn") and not isinstance(own, torch.nn.Sequential):  # a bare layer
        own = torch.nn.Sequential(own)
    graph = trace_graph(
        own,
        lambda module: has_rule(module) or find_twin(module) is not None,
        "A conversion needs a forward without data-dependent control flow. Convert the parts that have none, or write the twin "
        "with lipdp.nn by hand.",
    )
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    if len(inputs) != 1:
        raise UnsupportedError(
            f"{type(model).__name__}.forward takes {len(inputs)} inputs; conversion handles models of one input."
        )
    ids = token_dtype(own, graph)
    network, rows = _Conversion(own, graph, record(own, graph, shape, ids), inputs[0], copy_weights).run(type(model).__name__)
    # Token ids are looked up, not scaled: the table bounds what comes out.
    parts = [("input", front), ("network", network)] if ids is None else [("network", network)]
    twin = nn.Sequential(OrderedDict(parts)).train()
    return Conversion(twin, _verdict(twin, rows))


class _Conversion:
    """The walk over the graph; its state is the new graph and the report so far."""

    def __init__(
        self, model: torch.nn.Module, graph: fx.Graph, seen: dict[fx.Node, Seen], source: fx.Node, copy_weights: bool
    ) -> None:
        self.model, self.graph, self.seen, self.copy_weights = model, graph, seen, copy_weights
        self.modules = dict(model.named_modules())
        self.builder = Builder(self.modules)
        self.rows: list[Row] = []
        self.decided: dict[str, Decision] = {}  # layers with weights keep one twin, however often they are used
        self.source, self.active = source, {source}  # nodes that depend on the input
        self.single: set[fx.Node] = set()  # layers that gave a tuple, whose twins give its first item
        for node in graph.nodes:
            if any(argument in self.active for argument in node.all_input_nodes):
                self.active.add(node)
        self.final = next(node for node in graph.nodes if node.op == "output").args[0]

    def run(self, name: str) -> tuple[fx.GraphModule, tuple[Row, ...]]:
        for node in self.graph.nodes:
            if node.op == "call_module":
                self._module(node)
            elif node.op in ("call_function", "call_method") and node in self.active:
                self._function(node)
            else:
                self._other(node)
        return self.builder.finish(name), tuple(self.rows)

    def _module(self, node: fx.Node) -> None:
        target = str(node.target)
        module = self.modules[target]
        if target in self.decided:
            self._apply(node, module, target, self.decided[target])
            return
        decision = decide(module, self._where(node)) if node in self.active else _constant(module)
        if decision is None:
            self.builder.copy(node, self.model)
            return
        if any(True for _ in module.parameters()):
            self.decided[target] = decision
        self._report(target, module, decision)
        self._apply(node, module, target, decision)

    def _function(self, node: fx.Node) -> None:
        where, target = describe(node, self.modules).replace(" in the model's forward", ""), node.target
        operands = [argument for argument in node.all_input_nodes if argument in self.active]
        if target is operator.getitem and node.args[0] in self.single:
            self._item(node)
            return
        if target in FUNCTIONS and node in self.seen:
            module = FUNCTIONS[target](**self._arguments(node))
            decision = decide(module, self._where(node))
            if decision is not None:
                self._report(where, module, decision)
                self._apply(node, module, node.name, decision)
                return
        if target in _FINAL and node is self.final:
            self.rows.append(Row(where, "", "removed", "", "lipdp's losses take logits"))
            self.builder.env[node] = self.builder.env[operands[0]]
            return
        if target in _ADDITIONS and len(operands) == 2 and not node.kwargs and len(node.args) == 2:
            shapes = {self.seen[operand].shape for operand in operands}
            note = "" if len(shapes) == 1 else "the two have different shapes: what is broadcast counts with the root of its copies"
            self.rows.append(Row(where, "x + y", "replaced", "(x + y)/2", note))
            first, second = (self.builder.proxy(operand) for operand in operands)
            self.builder.env[node] = ((first + second) * 0.5).node  # type: ignore[attr-defined]
            return
        self.builder.copy(node, self.model)
        if node in self.seen and find_function_rule(target) is None:
            note = "nothing bounds it: put it into a module with a rule (lipdp.bounds.rule), or use another function"
            self.rows.append(Row(where, "", "not converted", "", note))

    def _item(self, node: fx.Node) -> None:
        """An item of what a layer returned whose twin returns one tensor."""
        source, index = node.args
        assert isinstance(source, fx.Node)
        if index == 0:
            self.builder.env[node] = self.builder.env[source]
        elif node.users:
            raise UnsupportedError(
                f"the model uses item {index} of what {describe(source, self.modules)} returns (attention weights), which its twin "
                "does not give. Leave them out (need_weights=False), or write the twin with lipdp.nn by hand."
            )

    def _other(self, node: fx.Node) -> None:
        self.builder.copy(node, self.model)
        value = self.builder.targets.get(str(self.builder.env[node].target)) if node.op == "get_attr" else None
        if isinstance(value, torch.nn.Parameter) and value.requires_grad:
            note = "a parameter that forward uses by itself: nothing keeps it bounded. Put it into a layer with a rule."
            self.rows.append(Row(str(node.target), f"Parameter{tuple(value.shape)}", "not converted", "", note))

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """The call's arguments by name, without the tensor."""
        normalised = node.normalized_arguments(self.model, normalize_to_only_use_kwargs=True)
        kwargs = dict(node.kwargs) if normalised is None else dict(normalised.kwargs)
        return {name: value for name, value in kwargs.items() if not isinstance(value, fx.Node)}

    def _where(self, node: fx.Node) -> Where:
        source = node.all_input_nodes[0]
        known, result = self.seen[source], self.seen.get(node)
        output = known.shape if result is None else result.shape
        harmless = all(value is None or name in _FLAGS for name, value in node.kwargs.items())
        alone = len(node.all_input_nodes) == 1 and harmless and all(value in (source, None) for value in node.args)
        last = node is self.final
        return Where(known.shape, output, self._features(node), last, self.copy_weights, alone, source is self.source)

    def _features(self, node: fx.Node) -> int:
        """Dimension 1, as in convolutions, unless a dense layer, which works along the last one, comes nearest before."""
        current = node
        while current.all_input_nodes:
            current = current.all_input_nodes[0]
            module = self.modules.get(str(current.target)) if current.op == "call_module" else None
            if isinstance(module, _LAST):
                return -1
            if isinstance(module, _CONVOLUTIONS):
                return 1
        return 1

    def _report(self, where: str, module: torch.nn.Module, decision: Decision) -> None:
        after = "" if decision.module is None or decision.outcome != "replaced" else _name(decision.module)
        self.rows.append(Row(where, _name(module), decision.outcome, after, decision.note))

    def _apply(self, node: fx.Node, module: torch.nn.Module, name: str, decision: Decision) -> None:
        arguments = [self.builder.env[source] for source in node.all_input_nodes]
        if decision.outcome == "not converted" and node.op == "call_module":
            self.builder.copy(node, self.model)
        elif decision.module is None:
            self.builder.env[node] = arguments[0]
        else:
            self.builder.env[node] = self.builder.call(name, decision.module, *arguments)
            if isinstance(module, torch.nn.MultiheadAttention):
                self.single.add(node)


def _constant(module: torch.nn.Module) -> Decision | None:
    """A layer whose output does not depend on the input."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return None
    note = "its output does not depend on the input, and nothing bounds it. A table of positions: use lipdp.nn.LearnedPositions"
    return Decision("not converted", module, note)


def _name(module: torch.nn.Module) -> str:
    """The class and its arguments, cut to what fits in a table."""
    text = str(module) if not list(module.children()) else type(module).__name__
    text = " ".join(text.split()).split(", constraint=")[0]
    if text.count("(") > text.count(")"):
        text += ")"
    return text if len(text) <= 44 else f"{text[:41]}…)"


def _verdict(twin: torch.nn.Module, rows: tuple[Row, ...]) -> ConversionReport:
    missing = [row.where for row in rows if row.outcome == "not converted"]
    head = f"Not converted: {', '.join(missing)}. " if missing else "Everything was converted. "
    try:
        analysis = analyse(twin, 1.0)
    except LipdpError as error:
        return ConversionReport(rows, False, f"{head}The twin has no finite sensitivities yet: {error}")
    if not analysis.parameters:
        return ConversionReport(rows, True, f"{head}The twin has no trainable parameters.")
    largest = max(analysis.parameters, key=lambda row: row.sensitivity)
    return ConversionReport(
        rows,
        True,
        f"{head}Every parameter has a finite sensitivity: at most {largest.sensitivity:.4g} ('{largest.name}') for a loss "
        "of Lipschitz constant 1.",
    )
