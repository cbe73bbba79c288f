"""Privacy without models: the Gaussian mechanism, its accounting, Poisson sampling and the randomness behind them."""

from __future__ import annotations

from lipdp._texts import guarantee
from lipdp.privacy.accounting import (
    Accountant,
    Adjacency,
    delta,
    epsilon,
    event,
    privacy_profile,
    run_epsilon,
)
from lipdp.privacy.budget import Budget, Reservation
from lipdp.privacy.calibration import MAX_STEPS, calibrate_noise, calibrate_run, longest_run, max_steps
from lipdp.privacy.costs import Approximate, Pure
from lipdp.privacy.mechanism import Allocation, add_noise, allocate, effective_multiplier, noise_energy
from lipdp.privacy.moments import Moments, private_moments
from lipdp.privacy.quantile import (
    AdaptiveClip,
    Crossing,
    PrivateQuantile,
    above_threshold,
    clip_search,
    gradient_multiplier,
    private_quantile,
)
from lipdp.privacy.randomness import Stream, derive_key, derive_seed, fresh_key, fresh_seed, generator
from lipdp.privacy.runs import PrivateRun, Release, Sampling
from lipdp.privacy.sampling import PoissonSampler, poisson_indices, sample_indices

__all__ = [
    "MAX_STEPS",
    "Accountant",
    "AdaptiveClip",
    "Adjacency",
    "Allocation",
    "Approximate",
    "Budget",
    "Crossing",
    "Moments",
    "PoissonSampler",
    "PrivateQuantile",
    "PrivateRun",
    "Pure",
    "Release",
    "Reservation",
    "Sampling",
    "Stream",
    "above_threshold",
    "add_noise",
    "allocate",
    "calibrate_noise",
    "calibrate_run",
    "clip_search",
    "delta",
    "derive_key",
    "derive_seed",
    "effective_multiplier",
    "epsilon",
    "event",
    "fresh_key",
    "fresh_seed",
    "generator",
    "gradient_multiplier",
    "guarantee",
    "longest_run",
    "max_steps",
    "noise_energy",
    "poisson_indices",
    "privacy_profile",
    "private_moments",
    "private_quantile",
    "run_epsilon",
    "sample_indices",
]
