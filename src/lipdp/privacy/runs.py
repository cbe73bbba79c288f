"""What a whole private run releases: its steps, at one noise level or several, and the one-off releases beside them.

This is a description. :mod:`lipdp.privacy.accounting` says what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lipdp._checks import positive, rate, whole
from lipdp.errors import ConfigurationError
from lipdp.fields import Count, Scale, check_fields

Kind = Literal["gaussian", "pure"]
Scheme = Literal["poisson", "truncated_poisson", "fixed_size"]


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
class Sampling:
    """How the records of a step are drawn. What is described here is what :func:`lipdp.privacy.sample_indices` does.

    - "poisson": each record independently with probability q.
    - "truncated_poisson": as Poisson, and of a sample of more than ``batch_size`` records a uniformly random subset of that size.
    - "fixed_size": a uniformly random subset of ``batch_size`` of the ``dataset_size`` records, without replacement.

    Attributes:
        scheme: one of these.
        dataset_size: N; not for Poisson. It is part of the analysis: for "fixed_size" the number of records, for
            "truncated_poisson" that of the larger of two neighbours.
        batch_size: the largest size of a sample, or its size; not for Poisson.
    """

    scheme: Scheme = "poisson"
    dataset_size: Count | None = None
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self, "a sampling")
        if self.scheme == "poisson":
            if self.dataset_size is not None or self.batch_size is not None:
                raise ConfigurationError(
                    "Poisson sampling knows neither a dataset_size nor a batch_size, only a rate; leave them out, or choose "
                    "truncated_poisson or fixed_size."
                )
            return
        if self.dataset_size is None or self.batch_size is None:
            raise ConfigurationError(f"sampling {self.scheme!r} needs dataset_size and batch_size: both are part of its analysis.")
        if self.scheme == "fixed_size" and self.batch_size > self.dataset_size:
            raise ConfigurationError(
                f"samples of {self.batch_size} can't be drawn from {self.dataset_size} records without replacement."
            )

    def check_size(self, size: int, adjacency: str) -> None:
        """Refuse a dataset of a size that the analysis is not for: it is for N records, and the neighbours of such datasets."""
        if self.dataset_size is None or size == self.dataset_size:
            return
        if adjacency == "add_remove" and size == self.dataset_size - 1:
            return
        raise ConfigurationError(
            f"the dataset has {size} records, and {self.scheme} sampling is analysed for {self.dataset_size}: a record's chance to "
            "be in a batch depends on how many there are. Make a plan for this many."
        )


# Noise multipliers that floating point has room for; squares and exponentials of others are 0, infinite, or neither.
_LEAST, _MOST = 1e-40, 1e40


def _reckonable(name: str, value: float) -> float:
    """A noise multiplier whose cost can be computed."""
    sigma = positive(name, value)
    if not _LEAST <= sigma <= _MOST:
        raise ConfigurationError(
            f"{name} is {value!r}: it has to be between {_LEAST:g} and {_MOST:g}; mostly it is between 0.1 and 100."
        )
    return sigma


@dataclass(frozen=True)
class PrivateRun:
    """Sampled Gaussian steps in segments of one noise multiplier each, and one-off releases.

    Attributes:
        sampling_rate: q of every step: the probability that a record is drawn (before truncation, where there is one).
        segments: (σ, number of steps) of each segment; the order does not matter for the cost.
        releases: the one-off releases.
        sampling: how the records of a step are drawn.
    """

    sampling_rate: float
    segments: tuple[tuple[float, int], ...]
    releases: tuple[Release, ...] = ()
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        q = rate(self.sampling_rate)
        if not isinstance(self.sampling, Sampling):
            raise ConfigurationError(
                f"sampling is {self.sampling!r}: a lipdp.privacy.Sampling, e.g. Sampling('fixed_size', 60_000, 600)."
            )
        records, size = self.sampling.dataset_size, self.sampling.batch_size
        if self.sampling.scheme == "fixed_size" and records and size and abs(q - size / records) > 1e-12 * q:
            raise ConfigurationError(
                f"sampling_rate is {q!r}, but samples of {size} of {records} records have the rate {size / records!r}; give that."
            )
        for sigma, steps in self.segments:
            _reckonable("noise_multiplier", sigma)
            whole("steps", steps, least=0)
        for release in self.releases:
            if release.kind == "gaussian":
                _reckonable(f"the noise multiplier of {release.name!r}", release.amount)
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
