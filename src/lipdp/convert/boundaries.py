"""An ordinary network as it is: between boundaries, so that sensitivities are proved though nothing constrains its weights; or with
normalisation of every example alone in the place of batch normalisation, so that clipping methods can train it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lipdp import nn
from lipdp._checks import whole
from lipdp.convert.twin import Row
from lipdp.errors import ConfigurationError

Weighted = torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.ConvTranspose2d
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


def between_boundaries(
    model: torch.nn.Module,
    input_shape: Sequence[int],
    *,
    clip: float,
    conv_clip: float | None = None,
    floor: float = 0.05,
) -> nn.Sequential:
    """A copy of an ordinary network in which every dense layer and convolution stands between two boundaries.

    What enters a layer is scaled to norm 1, and the cotangent of what leaves it is clipped: Δ = C for a dense layer, whatever its
    weights are, and √m·C for a convolution, m being the largest number of windows that one entry lies in. Activations, pools,
    residual sums and normalisations stay as they are: the clips keep their slopes away from every Δ. So nothing is lost on
    the way through the network, as it is with constrained weights: each dense layer reaches its bound, and convolutions lose
    only what their positions cancel of each other.

    Gradients are then those of another direction field than the loss's, as with any clip, and a layer no longer sees how long its
    inputs were. There is no useful certificate of robustness, since weights are free.

    Biases are left out, and so are the scales and shifts of normalisations: their gradients have bounds like those of the
    weights, and use less of them.

    Args:
        model: a module of torch's layers, which torch.fx can trace; it is left as it is.
        input_shape: shape of one example.
        clip: C of dense layers.
        conv_clip: C of convolutions; ``clip`` by default.
        floor: activations of a smaller norm than this are not scaled all the way to 1, see :class:`lipdp.nn.Boundary`.

    Returns:
        The network, behind a :class:`lipdp.nn.BoundedInput` that tells :func:`lipdp.plan` the input's shape.

    Example:
        >>> import torch, lipdp
        >>> from lipdp import losses
        >>> from lipdp.convert import between_boundaries
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
        >>> bounded = between_boundaries(net, (4,), clip=0.2)
        >>> lipdp.sensitivities(bounded, losses.CrossEntropy())
        {'network.0.layer.weight': 0.2, 'network.2.layer.weight': 0.2}
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"between_boundaries takes a torch.nn.Module, not {type(model).__name__}")
    bounds = _Bounds(clip, clip if conv_clip is None else conv_clip, floor)
    network = bounds.around(copy.deepcopy(model))
    return nn.Sequential(OrderedDict(input=nn.BoundedInput(input_shape, mode="sphere"), network=network))


class _Bounds:
    """The walk over the modules."""

    def __init__(self, clip: float, conv_clip: float, floor: float) -> None:
        self.clip, self.conv_clip, self.floor = clip, conv_clip, floor
        self.replaced: dict[torch.nn.Module, torch.nn.Module] = {}  # a layer that is used in two places stays one layer

    def around(self, module: torch.nn.Module) -> torch.nn.Module:
        """What takes the module's place."""
        if module not in self.replaced:
            self.replaced[module] = self._replaced(module)
        return self.replaced[module]

    def _replaced(self, module: torch.nn.Module) -> torch.nn.Module:
        if isinstance(module, Weighted):
            clip = self.clip if isinstance(module, torch.nn.Linear) else self.conv_clip
            module.bias = None
            scale, stop = nn.Boundary(norm=1.0, floor=self.floor), nn.Boundary(cotangent=clip)
            return torch.nn.Sequential(OrderedDict(scale=scale, layer=module, clip=stop))
        if isinstance(module, _NORMS):
            # As the layers write it down themselves where they are made without.
            module.register_parameter("weight", None)
            if hasattr(module, "bias"):
                module.register_parameter("bias", None)
            return module
        if type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
            return module  # attention and its like read the weights of their parts; the calculus says what it can't bound
        for name, child in list(module.named_children()):
            setattr(module, name, self.around(child))
        return module


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
    whole("groups", groups)
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
