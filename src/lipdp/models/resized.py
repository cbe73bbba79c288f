"""Any image model at another resolution: the input is resized first."""

from __future__ import annotations

from typing import Any

import torch

from lipdp.errors import ConfigurationError
from lipdp.models.registry import create, register

__all__ = ["resized"]


@register("resized")
def resized(input_shape: tuple[int, ...], classes: int, *, side: int, model: str, **options: Any) -> torch.nn.Sequential:
    """The named model on images brought to ``side`` × ``side`` pixels, bilinearly: any dataset at any resolution."""
    if len(input_shape) != 3:
        raise ConfigurationError(f"resized needs images (channels, height, width), not {input_shape}")
    if isinstance(side, bool) or not isinstance(side, int) or side < 1:
        raise ConfigurationError(f"side must be a whole number of at least 1, not {side!r}")
    inner = create(model, input_shape=(input_shape[0], side, side), classes=classes, **options)
    return torch.nn.Sequential(torch.nn.Upsample(size=(side, side), mode="bilinear", align_corners=False), inner)
