"""The Gaussian mechanism over groups of parameters: how much noise each group gets, and adding it.

Group d has p_d scalars and a per-example bound Δ_d on its part of the sum. With independent noise of std s_d on it,
dividing each group by its s_d shows one Gaussian mechanism of unit noise and sensitivity √(Σ Δ_d²/s_d²), so of multiplier

    σ = (Σ_d Δ_d²/s_d²)^(-1/2).

Accounting needs that one scalar; how the noise is spread over the groups is free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError, UnboundedError
from lipdp.privacy._checks import is_number, positive, whole

__all__ = ["Allocation", "add_noise", "allocate", "effective_multiplier", "noise_energy"]

Allocation = Literal["global", "per_layer", "optimal", "weights"]


def allocate(
    sensitivities: Mapping[str, float],
    sizes: Mapping[str, int],
    noise_multiplier: float,
    allocation: Allocation = "global",
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The noise std s_d of each group, such that the step has noise multiplier σ:

    - ``global``: s_d = σ·√(Σ Δ²), the same for all;
    - ``per_layer``: s_d = σ·√D·Δ_d, D the number of groups with Δ > 0 (each has the same signal-to-noise);
    - ``optimal``: least total noise energy Σ p_d·s_d²: s_d² = σ²·(Σ Δ√p)·Δ_d/√p_d;
    - ``weights``: s_d ∝ w_d as given, s_d = σ·w_d·√(Σ Δ²/w²).

    Proof that it is least: by Cauchy–Schwarz (Σ p s²)(Σ Δ²/s²) ≥ (Σ √p·Δ)², with equality for s² ∝ Δ/√p.
    A group with Δ = 0 is untouched by the data: it gets no noise and does not count.
    """
    _same_names("sensitivities", sensitivities, "sizes", sizes)
    sigma = positive("noise_multiplier", noise_multiplier)
    if allocation not in get_args(Allocation):
        raise ConfigurationError(f"allocation is {allocation!r}: choose one of {', '.join(get_args(Allocation))}.")
    if (weights is None) != (allocation != "weights"):
        raise ConfigurationError("weights are given with allocation='weights', and only with it")
    bounds = {name: _sensitivity(name, value) for name, value in sensitivities.items()}
    live = {name: bound for name, bound in bounds.items() if bound > 0}
    counts = {name: whole(f"the size of group {name!r}", sizes[name], int(name in live)) for name in sizes}
    if allocation == "global":
        total = sigma * math.hypot(*live.values())
        stds = dict.fromkeys(live, total)
    elif allocation == "per_layer":
        stds = {name: sigma * math.sqrt(len(live)) * bound for name, bound in live.items()}
    elif weights is not None:
        _same_names("weights", weights, "sensitivities", sensitivities)
        shares = {name: positive(f"the noise weight of group {name!r}", weights[name]) for name in live}
        scale = sigma * math.hypot(*(bound / shares[name] for name, bound in live.items()))
        stds = {name: scale * share for name, share in shares.items()}
    else:
        top = max(live.values(), default=1.0)  # ratios to it: no overflow
        total = math.fsum(bound / top * math.sqrt(counts[name]) for name, bound in live.items())
        scale = sigma * top * math.sqrt(total)
        stds = {name: scale * math.sqrt(bound / top / math.sqrt(counts[name])) for name, bound in live.items()}
    for name, std in stds.items():
        if not 0 < std < math.inf:
            raise ConfigurationError(
                f"Group {name!r} with sensitivity {live[name]:g} would get noise of std {std:g}: that is too far "
                "from the others' for floating point. Rescale the model or the loss, so that they are comparable."
            )
    return {name: stds.get(name, 0.0) for name in bounds}


def effective_multiplier(sensitivities: Mapping[str, float], stds: Mapping[str, float]) -> float:
    """The noise multiplier of the whole step, σ = (Σ Δ_d²/s_d²)^(-1/2), over the groups with Δ > 0.

    0 (no privacy) when some group with Δ > 0 has no noise; infinite when every Δ is 0.
    """
    _same_names("sensitivities", sensitivities, "stds", stds)
    ratios = []
    for name, value in sensitivities.items():
        bound, std = _sensitivity(name, value), _std(name, stds[name])
        if bound > 0:
            ratios.append(bound / std if std > 0 else math.inf)
    norm = math.hypot(*ratios)
    return 1 / norm if norm > 0 else math.inf


def noise_energy(stds: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """The expected squared norm of the step's noise, Σ p_d·s_d²."""
    _same_names("stds", stds, "sizes", sizes)
    return math.fsum(whole(f"the size of group {name!r}", sizes[name], 0) * _std(name, stds[name]) ** 2 for name in stds)


@torch.no_grad()
def add_noise(sums: Mapping[str, Tensor], stds: Mapping[str, float], generator: torch.Generator) -> dict[str, Tensor]:
    """The release of one step: sum_d + s_d·N(0, I) for each group, as new tensors.

    Noise is drawn and added in float32, or float64 for float64 sums; half-precision sums are promoted first, and come
    back in float32 (rounded noise is no Gaussian). Groups are drawn in the order of their names, so the order of the
    mapping does not matter, and a group of std 0 draws nothing. Floating-point noise is not the real-valued Gaussian of
    the proof: its low bits and far tails (beyond 5.7 std in float32) differ, as in all libraries of this kind.
    """
    _same_names("sums", sums, "stds", stds)
    noised = {}
    for name in sorted(sums):
        total, std = sums[name], _std(name, stds[name])
        if not total.dtype.is_floating_point or total.layout != torch.strided:
            raise ConfigurationError(
                f"The sum of group {name!r} is {total.dtype}, {total.layout}: Gaussian noise needs a dense, real "
                "floating-point tensor. Convert it before noising."
            )
        if not _same_device(total.device, generator.device):
            raise ConfigurationError(
                f"The sum of group {name!r} is on {total.device}, the noise generator on {generator.device}: noise is "
                f"drawn where the sum is. Make the generator with device={str(total.device)!r}."
            )
        dtype = torch.float64 if total.dtype == torch.float64 else torch.float32
        released = total.detach().to(dtype, copy=True)
        if std > 0:
            limits = torch.finfo(dtype)
            if not limits.tiny <= std <= limits.max:
                raise ConfigurationError(
                    f"The noise std {std:g} of group {name!r} is out of the range of {dtype}: the noise would be 0 or "
                    "infinite. Rescale the loss, or use float64."
                )
            noise = torch.randn(released.shape, dtype=dtype, device=released.device, generator=generator)
            released.add_(noise, alpha=std)
        noised[name] = released
    return {name: noised[name] for name in sums}


def _same_names(left: str, a: Mapping[str, object], right: str, b: Mapping[str, object]) -> None:
    odd = sorted(a.keys() ^ b.keys())
    if odd:
        raise ConfigurationError(
            f"{left} and {right} do not name the same groups: {', '.join(map(repr, odd[:5]))} in one only. "
            "Give both for every group."
        )


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)


def _sensitivity(name: str, value: float) -> float:
    if value == math.inf:
        raise UnboundedError(
            f"The sensitivity of group {name!r} is infinite: no noise hides an unbounded contribution. Bound it "
            "(constrained layers, a Boundary, or clipping), or freeze the group."
        )
    if not (is_number(value) and value >= 0):
        raise ConfigurationError(f"The sensitivity of group {name!r} is {value!r}: it has to be a number, 0 or above.")
    return float(value)


def _std(name: str, value: float) -> float:
    if not (is_number(value) and value >= 0):
        raise ConfigurationError(f"The noise std of group {name!r} is {value!r}: it has to be finite, 0 or above.")
    return float(value)
