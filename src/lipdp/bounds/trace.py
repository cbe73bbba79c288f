"""From a module to a graph of operations with known shapes, or a refusal that says what can't be analysed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lipdp.bounds.bound import Shape
from lipdp.bounds.registry import has_rule
from lipdp.bounds.way_out import no_rule, way_out
from lipdp.errors import ConfigurationError, LipdpError, UnsupportedError

__all__ = ["TABLES", "Traced", "describe", "find_input_dtype", "find_input_shape", "trace"]

# Two batch sizes, so that a size written into `forward` as a number can't pass for the batch dimension by chance.
_BATCHES = (3, 5)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
# Layers and functions that look token ids up.
TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_LOOKUPS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
# What may be asked of an activation without reading its entries.
_METADATA = {"size", "dim", "ndimension", "numel", "nelement", "shape", "ndim", "dtype", "device", "is_floating_point"}


class _Tracer(fx.Tracer):
    """Stops at every module that has a rule, and at torch's own modules (which are refused later if they have none)."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        if has_rule(m):
            return True
        if isinstance(m, _CONTAINERS) and type(m).forward is getattr(torch.nn, type(m).__name__, type(m)).forward:
            return False
        return type(m).__module__.startswith("torch.nn")


@dataclass(frozen=True)
class Traced:
    """A traced module: its graph, and for every node what it evaluates to (a shape without batch, or a constant)."""

    model: torch.nn.Module
    modules: dict[str, torch.nn.Module]
    graph: fx.Graph
    names: dict[int, str]  # id of a trainable parameter -> its name in the model the caller gave
    shapes: dict[fx.Node, tuple[Shape, ...]]
    constants: dict[fx.Node, Any]
    varying: frozenset[fx.Node]  # constants that change with the batch's size, as x.shape[0] does
    input_dtype: torch.dtype  # of the examples: an integer type for token ids


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


def describe(node: fx.Node, modules: dict[str, torch.nn.Module]) -> str:
    """How an error message names a node of the graph."""
    if node.op == "call_module":
        target = str(node.target)
        return f"layer '{target}' ({type(modules[target]).__name__})"
    stack = node.meta.get("nn_module_stack") or {}
    owner = next(reversed(stack), "") if stack else ""
    place = f" in the forward of '{owner}'" if owner else " in the model's forward"
    if node.op == "call_function":
        name = getattr(node.target, "__name__", str(node.target))
        if name == "fn":  # torch's pools that may return indices are all called so
            name = next((key for key, value in vars(torch.nn.functional).items() if value is node.target), name)
        return f"function '{name}'{place}"
    if node.op == "call_method":
        return f"tensor method '.{node.target}()'{place}"
    return f"{node.op} '{node.target}'"


def trace(model: torch.nn.Module, input_shape: Shape | None = None) -> Traced:
    """Trace ``model`` with torch.fx and evaluate every node's shape on zeros, at two batch sizes."""
    shape = find_input_shape(model) if input_shape is None else tuple(input_shape)
    if shape is None:
        raise ConfigurationError(
            "the shape of the model's input is unknown. Start the model with lipdp.nn.BoundedInput(shape, norm=…), or pass "
            "input_shape= (the shape of one example, without the batch dimension)."
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if has_rule(model):  # a bare layer: give it a graph of its own
        model = torch.nn.Sequential(model)
    attributes = set(vars(model))
    try:
        with _no_custom_backward():
            graph, again = _Tracer().trace(model), _Tracer().trace(model)
        _refuse_random(model, graph, again)
    except LipdpError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} can't be traced by torch.fx: {error}. The calculus needs a forward without "
            "data-dependent control flow. Move such code into a module of its own and give it a rule (lipdp.bounds.rule)."
        ) from error
    modules = dict(model.named_modules())
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    required = [node for node in placeholders if not node.args]
    if len(required) != 1:
        raise UnsupportedError(
            f"{type(model).__name__}.forward takes {len(required)} inputs; the calculus handles models of one input tensor."
        )
    in_place = _refuse_hidden_changes(graph, modules)
    dtype = _input_dtype(model, modules, graph)
    shapes, constants, varying = _evaluate(model, modules, graph, required[0], shape, in_place, dtype)
    for name in set(vars(model)) - attributes:  # torch.fx leaves tensors that `forward` made on the model
        delattr(model, name)
    return Traced(model, modules, graph, names, shapes, constants, varying, dtype)


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


@contextmanager
def _no_custom_backward() -> Iterator[None]:
    """Refuse torch.autograd.Function while tracing: torch.fx would record its forward and lose its own backward."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            raise UnsupportedError(
                f"the autograd function {cls.__name__} has a backward of its own, which the graph does not show and nothing "
                "bounds. Put it into a module and give that module a rule (lipdp.bounds.rule)."
            )
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _refuse_random(model: torch.nn.Module, graph: fx.Graph, again: fx.Graph) -> None:
    """Tracing bakes in what ``forward`` draws or counts in Python; two traces that differ show it."""

    def summary(traced: fx.Graph) -> list[tuple[Any, ...]]:
        index = {node: f"%{i}" for i, node in enumerate(traced.nodes)}
        rows: list[tuple[Any, ...]] = []
        for node in traced.nodes:
            made_here = node.op == "get_attr" and str(node.target).rpartition(".")[2].startswith("_tensor_constant")
            arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: index[n])
            value = operator.attrgetter(str(node.target))(model) if made_here else None
            rows.append((node.op, "" if made_here else str(node.target), repr(arguments), value))
        return rows

    first, second = summary(graph), summary(again)
    for a, b in zip(first, second, strict=False):
        if a[:3] != b[:3] or not _equal(a[3], b[3]):
            raise UnsupportedError(
                f"{type(model).__name__}.forward does something else each time it is traced (at '{a[1] or 'a tensor it makes'}'):"
                " random numbers or a counter. The calculus would take one draw for a constant. Use torch.nn.Dropout for random "
                "masks, or a module with a rule (lipdp.bounds.rule)."
            )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _refuse_hidden_changes(graph: fx.Graph, modules: dict[str, torch.nn.Module]) -> set[fx.Node]:
    """Hooks and torch parametrisations change what a layer computes behind its rule's back; in-place writes likewise.

    Returns the in-place operations that are left: those on the output of a layer that nothing else reads.
    """
    for name, module in modules.items():
        for local, parameter in module.named_parameters(recurse=False):
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UnsupportedError(
                    f"parameter '{local}' of layer '{name}' ({type(module).__name__}) has hooks, which can change its gradient "
                    "behind the bound's back. Remove them."
                )
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(module, hook, None) for hook in hooks):
            raise UnsupportedError(
                f"layer '{name}' ({type(module).__name__}) has hooks, which can change what it computes; its bound would "
                "not be proved. Remove them (old-style weight_norm and spectral_norm are hooks too)."
            )
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
            raise UnsupportedError(
                f"layer '{name}' ({type(module).__name__}) normalises by the statistics of the batch: it mixes examples, so "
                "one example's influence can't be bounded. Use lipdp.nn.LayerCentering or a GroupNorm in its place, or freeze "
                "it: .eval() with public statistics."
            )
        if torch.nn.utils.parametrize.is_parametrized(module):
            raise UnsupportedError(
                f"layer '{name}' uses torch.nn.utils.parametrize: gradients taken through a parametrisation have no known "
                "bound. Use a lipdp.nn layer with a constraint instead."
            )
    found: set[fx.Node] = set()
    for node in graph.nodes:
        in_place = (
            (node.op == "call_module" and getattr(modules[str(node.target)], "inplace", False))
            or (node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"))
            or (node.op == "call_function" and _inplace_argument(node))
            or (node.op == "call_function" and str(getattr(node.target, "__name__", "")).startswith("i") and _is_iop(node))
        )
        if not in_place:
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) > 1:
            raise _in_place_error(node, modules)
        found.add(node)
    return found


def _in_place_error(node: fx.Node, modules: dict[str, torch.nn.Module]) -> UnsupportedError:
    return UnsupportedError(
        f"{describe(node, modules)} works in place on a tensor that something else may read, so the graph does not "
        "say what is computed. Use the version that is not in place (inplace=False)."
    )


def _inplace_argument(node: fx.Node) -> bool:
    """The argument ``inplace`` of a function, by name or by position."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin: no signature, and none of them has this argument
        return bool(node.kwargs.get("inplace", False))
    return bool(bound.arguments.get("inplace", False))


def _is_iop(node: fx.Node) -> bool:
    return node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul)


@contextmanager
def _undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluate without leaving a trace: no gradients, the same random state, the same buffers afterwards."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield
        changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
        for name in changed:
            model.get_buffer(name).copy_(buffers[name])
        if changed:
            raise UnsupportedError(
                f"the forward pass changes the buffer '{changed[0]}' of {type(model).__name__}: state that is updated from "
                "the data is a release that nothing accounts for. Make it constant, or remove it."
            )


def _evaluate(
    model: torch.nn.Module,
    modules: dict[str, torch.nn.Module],
    graph: fx.Graph,
    placeholder: fx.Node,
    input_shape: Shape,
    in_place: set[fx.Node],
    dtype: torch.dtype,
) -> tuple[dict[fx.Node, tuple[Shape, ...]], dict[fx.Node, Any], frozenset[fx.Node]]:
    """Shapes of the nodes that depend on the input; values of those that do not, and which of these vary with the batch."""
    like = next(iter((*model.parameters(), *model.buffers())), torch.zeros(()))
    depends: set[fx.Node] = {placeholder}
    for node in graph.nodes:
        if any(source in depends for source in node.all_input_nodes):
            depends.add(node)
    shapes: dict[fx.Node, tuple[Shape, ...]] = {}
    constants: dict[fx.Node, Any] = {}
    varying: set[fx.Node] = set()
    with _undisturbed(model):
        for batch in _BATCHES:
            interpreter = _Recorder(model, graph, modules, in_place)
            interpreter.run(torch.zeros(batch, *input_shape, dtype=dtype, device=like.device))
            for node, value in interpreter.values.items():
                if node.op == "output":  # whatever it is, it is made of nodes that are looked at
                    continue
                module = modules.get(str(node.target)) if node.op == "call_module" else None
                if module is not None and node in depends and way_out(module) and not has_rule(module):
                    raise no_rule(describe(node, modules), module)
                parts = value if isinstance(value, tuple | list) else (value,)
                if node not in depends or not parts or not all(isinstance(part, torch.Tensor) for part in parts):
                    if node in depends:
                        _refuse_reading(node, modules, depends, constants)
                    if node in constants and not _equal(constants[node], value):
                        if node not in depends:
                            raise UnsupportedError(
                                f"{describe(node, modules)} gives another constant each time: its bound would be that of one "
                                "draw. Make it constant."
                            )
                        varying.add(node)
                    constants[node] = value
                    continue
                if any(part.ndim == 0 or part.shape[0] != batch for part in parts):
                    got = ", ".join(str(tuple(part.shape)) for part in parts)
                    raise UnsupportedError(
                        f"{describe(node, modules)} gives shape {got} for a batch of {batch}: its first dimension is no "
                        "longer the batch, so examples may be mixed. Keep dimension 0 for the examples."
                    )
                found = tuple(tuple(part.shape[1:]) for part in parts)
                if shapes.setdefault(node, found) != found:
                    raise UnsupportedError(
                        f"{describe(node, modules)} gives one example the shape {shapes[node]} or {found}, depending on how many "
                        "examples the batch has: bounds on one example can't depend on the others. Use fixed sizes, and unsqueeze "
                        "before combining tensors of different rank."
                    )
    return shapes, constants, frozenset(varying)


def _refuse_reading(
    node: fx.Node, modules: dict[str, torch.nn.Module], depends: set[fx.Node], constants: dict[fx.Node, Any]
) -> None:
    """A Python value may come from an activation's shape, never from its entries."""
    sources = [source for source in node.all_input_nodes if source in depends]
    name = node.args[1] if node.target is getattr else node.target
    if name not in _METADATA and not all(source in constants for source in sources):
        raise UnsupportedError(
            f"{describe(node, modules)} turns activations into Python values, which the calculus would take for constants. "
            "Keep to tensor operations that have rules."
        )


class _Recorder(fx.Interpreter):
    """Runs the graph and keeps every node's value; errors name the layer."""

    def __init__(
        self, model: torch.nn.Module, graph: fx.Graph, modules: dict[str, torch.nn.Module], in_place: set[fx.Node]
    ) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.modules_by_name = modules
        self.values: dict[fx.Node, Any] = {}
        self.in_place = in_place

    def _aliased(self, node: fx.Node) -> bool:
        """Whether other values live in the memory that this in-place operation overwrites."""
        source = node.args[0]
        memory = {
            value.untyped_storage().data_ptr()
            for other, value in self.values.items()
            if other is not source and isinstance(value, torch.Tensor)
        }
        return self.values[source].untyped_storage().data_ptr() in memory  # type: ignore[index]

    def run_node(self, n: fx.Node) -> Any:
        if n in self.in_place and self._aliased(n):
            raise _in_place_error(n, self.modules_by_name)
        try:
            self.values[n] = super().run_node(n)
        except LipdpError:
            raise
        except Exception as error:
            shape = n.args[0] if n.args else None
            got = getattr(self.values.get(shape) if isinstance(shape, fx.Node) else None, "shape", None)
            raise ConfigurationError(
                f"{describe(n, self.modules_by_name)} fails on an input of shape {tuple(got) if got else 'unknown'}: {error}"
            ) from error
        return self.values[n]
