"""VGG-like networks of Lipschitz layers: 5, 8 or 11 layers with weights."""

from __future__ import annotations

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.models.mlp import InputMode, head, stem
from lipdp.models.registry import register

__all__ = ["vgg", "vgg5", "vgg8", "vgg11"]

# Output channels of the convolutions of each stage, at width 64; a 2×2 pool behind each stage. Dense layers follow.
STAGES: dict[int, tuple[tuple[int, ...], ...]] = {
    5: ((64,), (128,), (256,)),
    8: ((64,), (128, 128), (256, 256)),
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
}
DENSE = {5: 1, 8: 2, 11: 2}  # hidden dense layers


@register("vgg")
def vgg(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 5,
    width: int = 64,
    hidden: int = 128,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """3×3 convolutions with GroupSort, an L2-norm pool behind each stage, dense layers: every Δ is G·X.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        depth: 5, 8 or 11 layers with weights.
        width: channels of the first stage (even); later ones are wider as in VGG.
        hidden: width of the hidden dense layers (even).
        input_norm: norm of the inputs.
        input_mode: "sphere" or "ball".
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    if depth not in STAGES:
        raise ConfigurationError(f"there is VGG with depth 5, 8 or 11, not {depth}")
    if len(input_shape) != 3 or min(input_shape[1:]) < 2:
        raise ConfigurationError(f"vgg needs images (channels, height, width) of at least 2 pixels a side, not {input_shape}")
    if width < 2 or width % 2 or hidden < 2 or hidden % 2:
        raise ConfigurationError(f"width and hidden must be even (GroupSort sorts pairs), not {width} and {hidden}")
    layers: list[torch.nn.Module] = stem(input_shape, input_norm, input_mode, centre)
    channels, rows, columns = input_shape
    for stage in STAGES[depth]:
        for size in stage:
            layers += [nn.SpectralConv2d(channels, size * width // 64, 3, padding=1, bias=False), nn.GroupSort(2)]
            channels = size * width // 64
        if min(rows, columns) >= 2:  # small images run out of pixels before the deep networks run out of stages
            layers.append(nn.L2NormPool2d(2))
            rows, columns = rows // 2, columns // 2
    layers.append(nn.Flatten())
    features = channels * rows * columns
    for _ in range(DENSE[depth]):
        layers += [nn.SpectralLinear(features, hidden, bias=False), nn.GroupSort(2)]
        features = hidden
    return nn.Sequential(*layers, *head(features, classes, clip))


@register("vgg5")
def vgg5(input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Sequential:
    """:func:`vgg` with 3 convolutions and 2 dense layers."""
    return vgg(input_shape, classes, depth=5, **options)  # type: ignore[arg-type]


@register("vgg8")
def vgg8(input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Sequential:
    """:func:`vgg` with 5 convolutions and 3 dense layers."""
    return vgg(input_shape, classes, depth=8, **options)  # type: ignore[arg-type]


@register("vgg11")
def vgg11(input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Sequential:
    """:func:`vgg` with 8 convolutions and 3 dense layers."""
    return vgg(input_shape, classes, depth=11, **options)  # type: ignore[arg-type]
