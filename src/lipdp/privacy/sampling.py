"""Real Poisson sampling: each record is in a step's sample independently with probability q. That is what is accounted.

Samples vary in size and may be empty, and an empty one is a step like any other: pure noise. Their size is private, so
sums are divided by the public constant q·N, never by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lipdp.privacy._checks import rate, whole
from lipdp.privacy.randomness import generator as seeded_generator

__all__ = ["PoissonSampler", "poisson_indices"]

_BLOCK = 1 << 24  # uniforms drawn at a time: 128 MB


def poisson_indices(size: int, sampling_rate: float, generator: torch.Generator) -> Tensor:
    """The indices, ascending, of a Poisson sample of 0 … size−1: i is in when U_i < q, with independent uniforms U_i.

    Uniforms are float64, multiples of 2⁻⁵³, so that each record's probability is q to within 2⁻⁵³ however small q is.
    The result (int64) is on the generator's device, and may be empty.
    """
    count, q = whole("size", size, least=0), rate(sampling_rate)
    parts = [torch.empty(0, dtype=torch.int64, device=generator.device)]
    for start in range(0, count, _BLOCK):
        length = min(_BLOCK, count - start)
        uniforms = torch.rand(length, dtype=torch.float64, device=generator.device, generator=generator)
        parts.append(_places_below(q, uniforms) + start)
    return torch.cat(parts)


def _places_below(q: float, uniforms: Tensor) -> Tensor:
    """Where they are below q, ascending; on a processor by NumPy, which takes a quarter of the time."""
    if uniforms.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(uniforms.numpy() < q).astype(np.int64, copy=False))
    return torch.nonzero(uniforms < q).squeeze(1)


@dataclass(frozen=True)
class PoissonSampler:
    """Poisson samples of a dataset of ``size`` records, one per step, each a function of the secret seed and the step.

    They are drawn on the CPU wherever the model is, so that a run resumed elsewhere samples the same records.
    """

    size: int
    sampling_rate: float
    seed: int = field(repr=False)

    def __post_init__(self) -> None:
        whole("size", self.size, least=0)
        whole("seed", self.seed, least=0)
        rate(self.sampling_rate)

    @property
    def expected_size(self) -> float:
        """q·N, the public constant that sums are divided by."""
        return self.sampling_rate * self.size

    def indices(self, step: int) -> Tensor:
        """The sample of this step (0, 1, …): the same at every call."""
        return poisson_indices(self.size, self.sampling_rate, seeded_generator(self.seed, step, "sample"))
