"""From a model with lipdp's layers to a plain torch module with the same outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lipdp.bounds.bound import Shape
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.export.graph import Builder, Seen, record, token_dtype
from lipdp.export.lowering import Lowering, Site, find_lowering
from lipdp.program import TABLES, describe, find_input_shape, trace_graph

__all__ = ["check_same", "export", "lower"]

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
    made: dict[tuple[str, Shape | None], torch.nn.Module] = {}  # a layer used twice at one size is one module
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
        if key in made:
            builder.env[node] = builder.call(key[0], made[key], *(builder.env[source] for source in node.args))
            continue
        dtype = like if known[0] is None else known[0].dtype
        builder.site = key[0]
        result: Any = rule(layer, Site(where, tuple(builder.proxy(source) for source in node.args), shapes, dtype))
        if isinstance(result, fx.Proxy):
            builder.env[node] = result.node
        elif isinstance(result, torch.nn.Module):
            made[key] = result
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
