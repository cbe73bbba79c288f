"""Models without lipdp: plain torch modules with the same outputs.

A layer says itself how it is written in plain torch::

    @lowering(MyLayer)
    def _my_layer(layer: MyLayer, site: Site) -> torch.Tensor:
        return torch.relu(site.x) * layer.factor     # recorded by torch.fx; layer.factor becomes a constant

    lowering(MyOther)(as_computed)     # of a layer whose forward is its own ``computed(x, dtype)``, where that can be recorded

A layer with weights answers with the torch.nn module that does the same; it takes the layer's place, and its name::

    @lowering(MyLinear)
    def _my_linear(layer: MyLinear, site: Site) -> torch.nn.Module:
        return placed(torch.nn.Linear(layer.in_features, layer.out_features, device="meta"), layer)

Recording shapes, and building a new graph out of an old one (:class:`Builder`), is what export, convert and certify share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx
from torch.nn import functional as F

from lipdp._numerics import Undrawn
from lipdp.behaviour import ByClass, entered
from lipdp.bounds.calculus import Shape
from lipdp.errors import ConfigurationError, LipdpError, UnsupportedError
from lipdp.program import TABLES, describe, find_input_dtype, find_input_shape, trace_graph

__all__ = ["Site", "export", "lowering"]


@dataclass(frozen=True)
class Site:
    """One call of a layer, as a lowering sees it.

    Attributes:
        where: how messages name the layer.
        inputs: stand-ins for the layer's tensor arguments: torch functions and methods applied to them are recorded.
        shapes: the shape of one example of each, or ``None`` where the model's input shape is not known.
        dtype: of the first input.
    """

    where: str
    inputs: tuple[torch.Tensor, ...]
    shapes: tuple[Shape | None, ...]
    dtype: torch.dtype

    @property
    def x(self) -> torch.Tensor:
        """The first input."""
        return self.inputs[0]

    @property
    def shape(self) -> Shape:
        """One example's shape of the first input, which must be known."""
        shape = self.shapes[0]
        if shape is None:
            raise ConfigurationError(
                f"{self.where} is exported for one size of input, and the model's input shape is unknown. Pass input_shape= "
                "(the shape of one example), or start the model with lipdp.nn.BoundedInput."
            )
        return shape


Lowering = Callable[[Any, Site], "torch.nn.Module | torch.Tensor"]
L = TypeVar("L", bound=Lowering)
_lowerings: ByClass[Lowering] = ByClass()


def lowering(*classes: type[torch.nn.Module]) -> Callable[[L], L]:
    """Register the decorated function as the lowering of these classes, and of subclasses with the same forward."""

    return entered(_lowerings, *classes)


def as_computed(layer: Any, site: Site) -> torch.Tensor:
    """The lowering of a layer that says in ``computed(x, dtype)``, in torch functions alone, what its forward computes with."""
    y: torch.Tensor = layer.computed(site.x, site.dtype)
    return y


# The lowering of a module's class or nearest base class that computes the same, see :mod:`lipdp.behaviour`.
find_lowering = _lowerings.find


P = TypeVar("P", bound=torch.nn.Module)


def used_weight(layer: torch.nn.Module, name: str = "weight") -> torch.Tensor:
    """The weight that ``layer`` computes with: W = π(θ) where it is reparametrised, the parameter itself elsewhere."""
    effective: Callable[[str], torch.Tensor] | None = getattr(layer, "effective", None)
    value: torch.Tensor = getattr(layer, name) if effective is None else effective(name)
    return value


def placed(plain: P, layer: torch.nn.Module, scale: float | None = None) -> P:
    """``plain`` with the layer's weight, times ``scale``, and bias. What is not changed is the same object: ties stay tied."""
    stored: torch.nn.Parameter | None = getattr(layer, "weight", None)
    if stored is not None:
        weight = used_weight(layer)
        if scale is not None:
            weight = weight.detach() * scale
        if weight is not stored:
            weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=stored.requires_grad)
        plain.register_parameter("weight", weight)
    if hasattr(layer, "bias"):
        plain.register_parameter("bias", layer.bias)  # type: ignore[arg-type]
    return plain


def widened(site: Site) -> torch.Tensor:
    """The first input in float32 or better."""
    wide = torch.promote_types(site.dtype, torch.float32)
    return site.x if wide == site.dtype else site.x.to(wide)


def narrowed(y: torch.Tensor, site: Site) -> torch.Tensor:
    """Back in the first input's own type."""
    return y if torch.promote_types(site.dtype, torch.float32) == site.dtype else y.to(site.dtype)


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
    with torch.no_grad(), Undrawn():
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


_ADVICE = (
    "Exporting needs a forward without data-dependent control flow; a layer that has it can say what it computes in plain torch "
    "operations (from lipdp.export import lowering)."
)


def export(model: torch.nn.Module, *, input_shape: Sequence[int] | None = None) -> fx.GraphModule:
    """A plain torch module with the outputs that ``model`` has in evaluation mode, and no lipdp in it.

    The graph of the model is traced, and each layer of lipdp is replaced by torch's own modules and functions: a
    SpectralLinear by a torch.nn.Linear of the same name and weights, a SpectralConv2d by a torch.nn.Conv2d that holds the
    kernel Θ/√m, a GroupSort by a maximum and a minimum. The result is independent of ``model``, takes any batch size,
    and can be pickled, saved by torch.export and read where lipdp is not installed. It works in the type (float32 …) that
    ``model`` has now. It is checked on random inputs before
    it is returned.

    What is lost: cotangent clipping (ClipGradient is the identity going forward) and the constraints. Training the result
    further is neither private nor Lipschitz.

    Args:
        model: a module that torch.fx can trace.
        input_shape: shape of one example, where no BoundedInput says it. Convolutions are exported for this size.

    Example:
        >>> import torch, lipdp
        >>> from lipdp import nn
        >>> model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 6), nn.GroupSort(2), nn.SpectralLinear(6, 3))
        >>> plain = model.export()
        >>> sorted({type(module).__module__.split(".")[0] for module in plain.modules()})
        ['torch']
        >>> bool(torch.allclose(plain(torch.ones(5, 4)), model(torch.ones(5, 4)), atol=1e-6))
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"export takes a torch.nn.Module, not {type(model).__name__}")
    name = type(model).__name__
    own = copy.deepcopy(model).eval()
    if find_lowering(own) is not None:  # a bare layer
        own = torch.nn.Sequential(own)
    shape = find_input_shape(model) if input_shape is None else tuple(int(size) for size in input_shape)
    graph = trace_graph(own, lambda module: find_lowering(module) is not None, _ADVICE)
    tokens = token_dtype(own, graph)
    seen = {} if shape is None else record(own, graph, shape, tokens)
    plain = lower(own, graph, seen, find_lowering, name)
    _refuse_lipdp(plain)
    plain.eval()
    if shape is not None:
        check_same(own, plain, shape, tokens)
    return plain


def lower(
    model: torch.nn.Module,
    graph: fx.Graph,
    seen: Mapping[fx.Node, Seen],
    choose: Callable[[torch.nn.Module], Lowering | None],
    name: str,
) -> fx.GraphModule:
    """``model`` with every layer replaced for which ``choose`` gives a lowering."""
    modules = dict(model.named_modules())
    like = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    builder = Builder(modules)
    lowered: dict[tuple[str, Shape | None], torch.nn.Module] = {}  # a layer used twice at one size is one module
    for node in graph.nodes:
        rule = choose(modules[str(node.target)]) if node.op == "call_module" else None
        if rule is None:
            builder.copy(node, model)
            continue
        layer, where = modules[str(node.target)], describe(node, modules)
        if node.kwargs or not all(isinstance(argument, fx.Node) for argument in node.args):
            raise UnsupportedError(f"{where} is called with arguments by name or constants; pass it tensors, by position.")
        known = [seen.get(source) for source in node.args]
        shapes = tuple(None if entry is None else entry.shape for entry in known)
        key = (str(node.target), shapes[0])
        if key in lowered:
            builder.env[node] = builder.call(key[0], lowered[key], *(builder.env[source] for source in node.args))
            continue
        dtype = like if known[0] is None else known[0].dtype
        builder.site = key[0]
        result: Any = rule(layer, Site(where, tuple(builder.proxy(source) for source in node.args), shapes, dtype))
        if isinstance(result, fx.Proxy):
            builder.env[node] = result.node
        elif isinstance(result, torch.nn.Module):
            lowered[key] = result
            builder.env[node] = builder.call(key[0], result, *(builder.env[source] for source in node.args))
        else:
            raise UnsupportedError(f"the lowering of {where} gave a {type(result).__name__}, not a module or its output")
    return builder.finish(name)


def _refuse_lipdp(plain: fx.GraphModule) -> None:
    """Everything that is left must live without lipdp."""
    for name, module in plain.named_modules():
        if "lipdp" in type(module).__module__:
            raise UnsupportedError(
                f"layer '{name}' ({type(module).__name__}) does not say what it is in plain torch: register a lowering for its "
                "class (from lipdp.export import lowering)."
            )
    for node in plain.graph.nodes:
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("lipdp"):
            raise UnsupportedError(f"the model calls lipdp's function '{node.target.__name__}', which can't be exported")


def check_same(model: torch.nn.Module, plain: fx.GraphModule, shape: Shape, tokens: torch.dtype | None = None) -> None:
    """Refuse a lowered module whose outputs on random inputs differ from the model's by more than rounding explains.

    ``tokens`` is the integer type of the inputs, if they are integers.
    """
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    if tokens is None:
        x = torch.randn(3, *shape, generator=generator).to(like)
    else:
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, TABLES)]
        x = torch.randint(min(sizes, default=1), (3, *shape), generator=generator, dtype=tokens).to(like.device)
    with torch.no_grad():
        expected, got = model(x), plain(x)
    if not isinstance(expected, torch.Tensor):
        return
    scale = max(1.0, float(expected.nan_to_num().abs().max())) if expected.numel() else 1.0
    if not torch.allclose(expected, got, rtol=0.0, atol=max(1e-6, 16 * torch.finfo(expected.dtype).eps) * scale, equal_nan=True):
        worst = float((expected - got).abs().max())
        raise UnsupportedError(
            f"in plain torch the model's outputs differ by {worst:.2g}: a lowering is wrong, or the forward depends on something "
            "that torch.fx does not record. Look at the lowerings (from lipdp.export import lowering) that are not lipdp's own."
        )
