"""What gets past the operations: numbers that Python reads of a tensor's memory, and functions that the backward pass calls.

Operations are followed one by one (:mod:`lipdp.clipping.follow`). Where a number leaves the tensors by none, it is torch's function
that shows it: ``tolist``, ``numpy``, a list of tensors that ``torch.tensor`` makes one of (it reads them without an operation),
memory that is handed out, compiled code (TorchScript) that reads by itself.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lipdp.errors import UnsupportedError


@dataclass(frozen=True)
class Reason:
    """Why records are not known to be apart: what was done, and where."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class NotApartError(UnsupportedError):
    """A pass in which records were not kept apart, as far as its operations show.

    Attributes:
        reason: what was done, and where.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"records of a batch are not known to be apart: {reason}")
        self.reason = reason


class Follower(Protocol):
    """Who is told (:class:`lipdp.clipping.follow.Following`)."""

    reads: list[Reason]

    def read(self, what: str) -> Any:
        """Raises: Python would see something of the batch."""

    def state(self, tensor: torch.Tensor) -> Any:
        """Where the records are in it; ``None``: nowhere."""

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether something of the batch may be in its memory."""

    def lend(self, tensor: torch.Tensor, how: str) -> None:
        """Its memory is handed out."""

    def bare(self, tensor: torch.Tensor) -> None:
        """Its memory can be written to without a version that tells."""


_LENDERS = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__dlpack__,
}
_READERS = _LENDERS | {
    torch.Tensor.tolist,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
    torch.Tensor.apply_,
    torch.Tensor.map_,
    torch.Tensor.map2_,
}
_HOOKS = {
    torch.Tensor.register_hook,
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.Tensor.register_post_accumulate_grad_hook,
}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_NOTED = _READERS | _HOOKS | {_DATA}
_INDEXING = torch.Tensor.__getitem__, torch.Tensor.__setitem__
# Functions of TorchScript that read tensors, give their memory without its versions, or run elsewhere, by no operation.
_SCRIPTED = (
    *("prim::tolist", "prim::data", "aten::_tensor_to_list", "aten::format", "aten::percentFormat", "aten::str", "aten::save"),
    *("prim::Print", "prim::fork", "prim::awaitable", "aten::tensor_split", "aten::_pad_packed_sequence"),
)
# Functions that read numbers of a tensor by its address, past all operations: sizes and scales.
_OF_PACKED = frozenset({"rnn_tanh", "rnn_relu", "gru", "lstm"})
_BY_POINTER = _OF_PACKED | {
    *("_pad_packed_sequence", "choose_qparams_optimized", "_saturate_weight_to_fp16", "fbgemm_linear_quantize_weight"),
    *("fbgemm_linear_int8_weight", "fbgemm_linear_int8_weight_fp32_activation", "fbgemm_linear_fp16_weight", "tensor_split"),
    *("fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix"),
    *("quantized_lstm_cell", "quantized_gru_cell", "quantized_rnn_relu_cell", "quantized_rnn_tanh_cell"),
}
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_BY_NAME = frozenset(name.partition("::")[2] for name in _SCRIPTED)
# Functions that no mode is told of.
_HANDING_OUT = torch._C._to_dlpack, getattr(torch._C, "_to_dlpack_versioned", None)
_HERE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_OPS = str(Path(_TORCH) / "_ops.py")
# Libraries whose layers ask about all of a batch for shortcuts only, and what stands between such a layer and an operation.
_SHORTCUTS = frozenset({"lipdp", "peft", "timm", "torch", "transformers"})
_LAYERS, _BETWEEN = str(Path(_TORCH) / "nn"), (_TORCH, str(Path(__file__).parent))


def hands_out(value: Any) -> bool:
    """Whether this is a function that hands out memory, and nobody sees it called."""
    return any(value is each for each in _HANDING_OUT if each is not None)


class Readings(TorchFunctionMode):
    """Values that leave the tensors past all operations, and hooks on gradients."""

    def __init__(self, of: Follower) -> None:
        super().__init__()
        self._of = of

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _NOTED and not _is_ours():
            self._note(func, args, kwargs or {})
        if not (_USUAL.issuperset(types) or all(map(_is_torchs, types))):
            self._of.read("a class of tensors with functions of its own")
        elif isinstance(func, torch._ops.OpOverloadPacket) and func.__name__ in _BY_NAME:
            self._scripted(func.__name__, (args, kwargs))
        if (name := getattr(func, "__name__", "").partition(".")[0]) in _BY_POINTER:
            self._pointed(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        others = [part for part in (*args[1:], *kwargs.values()) if isinstance(part, torch.Tensor)]
        if func in _HOOKS:
            self._of.read("a function of its own in the backward pass")
        elif first is None:
            return
        elif func is _DATA:
            self._of.bare(first)
        elif func in _LENDERS and first.layout == torch.strided:
            self._of.lend(first, func.__name__)
        elif any(self._of.shows(part) for part in (first, *others)):
            self._of.read(f"Python sees values of the batch ({func.__name__})")

    def _pointed(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (args[name == "tensor_split" :], kwargs)  # where to split, not what
        parts = [part for part in tree_leaves(given) if isinstance(part, torch.Tensor)]
        kinds = _WHOLE if name in _OF_PACKED else None  # recurrent layers read how many records there are at a time
        if any(self._of.state(part) is not None for part in parts if kinds is None or part.dtype in kinds):
            self._of.read(f"Python sees values of the batch ({name})")

    def _scripted(self, name: str, given: Any) -> None:
        if any(isinstance(part, torch.Tensor) and self._of.shows(part) for part in tree_leaves(given)):
            self._of.read(f"compiled code reads values of the batch ({name})")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block, this mode is on, and calls are noted of compiled functions and of those that no mode is told of."""
        noting = {
            "__call__": self._noting_script,
            "impl": self._noting_library,
            **dict.fromkeys(_COMPILING, _refusing),
            **dict.fromkeys(_OF_STORAGES, self._noting_storage),
        }
        places = (*_LOANS, *_SCRIPTS, _LIBRARY, *_STORAGES, *_compiling(len(sys.modules)))
        before = [(home, name, getattr(home, name)) for home, name in places]
        if replaced := _replaced(len(torch.library._impls)):
            self._of.read(f"{replaced} is computed by somebody's own code")
        try:
            for home, name, function in before:
                setattr(home, name, noting.get(name, self._noting_loan)(function))
            with self:
                yield
        finally:
            for home, name, function in before:
                setattr(home, name, function)

    def _noting_library(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(library: Any, name: Any, code: Any, dispatch_key: str = "", **more: Any) -> Any:
            # What torch.vmap does in an operation's place (registered when it is first used) makes others, which are seen.
            if (dispatch_key or getattr(library, "dispatch_key", "")) != "FuncTorchBatched":
                self._of.read("an operation is replaced by the model's own code")
            return function(library, name, code, dispatch_key, **more)

        return called

    def _noting_script(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(script: Any, *args: Any, **kwargs: Any) -> Any:
            found = _reading_in(script)
            if found:
                self._of.read(f"compiled code may read values of the batch ({found})")
            return function(script, *args, **kwargs)

        return called

    def _noting_storage(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(storage: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_ours():
                self._of.read("Python reads memory (a storage)")
            return function(storage, *args, **kwargs)

        return called

    def _noting_loan(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and not _is_ours() and tensor.layout == torch.strided:
                self._of.lend(tensor, "to_dlpack")
            return function(tensor, *args, **kwargs)

        return called


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of what sets up torch's compiler for torch.cond, scan, while_loop and the like.

    They compile what they are given, and can't while operations are followed. Tried, the compiler would not work afterwards either.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        raise NotApartError(Reason("torch compiles a part of it (torch.cond, scan, while_loop), and shows nothing of it", line()))

    return called


_COMPILING = "setup_compilation_env", "_set_compilation_env"


@functools.lru_cache(maxsize=1)
def _compiling(count: int) -> list[tuple[Any, str]]:
    """Where it is named, looked up again when ``count``, the number of modules, is another: there are thousands."""
    homes = [home for name, home in list(sys.modules.items()) if name.startswith("torch._higher_order_ops.")]
    return [(home, name) for home in homes for name in _COMPILING if name in vars(home)]


_LOANS = [(home, name) for home in (torch, torch._C, torch.utils.dlpack) for name, value in vars(home).items() if hands_out(value)]
_OF_STORAGES = "__getitem__", "tolist", "resize_"
_STORAGES = [(kind, name) for kind in (torch.UntypedStorage, torch.TypedStorage) for name in _OF_STORAGES]
_SCRIPTS = (torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__")
_LIBRARY = torch.library.Library, "impl"


# What torch has kernels of its own in Python for.
_OWN_KERNELS = frozenset(torch.library._impls)


@functools.lru_cache(maxsize=1)
def _replaced(count: int) -> str:
    """An operation of torch that somebody has given code of their own for a processor, where so many have any; else ""."""
    given = (name.split("/") for name in torch.library._impls if name not in _OWN_KERNELS)
    return next((name for home, name, key in given if home == "aten" and key.startswith(("CPU", "Autograd", "Composite"))), "")


def _reading_in(script: Any) -> str:
    """What in compiled code reads tensors by no operation; nothing, if nothing does."""
    graph = script.inlined_graph
    return next((name for name in _SCRIPTED if graph.findAllNodes(name)), "")


_USUAL = {torch.Tensor, torch.nn.Parameter}


def _is_torchs(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("torch", "lipdp")


def is_lifted(state: Callable[[torch.Tensor], Any]) -> bool:
    """Whether it is torch that has just made this tensor, of Python's numbers; not a model that calls the operation by its name.

    Of a list torch reads the numbers past all operations: those of tensors that depend on the batch too.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename == _OPS):
        named, frame = frame.f_code.co_filename == _OPS, frame.f_back
        ours = frame is not None and frame.f_code.co_filename.startswith(_HERE)
        if named and not (ours and frame is not None and frame.f_code.co_name == "__torch_dispatch__"):
            return False
    if frame is None:
        return False
    if frame.f_code is Readings.__torch_function__.__code__:
        known = frame.f_locals
        return "lift" not in str(getattr(known["func"], "__name__", "lift")) and all(
            isinstance(part, torch.Tensor) or _is_plain(part, state)
            for part in _given(known["func"], known["args"], known["kwargs"] or {})
        )
    return frame.f_code.co_filename.startswith((_HERE, _TORCH))


def _given(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments of a function. A tensor among them is read by operations; so is one that indexes by itself."""
    yield from kwargs.values()
    for part in args:
        if func in _INDEXING and isinstance(part, tuple):
            yield from part
        else:
            yield part


_PLAIN = (int, float, complex, bool, str, bytes, slice, range, type(None), type(...), torch.Size, torch.dtype, torch.device,
          torch.layout, torch.memory_format, np.dtype, np.generic, type)  # fmt: skip


def _is_plain(value: Any, state: Callable[[torch.Tensor], Any]) -> bool:
    """Whether Python's numbers are all that can be read of a value: what computes them when it is asked is none."""
    kind = type(value)
    if kind in (list, tuple):
        return all(_is_plain(part, state) for part in value)
    if isinstance(value, torch.Tensor):
        return state(value) is None
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return kind in _PLAIN or kind is array or isinstance(value, np.generic | np.dtype | type)


def _is_ours() -> bool:
    """Whether it is this library that asks torch, not the model."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_HERE)


def asks_for_a_shortcut() -> bool:
    """Whether a library known for it asks a question about all of the batch: its code takes another way to the same result.

    What a user's own code decides by such a question may be anything, so that no answer but the true one will do.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (file := frame.f_code.co_filename).startswith(_BETWEEN) and not file.startswith(_LAYERS):
        frame = frame.f_back  # torch asks for somebody: `3 in x`
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _SHORTCUTS


def line() -> str:
    """Where in the user's code this happens: the innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH, "<")):
            return f"{Path(file).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
