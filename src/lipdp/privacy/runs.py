"""What a whole private run releases: its steps, at one noise level or several, and the one-off releases beside them.

This is a description. :mod:`lipdp.privacy.accounting` says what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lipdp._checks import positive, rate, whole
from lipdp.errors import ConfigurationError
from lipdp.fields import Scale, check_fields

__all__ = ["PrivateRun", "Release"]

Kind = Literal["gaussian", "pure"]


@dataclass(frozen=True)
class Release:
    """One release of the whole dataset beside the training: statistics, an input bound, a clipping value.

    Attributes:
        name: what it is; the engine charges it by this name, once.
        kind: "gaussian": a Gaussian mechanism over all records, no sampling; "pure": any ε-DP mechanism.
        amount: the noise multiplier (std ÷ the bound on one record's part of the sum), or ε.
    """

    name: str
    kind: Kind
    amount: Scale

    def __post_init__(self) -> None:
        check_fields(self, f"release {self.name!r}")


@dataclass(frozen=True)
class PrivateRun:
    """Poisson-sampled Gaussian steps in segments of one noise multiplier each, and one-off releases.

    Attributes:
        sampling_rate: q of every step.
        segments: (σ, number of steps) of each segment; the order does not matter for the cost.
        releases: the one-off releases.
    """

    sampling_rate: float
    segments: tuple[tuple[float, int], ...]
    releases: tuple[Release, ...] = ()

    def __post_init__(self) -> None:
        rate(self.sampling_rate)
        for sigma, steps in self.segments:
            positive("noise_multiplier", sigma)
            whole("steps", steps, least=0)
        names = [release.name for release in self.releases]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"releases need different names, not {', '.join(map(repr, names))}")

    @property
    def steps(self) -> int:
        """All steps."""
        return sum(steps for _, steps in self.segments)

    @property
    def pure_epsilon(self) -> float:
        """Σ ε of the pure releases: they are added to the rest (basic composition)."""
        return sum(release.amount for release in self.releases if release.kind == "pure")

    @property
    def gaussian_releases(self) -> tuple[float, ...]:
        """Noise multipliers of the Gaussian releases."""
        return tuple(release.amount for release in self.releases if release.kind == "gaussian")
