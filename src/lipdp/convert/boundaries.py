"""An ordinary network between boundaries: sensitivities are proved though nothing constrains its weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError

__all__ = ["between_boundaries"]

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
        self.made: dict[torch.nn.Module, torch.nn.Module] = {}  # a layer that is used in two places stays one layer

    def around(self, module: torch.nn.Module) -> torch.nn.Module:
        """What takes the module's place."""
        if module not in self.made:
            self.made[module] = self._replaced(module)
        return self.made[module]

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
