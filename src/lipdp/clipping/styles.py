"""Clipping styles: which parameters are clipped together, each group to its own C_g.

==========  =============================================================================================
flat        one group: all parameters, one norm
per_layer   a group for each module that has parameters of its own
per_group   a group for each name prefix given
==========  =============================================================================================

The whole clipped gradient of an example has norm at most √(Σ_g C_g²). A single number C is divided as C_g = C/√groups, which makes
that C again, whatever the style.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lipdp.errors import ConfigurationError

__all__ = ["Clip", "Group", "MaxNorm", "Style", "clip_factors", "clipping_groups", "group_bounds"]

Style = Literal["flat", "per_layer", "per_group"]
Clip = Literal["clip", "automatic"]
MaxNorm = float | torch.Tensor | Mapping[str, float | torch.Tensor]


@dataclass(frozen=True)
class Group:
    """Parameters that are clipped together, to ``max_norm``.

    Attributes:
        name: "all", the module's name or the prefix, as the style has it.
        parameters: their names in the model.
        max_norm: C_g. A tensor stays where it is, and is not read: see :func:`group_bounds`.
    """

    name: str
    parameters: tuple[str, ...]
    max_norm: float | torch.Tensor


def clipping_groups(
    names: Iterable[str], max_norm: MaxNorm, style: Style = "flat", groups: Sequence[str] | None = None
) -> tuple[Group, ...]:
    """The groups that a style makes of these parameter names, with their C_g. Every parameter is in exactly one.

    Args:
        names: of the trainable parameters.
        max_norm: C_g by group name; or C, divided as C/√groups.
        style: "flat", "per_layer", "per_group".
        groups: for "per_group" with a single C: the prefixes that name the groups (a mapping names them itself). A parameter
            belongs to the longest prefix that it, or a module that it is in, is called by.

    Example:
        >>> [group.name for group in clipping_groups(["body.0.weight", "body.0.bias", "head.weight"], 1.0, "per_layer")]
        ['body.0', 'head']
    """
    listed = list(names)
    if style not in get_args(Style):
        raise ConfigurationError(f"style={style!r} is not known; choose one of {', '.join(get_args(Style))}")
    if groups is not None and style != "per_group":
        raise ConfigurationError(f"groups are only used by style='per_group', not by {style!r}")
    if style == "flat":
        if isinstance(max_norm, Mapping):
            raise ConfigurationError("a mapping of max_norm is for style='per_layer' or 'per_group'; style='flat' has one number")
        members = {"all": listed}
    elif style == "per_layer":
        members = _gather(listed, {name: name.rpartition(".")[0] or name for name in listed})
    else:
        prefixes = list(max_norm) if isinstance(max_norm, Mapping) and groups is None else groups
        if not prefixes:
            raise ConfigurationError("style='per_group' needs the groups: a max_norm by prefix, or groups=[prefix, …]")
        members = _gather(listed, {name: _longest(name, prefixes) for name in listed})
        idle = [prefix for prefix in prefixes if prefix not in members]
        if idle:
            raise ConfigurationError(f"group {idle[0]!r} has no trainable parameter; parameters: {', '.join(listed)}")
    return tuple(Group(name, tuple(found), _bound(max_norm, name, list(members))) for name, found in members.items())


def _gather(names: Sequence[str], group_of: Mapping[str, str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(group_of[name], []).append(name)
    return members


def _longest(name: str, prefixes: Sequence[str]) -> str:
    fitting = [prefix for prefix in prefixes if name == prefix or name.startswith(prefix + ".")]
    if not fitting:
        raise ConfigurationError(
            f"parameter {name!r} is in none of the groups {', '.join(prefixes)}; every parameter needs a bound"
        )
    return max(fitting, key=len)


def _bound(max_norm: MaxNorm, group: str, groups: Sequence[str]) -> float | torch.Tensor:
    if isinstance(max_norm, Mapping):
        if set(max_norm) != set(groups):
            raise ConfigurationError(f"max_norm names {', '.join(max_norm)}, but the groups are {', '.join(groups)}")
        value, share = max_norm[group], 1.0
    else:
        value, share = max_norm, math.sqrt(len(groups))
    if isinstance(value, torch.Tensor):
        if value.ndim != 0 or not value.is_floating_point():
            raise ConfigurationError(f"max_norm as a tensor must be one real number (0-dimensional), not {tuple(value.shape)}")
        return value.detach() / share
    if isinstance(value, bool) or not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ConfigurationError(f"max_norm must be a positive finite number, not {value!r}")
    return value / share


def group_bounds(groups: Sequence[Group], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """C_g as one tensor (groups,). A tensor that is negative, infinite or NaN counts as 0, which releases nothing.

    That a number on a device is sound can't be checked without waiting for it; this needs no check.
    """
    # Filled in on the device: a copy from the host would wait for it.
    numbers = {group.max_norm for group in groups if not isinstance(group.max_norm, torch.Tensor)}
    if len(numbers) == 1 and not any(isinstance(group.max_norm, torch.Tensor) for group in groups):
        return torch.full((len(groups),), numbers.pop(), dtype=dtype, device=device)
    bounds = torch.cat(
        [
            group.max_norm.to(device, dtype).reshape(1)
            if isinstance(group.max_norm, torch.Tensor)
            else torch.full((1,), group.max_norm, dtype=dtype, device=device)
            for group in groups
        ]
    )
    return torch.nan_to_num(bounds, nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0)


def clip_factors(norms: torch.Tensor, bounds: torch.Tensor, keep: torch.Tensor, clip: Clip, stability: float) -> torch.Tensor:
    """ν (batch, groups) from norms (batch, groups) and C (groups,); 0 for examples that are masked, or not finite in any group.

    "clip": ν = min(1, C_g/‖g‖); "automatic": ν = C_g/(‖g‖ + γ). Both give ν·‖g‖ ≤ C_g.
    """
    # Where both are 0, so is the gradient; 0/0 must not make a NaN of it.
    factors = bounds / (norms + stability) if clip == "automatic" else torch.where(norms <= bounds, 1.0, bounds / norms)
    counted = torch.isfinite(norms).all(1) & keep
    return torch.where(counted[:, None], factors, torch.zeros_like(factors))
