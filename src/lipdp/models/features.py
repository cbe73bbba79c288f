"""Public features and a private head: any fixed module in front, computed once, kept on disk.

What is fixed without looking at the data is public. Its outputs are still private, but each example's depend on that example
alone, so training a head on them has the guarantee of training the whole network: neighbouring datasets stay neighbours.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lipdp import nn
from lipdp._numerics import keep_freed_memory
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.data.augment import Augmentation, fixed_views
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.models.scattering_layers import ToGrid
from lipdp.program.dtypes import Types

__all__ = ["FrozenFeatures", "extract_features", "front_digest", "split_front"]

_FORMAT = 1
# Rows at once: what stays in a processor's cache, and what fills a GPU.
_ROWS_ON_CPU, _ROWS_ON_GPU = 16, 1024


class FrozenFeatures(torch.nn.Module):
    """A public, fixed feature extractor as the first layer: its parameters are frozen and it stays in evaluation mode.

    It must treat examples one by one (:func:`extract_features` checks that), and must have been made without the private data.

    Args:
        module: any module from one tensor to one tensor. A copy of its ``requires_grad`` is not kept: it is frozen in place.
        input_shape: shape of one example.
        lipschitz: a bound on its Lipschitz constant, if one is known; certificates need it, training does not.
        norm: a bound on the norm of its output, if one is known. Otherwise bound what follows, with
            :class:`lipdp.nn.BoundedInput` or :class:`lipdp.nn.Boundary`.
    """

    def __init__(
        self, module: torch.nn.Module, input_shape: Sequence[int], *, lipschitz: float = math.inf, norm: float = math.inf
    ) -> None:
        super().__init__()
        for name, value in (("lipschitz", lipschitz), ("norm", norm)):
            if not value > 0:
                raise ConfigurationError(f"FrozenFeatures {name} must be a positive number, not {value!r}")
        self.module = module.requires_grad_(False)
        self.input_shape = tuple(int(s) for s in input_shape)
        self.lipschitz, self.norm = float(lipschitz), float(norm)
        self.train(self.training)

    def train(self, mode: bool = True) -> FrozenFeatures:
        """The extractor stays in evaluation mode: no dropout, no statistics of a batch."""
        super().train(mode)
        self.module.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The features."""
        y: torch.Tensor = self.module(x)
        return y

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{self.input_shape}, lipschitz={self.lipschitz:g}, norm={self.norm:g}"


@rule(FrozenFeatures)
def _frozen_features(layer: FrozenFeatures, call: Call) -> Transfer:
    """What the user knows of it; nothing, in general. Nothing below it is trained, so only certificates ask for its gain."""
    if any(p.requires_grad for p in layer.parameters()):
        raise call.refuse("a parameter of the frozen features was unfrozen. Freeze it, or put the module in the model by itself.")
    return Transfer(
        Bound(layer.norm, call.output_shape),
        (layer.lipschitz,),
        exact=False,
        why_infinite="nothing is known of how steep or large frozen features are; pass lipschitz= or norm= to FrozenFeatures",
    )


def _by_copy(module: torch.nn.Module, x: torch.Tensor, copies: Augmentation) -> torch.Tensor:
    """(B, …) → (B, K, …): the module's outputs for every copy."""
    outputs: torch.Tensor = module(copies(x).flatten(0, 1))
    return outputs.reshape(len(x), copies.copies, *outputs.shape[1:])


def split_front(model: torch.nn.Sequential) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """(front, head) of a sequential model that starts with a fixed extractor: Scattering2d, PatchFeatures, FrozenFeatures.

    The front is all that can be computed once: up to the first layer that is trained, that gets statistics of the data
    (Standardize), that bounds what enters the head, or that only repeats values (ToGrid). Training the head on the front's
    outputs is training the model; see :func:`extract_features`. Layers are shared.
    """
    from lipdp.models.patches import PatchFeatures
    from lipdp.models.scattering import Scattering2d

    extractors = FrozenFeatures | Scattering2d | PatchFeatures
    layers = list(model)
    length = 0
    while length < len(layers) and not _belongs_to_head(layers[length]):
        length += 1
    if not any(isinstance(part, extractors) for layer in layers[:length] for part in layer.modules()):
        raise ConfigurationError(
            "the model does not start with a fixed front: there is no Scattering2d, PatchFeatures or FrozenFeatures before its "
            "first trained or bounding layer"
        )
    kind = type(model)
    return kind(*layers[:length]), kind(*layers[length:])


def _belongs_to_head(layer: torch.nn.Module) -> bool:
    trained = any(p.requires_grad for p in layer.parameters())
    return trained or any(isinstance(part, ToGrid | nn.Standardize | nn.BoundedInput | nn.Boundary) for part in layer.modules())


def extract_features(
    module: torch.nn.Module,
    dataset: TensorDataset,
    *,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    copies: Augmentation | None = None,
    dtype: torch.dtype | None = None,
    keep: torch.device | str = "cpu",
    cache: str | os.PathLike[str] | None = None,
) -> TensorDataset:
    """``dataset`` with ``module``'s outputs in place of its inputs, (N, *features) or, with copies, (N, K, *features).

    Args:
        module: fixed and public. It is run in evaluation mode without gradients, and must treat examples one by one: that is
            checked on random inputs, for features that mix examples would void any guarantee.
        dataset: of (inputs, targets). Inputs of another type than the module's are converted; token ids stay whole numbers.
        device: where to compute.
        batch_size: rows at once.
        copies: send these copies of every example through it: a fixed augmentation, e.g. ``lipdp.data.Flip()``. Train on them
            with ``augmentation=lipdp.data.PrecomputedCopies(K)``.
        dtype: to keep the features in; the module's by default.
        keep: where the features and targets end up; training is fastest where they are already on its device.
        cache: a folder. The file's name is a digest of the module (class, settings, weights), the data, the copies and the
            type, so nothing stale is ever read. The files hold private data in another form: keep them as safe as the data.
    """
    if not isinstance(dataset, TensorDataset) or len(dataset.tensors) != 2:
        raise ConfigurationError("extract_features takes a torch.utils.data.TensorDataset of (inputs, targets)")
    inputs, targets = dataset.tensors
    if copies is not None:
        fixed_views(copies)  # refuses random ones: they are drawn anew at every step, and can't be computed once
    file = None
    if cache is not None:
        file = Path(cache) / f"features-{_digest(module, inputs, copies, dtype)}.pt"
        stored = _read(file)
        if stored is not None:
            return TensorDataset(stored.to(keep), targets.to(keep))
    place = torch.device(device) if device is not None else next((t.device for t in _tensors(module).values()), inputs.device)
    rows = batch_size or max(1, (_ROWS_ON_CPU if place.type == "cpu" else _ROWS_ON_GPU) // (copies.copies if copies else 1))
    module.to(place)
    if place.type == "cpu":
        keep_freed_memory()
    with _evaluating(module), torch.no_grad():
        types = Types(module)
        _check_one_by_one(module, inputs, place, types)
        features: torch.Tensor | None = None
        for start in range(0, len(inputs), rows):
            x = types.inputs(inputs[start : start + rows].to(place))
            y = module(x) if copies is None else _by_copy(module, x, copies)
            if features is None:  # all of it at once: putting parts together would take the memory twice
                features = torch.empty((len(inputs), *y.shape[1:]), dtype=dtype or y.dtype, device=keep)
            features[start : start + len(y)] = y
    assert features is not None
    if file is not None:
        _write(features.cpu(), file)
    return TensorDataset(features, targets.to(keep))


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _check_one_by_one(module: torch.nn.Module, inputs: torch.Tensor, device: torch.device, types: Types) -> None:
    """A row's features may not change with the rows beside it."""
    if len(inputs) == 0:
        raise DataError("the dataset is empty: there are no features to compute")
    draw = torch.Generator().manual_seed(0)
    shape = (3, *inputs.shape[1:])
    # Token ids are only known to be valid where they occur; which rows are mixed below does not matter.
    x = torch.rand(shape, generator=draw).to(inputs.dtype) if inputs.is_floating_point() else inputs[:3].clone()
    x = types.inputs(x.to(device))
    together, other = module(x), module(torch.cat([x[:1], 1 - x[1:] if x.is_floating_point() else x[1:].flip(0)]))
    if not isinstance(together, torch.Tensor) or together.shape[:1] != x.shape[:1]:
        raise UnsupportedError(f"{type(module).__name__} must turn a batch into one tensor of as many rows")
    alone = module(x[:1])
    scale = 1e-3 * float(together.abs().max())  # a GPU may take another algorithm for one row
    if float((together[0] - alone[0]).abs().max()) > scale or float((together[0] - other[0]).abs().max()) > scale:
        raise UnsupportedError(
            f"{type(module).__name__} mixes examples: the features of one change with the others in its batch, so one example's "
            "influence is not bounded. Use an extractor that treats them one by one (no batch statistics)."
        )


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def front_digest(module: torch.nn.Module) -> str:
    """A digest of a module's class, settings and weights: the same for modules that compute the same features."""
    return _digest(module, torch.empty(0), None, None)


def _digest(module: torch.nn.Module, inputs: torch.Tensor, copies: Augmentation | None, dtype: torch.dtype | None) -> str:
    kinds = [f"{type(part).__module__}.{type(part).__qualname__}" for part in module.modules()]
    digest = hashlib.blake2b(f"{_FORMAT} {kinds} {module} {copies} {dtype}".encode(), digest_size=20)
    for name, tensor in (*sorted(_tensors(module).items()), ("inputs", inputs)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(raw.view(torch.uint8).numpy().data if raw.numel() else b"")
    return digest.hexdigest()


def _read(file: Path) -> torch.Tensor | None:
    """The stored features; ``None`` where there are none, or where the file is damaged (it will be written again)."""
    try:
        stored: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return None
    except Exception:
        return None
    return stored if isinstance(stored, torch.Tensor) else None


def _write(features: torch.Tensor, file: Path) -> None:
    """Whole or not at all: written next to its place, then moved into it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".part")
    os.close(handle)
    try:
        torch.save(features, name)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
