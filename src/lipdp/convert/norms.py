"""Normalisation over the batch, replaced by one that treats every example alone, so that clipping methods can train the network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lipdp.convert.twin import Row
from lipdp.errors import ConfigurationError

__all__ = ["NormReport", "Renormed", "per_example_norms"]

_BATCH = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
_INSTANCE = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
_GROUPS, _CHANNELS = 32, 4  # at most so many groups, of at least so many channels: one number alone has no variance


@dataclass(frozen=True)
class NormReport:
    """What was replaced, in the order of the model's modules.

    Attributes:
        rows: one for each layer that was replaced; none if nothing normalises over the batch.
    """

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        if not self.rows:
            return "nothing normalises over the batch: the model is as it was"
        width, before = (max(len(getattr(row, name)) for row in self.rows) for name in ("where", "before"))
        return "\n".join(f"{row.where:<{width}}  {row.before:<{before}}  →  {row.after}" for row in self.rows)


@dataclass(frozen=True)
class Renormed:
    """A copy of the model whose examples don't mix, and what was replaced. Unpacks as ``model, report = per_example_norms(…)``.

    Attributes:
        model: the copy.
        report: what was replaced in it.
    """

    model: torch.nn.Module
    report: NormReport

    def __iter__(self) -> Iterator[object]:
        return iter((self.model, self.report))


def per_example_norms(model: torch.nn.Module, groups: int = _GROUPS) -> Renormed:
    """A copy of ``model`` in which no layer uses statistics of the batch.

    BatchNorm becomes GroupNorm of the same channels, scale and shift, with as many groups of four channels or more as divide
    them, ``groups`` at most; its running statistics are dropped, so a trained network has to be trained on. InstanceNorm keeps no
    running statistics.

    Args:
        model: any model; it stays as it is.
        groups: of channels, at most.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> print(per_example_norms(network).report)
        1  BatchNorm2d(8)  →  GroupNorm(2, 8)
    """
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ConfigurationError(f"groups must be a whole number of at least 1, not {groups!r}")
    for name, layer in model.named_modules():
        if any(map(torch.nn.parameter.is_lazy, (*layer.parameters(recurse=False), *layer.buffers(recurse=False)))):
            raise ConfigurationError(f"layer '{name}' ({type(layer).__name__}) is not initialised yet. Run one forward pass first.")
    changed = copy.deepcopy(model)
    rows: list[Row] = []
    replaced: dict[int, torch.nn.Module] = {}  # a layer that is used twice stays one layer
    for name, layer in list(changed.named_modules()):
        new = _replacement(layer, groups)
        if new is not None:
            replaced[id(layer)] = new
            rows.append(Row(name or "the model", _short(layer), "replaced", _short(new)))
    for parent in list(changed.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in replaced:
                parent._modules[name] = replaced[id(child)]
    return Renormed(replaced.get(id(changed), changed), NormReport(tuple(rows)))


def _replacement(layer: torch.nn.Module, groups: int) -> torch.nn.Module | None:
    if isinstance(layer, _BATCH):
        channels = layer.num_features
        most = max(1, min(groups, channels // _CHANNELS))
        count = max(k for k in range(1, most + 1) if channels % k == 0)
        new: torch.nn.Module = torch.nn.GroupNorm(count, channels, layer.eps, layer.affine)
    elif isinstance(layer, _INSTANCE) and layer.track_running_stats:
        new = type(layer)(layer.num_features, layer.eps, affine=layer.affine)
    else:
        return None
    like = next((t for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()), None)
    if like is not None:
        new.to(like.device, like.dtype)
    if layer.affine:  # the very parameters, so that what refers to them (another layer, a frozen one) still does
        new.weight, new.bias = layer.weight, layer.bias
    return new.train(layer.training)


def _short(layer: torch.nn.Module) -> str:
    if isinstance(layer, torch.nn.GroupNorm):
        return f"GroupNorm({layer.num_groups}, {layer.num_channels})"
    return f"{type(layer).__name__}({getattr(layer, 'num_features', '')})"
