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
from lipdp.privacy.noise import DRAWABLE, Segment, noised_on_processor, pieces_of
from lipdp.privacy.randomness import Stream, derive_key, mix_key

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
    on: dict[torch.device, list[str]] = {}
    for name in sorted(sums):
        if sums[name].is_meta:
            raise ConfigurationError(f"The sum of group {name!r} is on the device 'meta': there is nothing to add noise to.")
        on.setdefault(sums[name].device, []).append(name)
    released: dict[str, Tensor] = {}
    for names in on.values():
        arranged = _arranged(_layout_of(sums, stds, names))
        released |= {name: _copied(sums[name]) for name in arranged.copied}
        if arranged.noised:
            released |= _noised(arranged, sums, generator)
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
    arranged = _arranged(_layout_of(sums, stds, sorted(sums)))
    if not arranged.noised:
        return None
    key, seen = stream.begin("noise", arranged.about)
    inputs = *noise_cuda.release_inputs(arranged.segments(sums), key, seen), *(sums[name].detach() for name in arranged.copied)
    return Draw(arranged.function(device, stream.bound), inputs, (arranged, stream.bound))


_Layout = tuple[tuple[str, float, torch.dtype, torch.layout, torch.Size], ...]


def _layout_of(sums: Mapping[str, Tensor], stds: Mapping[str, float], names: Sequence[str]) -> _Layout:
    """All that a draw for these sums, on one device, depends on besides their values."""
    parts = [(name, sums[name], stds[name]) for name in names]
    return tuple(
        (name, std if isinstance(std, float) else _std(name, std), total.dtype, total.layout, total.shape)
        for name, total, std in parts
    )


class _Arranged:
    """Sums of one layout, in the order of their names: those of one std and type are one long vector.

    Attributes:
        noised: by name, the shape of each that gets noise.
        copied: names of those that get none.
        vectors: std, type and names of each vector.
        about: what the draw is for.
    """

    def __init__(self, layout: _Layout) -> None:
        self.noised: dict[str, torch.Size] = {}
        self.copied: list[str] = []
        self.about: list[tuple[str, float, tuple[int, ...]]] = []
        vectors: dict[tuple[float, torch.dtype], list[str]] = {}
        for name, std, dtype, kind, shape in layout:
            released = _type_of_release(name, dtype, kind)
            if not _is_noised(name, released, std):
                self.copied.append(name)
                continue
            self.noised[name] = shape
            self.about.append((name, float(std), tuple(shape)))
            vectors.setdefault((float(std), released), []).append(name)
        self.vectors = [(*at, names) for at, names in vectors.items()]
        self._layout = layout
        self._functions: dict[tuple[torch.device, bool], DrawFunction] = {}

    def segments(self, sums: Mapping[str, Tensor]) -> list[Segment]:
        """The vectors of these sums."""
        return [([sums[name].detach() for name in names], std, dtype) for std, dtype, names in self.vectors]

    def by_name(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The vectors, taken apart."""
        released: dict[str, Tensor] = {}
        for (_, _, names), vector in zip(self.vectors, vectors, strict=True):
            parts = torch.split(vector, [self.noised[name].numel() for name in names])
            released |= {name: part.reshape(self.noised[name]) for name, part in zip(names, parts, strict=True)}
        return released

    def function(self, device: torch.device, bound: bool) -> DrawFunction:
        """The function of a :class:`Draw`; the same object for the same arguments."""
        if (device, bound) not in self._functions:
            like = {n: torch.empty(shape, dtype=dtype, layout=kind, device="meta") for n, _, dtype, kind, shape in self._layout}
            work = noise_cuda.release_function(noise_cuda.kinds_of(self.segments(like)), device, bound)

            def function(*inputs: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
                most = len(inputs) - len(self.copied)
                rest = {name: _copied(total) for name, total in zip(self.copied, inputs[most:], strict=True)}
                vectors, tag = work(*inputs[:most])
                return self.by_name(vectors) | rest, tag

            self._functions[device, bound] = function
        return self._functions[device, bound]


@lru_cache(maxsize=64)
def _arranged(layout: _Layout) -> _Arranged:
    """Looked at once for sums of one layout; an error for those that can't have noise."""
    return _Arranged(layout)


def _is_noised(name: str, dtype: torch.dtype, std: float) -> bool:
    """Whether a group that is released in this type gets noise; an error where it can't have it."""
    checked, limits = _std(name, std), torch.finfo(dtype)
    if checked > 0 and not max(limits.tiny, DRAWABLE[0]) <= checked <= min(limits.max, DRAWABLE[1]):
        raise ConfigurationError(
            f"The noise std {checked:g} of group {name!r} is out of the range of {dtype}: the noise would be 0 or "
            "infinite. Rescale the loss, or use float64."
        )
    return checked > 0


def _copied(total: Tensor) -> Tensor:
    """What is released of a group without noise."""
    return total.detach().to(torch.float64 if total.dtype == torch.float64 else torch.float32, copy=True)


def _type_of_release(name: str, dtype: torch.dtype, layout: torch.layout) -> torch.dtype:
    """The type that the release of such a sum has."""
    if not dtype.is_floating_point or layout != torch.strided:
        raise ConfigurationError(
            f"The sum of group {name!r} is {dtype}, {layout}: Gaussian noise needs a dense, real "
            "floating-point tensor. Convert it before noising."
        )
    return torch.float64 if dtype == torch.float64 else torch.float32


def _noised(arranged: _Arranged, sums: Mapping[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    """Sums on one device, with their noise."""
    (key, seen), segments = stream.begin("noise", arranged.about), arranged.segments(sums)
    if noise_cuda.available(segments[0][0][0].device):
        vectors, tag = noise_cuda.noised_on_device(segments, key, seen, bound=stream.bound)
        stream.claim_last(tag)
    else:
        vectors = _noised_on_processor(segments, mix_key(key, seen), stream)
    return arranged.by_name(vectors)


def _noised_on_processor(segments: Sequence[Segment], key: bytes, stream: Stream) -> list[Tensor]:
    """What :func:`lipdp.privacy.noise_cuda.noised_on_device` computes, for sums anywhere; claimed before it is drawn."""
    ready = [[piece.contiguous().cpu() for piece in pieces_of(*segment)] for segment in segments]
    if stream.bound:
        hasher = Poly1305(derive_key(key, "digest"))  # a key that is used once: no two sums are likely to collide
        for part in itertools.chain(*ready):
            hasher.update(part.numpy().data.cast("B"))
        key = derive_key(key, "bound", hasher.finalize())
        stream.claim_last(derive_key(key, "claim"))
    number = itertools.count()
    wholes = []
    for pieces, (tensors, std, _) in zip(ready, segments, strict=True):
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        drawn = []
        for piece in pieces:
            sums = piece.numpy()
            place = None if piece.untyped_storage().data_ptr() in given else sums  # a copy: nobody else has it
            drawn.append(torch.from_numpy(noised_on_processor(sums, std, key, next(number), place)))
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
