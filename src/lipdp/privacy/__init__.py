"""Privacy without models: the Gaussian mechanism, its accounting, Poisson sampling and the randomness behind them."""

from __future__ import annotations

from lipdp.privacy.accounting import MAX_STEPS, Accountant, Adjacency, calibrate_noise, delta, epsilon, event, max_steps
from lipdp.privacy.adaptive import AdaptiveClip, gradient_multiplier
from lipdp.privacy.mechanism import Allocation, add_noise, allocate, effective_multiplier, noise_energy
from lipdp.privacy.randomness import derive_seed, fresh_seed, generator
from lipdp.privacy.sampling import PoissonSampler, poisson_indices

__all__ = [
    "MAX_STEPS",
    "Accountant",
    "AdaptiveClip",
    "Adjacency",
    "Allocation",
    "PoissonSampler",
    "add_noise",
    "allocate",
    "calibrate_noise",
    "delta",
    "derive_seed",
    "effective_multiplier",
    "epsilon",
    "event",
    "fresh_seed",
    "generator",
    "gradient_multiplier",
    "max_steps",
    "noise_energy",
    "poisson_indices",
]
