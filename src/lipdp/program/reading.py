"""Reading a graph: what every node evaluates to, and whether the graph says all there is to say.

The graph is run on zeros at two batch sizes. Each node is then an activation (a tensor with a row for each example), a constant,
or a number that follows from how many examples there are, which no bound may rest on.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from lipdp._numerics import Undrawn, same_entries
from lipdp.errors import ConfigurationError, LipdpError, UnsupportedError
from lipdp.program.remember import Repeating
from lipdp.program.tracer import IN_PLACE_OPERATORS, describe, line_of

Shape = tuple[int, ...]
Role = Literal["constant", "activation", "sizes", "varying"]
# Two batch sizes, so that a size written into `forward` as a number can't pass for the batch dimension by chance.
_BATCHES = (3, 5)
# What may be asked of an activation without reading its entries, and whether the answer depends on the batch.
_FIXED = {"dim", "ndimension", "ndim", "dtype", "device", "layout", "is_floating_point"}
_COUNTS = {"numel", "nelement", "nbytes"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


@dataclass
class Reading:
    """What the nodes of a graph evaluate to.

    Attributes:
        shapes: for each activation the shapes of its parts, without the batch dimension.
        constants: values of all other nodes.
        varying: those of them that follow from the number of examples, as ``x.shape[0]`` does.
        in_place: operations that write into their first argument, which nothing else reads afterwards.
    """

    shapes: dict[fx.Node, tuple[Shape, ...]] = field(default_factory=dict)
    constants: dict[fx.Node, Any] = field(default_factory=dict)
    varying: set[fx.Node] = field(default_factory=set)
    in_place: frozenset[fx.Node] = frozenset()


def read(
    model: torch.nn.Module,
    modules: dict[str, torch.nn.Module],
    graph: fx.Graph,
    placeholder: fx.Node,
    input_shape: Shape,
    dtype: torch.dtype,
    refuse: Callable[[str, torch.nn.Module], LipdpError | None],
) -> Reading:
    """Evaluate every node; ``refuse`` may object to a layer that reads activations."""
    like = next(iter((*model.parameters(), *model.buffers())), torch.zeros(()))
    reading = Reading(in_place=frozenset(node for node in graph.nodes if _may_write(node, modules)))
    roles: dict[fx.Node, Role] = {}
    with undisturbed(model):
        for batch in _BATCHES:
            recorder = _Recorder(model, graph, modules, reading.in_place)
            with Repeating():
                recorder.run(torch.zeros(batch, *input_shape, dtype=dtype, device=like.device))
            for node, value in recorder.values.items():
                if node.op == "output":  # whatever it is, it is made of nodes that are looked at
                    continue
                if node.op == "call_module" and any(roles[source] == "activation" for source in node.all_input_nodes):
                    objection = refuse(describe(node, modules), modules[str(node.target)])
                    if objection is not None:
                        raise objection
                role = roles[node] = _role(node, value, roles, placeholder, modules)
                if role == "activation":
                    _note_shapes(reading, node, value, batch, modules)
                    continue
                if role != "constant":
                    reading.varying.add(node)
                elif node in reading.constants and not _equal(reading.constants[node], value):
                    raise UnsupportedError(
                        f"{describe(node, modules)} gives another constant each time: its bound would be that of one draw. Make it "
                        "constant."
                    )
                reading.constants[node] = value
    return reading


def _note_shapes(reading: Reading, node: fx.Node, value: Any, batch: int, modules: dict[str, torch.nn.Module]) -> None:
    parts = value if isinstance(value, tuple | list) else (value,)
    if any(part.is_complex() for part in parts):
        raise UnsupportedError(
            f"{describe(node, modules)} gives complex activations ({line_of(node)}); the calculus is one of real numbers. Put the "
            "computation into a module with a rule (lipdp.bounds.rule)."
        )
    if any(part.ndim == 0 or part.shape[0] != batch for part in parts):
        got = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UnsupportedError(
            f"{describe(node, modules)} gives shape {got} for a batch of {batch}: its first dimension is no longer the batch, so "
            "examples may be mixed. Keep dimension 0 for the examples."
        )
    shapes = tuple(tuple(part.shape[1:]) for part in parts)
    if reading.shapes.setdefault(node, shapes) != shapes:
        raise UnsupportedError(
            f"{describe(node, modules)} gives one example the shape {reading.shapes[node]} or {shapes}, depending on how many "
            "examples the batch has: bounds on one example can't depend on the others. Use fixed sizes, and unsqueeze before "
            "combining tensors of different rank."
        )


def _role(node: fx.Node, value: Any, roles: dict[fx.Node, Role], placeholder: fx.Node, modules: dict[str, torch.nn.Module]) -> Role:
    """By where a value comes from, not by what it is: numbers of the batch size may agree at the sizes that are tried."""
    if node is placeholder:
        return "activation"
    given = {roles[source] for source in node.all_input_nodes}
    parts = value if isinstance(value, tuple | list) else (value,)
    tensors = len(parts) > 0 and all(isinstance(part, torch.Tensor) for part in parts)
    if "activation" in given:
        return "activation" if tensors else _metadata(node, value, modules)
    if given <= {"constant"}:
        return "constant"
    if tensors:
        return "activation"  # made to the size of the batch: there is no rule for it, and none can be
    if node.target is operator.getitem and given == {"sizes"}:
        index = node.args[1]
        if isinstance(index, int):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return "varying" if index == 0 or index <= -len(_sizes_length(source)) else "constant"
        if isinstance(index, slice) and isinstance(index.start, int) and index.start > 0 and index.step in (None, 1):
            return "constant"
    return "varying"


def _sizes_length(node: fx.Node) -> tuple[int, ...]:
    """The sizes themselves, as they were read off the tensor."""
    return tuple(node.meta["sizes"])


def _metadata(node: fx.Node, value: Any, modules: dict[str, torch.nn.Module]) -> Role:
    """A Python value may come from an activation's shape, never from its entries."""
    name = node.args[1] if node.target is getattr else node.target
    if name in _FIXED:
        return "constant"
    if name in _COUNTS:
        return "varying"
    if name == "shape" or (name == "size" and isinstance(value, torch.Size)):
        node.meta["sizes"] = tuple(value)
        return "sizes"
    if name == "size" and isinstance(value, int):
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return "constant" if isinstance(dim, int) and (dim > 0 or dim == -1) and _rank(node) > 1 else "varying"
    raise UnsupportedError(
        f"{describe(node, modules)} turns activations into Python values ({line_of(node)}), which the calculus would take for "
        "constants. Keep to tensor operations that have rules."
    )


def _rank(node: fx.Node) -> int:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return int(source.meta["rank"])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def refuse_random(model: torch.nn.Module, graph: fx.Graph, again: fx.Graph) -> None:
    """Tracing bakes in what ``forward`` draws or counts in Python; two traces that differ show it."""

    def summary(traced: fx.Graph) -> list[tuple[Any, ...]]:
        index = {node: f"%{i}" for i, node in enumerate(traced.nodes)}
        rows: list[tuple[Any, ...]] = []
        for node in traced.nodes:
            made_here = node.op == "get_attr" and str(node.target).rpartition(".")[2].startswith("_tensor_constant")
            arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: index[n])
            value = operator.attrgetter(str(node.target))(model) if made_here else None
            rows.append((node.op, "" if made_here else str(node.target), repr(arguments), value, line_of(node)))
        return rows

    first, second = summary(graph), summary(again)
    for a, b in zip(first, second, strict=False):
        if a[:3] != b[:3] or not _equal(a[3], b[3]):
            raise UnsupportedError(
                f"{type(model).__name__}.forward does something else each time it is traced ({a[4]}, at "
                f"'{a[1] or 'a tensor it makes'}'): random numbers or a counter. The calculus would take one draw for a "
                "constant. Use torch.nn.Dropout for random masks, or a module with a rule (lipdp.bounds.rule)."
            )
    if len(first) != len(second):
        raise UnsupportedError(
            f"{type(model).__name__}.forward does something else each time it is traced: {len(first)} operations, then "
            f"{len(second)}. Take out what counts or draws."
        )


def refuse_hidden_changes(modules: dict[str, torch.nn.Module]) -> None:
    """Hooks and torch parametrisations change what a layer computes behind its rule's back."""
    registered = [name for name in _GLOBAL_HOOKS if getattr(torch.nn.modules.module, name)]
    if registered:
        raise UnsupportedError(
            "hooks on all modules are registered (torch.nn.modules.module.register_module_forward_hook and its like), which can "
            "change what every layer computes; no bound would be proved. Remove them."
        )
    for name, module in modules.items():
        for local, parameter in module.named_parameters(recurse=False):
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UnsupportedError(
                    f"parameter '{local}' of layer '{name}' ({type(module).__name__}) has hooks, which can change its gradient "
                    "behind the bound's back. Remove them."
                )
        if any(getattr(module, hook, None) for hook in _HOOKS):
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


def _may_write(node: fx.Node, modules: dict[str, torch.nn.Module]) -> bool:
    """Whether an operation writes into its first argument; one that writes elsewhere is refused."""
    if node.kwargs.get("out") is not None:
        raise _in_place_error(node, modules)
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op == "call_function":
        name = str(getattr(node.target, "__name__", ""))
        return node.target in IN_PLACE_OPERATORS or _inplace_argument(node) or (name.endswith("_") and not name.endswith("__"))
    return False


def _in_place_error(node: fx.Node, modules: dict[str, torch.nn.Module]) -> UnsupportedError:
    return UnsupportedError(
        f"{describe(node, modules)} works in place on a tensor that something else may read ({line_of(node)}), so the graph does "
        "not say what is computed. Use the version that is not in place (inplace=False)."
    )


def _inplace_argument(node: fx.Node) -> bool:
    """The argument ``inplace`` of a function, by name or by position."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin: no signature, and none of them has this argument
        return bool(node.kwargs.get("inplace", False))
    return bool(bound.arguments.get("inplace", False))


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluate without leaving a trace: no gradients, the same random state, the same parameters and buffers afterwards."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    changed: list[str] = []
    devices = {tensor.device for tensor in tensors.values()}
    with torch.no_grad(), Undrawn(*devices):
        try:
            yield
        finally:
            changed = [name for name, kept in before.items() if not _unchanged(tensors[name], kept)]
            for name in changed:
                tensors[name].copy_(before[name])
        if changed:
            kind = "parameter" if isinstance(tensors[changed[0]], torch.nn.Parameter) else "buffer"
            raise UnsupportedError(
                f"the forward pass changes the {kind} '{changed[0]}' of {type(model).__name__}: state that is updated from the "
                "data is a release that nothing accounts for. Make it constant, or remove it."
            )


def _unchanged(present: torch.Tensor, before: torch.Tensor) -> bool:
    same = present.shape == before.shape and present.dtype == before.dtype
    return same and (same_entries(present, before) or _equal(present, before))


class _Recorder(fx.Interpreter):
    """Runs the graph and keeps every node's value; errors name the layer."""

    def __init__(
        self, model: torch.nn.Module, graph: fx.Graph, modules: dict[str, torch.nn.Module], in_place: frozenset[fx.Node]
    ) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.modules_by_name = modules
        self.values: dict[fx.Node, Any] = {}
        self.in_place = in_place
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self._own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if t.numel()}

    def run_node(self, n: fx.Node) -> Any:
        if n in self.in_place and self._seen_elsewhere(n):
            raise _in_place_error(n, self.modules_by_name)
        try:
            value = self.values[n] = super().run_node(n)
        except LipdpError:
            raise
        except Exception as error:
            shape = n.args[0] if n.args else None
            got = getattr(self.values.get(shape) if isinstance(shape, fx.Node) else None, "shape", None)
            raise ConfigurationError(
                f"{describe(n, self.modules_by_name)} fails on an input of shape {tuple(got) if got else 'unknown'}: {error}"
            ) from error
        if isinstance(value, torch.Tensor):
            n.meta["rank"] = value.ndim
        return value

    def _seen_elsewhere(self, node: fx.Node) -> bool:
        """Whether a value that is read later, or one that is not an intermediate result, lives in the memory that is written."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return True
        written = self.values[source]
        if not isinstance(written, torch.Tensor):
            return isinstance(written, list | dict | set)  # x += 1 of a number makes another number
        memory, position = written.untyped_storage().data_ptr(), self._order[node]
        if memory in self._own:
            return True
        for other, value in self.values.items():
            parts = value if isinstance(value, tuple | list) else (value,)
            if not any(isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() == memory for part in parts):
                continue
            later = any(self._order[user] > position for user in other.users)
            if later or other.op in ("placeholder", "get_attr"):
                return True
        return False
