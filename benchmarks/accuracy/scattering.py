"""Scattering features and noise for benchmarks/accuracy/search.py: the training set alone, a part of it held out to choose by."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from columns import gaussian_mu
from torch import Tensor
from torch.nn import functional as F

from lipdp import data
from lipdp.data import Shifts
from lipdp.features.drawings import texture_images
from lipdp.features.scattering import Scattering2d

Config = dict[str, Any]

# (down, right) shifts by name; with a flip of each where the dataset's classes allow one.
SHIFTS: dict[str, list[tuple[int, int]]] = {
    "none": [(0, 0)],
    "pair": [(0, 0), (2, 2), (-2, -2)],
    "cross": [(0, 0), (2, 0), (-2, 0), (0, 2), (0, -2)],
    "cross1": [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)],
    "square": [(0, 0), *((a, b) for a in (-2, 0, 2) for b in (-2, 0, 2) if (a, b) != (0, 0))],
    "wide": [(0, 0), *((a, b) for a in (-3, 0, 3) for b in (-3, 0, 3) if (a, b) != (0, 0))],
}


@dataclass
class Split:
    """Images and labels, on the device."""

    images: Tensor
    labels: Tensor


def load_parts(name: str, held_out: float, device: torch.device) -> tuple[Split, Split, int]:
    """Training and validation parts of the *training* set, and the number of classes. The test set is not touched."""
    train, _, info = data.load(name, download=False)
    learn, validation = data.split(train, held_out)
    parts = [Split(*(tensor.to(device) for tensor in part.tensors)) for part in (learn, validation)]
    return parts[0], parts[1], info.classes


class Noise:
    """Noise multipliers from a table made beforehand: PLD, for (ε, batch, steps) at the size of the training part."""

    def __init__(self, file: Path) -> None:
        self.table = json.loads(file.read_text())

    def multiplier(self, dataset: str, epsilon: float, batch: int, steps: int, statistics: float | None) -> float:
        """σ of every step. Statistics released at multiplier z leave μ² − 1/z² of the budget's μ² (Gaussian approximation)."""
        entry = self.table[dataset]
        sigma: float = entry["sigma"][f"{epsilon:g}|{batch}|{steps}"]
        if statistics is None:
            return sigma
        left = 1 - 1 / (statistics * gaussian_mu(epsilon)) ** 2
        if left <= 0:
            raise ValueError(f"statistics at multiplier {statistics} cost more than epsilon={epsilon}")
        return sigma / math.sqrt(left)


class Features:
    """Scattering features of the copies of all images, kept on the device; the least recently used go when there is no room."""

    def __init__(self, learn: Split, validation: Split, flip: bool, budget_gib: float, rows: int) -> None:
        self.parts = (learn, validation)
        self.flip = flip
        self.budget = budget_gib * 2**30
        self.rows = rows
        self.kept: OrderedDict[str, tuple[list[Tensor], list[Tensor]]] = OrderedDict()
        self.dtype = torch.bfloat16 if learn.images.is_cuda else torch.float32

    def copies(self, config: Config) -> Shifts:
        return Shifts(SHIFTS[config["shifts"]], flip=self.flip)

    def get(self, config: Config) -> tuple[list[Tensor], list[Tensor]]:
        """(training, validation): for each front a tensor (N, K, C, H, W), centred and scaled by the statistics of textures.

        With merge "mean" the copies' mean is kept instead of the copies: K = 1.
        """
        key = feature_key(config)
        if key not in self.kept:
            shape = tuple(self.parts[0].images.shape[1:])
            fronts = [self._front(shape, J, L, config) for J, L in config["fronts"]]
            need = self._bytes(config, [front.transform.output_shape for front in fronts])
            if need > self.budget / 2:
                raise ValueError(f"these features take {need / 2**30:.0f} GiB")
            while self.kept and sum(t.nbytes for pair in self.kept.values() for p in pair for t in p) + need > self.budget:
                self.kept.popitem(last=False)
            computed = [[self._compute(part.images, front, config) for front in fronts] for part in self.parts]
            self.kept[key] = (computed[0], computed[1])
        self.kept.move_to_end(key)
        return self.kept[key]

    def _bytes(self, config: Config, shapes: Sequence[Sequence[int]]) -> int:
        rows = sum(len(part.images) for part in self.parts) * (1 if config["merge"] == "mean" else self.copies(config).copies)
        return rows * sum(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    def _front(self, shape: Sequence[int], J: int, L: int, config: Config) -> Front:
        device = self.parts[0].images.device
        transform = Scattering2d(shape, J=J, L=L, colour=config["colour"]).to(device)
        with torch.no_grad():
            response = transform(texture_images(shape).to(device))
            level = response.abs().mean((0, 2, 3), keepdim=True)
            response = _compressed(response, level, config["power"])
            mean, std = response.mean((0, 2, 3), keepdim=True), response.std((0, 2, 3), keepdim=True)
            # A channel that textures leave at 0 is not blown up.
            std = std.clamp_min(1e-3 * float(std.max()))
            mixing = None
            if config["white"]:
                even = ((response - mean) / std).movedim(1, -1).flatten(0, 2).double()
                values, vectors = torch.linalg.eigh(even.T @ even / len(even))
                shrunk = (1 - config["white"]) * values.clamp_min(0) + config["white"]
                mixing = (vectors @ torch.diag(shrunk.rsqrt()) @ vectors.T).float()
        return Front(transform, level, mean, std, mixing)

    def _compute(self, images: Tensor, front: Front, config: Config) -> Tensor:
        copies = self.copies(config)
        merged = config["merge"] == "mean"
        kept = 1 if merged else copies.copies
        out = torch.empty((len(images), kept, *front.transform.output_shape), dtype=self.dtype, device=images.device)
        with torch.no_grad():
            for start in range(0, len(images), self.rows):
                x = images[start : start + self.rows]
                responses = (front(view(x), config["power"]) for view in copies.views)
                if merged:
                    out[start : start + self.rows, 0] = (sum(responses) / copies.copies).to(self.dtype)  # type: ignore[union-attr]
                    continue
                for number, response in enumerate(responses):
                    out[start : start + self.rows, number] = response.to(self.dtype)
        return out


@dataclass(frozen=True)
class Front:
    """A transform, and the mean and deviation of every channel's response to random textures: public, they cost nothing.

    ``mixing`` decorrelates the channels as it would the textures' (shrunk towards leaving them alone).
    """

    transform: Scattering2d
    level: Tensor
    mean: Tensor
    std: Tensor
    mixing: Tensor | None

    def __call__(self, x: Tensor, power: str) -> Tensor:
        y = (_compressed(self.transform(x), self.level, power) - self.mean) / self.std
        return y if self.mixing is None else torch.einsum("ij,bjhw->bihw", self.mixing, y)


def feature_key(config: Config) -> str:
    """What features depend on."""
    names = ("fronts", "colour", "power", "shifts", "white")
    return json.dumps([*(config[name] for name in names), config["merge"] == "mean"])


def _compressed(x: Tensor, level: Tensor, power: str) -> Tensor:
    """Scattering coefficients are skewed. "log": sign(x)·log(1 + |x|/(0.3·level)); "root": sign(x)·√|x|; "none"."""
    if power == "log":
        return torch.sign(x) * torch.log1p(x.abs() / (0.3 * level))
    return torch.sign(x) * x.abs().sqrt() if power == "root" else x


def normalised(parts: tuple[list[Tensor], list[Tensor]], config: Config, generator: torch.Generator) -> list[Tensor]:
    """(N, K, C, H, W), or (N, K, D) for several fronts, of both parts; each copy on the unit sphere.

    "paid": per-channel means and second moments of the training part, clipped to a public radius and noised at ``stats``.
    "group": each copy normalised over groups of channels. "public": the textures' statistics alone. Then channels get public
    weights by the order of their path and by whether they are of brightness or colour.
    """
    fronts = []
    for number, (learn, validation) in enumerate(zip(*parts, strict=True)):
        weights = _channel_weights(learn.shape[2], config["fronts"][number], config, learn.device)
        weights = weights * _window(learn.shape[3], learn.shape[4], config["wp"], learn.device)
        if config["norm"] == "paid":
            # One release for all fronts: its radius is that of all features together.
            size = config["radius"] * math.sqrt(sum(part.shape[2] for part in parts[0]) / learn.shape[2])
            mean, std = _paid_statistics(learn, config["stats"], size, generator)
            change = partial(_standardised, mean=mean, std=std / weights)
        elif config["norm"] == "group":
            change = partial(_group_norm, groups=math.gcd(learn.shape[2], 27), weights=weights)
        else:
            change = partial(_standardised, mean=torch.zeros((), device=learn.device), std=1 / weights)
        fronts.append([_each_rows(x, change) for x in (learn, validation)])
    joined = fronts[0] if len(fronts) == 1 else [torch.cat([front[side].flatten(2) for front in fronts], 2) for side in (0, 1)]
    return [_bounded(x, config["merge"]) for x in joined]


def _channel_weights(channels: int, front: Sequence[int], config: Config, device: torch.device) -> Tensor:
    J, L = front
    orders = [1.0] * 1 + [config["w1"]] * (J * L) + [config["w2"]] * (math.comb(J, 2) * L**2)
    orders[0] = config["w0"]
    planes = channels // len(orders)
    colours = [1.0] + [config["wc"] if config["colour"] == "yuv" else 1.0] * (planes - 1)
    return torch.tensor([c * o for c in colours for o in orders], device=device)[:, None, None]


def _window(height: int, width: int, corner: float, device: torch.device) -> Tensor:
    """1 in the middle of the image, ``corner`` in its corners: corner^(r²/r_max²)."""
    y, x = (torch.linspace(-1, 1, n, device=device) if n > 1 else torch.zeros(1, device=device) for n in (height, width))
    return corner ** ((y[:, None] ** 2 + x[None, :] ** 2) / 2)


def _standardised(rows: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (rows - mean) / std


def _bounded(x: Tensor, merge: str) -> Tensor:
    """What an example trains on, so that the mean of δ_k⊗x_k over its copies has norm at most max‖δ_k‖.

    "copies", "mean": every copy (or the only one, their mean) on the unit sphere. "joint": copies on the sphere, then all divided
    by σ_max/√K of their stack: ‖Σδ_k⊗x_k‖_F ≤ ‖δ‖_F·σ_max, and copies that differ get longer.
    """
    sphere = _each_rows(x, _to_sphere)
    return _each_rows(sphere, _jointly_bounded) if merge == "joint" else sphere


def _jointly_bounded(rows: Tensor) -> Tensor:
    flat = rows.flatten(2)
    largest = torch.linalg.eigvalsh(flat @ flat.transpose(1, 2))[:, -1].clamp_min(1e-12).sqrt()
    return rows * (math.sqrt(rows.shape[1]) / largest).reshape(-1, *([1] * (rows.ndim - 1)))


def _group_norm(rows: Tensor, groups: int, weights: Tensor) -> Tensor:
    return F.group_norm(rows.flatten(0, 1), groups).reshape(rows.shape) * weights


def _to_sphere(rows: Tensor) -> Tensor:
    norms = rows.flatten(2).norm(dim=2).clamp_min(1e-12)
    return rows / norms.reshape(*norms.shape, *([1] * (rows.ndim - 2)))


def _each_rows(x: Tensor, function: Any, rows: int = 2048) -> Tensor:
    """The function in float32, a few rows at a time, into a new tensor of x's type."""
    out = torch.empty_like(x)
    for start in range(0, len(x), rows):
        out[start : start + rows] = function(x[start : start + rows].float()).to(x.dtype)
    return out


def _paid_statistics(x: Tensor, multiplier: float, size: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As lipdp.privacy.private_moments: m1, m2 of each record (means over positions and copies), clipped to R, summed, noised."""
    count, _, channels, *grid = x.shape
    positions = math.prod(grid)
    radius = size * math.sqrt(channels * positions)  # the textures' deviation is 1 in these units
    sums = [torch.zeros(channels, dtype=torch.float64, device=x.device) for _ in range(2)]
    for start in range(0, count, 2048):
        rows = x[start : start + 2048].float().flatten(3)
        rows = rows * (radius / rows.flatten(2).norm(dim=2).clamp_min(radius))[:, :, None, None]
        sums[0] += rows.mean((1, 3)).double().sum(0)
        sums[1] += rows.square().mean((1, 3)).double().sum(0)
    stds = (multiplier * radius / math.sqrt(positions) * math.sqrt(2), multiplier * radius**2 / positions * math.sqrt(2))
    noised = [s + std * torch.randn(channels, generator=generator, device=x.device) for s, std in zip(sums, stds, strict=True)]
    mean, square = (s / count for s in noised)
    floor = stds[1] / count
    std = (square - mean**2).clamp_min(floor).sqrt()
    return mean.float()[:, None, None], std.float()[:, None, None]
