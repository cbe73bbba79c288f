"""The Gaussian mechanism over groups of parameters: how much noise each group gets, and adding it.

Group d has p_d scalars and a per-example bound Δ_d on its part of the sum. With independent noise of std s_d on it,
dividing each group by its s_d shows one Gaussian mechanism of unit noise and sensitivity √(Σ Δ_d²/s_d²), so of multiplier

    σ = (Σ_d Δ_d²/s_d²)^(-1/2).

Accounting needs that one scalar; how the noise is spread over the groups is free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from lipdp._checks import is_number, positive, whole
from lipdp.errors import ConfigurationError, UnboundedError
from lipdp.privacy import noise_cuda
from lipdp.privacy.noise import Segment, noised_on_processor, pieces_of
from lipdp.privacy.randomness import Stream, derive_key, mix_key

__all__ = ["Allocation", "Draw", "add_noise", "allocate", "draw_on_device", "effective_multiplier", "noise_energy"]

Allocation = Literal["global", "per_layer", "optimal", "weights"]

_LEAST_STD = 2.0**-900  # below, the grid leaves float64


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

    Args:
        sensitivities: Δ_d by group, finite, 0 or above.
        sizes: p_d, the number of scalars, by group.
        noise_multiplier: σ of the whole step.
        allocation: one of the four.
        weights: w_d by group, above 0; given with "weights", and only with it.
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

    Args:
        sensitivities: Δ_d by group, finite, 0 or above.
        stds: s_d by group, finite, 0 or above.
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
    """The expected squared norm of the step's noise, Σ p_d·s_d².

    Args:
        stds: s_d by group, finite, 0 or above.
        sizes: p_d, the number of scalars, by group.
    """
    _same_names("stds", stds, "sizes", sizes)
    return math.fsum(whole(f"the size of group {name!r}", sizes[name], 0) * _std(name, stds[name]) ** 2 for name in stds)


@torch.no_grad()
def add_noise(sums: Mapping[str, Tensor], stds: Mapping[str, float], generator: Stream) -> dict[str, Tensor]:
    """The release of one step: sum_d plus Gaussian noise of std s_d for each group, on a public grid, as new tensors.

    What is added, and why it is the Gaussian mechanism to the last bit, is said in :mod:`lipdp.privacy.noise`. Sums are rounded to
    a grid of at most s_d·2⁻⁴¹; what that adds to the sensitivity is :func:`lipdp.privacy.noise.grid_factor`. Sums of float64 come
    back in float64, all others in float32. What is not finite counts as 0, or as the largest number of the grid.

    The noise is a function of the stream's key and of the draw's number; of the groups' names, shapes and standard deviations; and,
    for a stream that is bound (the default), of the sums themselves: if the same draw is made again with other sums, the noise is
    another, independent one. A group of std 0 is copied, and is no part of the draw.

    Args:
        sums: by group.
        stds: by group.
        generator: a stream, see :func:`lipdp.privacy.generator`; noise is drawn where the sums are, and is the same on all devices.
    """
    _same_names("sums", sums, "stds", stds)
    if not isinstance(generator, Stream):
        raise ConfigurationError(
            f"noise is drawn from a lipdp.privacy.Stream, not from a {type(generator).__name__}: torch's own generators can be "
            "predicted from what they gave. Use lipdp.privacy.Stream() (a fresh secret key) or lipdp.privacy.generator(seed, …)."
        )
    released: dict[str, Tensor] = {}
    live: dict[torch.device, list[str]] = {}
    for name in sorted(sums):
        if sums[name].is_meta:
            raise ConfigurationError(f"The sum of group {name!r} is on the device 'meta': there is nothing to add noise to.")
        if _is_noised(name, sums[name], stds[name]):
            live.setdefault(sums[name].device, []).append(name)
        else:
            released[name] = _copied(sums[name])
    for names in live.values():
        released |= _noised({name: sums[name].detach() for name in names}, {name: float(stds[name]) for name in names}, generator)
    return {name: released[name] for name in sums}


DrawFunction = Callable[..., tuple[dict[str, Tensor], Tensor | None]]


class Draw(NamedTuple):
    """What :func:`add_noise` would do, as a function of tensors on one device that never waits for it: fit to be recorded.

    Attributes:
        function: from ``inputs`` to the noised sums by name, and a tag that the draw is claimed by (:attr:`Stream.claim`).
        inputs: the secret and what it depends on, and the sums.
        depends_on: all that the function depends on besides: equal for functions that are the same.
    """

    function: DrawFunction
    inputs: tuple[Tensor, ...]
    depends_on: Hashable


def draw_on_device(sums: Mapping[str, Tensor], stds: Mapping[str, float], stream: Stream) -> Draw | None:
    """The draw that :func:`add_noise` would make; ``None`` where the sums are not all on one device that draws by itself."""
    _same_names("sums", sums, "stds", stds)
    devices = {total.device for total in sums.values()}
    if len(devices) != 1 or not noise_cuda.available(device := next(iter(devices))):
        return None
    layout = tuple((name, stds[name], sums[name].dtype, sums[name].layout, sums[name].shape) for name in sorted(sums))
    noised, copied, function = _function_of(layout, device, stream.bound)
    if not noised:
        return None
    key, seen, _, segments = _begun({name: sums[name].detach() for name in noised}, stds, stream)
    inputs = *noise_cuda.release_inputs(segments, key, seen), *(sums[name].detach() for name in copied)
    return Draw(function, inputs, (layout, stream.bound))


_Layout = tuple[tuple[str, float, torch.dtype, torch.layout, torch.Size], ...]


@lru_cache(maxsize=32)
def _function_of(layout: _Layout, device: torch.device, bound: bool) -> tuple[list[str], list[str], DrawFunction]:
    """Of sums on a device, by name: which get noise, which have none, and the function of a :class:`Draw`."""
    like = {name: torch.empty(shape, dtype=dtype, layout=kind, device="meta") for name, _, dtype, kind, shape in layout}
    stds = {name: std for name, std, *_ in layout}
    noised = [name for name in like if _is_noised(name, like[name], stds[name])]
    copied = [name for name in like if name not in noised]
    if not noised:
        return noised, copied, lambda *inputs: ({}, None)
    names_of, segments = _segments_of({name: like[name] for name in noised}, stds)
    work = noise_cuda.release_function(noise_cuda.kinds_of(segments), device, bound)
    shapes = {name: like[name].shape for name in noised}

    def function(*inputs: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        most = len(inputs) - len(copied)
        rest = {name: _copied(total) for name, total in zip(copied, inputs[most:], strict=True)}
        vectors, tag = work(*inputs[:most])
        return _by_name(names_of, vectors, shapes) | rest, tag

    return noised, copied, function


def _is_noised(name: str, total: Tensor, std: float) -> bool:
    """Whether a group gets noise; an error where it can't have it."""
    dtype, checked = _check_sum(name, total), _std(name, std)
    limits = torch.finfo(dtype)
    if checked > 0 and not max(limits.tiny, _LEAST_STD) <= checked <= limits.max:
        raise ConfigurationError(
            f"The noise std {checked:g} of group {name!r} is out of the range of {dtype}: the noise would be 0 or "
            "infinite. Rescale the loss, or use float64."
        )
    return checked > 0


def _copied(total: Tensor) -> Tensor:
    """What is released of a group without noise."""
    return total.detach().to(torch.float64 if total.dtype == torch.float64 else torch.float32, copy=True)


def _check_sum(name: str, total: Tensor) -> torch.dtype:
    """The type that its release has."""
    if not total.dtype.is_floating_point or total.layout != torch.strided:
        raise ConfigurationError(
            f"The sum of group {name!r} is {total.dtype}, {total.layout}: Gaussian noise needs a dense, real "
            "floating-point tensor. Convert it before noising."
        )
    return torch.float64 if total.dtype == torch.float64 else torch.float32


_Names = tuple[tuple[str, ...], ...]


def _begun(sums: dict[str, Tensor], stds: Mapping[str, float], stream: Stream) -> tuple[bytes, list[Tensor], _Names, list[Segment]]:
    """The key of a draw of sums on one device, what it is mixed with, and the segments with their groups' names."""
    key, seen = stream.begin("noise", [(name, float(stds[name]), tuple(total.shape)) for name, total in sums.items()])
    return key, seen, *_segments_of(sums, stds)


def _segments_of(sums: Mapping[str, Tensor], stds: Mapping[str, float]) -> tuple[_Names, list[Segment]]:
    """Sums in the order of their names, those of one std and type as one segment."""
    names_of: dict[tuple[float, torch.dtype], list[str]] = {}
    for name, total in sums.items():
        dtype = torch.float64 if total.dtype == torch.float64 else torch.float32
        names_of.setdefault((float(stds[name]), dtype), []).append(name)
    return tuple(map(tuple, names_of.values())), [([sums[name] for name in names], *at) for at, names in names_of.items()]


def _by_name(names_of: _Names, vectors: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The vectors of segments, taken apart."""
    released: dict[str, Tensor] = {}
    for names, vector in zip(names_of, vectors, strict=True):
        parts = torch.split(vector, [shapes[name].numel() for name in names])
        released |= {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}
    return released


def _noised(sums: dict[str, Tensor], stds: Mapping[str, float], stream: Stream) -> dict[str, Tensor]:
    """Sums on one device, in the order of their names: those of one std are one long vector."""
    key, seen, names_of, segments = _begun(sums, stds, stream)
    if noise_cuda.available(next(iter(sums.values())).device):
        vectors, tag = noise_cuda.noised_on_device(segments, key, seen, bound=stream.bound)
        stream.claim_last(tag)
    else:
        vectors = _noised_on_processor(segments, mix_key(key, seen), stream)
    return _by_name(names_of, vectors, {name: total.shape for name, total in sums.items()})


def _noised_on_processor(segments: Sequence[Segment], key: bytes, stream: Stream) -> list[Tensor]:
    """What :func:`lipdp.privacy.noise_cuda.noised_on_device` computes, for sums anywhere; claimed before it is drawn."""
    ready = [[piece.contiguous().cpu().numpy() for piece in pieces_of(*segment)] for segment in segments]
    if stream.bound:
        hasher = Poly1305(derive_key(key, "digest"))  # a key that is used once: no two sums are likely to collide
        for part in itertools.chain(*ready):
            hasher.update(part.data.cast("B"))
        key = derive_key(key, "bound", hasher.finalize())
        stream.claim_last(derive_key(key, "claim"))
    number = itertools.count()
    wholes = []
    for pieces, (tensors, std, _) in zip(ready, segments, strict=True):
        drawn = [torch.from_numpy(noised_on_processor(piece, std, key, next(number))) for piece in pieces]
        wholes.append((drawn[0] if len(drawn) == 1 else torch.cat(drawn)).to(tensors[0].device))
    return wholes


def _same_names(left: str, a: Mapping[str, object], right: str, b: Mapping[str, object]) -> None:
    odd = sorted(a.keys() ^ b.keys())
    if odd:
        raise ConfigurationError(
            f"{left} and {right} do not name the same groups: {', '.join(map(repr, odd[:5]))} in one only. "
            "Give both for every group."
        )


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
