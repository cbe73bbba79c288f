"""From images to bounded vectors of features, all by public constants: what the heads of :mod:`lipdp.models.heads` stand on.

A head under noise learns from what is large. So each block is brought to one scale by public constants, its responses to drawn
images: compressed (pooled responses are skewed), standardised channel by channel, and decorrelated by ((1−a)·Σ + a·I)^(-1/2) with
Σ the correlations of its channels, for where a few directions hold most of the energy the others drown. What is left is the data's
own mean, which differs from that of drawn images: :class:`lipdp.nn.Standardize` takes it off, entry by entry, and is paid for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from lipdp import nn
from lipdp.data.augment import Shifts, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.features.drawings import leaf_images, texture_images
from lipdp.features.kernels import RandomReLU
from lipdp.features.layers import (
    Compress,
    Compression,
    FromGrid,
    Mix,
    SideBySide,
    Straightening,
    ToGrid,
    Window,
    straighten_layers,
    window,
)
from lipdp.features.learned import LearnedFeatures
from lipdp.features.patches import Dictionary, PatchFeatures, kept_constants
from lipdp.features.scattering import Colour, Padding, Scattering2d

Statistics = Literal["none", "textures", "private"]
# Where compression sets in, in units of a channel's mean response to drawn images.
_LEVELS = {"log": 0.3, "root": 0.01}


def scattering_front(
    input_shape: tuple[int, ...],
    *,
    scales: Sequence[tuple[int, int]] = ((2, 8),),
    order: int = 2,
    colour: Colour | None = None,
    padding: Padding = "reflect",
    compress: Compression = "none",
    shifts: Sequence[tuple[int, int]] = ((0, 0),),
    flip: bool = False,
    whiten: float = 0.0,
    statistics: Statistics = "textures",
    radius: float = 1.8,
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    corner: float = 1.0,
    input_mode: Literal["ball", "sphere"] = "sphere",
    straighten: Straightening = False,
) -> tuple[list[torch.nn.Module], int]:
    """Layers from images to a bounded vector of features, none of them trained, and how many features there are.

    Args:
        input_shape: (channels, height, width).
        scales: (J, L) of each transform, see :class:`~lipdp.features.scattering.Scattering2d`; the maps of several are put on one
            grid, the finest.
        order: the same.
        colour: the same; by default "yuv" for three channels.
        padding: the same.
        compress: "log" or "root" of the coefficients, see :class:`~lipdp.features.layers.Compress`.
        shifts: features are the mean over copies of the image moved by these (down, right) pixels.
        flip: and over their mirror images.
        whiten: a in (0, 1]: channels are decorrelated as it would decorrelate the textures', by ((1−a)·Σ + a·I)^(-1/2); 0: not.
        statistics: what channels are evened out by. "textures": public constants, the response to random textures
            (:mod:`lipdp.features.drawings`). "private": then also by the data's own statistics, paid for out of
            ``lipdp.plan(…, statistics_budget=…)``. "none".
        radius: for "private": a public bound on the root mean square of an image's features, in units of the textures' deviation.
        weights: of the features' orders 0, 1 and 2 (and up), and of the colour differences of "yuv" relative to brightness.
        corner: weight of the image's corners relative to its middle.
        input_mode: "sphere" puts every example's features on the unit sphere, "ball" only shortens long ones.
        straighten: bring every image into one pose first, for handwriting; settings of
            :class:`~lipdp.features.layers.Straighten`, or ``True`` for its own.
    """
    if statistics not in ("none", "textures", "private"):
        raise ConfigurationError(f"statistics must be 'none', 'textures' or 'private', not {statistics!r}")
    if len(weights) != 4 or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ConfigurationError(f"weights are four positive numbers (orders 0, 1, 2; colour), not {weights!r}")
    if compress not in ("none", "log", "root") or not 0 <= whiten <= 1:
        raise ConfigurationError(f"compress is 'none', 'log' or 'root' and whiten in [0, 1], not {compress!r} and {whiten!r}")
    chosen, copies = colour or _usual_colour(input_shape), _copies(shifts, flip)
    if not scales:
        raise ConfigurationError("scattering needs at least one scale (J, L)")
    # The finest grid first: the others are put on it.
    transforms = [Scattering2d(input_shape, J, L, order, chosen, padding) for J, L in sorted(scales)]
    branches = [_branch(transform, copies, compress, whiten, statistics != "none") for transform in transforms]
    layers: list[torch.nn.Module] = branches[0]
    shape: tuple[int, ...] = transforms[0].output_shape
    each = [_factors(transform, weights, corner) for transform in transforms]
    factors, grid = each[0], None
    if len(branches) > 1:
        layers = [SideBySide(*(nn.Sequential(*branch) for branch in branches))]
        factors = torch.cat([part.flatten() for part in each])
        shape = tuple(factors.shape)
        if statistics == "private":  # channels of all scales side by side, for the statistics only
            grid = ToGrid([transform.output_shape for transform in transforms])
            layers.append(grid)
            shape, factors = grid.output_shape, grid(factors[None])[0] * grid.evening
    if statistics == "private":
        layers.append(nn.Standardize(shape[0], radius=radius * math.sqrt(math.prod(shape))))
    if not bool((factors == 1).all()):
        layers.append(Window(factors))
    if grid is not None:
        layers.append(FromGrid(grid))
        shape = grid.input_shape
    first = straighten_layers(input_shape, straighten)
    return [*first, *layers, nn.BoundedInput(shape, mode=input_mode), nn.Flatten()], math.prod(shape)


def _usual_colour(shape: tuple[int, ...]) -> Colour:
    return "yuv" if shape[:1] == (3,) else "rgb"


def _copies(shifts: Sequence[tuple[int, int]], flip: bool) -> Shifts:
    return Shifts([(int(down), int(right)) for down, right in shifts], flip=flip)


def _factors(transform: Scattering2d, weights: tuple[float, float, float, float], corner: float) -> torch.Tensor:
    _, height, width = transform.output_shape
    return channel_weights(transform, weights)[:, None, None] * window(height, width, corner)


def _branch(transform: Scattering2d, copies: Shifts, compress: Compression, whiten: float, even: bool) -> list[torch.nn.Module]:
    """One transform with what is public and follows it: compression, the mean over copies, the textures' statistics."""
    made_with = transform.input_shape, transform.J, transform.L, transform.order, transform.colour, transform.padding
    levels, mean, std, mixing = _constants(made_with, compress, whiten if even else 0.0)
    extractor: torch.nn.Module = transform
    if compress != "none":
        extractor = nn.Sequential(transform, Compress(levels, compress))
    layers = [extractor if copies.copies == 1 else TestTimeAverage(extractor, copies)]
    if even:
        layers.append(nn.Normalize(mean, std))
    if mixing is not None:
        layers.append(Mix(mixing))
    return layers


@lru_cache(maxsize=16)
def _constants(
    made_with: tuple[Any, ...], compress: Compression, whiten: float
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], torch.Tensor | None]:
    """Of the response to textures: levels of compression, means and deviations by channel, and what decorrelates channels."""
    transform = Scattering2d(*made_with)
    levels, mean, std, even = _response(transform, texture_images(transform.input_shape), 32, compress)
    rows = even.flatten(0, 2).double()
    mixing = _decorrelating(rows.T @ rows / len(rows), whiten) if whiten else None
    return tuple(levels.tolist()), tuple(mean.tolist()), tuple(std.tolist()), mixing


@torch.no_grad()
def _response(
    extractor: torch.nn.Module, images: torch.Tensor, rows: int, compress: Compression
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """To drawn images: levels of compression, means and deviations by channel, and what is left, evened out, channels last."""
    response = torch.cat([extractor(part) for part in torch.split(images, rows)])
    level = response.abs().mean((0, 2, 3))
    # A channel that drawn images leave at 0 (colour differences of grey ones, say) is not blown up.
    levels = (_LEVELS.get(compress, 1.0) * level).clamp_min(1e-6 * float(level.max()))
    if compress != "none":
        response = Compress(levels.tolist(), compress)(response)
    mean, std = response.mean((0, 2, 3)), response.std((0, 2, 3))
    std = std.clamp_min(1e-3 * float(std.max()))
    return levels, mean, std, ((response - mean[:, None, None]) / std[:, None, None]).movedim(1, -1)


def _decorrelating(covariance: torch.Tensor, share: float) -> torch.Tensor:
    """((1 − share)·Σ + share·I)^(-1/2)."""
    values, vectors = torch.linalg.eigh(covariance)
    shrunk = (1 - share) * values.clamp_min(0) + share
    mixing: torch.Tensor = (vectors * shrunk.rsqrt() @ vectors.T).float()
    return mixing


def channel_weights(transform: Scattering2d, weights: tuple[float, float, float, float]) -> torch.Tensor:
    """By channel; maps come by order, plane after plane."""
    counts = [math.comb(transform.J, m) * transform.L**m for m in range(transform.order + 1)]
    orders = [weights[min(m, 2)] for m, count in enumerate(counts) for _ in range(count)]
    colours = [1.0] + [weights[3] if transform.colour == "yuv" else 1.0] * (transform.input_shape[0] - 1)
    return torch.tensor([colour * order for colour in colours for order in orders])


# Blocks of fixed features side by side, each evened out by what drawn images give: what the patches-… heads stand on.

Centre = Literal["drawn", "private"]

_TEXTURES = 512


@dataclass(frozen=True)
class PatchBlock:
    """:class:`~lipdp.features.patches.PatchFeatures` (whose arguments have the same names), evened out.

    Attributes:
        compress: "root", "log" or "none".
        decorrelate: a; 0: not.
        weight: of this block relative to the others.
    """

    patch: int = 6
    filters: int = 1000
    grid: int = 4
    overlap: float = 1.5
    threshold: float = 1.0
    whiten: float = 0.01
    contrast: float = 0.1
    mirror: bool = True
    dictionary: Dictionary = "leaves"
    compress: Compression = "root"
    decorrelate: float = 0.1
    weight: float = 1.0

    def extractor(self, shape: tuple[int, ...]) -> PatchFeatures:
        """The transform of images of this shape."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("compress", "decorrelate", "weight"):
            del own[name]
        return PatchFeatures(shape, **own)

    def drawn(self, shape: tuple[int, ...]) -> torch.Tensor:
        """What its scales are taken from."""
        return leaf_images(shape)

    def channel_factors(self, shape: tuple[int, ...]) -> torch.Tensor:
        """All channels count alike."""
        return torch.ones(())


@dataclass(frozen=True)
class ScatteringBlock:
    """:class:`~lipdp.features.scattering.Scattering2d`, averaged over copies, evened out.

    Attributes:
        shifts: features are the mean over copies of the image moved by these (down, right) pixels,
        flip: and over their mirror images.
        orders: weights of orders 0, 1, 2 (and up), and of colour differences.
        compress: "root", "log" or "none".
        decorrelate: a; 0: not.
        weight: of this block relative to the others.
    """

    J: int = 2
    L: int = 8
    order: int = 2
    colour: Colour | None = None
    padding: Padding = "reflect"
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)
    flip: bool = True
    orders: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    compress: Compression = "root"
    decorrelate: float = 0.1
    weight: float = 1.0

    def extractor(self, shape: tuple[int, ...]) -> torch.nn.Module:
        """The transform of images of this shape."""
        transform = self._transform(shape)
        copies = _copies(self.shifts, self.flip)
        return transform if copies.copies == 1 else TestTimeAverage(transform, copies)

    def _transform(self, shape: tuple[int, ...]) -> Scattering2d:
        return Scattering2d(shape, self.J, self.L, self.order, self.colour or _usual_colour(shape), self.padding)

    def drawn(self, shape: tuple[int, ...]) -> torch.Tensor:
        """What its scales are taken from."""
        return texture_images(shape, _TEXTURES)

    def channel_factors(self, shape: tuple[int, ...]) -> torch.Tensor:
        """By the order of a channel's path and by its colour."""
        return channel_weights(self._transform(shape), self.orders)[:, None, None]


@dataclass(frozen=True)
class LearnedBlock:
    """:class:`~lipdp.features.learned.LearnedFeatures` (whose arguments have the same names), which are even by themselves.

    Attributes:
        weight: of this block relative to the others.
    """

    network: str = "small"
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)
    flip: bool = True
    weight: float = 1.0


AnyBlock = PatchBlock | ScatteringBlock | LearnedBlock
_KINDS: dict[str, type[PatchBlock] | type[ScatteringBlock] | type[LearnedBlock]] = {
    "patches": PatchBlock,
    "scattering": ScatteringBlock,
    "learned": LearnedBlock,
}


def block_of(given: AnyBlock | Mapping[str, Any]) -> AnyBlock:
    """A block from a mapping with its ``kind`` ("patches", "scattering", "learned") and settings, or a block as it is."""
    if isinstance(given, AnyBlock):
        return given
    settings = {name: _frozen(value) for name, value in given.items()}
    kind = settings.pop("kind", None)
    if kind not in _KINDS:
        raise ConfigurationError(f"a block of features is of kind 'patches', 'scattering' or 'learned', not {kind!r}")
    known = {f.name for f in dataclasses.fields(_KINDS[kind])}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigurationError(f"a block of {kind} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return _KINDS[kind](**settings)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def feature_front(
    input_shape: tuple[int, ...],
    *,
    blocks: Sequence[AnyBlock | Mapping[str, Any]] = (PatchBlock(),),
    centre: Centre = "drawn",
    radius: float = 2.5,
    input_mode: Literal["ball", "sphere"] = "sphere",
    straighten: Straightening = False,
    relu: int = 0,
) -> tuple[list[torch.nn.Module], int]:
    """Layers from images to a bounded vector of features, none of them trained, and how many features there are.

    Args:
        input_shape: (channels, height, width).
        blocks: of features.
        centre: "drawn": the means of drawn images are taken off, which costs nothing. "private": then also the data's own means,
            entry by entry, paid for out of ``lipdp.plan(…, statistics_budget=…)``.
        radius: for "private": a public bound on the length of an image's features, in units of the drawn images'.
        input_mode: "sphere" puts every example's features on the unit sphere, "ball" only shortens long ones.
        straighten: bring every image into one pose first, for handwriting; settings of
            :class:`~lipdp.features.layers.Straighten`, or ``True`` for its own.
        relu: blocks of random ReLU features of the bounded vector (:class:`~lipdp.features.kernels.RandomReLU`), put on the unit
            sphere again; 0: none.
    """
    if centre not in ("drawn", "private"):
        raise ConfigurationError(f"centre must be 'drawn' or 'private', not {centre!r}")
    chosen = [block_of(block) for block in blocks]
    if not chosen:
        raise ConfigurationError("features need at least one block")
    if not all(math.isfinite(block.weight) and block.weight > 0 for block in chosen):
        raise ConfigurationError(f"the weights of blocks are positive numbers, not {[block.weight for block in chosen]}")
    stacks = [_layers(tuple(input_shape), block) for block in chosen]
    width = sum(size for _, size in stacks)
    layers: list[torch.nn.Module] = straighten_layers(input_shape, straighten)
    layers.append(SideBySide(*(nn.Sequential(*parts) for parts, _ in stacks)))
    if centre == "private":
        length = radius * math.sqrt(sum(block.weight**2 for block in chosen))
        layers.append(nn.Standardize(width, radius=length, moments=1))
    layers.append(nn.BoundedInput((width,), mode=input_mode))
    if relu:
        random = RandomReLU(width, blocks=relu)
        width = random.output_features
        layers += [random, nn.BoundedInput((width,), mode="sphere")]
    return layers, width


def _layers(shape: tuple[int, ...], block: AnyBlock) -> tuple[list[torch.nn.Module], int]:
    """A block's layers, new at every call, and how many features it has; drawn images have features of norm about its weight."""
    if isinstance(block, LearnedBlock):
        learned = LearnedFeatures(shape, block.network, shifts=block.shifts, flip=block.flip)
        return [learned, Window(torch.tensor(float(block.weight)))], learned.output_shape[0]
    constants = _block_constants(shape, dataclasses.replace(block, weight=1.0))
    extractor = block.extractor(shape)
    layers = [extractor]
    if block.compress != "none":
        layers.append(Compress(constants.levels, block.compress))
    layers.append(nn.Normalize(constants.mean, constants.std))
    if constants.mixing is not None:
        layers.append(Mix(constants.mixing))
    size = math.prod(constants.shape)
    factors = block.channel_factors(shape) * (block.weight / math.sqrt(size))
    return [*layers, Window(factors)], size


@dataclass(frozen=True)
class _Constants:
    shape: tuple[int, ...]
    levels: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mixing: torch.Tensor | None


@lru_cache(maxsize=16)
def _block_constants(shape: tuple[int, ...], block: PatchBlock | ScatteringBlock) -> _Constants:
    """Of the response to drawn images: levels of compression, means and deviations by channel, and what decorrelates channels."""
    if block.compress not in ("none", "log", "root") or not 0 <= block.decorrelate <= 1:
        raise ConfigurationError(
            f"compress is 'none', 'log' or 'root' and decorrelate in [0, 1], not {block.compress!r} and {block.decorrelate!r}"
        )
    kept = kept_constants(
        "scattering" if isinstance(block, ScatteringBlock) else "patches", (shape, block), lambda: _measured(shape, block)
    )
    levels, mean, std = (tuple(kept[name].tolist()) for name in ("levels", "mean", "std"))
    return _Constants(tuple(kept["shape"].tolist()), levels, mean, std, kept.get("mixing"))


def _measured(shape: tuple[int, ...], block: PatchBlock | ScatteringBlock) -> dict[str, torch.Tensor]:
    levels, mean, std, even = _response(block.extractor(shape), block.drawn(shape), 16, block.compress)
    constants = {"shape": torch.tensor((even.shape[-1], *even.shape[1:-1])), "levels": levels, "mean": mean, "std": std}
    if block.decorrelate:
        rows = even.flatten(0, 2)
        constants["mixing"] = _decorrelating((rows.T @ rows).double() / len(rows), block.decorrelate)
    return constants
