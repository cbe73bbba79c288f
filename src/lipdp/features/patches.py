"""Features of small patches: whitened, compared with a fixed dictionary, thresholded on both sides and averaged over windows.

A linear classifier on such features is a convolutional kernel machine, and a good one on small photographs (Coates & Ng 2011; Thiry
et al. 2021) when the dictionary and the whitening come from the data. Here both come from drawn images
(:mod:`lipdp.features.drawings`), so nothing is read off the data and nothing has to be paid for.

Such public constants (dictionaries, scales, decorrelating matrices) follow from drawn images and settings alone: no record has a
part in them, so nothing has to be kept safe. The first program computes them, seconds to two minutes on a processor, and says so to
the logger ``lipdp``; they are kept in the user's cache, where the next one reads them. A file's name is a digest of what the
constants follow from, torch's version included; a file that can't be read is computed again, and where nothing can be written
nothing is kept.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from lipdp._files import PUBLIC, written_whole
from lipdp.bounds import Bound, Call, Transfer, rule, times
from lipdp.data.files import data_root
from lipdp.errors import ConfigurationError, DataError, LipdpError
from lipdp.export import Site, lowering
from lipdp.features.drawings import leaf_images

_FORMAT = 1  # to be raised whenever what is computed changes
_FOLDER = "constants"
_log = logging.getLogger("lipdp")


def kept_constants(what: str, settings: object, compute: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors by name: read from the cache, or computed and put there.

    Args:
        what: they are of, in words: part of the file's name, and of what the logger is told.
        settings: all that they follow from; its text is.
        compute: makes them.
    """
    told = f"{_FORMAT} {torch.__version__} {what} {settings!r}"
    file = _place(f"{what.replace(' ', '-')}-{hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}.npz")
    known = None if file is None else _read(file, told)
    if known is not None:
        return known
    _log.info("computing public constants of %s from drawn images, once on this machine", what)
    started = time.monotonic()
    constants = {name: tensor.detach().cpu().contiguous() for name, tensor in compute().items()}
    _log.info("constants of %s took %.1f s", what, time.monotonic() - started)
    if file is not None:
        _write(file, told, constants)
    return constants


def _place(name: str) -> Path | None:
    try:
        return data_root() / _FOLDER / name
    except LipdpError:  # there is no folder for data here
        return None


def _read(file: Path, told: str) -> dict[str, torch.Tensor] | None:
    """What the file holds; ``None`` where there is none, or none that is whole and of these settings."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            if bytes(stored["told"]).decode() != told:
                return None
            return {name: torch.from_numpy(stored[name]) for name in stored.files if name != "told"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, told: str, constants: Mapping[str, torch.Tensor]) -> None:
    arrays = {name: tensor.numpy() for name, tensor in constants.items()}
    try:
        with written_whole(file, PUBLIC) as stream:
            np.savez(stream, told=np.frombuffer(told.encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        _log.info("constants are not kept: %s", error)


Dictionary = Literal["leaves", "gaussian"]
_PATCHES = 40_000
# Filters are stored in float32 and products rounded: both far below this.
_ROUNDING = 1 + 1e-4
_ENTRIES_ON_CPU, _ENTRIES_ELSEWHERE = 800_000, 2**28


class PatchFeatures(torch.nn.Module):
    """``y_kp = Σ_q P_pq·max(0, ±⟨d_k, z_q⟩ − t)``: z_q a whitened patch, d_k unit vectors of a dictionary, P averages over windows.

    A patch x_q has its mean taken off and is whitened, w = ((1−a)Σ + a·λ̄·I)^(-1/2)·(x_q − mean), and shortened to
    z = w/√(|w|²/m + c) with m the mean of |w|² over drawn images: c is the contrast below which a patch fades instead of being
    blown up. Σ, m and the dictionary (whitened patches with more than middling contrast) are those of drawn images. The
    threshold t is in units of the root mean square of ⟨d, z⟩ over drawn images.

    Its constants: |z| ≤ √m, and |∂z/∂w| ≤ 1/√c; a pixel is in at most p² patches; the two sides of a response are never both above
    the threshold, so they are as far apart as the responses at most; the mean of two mirrored halves is at most 1/√2 as long as
    they are together. With D the dictionary and W the whitening, ``ℓ = p·‖D‖₂·‖W‖₂·‖P‖₂/√c`` and, over Q positions,
    ``‖y‖ ≤ √(Q·m)·‖D‖₂·‖P‖₂``, both divided by √2 with ``mirror``: they are kept in ``lipschitz`` and ``norm``. y(0) = 0.

    With ``mirror`` half of the dictionary is the mirror image of the other half, and y is averaged with that of the mirrored
    image: that one is y with the two halves and left and right exchanged, so the average costs nothing.

    Args:
        shape: (channels, height, width) of one image, or of one output of ``below``.
        patch: side of a patch.
        filters: size of the dictionary.
        grid: windows along each side.
        overlap: width of a window in units of the distance between two.
        threshold: t.
        whiten: a.
        contrast: c.
        mirror: average over the image and its mirror; needs an even number of filters, and half as many features come out.
        dictionary: "leaves", or "gaussian": random directions.
        seed: of the dictionary; public.
        drawn: images to learn from in place of leaves: public ones. For features of features, those of leaves.
    """

    filters: torch.Tensor
    energy: torch.Tensor
    pooling: torch.Tensor

    def __init__(
        self,
        shape: Sequence[int],
        *,
        patch: int = 6,
        filters: int = 1000,
        grid: int = 4,
        overlap: float = 1.0,
        threshold: float = 1.0,
        whiten: float = 0.01,
        contrast: float = 0.1,
        mirror: bool = True,
        dictionary: Dictionary = "leaves",
        seed: int = 0,
        drawn: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.input_shape = tuple(int(s) for s in shape)
        self.patch, self.grid, self.overlap, self.mirror = patch, grid, overlap, mirror
        self.threshold, self.whiten, self.contrast, self.dictionary, self.seed = threshold, whiten, contrast, dictionary, seed
        self._check(filters)
        settings = (patch, whiten, filters // 2 if mirror else filters, dictionary, mirror, seed)
        learned = _learn_from_leaves(self.input_shape, *settings) if drawn is None else _learn(drawn, *settings)
        whitener, vectors, self.mean_energy, patches = learned
        channels, height, width = self.input_shape
        strength = torch.rsqrt(patches.square().sum(1) / self.mean_energy + contrast)
        self.level = float(((patches @ vectors.T) * strength[:, None]).square().mean().sqrt())
        if mirror:
            mirrored = torch.flip(torch.unflatten(vectors, 1, (channels, patch, patch)), (3,)).flatten(1)
            vectors = torch.cat([vectors, mirrored])
        kernel = (channels, patch, patch)
        self.register_buffer("energy", torch.unflatten(whitener.float(), 1, kernel), persistent=False)
        self.register_buffer("filters", torch.unflatten((vectors @ whitener).float(), 1, kernel), persistent=False)
        positions = height - patch + 1, width - patch + 1
        windows = [pooling_windows(size, grid, overlap) for size in positions]
        self.register_buffer("pooling", torch.kron(*windows).T.contiguous().float(), persistent=False)
        self.output_shape = (filters if mirror else 2 * filters, grid, grid)
        gain = _norm(vectors) * math.prod(_norm(window) for window in windows) / (math.sqrt(2) if mirror else 1.0) * _ROUNDING
        reads = math.prod(min(patch, size) for size in positions)  # patches that a pixel is in
        self.lipschitz = gain * math.sqrt(reads / contrast) * _norm(whitener)
        self.norm = gain * math.sqrt(math.prod(positions) * self.mean_energy)

    def _check(self, filters: int) -> None:
        if len(self.input_shape) != 3 or not 1 < self.patch <= min(self.input_shape[1:]):
            raise ConfigurationError(f"patches of side {self.patch!r} do not fit on images of shape {self.input_shape}")
        if filters < 2 or (self.mirror and filters % 2):
            raise ConfigurationError(f"PatchFeatures needs at least 2 filters, with mirror an even number of them, not {filters!r}")
        if not 1 <= self.grid <= min(self.input_shape[1:]) - self.patch + 1 or not self.overlap >= 1:
            raise ConfigurationError(f"grid={self.grid!r} and overlap={self.overlap!r} make no windows on {self.input_shape}")
        if not (0 < self.whiten <= 1 and self.contrast > 0 and self.threshold >= 0):
            raise ConfigurationError(
                f"PatchFeatures needs whiten in (0, 1], contrast > 0 and threshold ≥ 0, not {self.whiten!r}, {self.contrast!r} and "
                f"{self.threshold!r}"
            )
        if self.dictionary not in ("leaves", "gaussian"):
            raise ConfigurationError(f"dictionary must be 'leaves' or 'gaussian', not {self.dictionary!r}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) → (batch, features, grid, grid)."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise DataError(f"PatchFeatures expects images of shape {self.input_shape}; got a tensor of shape {tuple(x.shape)}")
        # A few images at a time: on a processor what stays in its cache, from the responses to their averages.
        entries = _ENTRIES_ON_CPU if x.device.type == "cpu" else _ENTRIES_ELSEWHERE
        rows = max(1, entries // (len(self.filters) * len(self.pooling)))
        return torch.cat([self._features(part) for part in torch.split(x, rows)])

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        energy, filters = self.energy.to(x.dtype), self.filters.to(x.dtype)
        if x.device.type == "cpu":
            return self._pooled(F.conv2d(x, energy).flatten(2), F.conv2d(x, filters).flatten(2), x.dtype)
        # Convolutions of so few channels into so many have no fast kernel on a GPU; products of matrices do.
        patches = F.unfold(x, self.patch)
        return self._pooled(energy.flatten(1) @ patches, filters.flatten(1) @ patches, x.dtype)

    def _pooled(self, white: torch.Tensor, products: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """From W·x_q and D·W·x_q, (batch, …, positions), to the features, in torch functions alone: they can be exported."""
        energy = torch.sum(torch.square(white), 1, keepdim=True) / self.mean_energy
        responses = products * torch.rsqrt(energy + self.contrast)
        pooling, threshold = self.pooling.to(dtype), self.threshold * self.level
        # In place: on a processor half of the time went into fresh memory.
        sides = [torch.matmul(torch.relu_(side), pooling) for side in (responses - threshold, -threshold - responses)]
        pooled = torch.reshape(torch.stack(sides, dim=1), (-1, 2, len(self.filters), self.grid, self.grid))
        if self.mirror:
            first, second = torch.chunk(pooled, 2, dim=2)
            pooled = (first + torch.flip(second, (4,))) / 2
        return torch.flatten(pooled, 1, 2)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return (
            f"{self.input_shape}, patch={self.patch}, filters={len(self.filters)}, grid={self.grid}, overlap={self.overlap:g}, "
            f"threshold={self.threshold:g}, whiten={self.whiten:g}, contrast={self.contrast:g}, mirror={self.mirror}, "
            f"dictionary={self.dictionary!r}, seed={self.seed}"
        )


def _norm(matrix: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


def pooling_windows(size: int, grid: int, overlap: float) -> torch.Tensor:
    """(grid, size): weights of ``grid`` windows over ``size`` positions, each ``overlap``·size/grid wide and of total weight 1.

    A window is a box, its borders smoothed over one position; with an overlap above 1 it reaches into its neighbours.
    """
    distance = size / grid
    centres = (torch.arange(grid, dtype=torch.float64) + 0.5) * distance - 0.5
    away = (torch.arange(size, dtype=torch.float64)[None, :] - centres[:, None]).abs()
    weights = (overlap * distance / 2 + 0.5 - away).clamp(0, 1)
    return weights / weights.sum(1, keepdim=True)


@lru_cache(maxsize=8)
def _learn_from_leaves(
    shape: tuple[int, ...], patch: int, whiten: float, count: int, dictionary: Dictionary, mirror: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """:func:`_learn` from leaves: computed once on this machine."""

    def compute() -> dict[str, torch.Tensor]:
        learned = _learn(leaf_images(shape, seed=seed), patch, whiten, count, dictionary, mirror, seed)
        whitener, vectors, energy, patches = learned
        return {"whitener": whitener, "vectors": vectors, "energy": torch.tensor(energy, dtype=torch.float64), "patches": patches}

    kept = kept_constants("a dictionary of patches", (shape, patch, whiten, count, dictionary, mirror, seed), compute)
    return kept["whitener"], kept["vectors"], float(kept["energy"]), kept["patches"]


def _learn(
    images: torch.Tensor, patch: int, whiten: float, count: int, dictionary: Dictionary, mirror: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """(what centres and whitens a patch, the dictionary's unit vectors, mean energy of white patches, some of them), in float64."""
    draw = torch.Generator().manual_seed(seed + 1)
    patches = F.unfold(images, patch).transpose(1, 2).flatten(0, 1)
    patches = patches[torch.randperm(len(patches), generator=draw)[:_PATCHES]].double()
    size = patches.shape[1]
    centring = torch.eye(size, dtype=torch.float64) - 1 / size
    patches = patches @ centring
    covariance = patches.T @ patches / len(patches)
    if mirror:  # the same for a patch and its mirror image
        turned = torch.arange(size).reshape(-1, patch, patch).flip(2).flatten()
        covariance = (covariance + covariance[turned][:, turned]) / 2
    values, vectors = torch.linalg.eigh(covariance)
    shrunk = (1 - whiten) * values.clamp_min(0) + whiten * values.mean()
    whitener = vectors * shrunk.rsqrt() @ vectors.T @ centring
    white = patches @ whitener.T
    energies = white.square().sum(1)
    chosen = torch.randn(count, size, generator=draw, dtype=torch.float64) @ centring
    if dictionary == "leaves":
        strong = torch.nonzero(energies > energies.median()).flatten()
        chosen = white[strong[torch.randint(len(strong), (count,), generator=draw)]]
    return whitener, chosen / chosen.norm(dim=1, keepdim=True), float(energies.mean()), white[:4000]


@rule(PatchFeatures)
def _patch_features(layer: PatchFeatures, call: Call) -> Transfer:
    """The two constants of the class's description. Not exact: no image is worst for every factor."""
    norm = min(times(layer.lipschitz, call.inputs[0].norm), layer.norm)
    return Transfer(Bound(norm, call.output_shape), (layer.lipschitz,), exact=False)


@lowering(PatchFeatures)
def _plain_patch_features(layer: PatchFeatures, site: Site) -> torch.Tensor:
    white, products = (torch.flatten(F.conv2d(site.x, kernel.to(site.dtype)), 2) for kernel in (layer.energy, layer.filters))
    return layer._pooled(white, products, site.dtype)
