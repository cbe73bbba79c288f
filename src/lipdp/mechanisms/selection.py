"""Choosing a response from a public list: exact probabilities of the exponential mechanism and of permute-and-flip.

Utilities u(x, r) move by at most Δ when one record is replaced. Both mechanisms see them through
a_r = exp(ε(u_r − u_max)/2Δ). The factor ½ is needed: exp(ε·u/Δ), as the paper writes it, is only 2ε-DP in general.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lipdp.errors import ConfigurationError

__all__ = ["Selection", "exponential_probabilities", "flip_probabilities", "probabilities"]

Selection = Literal["exponential", "permute_and_flip"]
ENOUGH_NODES = 24
"""Quadrature nodes that reach machine precision (tested up to 200 responses and down to ε = 0.1), where speed counts."""
_CHUNK = 1_000_000  # numbers in one intermediate tensor: what fits in a cache is three times faster


@cache
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    places, weights = np.polynomial.legendre.leggauss(count)
    return (places + 1) / 2, weights / 2


def exponential_probabilities(logits: Tensor) -> Tensor:
    """P_r = a_r / Σ_s a_s, from log a_r (batch, R)."""
    return torch.softmax(logits, -1)


def flip_probabilities(logits: Tensor, nodes: int | None = None) -> Tensor:
    """P_r = a_r ∫₀¹ Π_{s≠r} (1 − w·a_s) dw, from log a_r ≤ 0 (batch, R) whose largest is 0; differentiable.

    Why: give each candidate a uniform arrival time w; r is the answer where its own coin says stop and no earlier one did.
    The integrand is a polynomial of degree R−1 in w, so ⌈R/2⌉ Gauss–Legendre nodes are exact. Fewer ``nodes`` serve training.
    """
    count = nodes if nodes is not None else (logits.shape[-1] + 1) // 2
    places, weights = _legendre(count)
    w = torch.as_tensor(places, dtype=logits.dtype)[:, None]
    c = torch.as_tensor(weights, dtype=logits.dtype)[:, None]
    a = logits.exp()
    miss = torch.log1p(-w * a[:, None, :])  # (batch, nodes, R); w < 1 keeps it finite
    others = (miss.sum(-1, keepdim=True) - miss).exp()
    return a * (c * others).sum(1)


def probabilities(method: Selection, utilities: Tensor, sensitivity: float, epsilon: float, nodes: int | None = None) -> Tensor:
    """P(r | x) for utilities (batch, R) of sensitivity Δ, as (batch, R)."""
    if method not in get_args(Selection):
        raise ConfigurationError(f"method is {method!r}: choose one of {', '.join(get_args(Selection))}.")
    logits = (utilities - utilities.amax(-1, keepdim=True)) * (epsilon / (2 * sensitivity))
    if method == "exponential":
        return exponential_probabilities(logits)
    exact = (logits.shape[-1] + 1) // 2
    used = exact if nodes is None else min(nodes, exact)
    rows = max(_CHUNK // (used * logits.shape[-1]), 1)
    return torch.cat([flip_probabilities(part, used) for part in torch.split(logits, rows)])
