"""Fixed layers behind a scattering transform: they even its coefficients out, by public constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.errors import ConfigurationError, DataError
from lipdp.export.registry import Site, lowering

__all__ = ["LogCompress"]


class LogCompress(torch.nn.Module):
    """``y_c = sign(x_c)·log(1 + |x_c|/a_c)`` per channel (dimension 1): large coefficients are drawn in, signs are kept.

    Scattering coefficients are skewed, as energies are; their logarithms are not, which suits linear layers. The derivative is
    1/(a_c + |x_c|), so it is 1/min a-Lipschitz.

    Args:
        levels: a, one positive number for each channel: where it turns from linear to logarithmic. Public constants.
    """

    levels: torch.Tensor

    def __init__(self, levels: Sequence[float]) -> None:
        super().__init__()
        values = torch.tensor([float(level) for level in levels])
        if not len(values) or not bool((torch.isfinite(values) & (values > 0)).all()):
            raise ConfigurationError("LogCompress needs a positive finite level for each channel")
        self.register_buffer("levels", values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compress each channel."""
        if x.ndim < 2 or x.shape[1] != len(self.levels):
            raise DataError(f"LogCompress has {len(self.levels)} channels, and the tensor the shape {tuple(x.shape)}")
        return _compressed(x, self.levels.to(x.dtype).reshape(-1, *([1] * (x.ndim - 2))))

    def extra_repr(self) -> str:
        """Arguments, in short."""
        return f"{len(self.levels)} channels, levels from {float(self.levels.min()):.3g} to {float(self.levels.max()):.3g}"


def _compressed(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    # Not sign(x)·log1p(|x|/a): its derivative at 0 would be 0 instead of 1/a.
    return torch.log1p(torch.relu(x) / levels) - torch.log1p(torch.relu(-x) / levels)


@rule(LogCompress)
def _log_compress(layer: LogCompress, call: Call) -> Transfer:
    """|y| ≤ |x|/a, since log(1 + u) ≤ u, and the derivative is at most 1/a: reached as x → 0 in the channel of the least a."""
    x = call.inputs[0]
    gain = 1 / float(layer.levels.double().min())
    return Transfer(Bound(times(gain, x.norm), x.shape, max_abs=times(gain, x.max_abs)), (gain,), exact=False)


@lowering(LogCompress)
def _plain_log_compress(layer: LogCompress, site: Site) -> torch.Tensor:
    return _compressed(site.x, layer.levels.to(site.dtype).reshape(-1, *([1] * (len(site.shape) - 1))))
