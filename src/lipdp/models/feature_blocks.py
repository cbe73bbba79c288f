"""Blocks of fixed features side by side, each evened out by what drawn images give: the front of the heads in patch_heads.py.

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
from lipdp.models.leaves import leaf_images
from lipdp.models.patches import Dictionary, PatchFeatures
from lipdp.models.random_relu import RandomReLU
from lipdp.models.scattering import Colour, Padding, Scattering2d
from lipdp.models.scattering_front import channel_weights
from lipdp.models.scattering_layers import Compress, Compression, Mix, SideBySide, Window
from lipdp.models.scattering_textures import texture_images
from lipdp.models.straighten import Straightening, straighten_layers

__all__ = ["Centre", "PatchBlock", "ScatteringBlock", "block_of", "feature_front"]

Centre = Literal["drawn", "private"]
# Where compression sets in, in units of a channel's mean response to drawn images.
_LEVELS = {"log": 0.3, "root": 0.01}
_TEXTURES = 512


@dataclass(frozen=True)
class PatchBlock:
    """:class:`~lipdp.models.patches.PatchFeatures` (whose arguments have the same names), evened out.

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
    """:class:`~lipdp.models.scattering.Scattering2d`, averaged over copies, evened out.

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
        copies = Shifts([(int(down), int(right)) for down, right in self.shifts], flip=self.flip)
        return transform if copies.copies == 1 else TestTimeAverage(transform, copies)

    def _transform(self, shape: tuple[int, ...]) -> Scattering2d:
        colour: Colour = self.colour or ("yuv" if shape[:1] == (3,) else "rgb")
        return Scattering2d(shape, self.J, self.L, self.order, colour, self.padding)

    def drawn(self, shape: tuple[int, ...]) -> torch.Tensor:
        """What its scales are taken from."""
        return texture_images(shape, _TEXTURES)

    def channel_factors(self, shape: tuple[int, ...]) -> torch.Tensor:
        """By the order of a channel's path and by its colour."""
        return channel_weights(self._transform(shape), self.orders)[:, None, None]


AnyBlock = PatchBlock | ScatteringBlock
_KINDS: dict[str, type[PatchBlock] | type[ScatteringBlock]] = {"patches": PatchBlock, "scattering": ScatteringBlock}


def block_of(given: AnyBlock | Mapping[str, Any]) -> AnyBlock:
    """A block from a mapping with its ``kind`` ("patches", "scattering") and settings, or a block as it is."""
    if isinstance(given, PatchBlock | ScatteringBlock):
        return given
    settings = {name: _frozen(value) for name, value in given.items()}
    kind = settings.pop("kind", None)
    if kind not in _KINDS:
        raise ConfigurationError(f"a block of features is of kind 'patches' or 'scattering', not {kind!r}")
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
            :class:`~lipdp.models.straighten.Straighten`, or ``True`` for its own.
        relu: blocks of random ReLU features of the bounded vector (:class:`~lipdp.models.random_relu.RandomReLU`), put on the unit
            sphere again; 0: none.
    """
    if centre not in ("drawn", "private"):
        raise ConfigurationError(f"centre must be 'drawn' or 'private', not {centre!r}")
    chosen = [block_of(block) for block in blocks]
    if not chosen:
        raise ConfigurationError("features need at least one block")
    if not all(math.isfinite(block.weight) and block.weight > 0 for block in chosen):
        raise ConfigurationError(f"the weights of blocks are positive numbers, not {[block.weight for block in chosen]}")
    made = [_layers(tuple(input_shape), block) for block in chosen]
    width = sum(size for _, size in made)
    layers: list[torch.nn.Module] = straighten_layers(input_shape, straighten)
    layers.append(SideBySide(*(nn.Sequential(*parts) for parts, _ in made)))
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
    constants = _constants(shape, dataclasses.replace(block, weight=1.0))
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
def _constants(shape: tuple[int, ...], block: AnyBlock) -> _Constants:
    """Of the response to drawn images: levels of compression, means and deviations by channel, and what decorrelates channels."""
    if block.compress not in ("none", "log", "root") or not 0 <= block.decorrelate <= 1:
        raise ConfigurationError(
            f"compress is 'none', 'log' or 'root' and decorrelate in [0, 1], not {block.compress!r} and {block.decorrelate!r}"
        )
    extractor = block.extractor(shape)
    with torch.no_grad():
        response = torch.cat([extractor(part) for part in torch.split(block.drawn(shape), 16)])
        level = response.abs().mean((0, 2, 3))
        # A channel that drawn images leave at 0 (colour differences of grey ones, say) is not blown up.
        levels = (_LEVELS.get(block.compress, 1.0) * level).clamp_min(1e-6 * float(level.max()))
        if block.compress != "none":
            response = Compress(levels.tolist(), block.compress)(response)
        mean, std = response.mean((0, 2, 3)), response.std((0, 2, 3))
        std = std.clamp_min(1e-3 * float(std.max()))
        mixing = None
        if block.decorrelate:
            even = ((response - mean[:, None, None]) / std[:, None, None]).movedim(1, -1).flatten(0, 2)
            values, vectors = torch.linalg.eigh((even.T @ even).double() / len(even))
            shrunk = (1 - block.decorrelate) * values.clamp_min(0) + block.decorrelate
            mixing = (vectors * shrunk.rsqrt() @ vectors.T).float()
    return _Constants(tuple(response.shape[1:]), tuple(levels.tolist()), tuple(mean.tolist()), tuple(std.tolist()), mixing)
