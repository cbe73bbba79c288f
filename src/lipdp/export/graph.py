"""Tracing a model, recording shapes, and building a new graph out of an old one: what export, convert and certify share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from lipdp.bounds.bound import Shape
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.program import TABLES, describe, find_input_dtype

__all__ = ["Builder", "Seen", "record", "token_dtype"]

_METADATA = (getattr, "size", "dim", "numel")  # what may be asked of an input of any type


def token_dtype(model: torch.nn.Module, graph: fx.Graph) -> torch.dtype | None:
    """The integer type of the model's input, if it is looked up in a table; a table that something else indexes says nothing."""
    dtype, modules = find_input_dtype(model), dict(model.named_modules())
    reached: set[fx.Node] = set()
    for node in graph.nodes if dtype is not None else ():
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if node.op == "placeholder" or (not reached.isdisjoint(node.all_input_nodes) and node.target not in _METADATA):
            reached.add(node)
            looks_up = isinstance(module, TABLES) or node.target in (F.embedding, F.embedding_bag)
            if looks_up or isinstance(getattr(module, "input_dtype", None), torch.dtype):
                return dtype
    return None


@dataclass(frozen=True)
class Seen:
    """What a node of the graph evaluates to: one example's shape, and the type."""

    shape: Shape
    dtype: torch.dtype


def record(model: torch.nn.Module, graph: fx.Graph, input_shape: Shape, dtype: torch.dtype | None = None) -> dict[fx.Node, Seen]:
    """Run ``graph`` on two examples of zeros and note what every node gives. Nodes that are not tensors are left out.

    ``dtype`` is the type of the zeros, the model's own by default.
    """
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.zeros(()))
    recorder = _Recorder(model, graph)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        recorder.run(torch.zeros(2, *input_shape, dtype=dtype or like.dtype, device=like.device))
    return recorder.seen


class _Recorder(fx.Interpreter):
    def __init__(self, model: torch.nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self.named = dict(model.named_modules())
        self.seen: dict[fx.Node, Seen] = {}

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except LipdpError:
            raise
        except Exception as error:
            source = self.seen.get(n.all_input_nodes[0]) if n.all_input_nodes else None
            got = "" if source is None else f" on examples of shape {source.shape}"
            raise ConfigurationError(f"{describe(n, self.named)} fails{got}: {error}. Is input_shape right?") from error
        if isinstance(value, torch.Tensor):
            self.seen[n] = Seen(tuple(value.shape[1:]), value.dtype)
        return value


class _Appender(fx.proxy.GraphAppendingTracer):
    """Writes the operations on stand-ins into the builder's graph; tensors among their arguments become the new model's."""

    def __init__(self, builder: Builder) -> None:
        super().__init__(builder.graph)
        self.builder = builder

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return self.builder.graph.get_attr(self.builder.place(self.builder.name_of(a), a))
        return super().create_arg(a)


@dataclass
class Builder:
    """A new graph that is written node by node while an old one is read.

    ``env`` maps the old graph's nodes to the new one's; ``targets`` holds the modules and tensors that the new graph uses.
    """

    modules: Mapping[str, torch.nn.Module]
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    targets: dict[str, Any] = field(default_factory=dict)
    site: str = ""  # the old module that is being replaced

    def __post_init__(self) -> None:
        self._tracer = _Appender(self)

    def proxy(self, old: fx.Node) -> torch.Tensor:
        """A stand-in for what ``old`` computes: torch functions applied to it are written into the new graph."""
        return fx.Proxy(self.env[old], self._tracer)  # type: ignore[return-value]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that a replacement uses: its own, if it is one of the old module's."""
        owner = self.modules.get(self.site)
        named = () if owner is None else (*owner.named_parameters(), *owner.named_buffers())
        local = next((name for name, value in named if value is tensor), "constant")
        return f"{self.site}.{local}" if self.site else local

    def place(self, name: str, value: Any) -> str:
        """Put a module or tensor into the new model, under ``name`` or, if that is taken by another one, next to it."""
        unique, count = name, 0
        while unique in self.targets and self.targets[unique] is not value:
            count += 1
            unique = f"{name}_{count}"
        self.targets[unique] = value
        return unique

    def call(self, name: str, module: torch.nn.Module, *arguments: fx.Node) -> fx.Node:
        """``module(*arguments)``."""
        return self.graph.call_module(self.place(name, module), arguments)

    def copy(self, node: fx.Node, owner: torch.nn.Module) -> None:
        """The same operation in the new graph."""
        new = self.graph.node_copy(node, lambda old: self.env[old])
        new.meta.clear()  # it refers to the old classes
        if node.op == "call_module":
            new.target = self.place(str(node.target), self.modules[str(node.target)])
        elif node.op == "get_attr":
            value: Any = owner
            for part in str(node.target).split("."):
                value = getattr(value, part)
            new.target = self.place(str(node.target), value)
        self.env[node] = new

    def finish(self, name: str) -> fx.GraphModule:
        """The new model."""
        self.graph.lint()
        return fx.GraphModule(self.targets, self.graph, name)
