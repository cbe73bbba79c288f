"""Norm rules of layers that multiply by a matrix or scale: Linear, Bilinear, PReLU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lipdp.clipping.arithmetic import Squares
from lipdp.clipping.contribution import Contribution, PositionSum, summed
from lipdp.clipping.outer import OuterSum
from lipdp.clipping.registry import Contributions, norm_rule

__all__ = ["affine", "linear", "positions"]


def positions(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, …, features) as (batch, positions, features)."""
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:-1]), tensor.shape[-1])


def affine(
    cotangent: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    names: tuple[str, str] = ("weight", "bias"),
) -> dict[str, Contribution]:
    """Gradients of y = Wx + b at any number of positions: Σ_t δ_t⊗x_t and Σ_t δ_t. x may be None where W is frozen."""
    delta = positions(cotangent)
    squares = Squares(delta)
    result: dict[str, Contribution] = {}
    if weight.requires_grad and x is not None:
        result[names[0]] = OuterSum(delta, positions(x), tuple(weight.shape), squares=squares)
    if bias is not None and bias.requires_grad:
        result[names[1]] = PositionSum(delta, tuple(bias.shape), squares)
    return result


@norm_rule(torch.nn.Linear)
def linear(layer: torch.nn.Linear, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """Σ_t δ_t⊗x_t and Σ_t δ_t."""
    x = inputs[0].detach() if layer.weight.requires_grad else None
    return lambda cotangent: affine(cotangent, x, layer.weight, layer.bias)


@norm_rule(torch.nn.Bilinear)
def _bilinear(layer: torch.nn.Bilinear, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """y_k = aᵀW_k b: the gradient is Σ_t δ_t ⊗ (a_t ⊗ b_t)."""
    a, b = (positions(part.detach()) for part in inputs[:2])

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        products = (a[..., :, None] * b[..., None, :]).flatten(2) if layer.weight.requires_grad else None
        return affine(cotangent, products, layer.weight, layer.bias)

    return contributions


@norm_rule(torch.nn.PReLU, at_once=True)
def _prelu(layer: torch.nn.PReLU, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """∂y/∂a = min(x, 0), summed over the positions (and channels, for a single a) that share it."""
    x = inputs[0].detach()

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        product = (cotangent * x.clamp_max(0)).flatten(1)
        channels = layer.num_parameters
        terms = product.reshape(x.shape[0], channels, product.shape[1] // channels).transpose(1, 2)
        return {"weight": summed(terms, (channels,))}

    return contributions
