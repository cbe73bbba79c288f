"""Models that ``fully_shard`` (FSDP2) has divided among the ranks: their whole twin, and how numbers go between the two.

Proofs, projections, certificates and norm rules are of whole weights and of the layers as they were written; ``fully_shard``
leaves parts of the weights, changes every layer's class and gathers the rest in hooks. So the engine computes with a *whole* copy
of the model, of the original classes and without those hooks, which is an ordinary model to all that is proved, watched and run.
The user's model keeps its shards: the optimiser, its state and averages work on them alone, each rank on its own. In a step weights
are gathered, the released gradient is cut to the shard, the optimiser steps there, the result is gathered, projected layer by layer
as a whole, and cut again. All ranks hold the same whole weights and the same released gradient
(:mod:`lipdp.training.distributed`), so each can cut its shard by itself; nothing is sent but the shards that are gathered.

What is written into the user's model between two steps is gathered with the rest and noticed as in any other model; its settings
(dropout's share, modes) are those that it had when the engine was made.
"""

from __future__ import annotations

import copy
import glob
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lipdp._numerics import whole_tensor
from lipdp.errors import CheckpointError, UnsupportedError

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_API = "torch.distributed.fsdp"


def _is_dtensor(value: Any) -> bool:

    return _are_dtensors(type(value))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _are_dtensors(kind: Any) -> bool:
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed") for base in kind.__mro__)


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    part: Any = value
    found: torch.Tensor = part.to_local() if _are_dtensors(type(value)) else value
    return found


def shard_like(value: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same on all ranks, divided as ``template`` is; nothing is sent."""
    if not _is_dtensor(template) or _is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    like: Any = template
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


class Shards:
    """The user's model and what is computed with: the same object, unless ``fully_shard`` has divided it.

    Attributes:
        given: the user's model.
        model: what is proved and run: whole.
        divided: whether they are two.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.given = self.model = model
        units = [module for module in model.modules() if _unit(module)]
        self.divided = bool(units)
        self._units: list[Any] = units
        if self.divided:
            _check_units(units)
            self._reshard()
            self.model = _whole_twin(model)
        self.parameters: dict[str, torch.nn.Parameter] = {n: p for n, p in self.given.named_parameters() if p.requires_grad}
        """The trained ones, as the optimiser holds them."""
        self._pairs = list(zip(self.given.parameters(), self.model.parameters(), strict=True)) if self.divided else []

    def gather(self) -> None:
        """The user's weights into the whole model. Every rank has to."""
        if not self.divided:
            return
        self._reshard()
        with torch.no_grad():
            for shard, full in self._pairs:
                full.copy_(whole_tensor(shard))

    def scatter(self) -> None:
        """The whole model's weights into the user's."""
        if not self.divided:
            return
        self._reshard()
        with torch.no_grad():
            for shard, full in self._pairs:
                local(shard).copy_(local(shard_like(full.detach(), shard)))
            for mine, theirs in zip(self.given.buffers(), self.model.buffers(), strict=True):
                if mine is not theirs:
                    mine.copy_(theirs)

    def state_dict(self) -> dict[str, Any]:
        """The user's weights and buffers, divided as they are."""
        self._reshard()
        return self.given.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over weights and buffers; :meth:`gather` brings them into the whole model."""
        self._reshard()
        self.given.load_state_dict(state)

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Hand the optimiser its gradients: of its own shard, in the parameter's type."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            own = gradient.to(parameter.dtype)
            parameter.grad = shard_like(own, parameter) if self.divided else own

    def _reshard(self) -> None:
        """A forward pass of the user's leaves the outermost unit gathered; its parameters are others then."""
        for unit in self._units:
            unit.reshard()


def _unit(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" and kind.__module__.startswith(_API) for kind in type(module).__mro__)


def _check_units(units: list[Any]) -> None:
    for unit in units:
        policy = unit._get_fsdp_state()._mp_policy
        if policy.param_dtype is not None or policy.reduce_dtype is not None or policy.output_dtype is not None:
            raise UnsupportedError(
                "fully_shard was given a MixedPrecisionPolicy, which would cast weights and gradients in its own hooks: what is "
                "proved and run here is the model in the types of its parameters. Leave mp_policy out; plan(…, precision=…) or "
                "model.to(torch.bfloat16) before sharding say how to compute."
            )


def _original(unit: torch.nn.Module) -> type[torch.nn.Module]:
    """The class that fully_shard has put its own before."""
    kind: Any = type(unit)
    found: type[torch.nn.Module] = kind.__mro__[kind._orig_cls_mro_index]
    return found


def _whole_twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the original classes, without the hooks and marks of fully_shard: whole weights, and the model's own buffers."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(whole_tensor(parameter).clone(), requires_grad=parameter.requires_grad)
    with _undressed(model):
        return copy.deepcopy(model, memo)


@contextmanager
def _undressed(model: torch.nn.Module) -> Iterator[None]:
    """Within the block the model is what it was before fully_shard, but for its parameters."""
    kept: list[tuple[torch.nn.Module, type, dict[str, Any]]] = []
    try:
        for module in model.modules():
            kept.append((module, type(module), dict(vars(module))))
            own = vars(module)
            for name in [name for name in own if name in _MARKS or name.startswith("__composable_api_state_key")]:
                del own[name]
            _without_hooks(own)
            if _unit(module):
                module.__class__ = _original(module)
        yield
    finally:
        for module, kind, attributes in kept:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)


def _without_hooks(own: dict[str, Any]) -> None:
    """Those of fully_shard left out; dictionaries are replaced, not changed."""
    theirs: set[int] = set()
    for name, hooks in own.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            theirs |= {key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_API)}
    for name, hooks in list(own.items()):
        if "_hooks" in name and isinstance(hooks, dict) and theirs & hooks.keys():
            own[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in theirs)


# --- states ------------------------------------------------------------------------------------------------------------


class Places:
    """Which tensors of an engine's state are divided, and how: those of the model, of its average, and of the optimiser's state."""

    def __init__(self, shards: Shards, optimizer: torch.optim.Optimizer) -> None:
        self._by_name = shards.state_dict() if shards.divided else {}
        self._by_number = [p for group in optimizer.param_groups for p in group["params"]]

    def template(self, path: tuple[Any, ...], shape: torch.Size) -> torch.Tensor | None:
        """What the tensor at this place of the state is divided like; ``None`` for one that stays whole."""
        found: Any = None
        if path[:1] == ("model",) or path[:2] == ("average", "weights"):
            found = self._by_name.get(path[-1])
        elif path[:2] == ("optimizer", "state") and type(path[2]) is int and 0 <= path[2] < len(self._by_number):
            found = self._by_number[path[2]]
        return found if _is_dtensor(found) and found.shape == shape else None

    def divided(self, state: Any) -> Any:
        """The state of a whole run, or one that is divided already, as this rank keeps it."""

        def part(path: tuple[Any, ...], value: Any) -> Any:
            template = self.template(path, value.shape) if isinstance(value, torch.Tensor) else None
            return value if template is None else shard_like(value, template)

        return _mapped(part, state) if isinstance(state, dict) else state


def _mapped(function: Callable[[tuple[Any, ...], Any], Any], value: Any, path: tuple[Any, ...] = ()) -> Any:
    """The same containers with ``function(path, leaf)`` in the place of each leaf."""
    if isinstance(value, dict) and _STORED not in value:
        return {key: _mapped(function, part, (*path, key)) for key, part in value.items()}
    if isinstance(value, list):
        return [_mapped(function, part, (*path, number)) for number, part in enumerate(value)]
    return function(path, value)


# --- files -------------------------------------------------------------------------------------------------------------

_STORED, _FOLDER = "stored in shards", "shards"
_KINDS = {str(kind): kind for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)}
_FILE = re.compile(r"__\d+_\d+\.distcp")


def put_aside(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A state without its divided tensors, which are given beside it under the names that stand in their places."""
    tensors: dict[str, torch.Tensor] = {}

    def out(path: tuple[Any, ...], value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and _is_dtensor(value)):
            return value
        name = f"t{len(tensors)}"
        tensors[name] = value
        return {_STORED: name, "shape": list(value.shape), "type": str(value.dtype)}

    return _mapped(out, state), tensors


def save_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Every rank writes its parts, by torch.distributed.checkpoint; all have to call it."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(tensors), storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True))


def take_back(state: dict[str, Any], folder: Path, places: Places | None, *, together: bool) -> dict[str, Any]:
    """The state with its tensors from ``folder``: this rank's parts of them where ``places`` divides, whole ones elsewhere.

    ``together``: all ranks of the group read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors: dict[str, torch.Tensor] = {}

    def back(path: tuple[Any, ...], value: Any) -> Any:
        if not (isinstance(value, dict) and _STORED in value):
            return value
        name, shape, kind = value[_STORED], value.get("shape"), _KINDS.get(str(value.get("type")))
        if kind is None or not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise CheckpointError(f"the checkpoint does not say what is stored as {name!r}")
        template = None if places is None else places.template(path, torch.Size(shape))
        tensors[name] = torch.empty(shape, dtype=kind) if template is None else torch.empty_like(template, dtype=kind).detach()
        return tensors[name]

    whole_state: dict[str, Any] = _mapped(back, state)
    try:
        load(dict(tensors), storage_reader=_plain_reader(folder), no_dist=not together)
    except (Exception, CheckpointException) as error:  # of a damaged or foreign folder nearly anything
        raise CheckpointError(f"the folder '{folder.name}' beside the checkpoint can't be read: {error!r}") from error
    return whole_state


def shards_of_file(state: Mapping[str, Any], file: Path) -> Path | None:
    """The folder that a checkpoint's divided tensors are in, beside it."""
    name = state.get(_FOLDER)
    if name is None:
        return None
    if not isinstance(name, str) or ".shards-" not in name or Path(name).name != name:
        raise CheckpointError(f"'{file}' says that its tensors are in {name!r}, which is no folder of its own")
    return file.with_name(name)


def remove_shards(file: Path, keep: Collection[str]) -> None:
    """Folders of checkpoints that are not there any more."""
    for folder in file.parent.glob(f"{glob.escape(file.name)}.shards-*"):
        if folder.name not in keep and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


class _Plain(pickle.Unpickler):
    """Of the metadata of torch.distributed.checkpoint nothing but what describes tensors: a file runs no code."""

    _known = (
        (
            "torch.distributed.checkpoint.metadata",
            {"Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"},
        ),
        ("torch.distributed.checkpoint.metadata", {"MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"}),
        ("torch.distributed.checkpoint.filesystem", {"_StorageInfo"}),
        ("torch", {"Size", *(str(kind).removeprefix("torch.") for kind in _KINDS.values())}),
        ("torch.serialization", {"_get_layout"}),
        ("collections", {"OrderedDict"}),
        ("pathlib", {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
    )

    def find_class(self, module: str, name: str) -> Any:
        """The classes above, and no others."""
        if any(module == known and name in names for known, names in self._known):
            return super().find_class(module, name)
        raise CheckpointError(f"its metadata name {module}.{name}, which describes no tensor")


def _plain_reader(folder: Path) -> Any:
    """Reads tensors of torch.distributed.checkpoint, and nothing that could run."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (folder / ".metadata").open("rb") as file:
                metadata = _Plain(file).load()
            if not all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()):
                raise CheckpointError("its metadata describe something that is no tensor")
            if not all(_FILE.fullmatch(str(part.relative_path)) for part in metadata.storage_data.values()):
                raise CheckpointError("its metadata name files elsewhere")
            metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(folder)
