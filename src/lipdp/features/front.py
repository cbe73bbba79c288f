"""The front: fixed layers before the first trained one, computed once for a whole dataset, for all copies, kept on disk.

What is fixed without looking at the data is public. Its outputs are still private, but each example's depend on that example
alone, so training what follows on them has the guarantee of training the whole network: neighbouring datasets stay neighbours.
:func:`lipdp.fit` does it for any model (``settle=True``, see :mod:`lipdp.training.front`); :func:`split_front` and
:func:`extract_features` are for a loop of your own.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import TensorDataset

from lipdp import nn
from lipdp._checks import discreet
from lipdp._files import written_whole
from lipdp._numerics import keep_freed_memory
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.clipping.restored import left_as_it_was
from lipdp.data.augment import Augmentation, copies_of, fixed_views
from lipdp.data.norms import one_by_one
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.features.layers import ToGrid
from lipdp.features.learned import LearnedFeatures
from lipdp.features.patches import PatchFeatures
from lipdp.features.scattering import Scattering2d
from lipdp.inputs import evaluating
from lipdp.nn.boundary import to_ball
from lipdp.program.dtypes import Types

_FORMAT = 2
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


def split_front(model: torch.nn.Sequential) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """(front, head) of a sequential model that starts with a fixed extractor (Scattering2d, PatchFeatures, …).

    The front is all that can be computed once: up to the first layer that is trained, that gets statistics of the data
    (Standardize), that bounds what enters the head, or that only repeats values (ToGrid). Training the head on the front's
    outputs is training the model; see :func:`extract_features`. Layers are shared.

    Args:
        model: is left as it is; the two parts hold its layers, not copies.
    """
    layers = list(model)
    stops = (ToGrid, nn.Standardize, nn.BoundedInput, nn.Boundary)
    length = next((i for i, layer in enumerate(layers) if _is_trained(layer) or _contains(layer, stops)), len(layers))
    if not any(_contains(layer, _extractors()) for layer in layers[:length]):
        raise ConfigurationError(
            "the model does not start with a fixed front: there is no Scattering2d, PatchFeatures, LearnedFeatures or "
            "FrozenFeatures before its first trained or bounding layer"
        )
    kind = type(model)
    return kind(*layers[:length]), kind(*layers[length:])


def fixed_layers(model: torch.nn.Module, *, waiting: bool = False) -> int:
    """How many layers at the front of a sequential model are fixed: nothing to train, nothing random, no cotangent clipped.

    Args:
        model: a Sequential.
        waiting: a Standardize still waits for its statistics: the front ends there, or where values are only repeated for it.
    """
    plain = isinstance(model, torch.nn.Sequential) and type(model).forward is torch.nn.Sequential.forward
    if not plain or model._forward_hooks or model._forward_pre_hooks:
        raise ConfigurationError(
            f"only a Sequential without hooks says where its fixed layers end, and {type(model).__name__} is none: put the fixed "
            "part and the trained part into one nn.Sequential"
        )
    assert isinstance(model, torch.nn.Sequential)
    stops = (nn.ClipGradient, *((ToGrid, nn.Standardize) if waiting else ()))
    count = 0
    for layer in model:
        if _is_trained(layer) or _contains(layer, stops) or any(map(_is_random, layer.modules())):
            break
        count += 1
    return count


def _is_trained(layer: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters())


def _contains(layer: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...]) -> bool:
    return any(isinstance(part, kinds) for part in layer.modules())


def _is_random(module: torch.nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def _extractors() -> tuple[type[torch.nn.Module], ...]:
    return FrozenFeatures, Scattering2d, PatchFeatures, LearnedFeatures


def rows_through(model: torch.nn.Module, usual: int, device: torch.device, copies: int = 1) -> int:
    """How many examples to work on at once: ``usual``, or fewer where an extractor's inner arrays should stay in the cache."""
    few = (_ROWS_ON_CPU if device.type == "cpu" else _ROWS_ON_GPU) // copies
    return max(1, min(usual, few) if _contains(model, _extractors()) else usual)


Reader = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From numbers of records to their inputs and targets."""


@dataclass(frozen=True)
class Front:
    """Fixed layers, ready to be applied.

    Attributes:
        layers: the module: what :meth:`digest` describes and who is asked how many rows to take at once.
        run: what computes it: the module, or the program that was proved of it.
        types: converts inputs to what it takes.
        device: where to compute.
        copies: what makes copies of each example; ``None`` for the example itself.
        radius: outputs are brought into the ball of this radius.
        entries: numbers of one output.
    """

    layers: torch.nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    types: Types
    device: torch.device
    copies: Augmentation | None = None
    radius: float = math.inf
    entries: int = 1

    @property
    def count(self) -> int:
        """K."""
        return 1 if self.copies is None else self.copies.copies

    def apply(
        self,
        read: Reader,
        places: torch.Tensor,
        rows: int,
        storage: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs, targets) of all records. ``rows`` at once, always: what becomes of a record depends on its place, on no other.

        Args:
            read: gives records by their numbers.
            places: by place, which record sits there, −1 for none: every record once.
            rows: places that are computed together.
            storage: makes the array for all outputs, of the inputs and the outputs of the first rows.
        """
        outputs: torch.Tensor | None = None
        targets: torch.Tensor | None = None
        size = int((places >= 0).sum())
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for start in range(0, len(places), rows):
                part = places[start : start + rows]
                taken = torch.nonzero(part >= 0).flatten()
                if len(taken) == 0:
                    continue
                numbers = part[taken[:1]].repeat(rows)  # empty places have a copy of somebody who is there
                numbers[taken] = part[taken]
                inputs, labels = read(numbers)
                y = self._outputs(self.types.inputs(inputs.to(self.device)))
                if outputs is None or targets is None:
                    outputs, targets = storage(inputs, y), labels.new_empty(size, *labels.shape[1:])
                outputs[part[taken].to(outputs.device)] = y[taken.to(y.device)].to(outputs.device, outputs.dtype)
                targets[part[taken].to(targets.device)] = labels[taken.to(labels.device)]
        assert outputs is not None
        assert targets is not None
        return outputs, targets

    def _outputs(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x if self.copies is None else copies_of(self.copies, x).flatten(0, 1))
        y = y if math.isinf(self.radius) else to_ball(y, self.radius)
        return y if self.copies is None else y.reshape(len(x), self.copies.copies, *y.shape[1:])

    def digest(self, inputs: torch.Tensor, dtype: torch.dtype | None = None) -> str:
        """Of the layers (classes, settings, weights), the copies, the ball, the type and the data."""
        kinds = [f"{type(part).__module__}.{type(part).__qualname__}" for part in self.layers.modules()]
        told = f"{_FORMAT} {kinds} {self.layers} {self.copies} {self.radius!r} {dtype}"
        digest = hashlib.blake2b(told.encode(), digest_size=20)
        for name, tensor in (*sorted(_tensors(self.layers).items()), ("inputs", inputs)):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            raw = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(raw.view(torch.uint8).numpy().data if raw.numel() else b"")
        return digest.hexdigest()


def cache_file(cache: str | os.PathLike[str], front: Front, inputs: torch.Tensor, dtype: torch.dtype | None = None) -> Path:
    """Where a folder keeps these outputs."""
    return Path(cache) / f"features-{front.digest(inputs, dtype)}.pt"


@discreet
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
            checked on random inputs, and followed through every operation on these; where it can't be, each example is taken by
            itself. Features that mix examples would void any guarantee.
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
    place = torch.device(device) if device is not None else next((t.device for t in _tensors(module).values()), inputs.device)
    front = Front(module, one_by_one(module), Types(module), place, copies)
    file = None if cache is None else cache_file(cache, front, inputs, dtype)
    stored = None if file is None else read_outputs(file, len(inputs))
    if stored is None:
        module.to(place)
        if place.type == "cpu":
            keep_freed_memory()
        with evaluating(module), torch.no_grad():
            with left_as_it_was(module):  # a scale of the first records would be a constant to the others
                _check_one_by_one(module, inputs, place, front.types)
            rows = batch_size or max(1, (_ROWS_ON_CPU if place.type == "cpu" else _ROWS_ON_GPU) // front.count)
            stored, _ = front.apply(
                lambda numbers: (inputs[numbers.to(inputs.device)], targets[numbers.to(targets.device)]),
                torch.arange(len(inputs)),
                min(rows, len(inputs)),
                lambda x, y: torch.empty((len(inputs), *y.shape[1:]), dtype=dtype or y.dtype, device=keep),
            )
        if file is not None:
            write_outputs(stored.cpu(), file)
    return TensorDataset(stored.to(keep), targets.to(keep))


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


def read_outputs(file: Path, records: int) -> torch.Tensor | None:
    """The stored outputs of so many records; ``None`` where there are none, or where the file is damaged (it is written again)."""
    try:
        stored: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return None
    except Exception:
        return None
    return stored if isinstance(stored, torch.Tensor) and stored.shape[:1] == (records,) else None


def write_outputs(features: torch.Tensor, file: Path) -> None:
    """They are of private records: for the owner's eyes."""
    with written_whole(file) as stream:
        torch.save(features, stream)
