"""The exact samplers of :mod:`lipdp.privacy.exact`, where they were before."""

from __future__ import annotations

from lipdp.privacy.exact import bernoulli_exp, discrete_laplace, discrete_staircase, exponential_mechanism, permute_and_flip

__all__ = ["bernoulli_exp", "discrete_laplace", "discrete_staircase", "exponential_mechanism", "permute_and_flip"]
