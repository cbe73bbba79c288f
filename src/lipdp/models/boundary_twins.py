"""Conventional networks between boundaries: sensitivities are proved, and no weight has a constraint.

Each is the twin of the same name in :mod:`lipdp.models.plain_twins`, through :func:`lipdp.convert.between_boundaries`: what a layer
gets is scaled to norm 1, and the cotangent of what it gives is clipped. The logits start at zero.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lipdp import nn
from lipdp.models import plain_twins
from lipdp.models.registry import Builder, register

__all__ = ["boundary_twin"]

TWINS: dict[str, Builder] = {
    "dense": plain_twins.plain_dense,
    "lenet": plain_twins.plain_lenet,
    "vgg": plain_twins.plain_vgg,
    "resnet": plain_twins.plain_resnet,
    "mixer": plain_twins.plain_mixer,
}
_CLIP, _CONV_CLIP = 0.2, 0.05


def boundary_twin(
    plain: Builder,
    input_shape: tuple[int, ...],
    classes: int,
    *,
    clip: float = _CLIP,
    conv_clip: float = _CONV_CLIP,
    **options: Any,
) -> nn.Sequential:
    """A conventional network between boundaries.

    Args:
        plain: makes it.
        input_shape: shape of one example.
        classes: number of outputs.
        clip: bound on the norm of cotangents where they reach a dense layer's output: its Δ.
        conv_clip: the same for convolutions, whose Δ is √m times as large, m being the number of windows an entry lies in.
        options: of the network.
    """
    from lipdp.convert import between_boundaries  # it knows the layers and the models that they make

    network = plain(input_shape, classes, **options)
    logits = [module for module in network.modules() if isinstance(module, torch.nn.Linear)][-1]
    torch.nn.init.zeros_(logits.weight)
    return between_boundaries(network, input_shape, clip=clip, conv_clip=conv_clip)


def _register(name: str, plain: Builder) -> None:
    def build(input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Sequential:
        return boundary_twin(plain, input_shape, classes, **options)

    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation="float")
        for name, value in (("clip", _CLIP), ("conv_clip", _CONV_CLIP))
    ]
    signature = inspect.signature(plain)
    build.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])  # type: ignore[attr-defined]
    build.__doc__ = f"`plain-{name}` with every layer between boundaries: inputs of norm 1, cotangents clipped; Δ is proved."
    register(f"boundary-{name}")(build)


for _name, _plain in TWINS.items():
    _register(_name, _plain)
