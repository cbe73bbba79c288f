"""Networks on blocks of fixed features (patches, scattering): a front that needs no privacy, and a head between boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from lipdp import nn
from lipdp.models.feature_blocks import Centre, PatchBlock, ScatteringBlock, feature_front
from lipdp.models.heads import hidden_layers, logit_layers
from lipdp.models.registry import register
from lipdp.models.straighten import Straightening

__all__ = ["BlockOptions", "patches_linear", "patches_mlp"]


class BlockOptions(TypedDict, total=False):
    """The arguments of :func:`~lipdp.models.feature_blocks.feature_front`."""

    blocks: Sequence[PatchBlock | ScatteringBlock | Mapping[str, Any]]
    centre: Centre
    radius: float
    input_mode: Literal["ball", "sphere"]
    straighten: Straightening
    relu: int


@register("patches-linear")
def patches_linear(
    input_shape: tuple[int, ...], classes: int, *, clip: float | None = 0.3, normalise: bool = False, **front: Unpack[BlockOptions]
) -> nn.Sequential:
    """A linear layer, from zero and without constraints, on features of patches: Δ = clip.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        clip: bound on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        normalise: bring the logits' gradients to norm C instead of only shortening long ones.
        front: see :func:`~lipdp.models.feature_blocks.feature_front`.
    """
    layers, features = feature_front(input_shape, **front)
    return nn.Sequential(*layers, *logit_layers(features, classes, clip, normalise))


@register("patches-mlp")
def patches_mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (512,),
    clip: float | None = 0.2,
    hidden_clip: float | None = 0.2,
    normalise: bool = False,
    init: float = 1.0,
    **front: Unpack[BlockOptions],
) -> nn.Sequential:
    """`patches-linear` with hidden ReLU layers, each between boundaries: Δ = hidden_clip for theirs, clip for the last.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        hidden: widths of the hidden layers.
        clip: bound on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        hidden_clip: bound on the norm of the gradient at the outputs of hidden layers, before their ReLU; ``None`` likewise.
        normalise: bring both to these norms instead of only shortening long ones.
        init: standard deviation of the hidden layers' first weights.
        front: see :func:`~lipdp.models.feature_blocks.feature_front`.
    """
    layers, features = feature_front(input_shape, **front)
    between, width = hidden_layers(features, hidden, hidden_clip, normalise, init)
    return nn.Sequential(*layers, *between, *logit_layers(width, classes, clip, normalise))
