"""Modules without a norm rule: their own parameters' gradients by torch.func, one example at a time, vectorised.

This covers bare ``nn.Parameter``s in a module's forward (class tokens, positions, scales) and custom layers. It evaluates the
module again and holds batch × parameters numbers, for that module alone; a notice says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call, vjp, vmap

from lipdp.clipping.contribution import Contribution, Dense
from lipdp.clipping.registry import Contributions
from lipdp.errors import LipdpNotice, UnsupportedError

__all__ = ["per_example_fallback"]


def per_example_fallback(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> list[tuple[torch.Tensor, Contributions]]:
    """(output tensor, its contributions) for a module that has no rule."""
    if not isinstance(output, torch.Tensor):
        raise UnsupportedError(
            f"{type(module).__name__} has parameters of its own, no norm rule, and returns {type(output).__name__} instead of a "
            "tensor. Move its parameters into a module that returns one tensor, or register a rule (lipdp.clipping.norm_rule)."
        )
    own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    size = sum(p.numel() for p in own.values())
    warnings.warn(
        f"{type(module).__name__} has no norm rule: the gradients of its {size:,} parameter(s) ({', '.join(own)}) are computed for "
        "every example by torch.func.",
        LipdpNotice,
        stacklevel=2,
    )
    batch = output.shape[0]

    def contributions(cotangent: torch.Tensor) -> Mapping[str, Contribution]:
        # Tensors with a batch dimension are split by example; others (masks, positions) are shared.
        def per_example(value: Any) -> int | None:
            return 0 if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == batch else None

        values = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
        named = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
        dims = [per_example(value) for value in values]
        named_dims = {key: per_example(value) for key, value in named.items()}
        if len(set(map(type, values))) == 0 and not named:
            raise UnsupportedError(f"{type(module).__name__} is called without inputs; its per-example gradients can't be told")

        def one(delta: torch.Tensor, xs: list[Any], extra: dict[str, Any]) -> dict[str, torch.Tensor]:
            xs = [x.unsqueeze(0) if dim == 0 else x for x, dim in zip(xs, dims, strict=True)]
            extra = {key: x.unsqueeze(0) if named_dims[key] == 0 else x for key, x in extra.items()}

            def run(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
                result: torch.Tensor = functional_call(module, parameters, tuple(xs), extra)
                return result

            pull = vjp(run, {name: p.detach() for name, p in own.items()})[1]
            gradients: dict[str, torch.Tensor] = pull(delta.unsqueeze(0))[0]
            return gradients

        with torch.enable_grad():
            gradients = vmap(one, in_dims=(0, dims, named_dims), randomness="error")(cotangent, values, named)
        return {name: Dense(gradient.detach()) for name, gradient in gradients.items()}

    return [(output, contributions)]
