"""Choosing a response from a public list: exact probabilities of the exponential mechanism and of permute-and-flip.

Utilities u(x, r) move by at most Δ when one record is replaced. Both mechanisms see them through
a_r = exp(ε(u_r − u_max)/2Δ). The factor ½ is needed: exp(ε·u/Δ), as the paper writes it, is only 2ε-DP in general.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lipdp.errors import ConfigurationError

__all__ = ["Selection", "exponential_probabilities", "flip_probabilities", "probabilities"]

Selection = Literal["exponential", "permute_and_flip"]
ENOUGH_NODES = 24
"""Quadrature nodes that are as good as exact (10⁻⁸ for 300 responses at ε = 0.1, less elsewhere), where speed counts."""
_CHUNK = 200_000  # numbers in one intermediate tensor: what fits in a core's own cache is three times faster


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
    made: Tensor = _Flip.apply(logits, count)  # type: ignore[no-untyped-call]
    return made


class _Flip(torch.autograd.Function):
    """The quadrature, with its gradient in closed form: one (batch, nodes, R) tensor is kept instead of five.

    With q_wr = 1/(1 − w·a_r) and E_w = c_w·Π_s(1 − w·a_s): P_r = a_r Σ_w E_w q_wr. Since ∂E_w/∂a_s = −w·E_w·q_ws and
    q + w·a·q² = q², a gradient g on P gives Σ_w E_w q_ws (g_s·q_ws − w·Σ_r g_r a_r q_wr) on a_s.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, nodes: int) -> Tensor:
        places, weights = _legendre(nodes)
        w, c = torch.as_tensor(places, dtype=logits.dtype), torch.as_tensor(weights, dtype=logits.dtype)
        # Training is in float32, where less than e^-60 is nothing beside 1 but ends in subnormals, which are slow.
        a = (logits.clamp(min=-60.0) if logits.dtype == torch.float32 else logits).exp()
        miss = 1 - w[:, None] * a[:, None, :]  # (batch, nodes, R); w < 1 keeps it above 0
        product = c * miss.log().sum(-1).exp()
        inverse = miss.reciprocal_()
        ctx.save_for_backward(a, inverse, product, w)
        return a * torch.bmm(product[:, None], inverse)[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        a, inverse, product, w = ctx.saved_tensors
        (given,) = gradients
        total = torch.bmm(inverse, (given * a)[:, :, None])[..., 0]
        own = given * torch.bmm(product[:, None], inverse * inverse)[:, 0]
        others = torch.bmm((product * total * w)[:, None], inverse)[:, 0]
        return a * (own - others), None


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
