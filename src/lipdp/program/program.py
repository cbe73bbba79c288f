"""A program: the graph that is analysed, and that runs. Nobody's Python is called again once it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lipdp._pairs import Fused, channels_last, fusions
from lipdp.behaviour import ClassBodies
from lipdp.digest import content_digest
from lipdp.errors import ConfigurationError, LipdpError, UnsupportedError
from lipdp.program.reading import Reading, Shape, read, refuse_hidden_changes, refuse_random, undisturbed
from lipdp.program.tracer import describe, line_of, trace_graph

# Layers and functions that look token ids up.
TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_LOOKUPS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
_ADVICE = (
    "The calculus needs a forward without data-dependent control flow. Move such code into a module of its own and give it a rule "
    "(lipdp.bounds.rule)."
)
RunsAs = Callable[[torch.nn.Module], type[torch.nn.Module] | None]
Refuse = Callable[[str, torch.nn.Module], LipdpError | None]


@dataclass(frozen=True, eq=False)
class Program:
    """A traced module, as a function of one batch of examples.

    What the graph captured is held by value, trainable parameters by reference. A layer is run as the class whose forward its rule
    describes, whatever sits on the instance, and without hooks. Operations that write in place get a copy to write into. Every
    activation must have the shape that it had when the bounds were proved, with a row for each example.

    Attributes:
        model: the module it was made from (a bare layer is put into a Sequential).
        modules: its modules, by name.
        graph: the operations.
        names: id of a trainable parameter → its name in the model the caller gave.
        reading: what every node evaluates to.
        input_dtype: of the examples: an integer type for token ids.
        runs_as: the class that a layer is run as; ``None`` for one that nothing is said of.
    """

    model: torch.nn.Module
    modules: dict[str, torch.nn.Module]
    graph: fx.Graph
    names: dict[int, str]
    reading: Reading
    input_shape: Shape
    input_dtype: torch.dtype
    runs_as: RunsAs = field(repr=False)

    @cached_property
    def shapes(self) -> dict[fx.Node, tuple[Shape, ...]]:
        """Shapes of each activation's parts, without the batch dimension."""
        return self.reading.shapes

    @cached_property
    def constants(self) -> dict[fx.Node, Any]:
        """Values of the nodes that are no activations."""
        return self.reading.constants

    @cached_property
    def varying(self) -> set[fx.Node]:
        """Numbers that follow from how many examples there are."""
        return self.reading.varying

    def __call__(self, x: torch.Tensor) -> Any:
        """The outputs for a batch of examples."""
        return self.whole(x)

    @cached_property
    def whole(self) -> Callable[[torch.Tensor], Any]:
        """All of it, operation by operation."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        return self.up_to(output.args[0])

    @cached_property
    def fused(self) -> Callable[[torch.Tensor], Any]:
        """The same outputs and gradients by fewer, larger operations (:mod:`lipdp._pairs`): what steps run."""
        if not any(self._convolves(node) for node in self.graph.nodes) and not self._fusions():
            return self.whole
        output = next(node for node in self.graph.nodes if node.op == "output")
        return self.up_to(output.args[0], fuse=True)

    def up_to(self, result: Any, *, fuse: bool = False) -> Callable[[torch.Tensor], Any]:
        """The part of the program that computes a node (or a nest of nodes), as a function of a batch of examples."""
        run = self._compile(result, fuse)

        def function(x: torch.Tensor) -> Any:
            if tuple(x.shape[1:]) != self.input_shape:
                raise ConfigurationError(
                    f"examples of shape {tuple(x.shape[1:])} can't enter a program that was proved for the shape {self.input_shape}"
                )
            return run(x, self._captured(x.device))

        return function

    def reaching(self, layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """The part of the program in front of a layer: what enters it."""
        for node in self.graph.nodes:
            if node.op == "call_module" and self.modules[str(node.target)] is layer:
                return self.up_to(node.args[0])
        raise ConfigurationError(f"the model's forward does not reach its {type(layer).__name__}")

    def has_changed_classes(self) -> bool:
        """Whether some layer would no longer be run as the class that it was analysed as.

        What sits on an instance is no concern of it: that is among the model's settings (:mod:`lipdp.fingerprint`).
        """
        return not self._classes.stand and any(self.runs_as(module) is not cls for module, cls in self._leaves)

    @cached_property
    def _classes(self) -> ClassBodies:
        return ClassBodies({type(module) for module, _ in self._leaves})

    @cached_property
    def _leaves(self) -> list[tuple[torch.nn.Module, type[torch.nn.Module] | None]]:
        """One layer of each class."""
        leaves = [self.modules[str(node.target)] for node in self.graph.nodes if node.op == "call_module"]
        return [(module, self.runs_as(module)) for module in {type(module): module for module in leaves}.values()]

    @cached_property
    def digest(self) -> str:
        """Stands for what is computed: operations, layers' classes, constants by value, names and shapes of parameters."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        rows: list[Any] = []
        for node in self.graph.nodes:
            target = str(node.target)
            if node.op == "call_module":
                target = f"{target}: {self._class_of(target).__qualname__}"
            elif node.op == "call_function":
                target = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.target)}"
            elif node.op == "get_attr" and self._parameter(node) is None:
                target = "constant"
            arguments = repr(fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}"))
            value = self.constants.get(node) if node.op == "get_attr" and self._parameter(node) is None else None
            rows.append([node.op, target, arguments, value if isinstance(value, torch.Tensor) else repr(value)])
        parameters = [[name, list(p.shape), str(p.dtype)] for name, p in self.model.named_parameters()]
        return content_digest(rows, parameters, list(self.input_shape), str(self.input_dtype)).hex()

    def summary(self) -> list[str]:
        """What it is made of, in words: how many operations, and every tensor that it captured by value."""
        tensors = {
            node: value for node, value in self._held.items() if isinstance(value, torch.Tensor) and self._parameter(node) is None
        }
        shapes = [f"{node.target} {tuple(value.shape)}" for node, value in tensors.items()]
        captured = f"; captured by value: {', '.join(shapes)}" if shapes else "; no tensor captured"
        return [f"{len(self.shapes)} operations{captured}; digest {self.digest[:16]}"]

    # ------------------------------------------------------------------ running

    def _parameter(self, node: fx.Node) -> torch.nn.Parameter | None:
        value = self.constants.get(node)
        return value if isinstance(value, torch.nn.Parameter) and id(value) in self.names else None

    def _class_of(self, target: str) -> type[torch.nn.Module]:
        module = self.modules[target]
        return self.runs_as(module) or type(module)

    @cached_property
    def _held(self) -> dict[fx.Node, Any]:
        """Constants that are read while running, by value."""
        runs = [node for node in self.graph.nodes if self._runs(node) or node.op == "output"]
        readers = {source for node in runs for source in node.all_input_nodes}
        return {
            node: value.detach().clone() if isinstance(value, torch.Tensor) and self._parameter(node) is None else value
            for node, value in self.constants.items()
            if node in readers and node not in self.varying
        }

    def _captured(self, device: torch.device) -> dict[str, Any]:
        if device not in self._by_device:
            self._by_device[device] = {
                node.name: value.to(device) if isinstance(value, torch.Tensor) and self._parameter(node) is None else value
                for node, value in self._held.items()
            }
        return self._by_device[device]

    @cached_property
    def _by_device(self) -> dict[torch.device, dict[str, Any]]:
        return {}

    def _runs(self, node: fx.Node) -> bool:
        return (node in self.shapes or node in self.varying) and node.op not in ("placeholder", "output")

    def _layer_of(self, node: fx.Node) -> tuple[torch.nn.Module, type[torch.nn.Module]] | None:
        if node.op != "call_module" or node in self.reading.in_place:
            return None
        return self.modules[str(node.target)], self._class_of(str(node.target))

    def _fusions(self) -> dict[fx.Node, Fused]:
        ranks = {node: 1 + len(shapes[0]) for node, shapes in self.shapes.items()}
        return fusions(self.graph, self._layer_of, ranks)

    def _compile(self, result: Any, fuse: bool) -> Callable[[torch.Tensor, dict[str, Any]], Any]:
        """The operations as one straight function: a line for each, a check of each result, memory freed after its last use."""
        calls = self._fusions() if fuse else {}
        skipped = {node for call in calls.values() for node in call.inside[:-1]}
        wanted: set[fx.Node] = set()
        fx.map_arg(result, wanted.add)
        kept = set(wanted)
        for node in reversed(self.graph.nodes):
            if node in kept and self._runs(node):
                kept.update(node.all_input_nodes)
        source = next(node for node in self.graph.nodes if node in self.shapes and node.op == "placeholder")
        scope: dict[str, Any] = {"check": self._check, "clone": torch.Tensor.clone, "channels_last": channels_last}
        lines = ["def run(x, held):", "    rows = x.shape[0]", f"    {_local(source)} = x"]
        steps = [(n, node) for n, node in enumerate(self.graph.nodes) if node in kept and self._runs(node) and node not in skipped]
        read = {node: [calls[node].source] if node in calls else node.all_input_nodes for _, node in steps}
        last = {operand: node for _, node in steps for operand in read[node]}
        for number, node in steps:
            given = (calls[node].source,) if node in calls else node.args
            arguments = [self._text(argument, scope) for argument in given]
            if fuse and self._convolves(node):
                arguments[0] = f"channels_last({arguments[0]})"
            if node in self.reading.in_place and node in self.shapes:
                arguments[0] = f"clone({arguments[0]})"
            arguments += [f"{key}={self._text(value, scope)}" for key, value in node.kwargs.items()]
            if node in calls:
                scope[f"f{number}"] = calls[node].function
                lines.append(f"    {_local(node)} = f{number}({arguments[0]})")
            else:
                lines.append(f"    {_local(node)} = {self._call(node, number, arguments, scope)}")
            if node in self.shapes:
                scope[f"s{number}"] = node
                lines.append(f"    check(s{number}, {_local(node)}, rows)")
            freed = [operand for operand in read[node] if last[operand] is node and self._is_local(operand)]
            lines += [f"    {_local(operand)} = None" for operand in dict.fromkeys(freed) if operand not in wanted]
        lines.append(f"    return {self._text(result, scope)}")
        exec("\n".join(lines), scope)
        run: Callable[[torch.Tensor, dict[str, Any]], Any] = scope["run"]
        return run

    def _convolves(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.modules[str(node.target)], torch.nn.Conv2d) and bool(node.args)

    def _is_local(self, node: fx.Node) -> bool:
        return node in self.shapes or node in self.varying

    def _call(self, node: fx.Node, number: int, arguments: list[str], scope: dict[str, Any]) -> str:
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        if node.op == "call_module":
            scope[f"m{number}"] = self.modules[str(node.target)]
            scope[f"f{number}"] = self._class_of(str(node.target)).forward
            return f"f{number}({', '.join([f'm{number}', *arguments])})"
        scope[f"f{number}"] = node.target
        return f"f{number}({', '.join(arguments)})"

    def _text(self, value: Any, scope: dict[str, Any]) -> str:
        """An argument as it stands in the function's text."""
        if isinstance(value, fx.Node):
            return _local(value) if self._is_local(value) else f"held[{value.name!r}]"
        if isinstance(value, tuple | list):
            items = ", ".join(self._text(item, scope) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._text(item, scope)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self._text(part, scope) for part in (value.start, value.stop, value.step))})"
        name = f"k{len(scope)}"
        scope[name] = value
        return name

    def _check(self, node: fx.Node, value: Any, rows: int) -> None:
        parts = value if isinstance(value, tuple | list) else (value,)
        for part, shape in zip(parts, self.shapes[node], strict=True):
            if part.shape[0] != rows or part.shape[1:] != shape:
                raise UnsupportedError(
                    f"{describe(node, self.modules)} gives shape {tuple(part.shape)} for {rows} examples ({line_of(node)}), and "
                    f"({rows}, {', '.join(map(str, shape))}) was proved: what it computes depends on how many examples there "
                    "are. Use fixed sizes."
                )


def _local(node: fx.Node) -> str:
    return f"v_{node.name}"


def find_input_shape(model: torch.nn.Module) -> Shape | None:
    """The per-example input shape that a :class:`lipdp.nn.BoundedInput` of the model declares, if there is one."""
    for module in model.modules():
        shape = getattr(module, "input_shape", None)
        if isinstance(shape, tuple):
            return shape
    return None


def find_input_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """The integer dtype that the model's first layer that cares wants of its input (token ids), ``None`` for floats.

    A module says so by an attribute ``input_dtype`` (:class:`lipdp.nn.BoundedEmbedding` does); a torch.nn.Embedding implies it.
    A layer that declares the shape of a float input (:class:`lipdp.nn.BoundedInput`) and comes first settles it too.
    """
    for module in model.modules():
        dtype = getattr(module, "input_dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype if not dtype.is_floating_point else None
        if isinstance(module, TABLES):
            return torch.long
        if isinstance(getattr(module, "input_shape", None), tuple):
            return None
    return None


def trace(model: torch.nn.Module, input_shape: Shape | None, runs_as: RunsAs, refuse: Refuse) -> Program:
    """The program of ``model`` for examples of this shape.

    Args:
        model: a module that torch.fx can trace.
        input_shape: shape of one example; by default that of the model's BoundedInput.
        runs_as: for a layer that is one operation, the class whose forward it runs; ``None``: it is traced into.
        refuse: an objection to a layer that reads activations, or ``None``.
    """
    shape = find_input_shape(model) if input_shape is None else tuple(input_shape)
    if shape is None:
        raise ConfigurationError(
            "the shape of the model's input is unknown. Start the model with lipdp.nn.BoundedInput(shape, norm=…), or pass "
            "input_shape= (the shape of one example, without the batch dimension)."
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if runs_as(model) is not None:  # a bare layer: give it a graph of its own
        model = torch.nn.Sequential(model)
    modules = dict(model.named_modules())
    refuse_hidden_changes(modules)
    with _same_attributes(modules):
        with undisturbed(model), torch.enable_grad():
            graph = trace_graph(model, lambda m: runs_as(m) is not None, _ADVICE)
            again = graph if _is_ours(model, runs_as) else trace_graph(model, lambda m: runs_as(m) is not None, _ADVICE)
        _refuse_kept(modules)
        refuse_random(model, graph, again)
        required = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
        if len(required) != 1:
            raise UnsupportedError(
                f"{type(model).__name__}.forward takes {len(required)} inputs; the calculus handles models of one input tensor."
            )
        dtype = _input_dtype(model, modules, graph)
        reading = read(model, modules, graph, required[0], shape, dtype, refuse)
    return Program(model, modules, graph, names, reading, shape, dtype, runs_as)


def _is_ours(module: torch.nn.Module, runs_as: RunsAs) -> bool:
    """Whether nobody's Python but torch's and this library's runs down to the layers: it does the same each time."""
    if runs_as(module) is not None:
        return True
    cls = type(module)
    homes = cls.__module__, cls.forward.__module__, cls.__call__.__module__
    plain = all(home.startswith(("lipdp.", "torch.nn.modules.")) for home in homes) and "forward" not in vars(module)
    return plain and all(_is_ours(child, runs_as) for child in module.children())


def _refuse_kept(modules: dict[str, torch.nn.Module]) -> None:
    """A forward that makes a buffer of an activation would keep data in the model."""
    for name, module in modules.items():
        for key, value in (*module._buffers.items(), *module._parameters.items()):
            if isinstance(value, fx.Proxy):
                raise UnsupportedError(
                    f"the forward pass keeps an activation as '{key}' of a {type(module).__name__} ('{name}'): state that is "
                    "made from the data is a release that nothing accounts for. Remove it."
                )


@contextmanager
def _same_attributes(modules: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Take off what a trace leaves on modules: torch.fx's constants, and stand-ins that ``forward`` kept."""
    before = [(module, {name: _shallow(value) for name, value in vars(module).items()}) for module in modules.values()]
    try:
        yield
    finally:
        for module, attributes in before:
            present = vars(module)
            for name in [name for name in present if name not in attributes]:
                del present[name]
            for name, (value, items) in attributes.items():
                if isinstance(value, dict) and (len(value) != len(items) or any(value.get(k) is not v for k, v in items.items())):
                    value.clear()
                    value.update(items)
                present[name] = value


def _shallow(value: Any) -> tuple[Any, dict[Any, Any]]:
    return value, dict(value) if isinstance(value, dict) else {}


def _input_dtype(model: torch.nn.Module, modules: dict[str, torch.nn.Module], graph: fx.Graph) -> torch.dtype:
    """The dtype of the examples that shapes are found with: integers if the graph looks them up in a table."""
    reached = {next(node for node in graph.nodes if node.op == "placeholder")}
    for node in graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            module = modules[str(node.target)] if node.op == "call_module" else None
            if isinstance(module, TABLES) or node.target in _LOOKUPS:
                return getattr(module, "input_dtype", torch.long)
            declared = getattr(module, "input_dtype", None)
            if isinstance(declared, torch.dtype):
                return declared
            reached.add(node)
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.zeros(()))
    return like.dtype
