"""What a whole private run releases: its steps, at one noise level or several, and the one-off releases beside them.

This is a description. :mod:`lipdp.privacy.accounting` says what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lipdp.errors import ConfigurationError
from lipdp.privacy._checks import positive, rate, whole

__all__ = ["PrivateRun", "Release", "Sampling", "Scheme"]

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
    amount: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigurationError(f"release {self.name!r} is of kind {self.kind!r}; choose one of {', '.join(get_args(Kind))}")
        positive(f"the {'noise multiplier' if self.kind == 'gaussian' else 'epsilon'} of release {self.name!r}", self.amount)


@dataclass(frozen=True)
class Sampling:
    """How the records of a step are drawn. What is described here is what :func:`lipdp.privacy.sample_indices` does.

    - "poisson": each record independently with probability q.
    - "truncated_poisson": as Poisson, and of a sample of more than ``batch_size`` records a uniformly random subset of that size.
    - "fixed_size": a uniformly random subset of ``batch_size`` of the ``dataset_size`` records, without replacement.

    Attributes:
        scheme: one of these.
        dataset_size: N; not for Poisson. It is part of the analysis: for "fixed_size" the number of records, for
            "truncated_poisson" the largest number that a dataset and its neighbours may have.
        batch_size: the largest size of a sample, or its size; not for Poisson.
    """

    scheme: Scheme = "poisson"
    dataset_size: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in get_args(Scheme):
            raise ConfigurationError(f"sampling is {self.scheme!r}: choose one of {', '.join(get_args(Scheme))}.")
        if self.scheme == "poisson":
            if self.dataset_size is not None or self.batch_size is not None:
                raise ConfigurationError(
                    "Poisson sampling knows neither a dataset_size nor a batch_size, only a rate; leave them out, or choose "
                    "truncated_poisson or fixed_size."
                )
            return
        if self.dataset_size is None or self.batch_size is None:
            raise ConfigurationError(f"sampling {self.scheme!r} needs dataset_size and batch_size: both are part of its analysis.")
        records, most = whole("dataset_size", self.dataset_size), whole("batch_size", self.batch_size)
        if self.scheme == "fixed_size" and most > records:
            raise ConfigurationError(f"samples of batch_size {most} can't be drawn from {records} records without replacement.")


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
        for sigma, steps in self.segments:
            positive("noise_multiplier", sigma)
            whole("steps", steps, least=0)
        names = [release.name for release in self.releases]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"releases need different names, not {', '.join(map(repr, names))}")
        records, size = self.sampling.dataset_size, self.sampling.batch_size
        if records is None or size is None:
            return
        if self.sampling.scheme == "fixed_size" and abs(q - size / records) > 1e-12 * q:
            raise ConfigurationError(
                f"sampling_rate is {q!r}, but samples of {size} of {records} records have the rate {size / records!r}; give that."
            )
        # Up to this size a larger dataset costs more (see docs/accounting.md), so that the one given covers all smaller ones.
        if self.sampling.scheme == "truncated_poisson" and size < q * records:
            raise ConfigurationError(
                f"samples cut to {size} records at most, where {q * records:g} are expected, would be cut most of the time: the "
                "analysis is for cuts that are rare. Raise the largest size above the expected one, by a few of its square roots."
            )

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
