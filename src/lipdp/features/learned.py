"""Features learned from drawings: what a network, taught without labels on drawn scenes alone, sees in an image.

The network is a public constant, like a table of filters: no photograph and no private record had a part in it. It is residual,
normalised by batches while it learns and folded into plain convolutions after. The small one comes with the package; the large
one is rebuilt by ``lipdp features train large``, in minutes on a GPU, and kept in the user's cache.

Averages of a stage's maps over cells (4 × 4 of the last stage but one; 2 × 2 and 1 × 1 of the last) are skewed, as energies
are: their square roots are taken. Then each channel is brought to mean 0 and deviation 1 and channels are decorrelated part of
the way, by (Σ + .1·λ̄·I)^−.3 with Σ the correlations of the channels' responses to drawings and λ̄ their mean eigenvalue: a
head under noise learns from what is large.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lipdp._files import PUBLIC, written_whole
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.data.augment import Shift
from lipdp.data.files import data_root
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import as_computed, lowering
from lipdp.features.drawings import draw_images


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a network: channels of its stages, and residual blocks of each. Every stage but the first halves the image."""

    widths: tuple[int, ...]
    blocks: tuple[int, ...]


SHAPES = {
    "large": NetworkShape((128, 256, 512), (2, 2, 2)),
    "small": NetworkShape((48, 128, 256), (1, 1, 1)),
}
"""By the names that features="…" knows."""


class _NormedConvolution(nn.Module):
    """A convolution without bias, then batch normalisation: what learns."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.convolution(x))
        return y

    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of the convolution that does the same in evaluation mode."""
        norm = self.norm
        assert norm.running_var is not None
        assert norm.running_mean is not None
        factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        return self.convolution.weight * factor[:, None, None, None], norm.bias - norm.running_mean * factor


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, learning: bool) -> nn.Module:
    if learning:
        return _NormedConvolution(inputs, outputs, kernel, stride)
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, learning: bool) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride, learning)
        self.second = _convolution(outputs, outputs, 3, 1, learning)
        same = inputs == outputs and stride == 1
        self.short: nn.Module = nn.Identity() if same else _convolution(inputs, outputs, 1, stride, learning)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.short(x))


class ResidualNetwork(nn.Module):
    """Stages of residual blocks behind one 3 × 3 convolution of three channels.

    Args:
        shape: its sizes.
        learning: with batch normalisation. Otherwise plain convolutions, for the weights of :func:`folded_weights`.
    """

    def __init__(self, shape: NetworkShape, *, learning: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.stem = _convolution(3, shape.widths[0], 3, 1, learning)
        self.stages, inputs = nn.ModuleList(), shape.widths[0]
        for number, (width, blocks) in enumerate(zip(shape.widths, shape.blocks, strict=True)):
            strides = [2 if number else 1] + [1] * (blocks - 1)
            layers = [_Block(width if j else inputs, width, stride, learning) for j, stride in enumerate(strides)]
            self.stages.append(nn.Sequential(*layers))
            inputs = width

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Images (batch, 3, height, width) around 0 → the maps of every stage, none of them negative."""
        maps, y = [], F.relu(self.stem(x))
        for stage in self.stages:
            y = stage(y)
            maps.append(y)
        return maps


def folded_weights(network: ResidualNetwork) -> dict[str, torch.Tensor]:
    """The weights of the network without normalisation that does the same in evaluation mode."""
    weights: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, part in network.named_modules():
            if isinstance(part, _NormedConvolution):
                weights[f"{name}.weight"], weights[f"{name}.bias"] = (value.detach().float().cpu() for value in part.folded())
    return weights


# What is read off: (stage counted from the last, cells along each side).
_TAPS = ((-2, 4), (-1, 2), (-1, 1))
_POWER, _FLOOR = -0.3, 0.1
_TINY = 1e-6
_DRAWINGS, _DRAWINGS_SEED = 4096, 77_000_000  # apart from those that networks learn from
# sha256 of what the package brings along.
_SHIPPED = {"small": "b5fe68d2631beb182e82d5369ca9221f0e77b337106c0719d58989c1729afc5b"}
_SUFFIX = ".npz"


@dataclass(frozen=True)
class Network:
    """A network of convolutions and what its responses to drawings are like.

    Attributes:
        shape: its sizes.
        view: pixels along each side of the images that it takes.
        weights: of its convolutions, by name.
        means: of the square roots, one vector of channels for each tap.
        mixings: what standardises and decorrelates them, one matrix over the channels for each tap.
        about: where it comes from: its lesson, and the command that made it.
        digest: of its file.
    """

    shape: NetworkShape
    view: int
    weights: Mapping[str, torch.Tensor]
    means: tuple[torch.Tensor, ...]
    mixings: tuple[torch.Tensor, ...]
    about: Mapping[str, Any]
    digest: str

    @property
    def features(self) -> int:
        """How many come out."""
        return sum(self.shape.widths[stage] * cells**2 for stage, cells in _TAPS)


class LearnedFeatures(torch.nn.Module):
    """Images (batch, 1 or 3 channels, height, width) → (batch, features); drawings come out with norm about 1.

    Images of another size than the network's are resized, grey ones repeated in three channels. Averages over copies of the image
    are taken before the square roots. Nothing is known of how steep it is: certificates are refused behind it, training asks for
    no constant of a fixed layer.

    Args:
        shape: (channels, height, width) of one image, with values from 0 to 1.
        network: "small", "large", a file that :func:`write_network` made, or what was read from one.
        shifts: the image is moved by these (down, right) pixels, of the network's view.
        flip: and mirrored.
    """

    def __init__(
        self,
        shape: Sequence[int],
        network: str | os.PathLike[str] | Network = "small",
        *,
        shifts: Sequence[tuple[int, int]] = ((0, 0),),
        flip: bool = True,
    ) -> None:
        super().__init__()
        self.input_shape = tuple(int(s) for s in shape)
        if len(self.input_shape) != 3 or self.input_shape[0] not in (1, 3) or min(self.input_shape) < 1:
            raise ConfigurationError(
                f"learned features are of images (channels, height, width) with 1 or 3 channels, not of {self.input_shape}"
            )
        loaded = network if isinstance(network, Network) else read_network(network)
        self.digest, self.view, self.shape = loaded.digest, loaded.view, loaded.shape
        self.copies = torch.nn.ModuleList([Shift(down, right) for down, right in shifts])
        self.flip = flip
        if not len(self.copies):
            raise ConfigurationError("learned features need at least one copy of the image: shifts is empty")
        self._names = tuple(loaded.weights)
        for name, weight in loaded.weights.items():
            layout = torch.channels_last if weight.ndim == 4 else torch.contiguous_format
            self.register_buffer(_buffer(name), weight.clone(memory_format=layout), persistent=False)
        for number, (mean, mixing) in enumerate(zip(loaded.means, loaded.mixings, strict=True)):
            self.register_buffer(f"mean_{number}", mean.clone(), persistent=False)
            self.register_buffer(f"mixing_{number}", mixing.clone(), persistent=False)
        self.output_shape = (loaded.features,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The features."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise DataError(f"LearnedFeatures expects images of shape {self.input_shape}; got a tensor of shape {tuple(x.shape)}")
        return self.computed(x, x.dtype)

    def computed(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :func:`lipdp.export.as_computed`."""
        if self.input_shape[0] == 1:
            x = torch.cat([x, x, x], 1)
        if self.input_shape[1:] != (self.view, self.view):
            x = F.interpolate(x, size=(self.view, self.view), mode="bilinear", align_corners=False, antialias=True)
        views = [copy(x - 0.5) for copy in self.copies]
        views += [torch.flip(view, (3,)) for view in views] if self.flip else []
        pooled = self._pooled(views[0], dtype)
        for view in views[1:]:
            pooled = [total + more for total, more in zip(pooled, self._pooled(view, dtype), strict=True)]
        parts = []
        for number, cells in enumerate(pooled):
            roots = torch.sqrt(torch.flatten(cells, 2) * (1 / len(views)) + _TINY)
            even = roots - self.get_buffer(f"mean_{number}").to(dtype)[:, None]
            parts.append(torch.flatten(torch.matmul(self.get_buffer(f"mixing_{number}").to(dtype), even), 1))
        return torch.cat(parts, 1) * (1 / math.sqrt(self.output_shape[0]))

    def _pooled(self, x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """The cells of each tap."""
        maps, y = [], torch.relu(self._convolved(x, "stem", 1, dtype))
        for number, blocks in enumerate(self.shape.blocks):
            for block in range(blocks):
                name, stride = f"stages.{number}.{block}", 2 if number and not block else 1
                inner = self._convolved(torch.relu(self._convolved(y, f"{name}.first", stride, dtype)), f"{name}.second", 1, dtype)
                short = self._convolved(y, f"{name}.short", stride, dtype) if f"{name}.short.weight" in self._names else y
                y = torch.relu(inner + short)
            maps.append(y)
        return [F.adaptive_avg_pool2d(maps[stage], cells) for stage, cells in _TAPS]

    def _convolved(self, x: torch.Tensor, name: str, stride: int, dtype: torch.dtype) -> torch.Tensor:
        weight, bias = (self.get_buffer(_buffer(f"{name}.{kind}")).to(dtype) for kind in ("weight", "bias"))
        return F.conv2d(x, weight, bias, stride=stride, padding=weight.shape[2] // 2)

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn, and which network it is."""
        shifts = [(copy.down, copy.right) for copy in self.copies if isinstance(copy, Shift)]
        return f"{self.input_shape}, network={self.digest[:16]}, shifts={shifts}, flip={self.flip}"


def _buffer(name: str) -> str:
    return name.replace(".", "_")


@rule(LearnedFeatures)
def _learned_features(layer: LearnedFeatures, call: Call) -> Transfer:
    return Transfer(
        Bound(math.inf, call.output_shape),
        (math.inf,),
        exact=False,
        why_infinite="nothing useful is known of how steep or large learned features are; put BoundedInput behind them",
    )


lowering(LearnedFeatures)(as_computed)


# Files of networks.


def network_file(name: str | os.PathLike[str]) -> Path:
    """Where a network is: in the package, in the user's cache ("large"), or where the name says."""
    told = os.fspath(name)
    if told in _SHIPPED:
        return Path(__file__).parent / "networks" / f"{told}{_SUFFIX}"
    return Path(told) if told.endswith(_SUFFIX) else data_root() / "networks" / f"{told}{_SUFFIX}"


def read_network(name: str | os.PathLike[str]) -> Network:
    """A network from its file, which must be whole: the digest of a shipped one is known, that of a rebuilt one lies beside it."""
    file = network_file(name)
    told = os.fspath(name)
    try:
        stamp = file.stat()
        wanted = _SHIPPED.get(told) or file.with_suffix(".sha256").read_text(encoding="ascii").strip()
    except OSError as error:
        if told in _SHIPPED:
            raise DataError(
                f"the network {told!r} that comes with lipdp is missing ({error}). Install the package again."
            ) from None
        raise DataError(
            f"there is no network {told!r} at '{file}'. Build it with `lipdp features train {told}` (minutes on a GPU), or take "
            "features='small', which comes with lipdp."
        ) from None
    return _read(file, wanted, stamp.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(file: Path, wanted: str, changed: int) -> Network:
    raw = file.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != wanted:
        raise DataError(
            f"the network '{file}' is corrupt: its sha256 is {digest}, and should be {wanted}. Delete it and build it again."
        )
    with np.load(file, allow_pickle=False) as stored:
        about = json.loads(bytes(stored["about"]).decode())
        tensors = {key: torch.from_numpy(stored[key].astype(np.float32)) for key in stored.files if key != "about"}
    weights = {key.removeprefix("weight:"): value for key, value in tensors.items() if key.startswith("weight:")}
    means, mixings = (tuple(tensors[f"{kind}:{number}"] for number in range(len(_TAPS))) for kind in ("mean", "mixing"))
    shape = NetworkShape(*(tuple(map(int, about["shape"][name])) for name in ("widths", "blocks")))
    return Network(shape, int(about["view"]), weights, means, mixings, about, digest)


def write_network(
    file: str | os.PathLike[str],
    shape: NetworkShape,
    weights: Mapping[str, torch.Tensor],
    view: int,
    about: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
) -> Network:
    """Measure the network's responses to drawings and keep it, in half precision, with its digest beside it.

    Args:
        file: ends in .npz.
        shape: of the network.
        weights: of its convolutions, see :func:`lipdp.features.learned.folded_weights`.
        view: pixels along each side of its images.
        about: where it comes from.
        device: where to compute.
    """
    path = Path(file)
    if path.suffix != _SUFFIX:
        raise ConfigurationError(f"a network's file ends in {_SUFFIX}, and '{path}' does not")
    halves = {name: weight.detach().cpu().half() for name, weight in weights.items()}
    means, mixings = _measured(shape, {name: weight.float() for name, weight in halves.items()}, view, torch.device(device))
    told = {**about, "shape": asdict(shape), "view": view, "taps": _TAPS, "power": _POWER, "floor": _FLOOR}
    arrays = {f"weight:{name}": weight.numpy() for name, weight in halves.items()}
    for number, (mean, mixing) in enumerate(zip(means, mixings, strict=True)):
        arrays |= {f"mean:{number}": mean.half().numpy(), f"mixing:{number}": mixing.half().numpy()}
    arrays["about"] = np.frombuffer(json.dumps(told, sort_keys=True).encode(), dtype=np.uint8)
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    with written_whole(path, PUBLIC) as stream:
        stream.write(content.getvalue())
    path.with_suffix(".sha256").write_text(f"{digest}\n", encoding="ascii")
    return _read(path, digest, path.stat().st_mtime_ns)


def _measured(
    shape: NetworkShape, weights: Mapping[str, torch.Tensor], view: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Means of the square roots, and what decorrelates them, by tap: of drawings that the network has not seen."""
    sizes = [shape.widths[stage] for stage, _ in _TAPS]
    raw = Network(shape, view, weights, tuple(torch.zeros(n) for n in sizes), tuple(torch.eye(n) for n in sizes), {}, "")
    layer = LearnedFeatures((3, view, view), raw, flip=False).to(device)
    sums = [torch.zeros(n, dtype=torch.float64, device=device) for n in sizes]
    products = [torch.zeros(n, n, dtype=torch.float64, device=device) for n in sizes]
    count, at_once = 0, min(256, _DRAWINGS)
    with torch.no_grad():
        for start in range(0, _DRAWINGS, at_once):
            drawings = draw_images(at_once, 2 * view, _DRAWINGS_SEED + start, device=device)
            images = F.interpolate(drawings, size=(view, view), mode="bilinear", align_corners=False, antialias=True) - 0.5
            for number, cells in enumerate(layer._pooled(images, torch.float32)):
                roots = torch.sqrt(cells.flatten(2) + _TINY).transpose(1, 2).flatten(0, 1).double()
                sums[number] += roots.sum(0) / _TAPS[number][1] ** 2
                products[number] += roots.T @ roots / _TAPS[number][1] ** 2
            count += at_once
    means = [total / count for total in sums]
    mixings = [_mixing(product / count - torch.outer(mean, mean)) for product, mean in zip(products, means, strict=True)]
    return [mean.float().cpu() for mean in means], [mixing.float().cpu() for mixing in mixings]


def _mixing(covariance: torch.Tensor) -> torch.Tensor:
    """M = s·(Σ + .1·λ̄·I)^−.3·D^−1: D the deviations, Σ the correlations, s such that E‖M(x − mean)‖² is the number of channels."""
    deviations = covariance.diagonal().clamp_min(0).sqrt()
    deviations = deviations.clamp_min(1e-2 * float(deviations.max()))
    correlations = covariance / deviations[:, None] / deviations[None, :]
    values, vectors = torch.linalg.eigh(correlations)
    values = values.clamp_min(0)
    powers = (values + _FLOOR * values.mean()) ** _POWER
    scale = math.sqrt(len(values) / float((values * powers**2).sum()))
    mixing: torch.Tensor = scale * (vectors * powers @ vectors.T) / deviations[None, :]
    return mixing
