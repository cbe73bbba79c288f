"""A pass over a proved program: neighbouring layers that are faster as one function run as one.

The graph, its bounds and its digest stay those of the layers; only what is *called* changes. A layer says by :func:`stage` what it
does to pairs of channels and to windows (:mod:`lipdp._pairs`). A sorting layer and the pooling layer that alone reads it become one
function; the other stages one each. Convolutions on CUDA get their images in channels-last memory, in which pairs are neighbours.
:func:`lipdp.program.check_program` compares the result with the module, so what was fused wrongly is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx

from lipdp._pairs import Pooling, sorted_pool

__all__ = ["Fused", "Pooling", "Stage", "channels_last", "fusions", "stage"]

L = TypeVar("L", bound=torch.nn.Module)


@dataclass(frozen=True)
class Stage:
    """What a layer does, in the words of :func:`lipdp._pairs.sorted_pool`.

    Attributes:
        dim: along which pairs are sorted; ``None``: they are not.
        pool: the windows whose norms are taken; ``None``: none.
    """

    dim: int | None = None
    pool: Pooling | None = None


@dataclass(frozen=True)
class Fused:
    """One call for the nodes ``inside`` it; it reads what the first of them reads, and gives what the last gives."""

    function: Callable[[torch.Tensor], torch.Tensor]
    source: fx.Node
    inside: tuple[fx.Node, ...]


_stages: dict[type[torch.nn.Module], Callable[[Any], Stage | None]] = {}


def stage(*classes: type[L]) -> Callable[[Callable[[L], Stage | None]], Callable[[L], Stage | None]]:
    """Registers for exactly these classes what a layer's forward is, or that it is no stage as it is set."""

    def register(function: Callable[[L], Stage | None]) -> Callable[[L], Stage | None]:
        for cls in classes:
            _stages[cls] = function
        return function

    return register


def fusions(
    graph: fx.Graph,
    layer_of: Callable[[fx.Node], tuple[torch.nn.Module, type[torch.nn.Module]] | None],
    ranks: Mapping[fx.Node, int],
) -> dict[fx.Node, Fused]:
    """By its last node, every call that stands for one layer or for two.

    Args:
        graph: the program's.
        layer_of: a node's layer and the class that it runs as; ``None`` for other operations.
        ranks: dimensions of each activation, the batch's included.
    """
    fused: dict[fx.Node, Fused] = {}
    for node in graph.nodes:
        own = _stage_of(node, layer_of)
        if own is None or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            continue
        source, rank = node.args[0], ranks.get(node.args[0], 0)
        before = fused.get(source)
        if (
            own.pool is not None
            and before is not None
            and len(source.users) == 1
            and rank == 4
            and _sorts_channels(source, layer_of)
        ):
            del fused[source]
            fused[node] = Fused(partial(sorted_pool, sort=True, pool=own.pool), before.source, (*before.inside, node))
        elif own.pool is not None and rank == 4:
            fused[node] = Fused(partial(sorted_pool, sort=False, pool=own.pool), source, (node,))
        elif own.dim is not None and rank >= 2 and own.dim % rank in (1, rank - 1):
            function = partial(sorted_pool, sort=True) if own.dim % rank == 1 else _sort_features
            fused[node] = Fused(function, source, (node,))
    return fused


def _stage_of(node: fx.Node, layer_of: Callable[[fx.Node], tuple[torch.nn.Module, type[torch.nn.Module]] | None]) -> Stage | None:
    layer = layer_of(node)
    return None if layer is None or layer[1] not in _stages else _stages[layer[1]](layer[0])


def _sorts_channels(node: fx.Node, layer_of: Callable[[fx.Node], tuple[torch.nn.Module, type[torch.nn.Module]] | None]) -> bool:
    own = _stage_of(node, layer_of)
    return own is not None and own.pool is None and own.dim is not None and own.dim % 4 == 1


def _sort_features(x: torch.Tensor) -> torch.Tensor:
    """Pairs along the last dimension: those of rows."""
    return sorted_pool(x.reshape(-1, x.shape[-1]), sort=True).reshape(x.shape)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Images on CUDA with their channels side by side; all else as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.device.type == "cuda" and x.ndim == 4 else x
