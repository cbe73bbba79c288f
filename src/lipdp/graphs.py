"""Functions of tensors, recorded once as a CUDA graph and replayed: hundreds of kernel launches for the price of one.

A step on small microbatches is bound by the host, which launches each kernel by itself. Microbatches have a fixed shape, so the
launches are the same every time. :class:`GraphedFunction` records them on first use and replays them. What a recording depends on
(shapes, storages, modes, settings, the arithmetic in force) is its key: when any of it changes, it is recorded again.

A recording repeats *kernels*, no Python: a function is refused (and called as it is, with one notice) if it reads values from the
device, draws from Python's or NumPy's random numbers, or changes its own state; and if a replay does not give what a call gave.
Dropout is fine: CUDA's generator is followed in a replay, from whatever seed it has then.
"""

from __future__ import annotations

import copy
import gc
import operator
import random
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lipdp.errors import LipdpError, LipdpNotice
from lipdp.fingerprint import Watched, fingerprint

__all__ = [
    "Branches",
    "GraphedFunction",
    "Staged",
    "Watched",
    "copies",
    "fingerprint",
    "holds",
    "is_capturing",
    "is_large",
    "is_recording",
    "rest_of",
]

R = TypeVar("R")
Staged = Generator[Any, None, R]
# A replay differs from a call by the order of atomic additions at most.
_SAME = 1e-3
# Recordings in a row that were never replayed, per recording that may be kept: after that, recording is given up.
_PATIENCE = 2
_LARGE = 2**26  # bytes
_BRANCHES = 6  # streams for work side by side


_recording: ContextVar[bool] = ContextVar("recording", default=False)
_rehearsed: ContextVar[deque[bool] | None] = ContextVar("rehearsed", default=None)


def is_recording() -> bool:
    """Whether a function is being rehearsed or recorded, and must not wait for the device."""
    return _recording.get()


def is_capturing(device: torch.device) -> bool:
    """Whether what is done now is recorded, not done: no number of the device can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _RecordingError(Exception):
    """Why a function can't be replayed."""


Between = Callable[[Any], None]


@dataclass
class _Recorded(Generic[R]):
    """One graph, or one for each stage, with the buffers that they read and write."""

    inputs: list[torch.Tensor]
    early: Any
    outputs: R
    replays: list[Callable[[], None]]

    def __post_init__(self) -> None:
        self._of_type: dict[torch.dtype, list[int]] = {}
        for number, part in enumerate(self.inputs):
            if part.numel():
                self._of_type.setdefault(part.dtype, []).append(number)

    def __call__(self, inputs: tuple[torch.Tensor, ...], between: Between | None) -> R:
        for numbers in self._of_type.values():  # one launch for each type
            others = [number for number in numbers if inputs[number] is not self.inputs[number]]
            if others:
                torch._foreach_copy_([self.inputs[number] for number in others], [inputs[number] for number in others], True)
        *first, last = self.replays
        for replay in first:
            replay()
            if between is not None:
                between(self.early)
        last()
        return self.outputs


class GraphedFunction(Generic[R]):
    """``function(*tensors)``, replayed on CUDA; called as it is elsewhere.

    The first call with a key is an ordinary one (libraries load, choices are measured); the second one records.

    Args:
        function: from tensors to tensors (in tuples, dicts …). It must not wait for the device. A generator function that yields
            once has two stages: what it yields is there before the second begins, see ``between``.
        state: what the result depends on besides the inputs' values, e.g. ``Watched(model, loss)``.
        limit: recordings kept at a time, each with the memory of one call.

    The tensors returned are **overwritten by the next call**: add them up or copy them before.
    """

    def __init__(self, function: Callable[..., R | Staged[R]], *, state: Callable[[], Hashable], limit: int = 4) -> None:
        self.function, self.state, self.limit = function, state, limit
        self._recorded: OrderedDict[Hashable, _Recorded[R] | None] = OrderedDict()
        self._met: set[Hashable] = set()
        self._unused = 0  # recordings since the last one that was replayed
        self.replays = 0  # calls in which no Python of the function ran
        self._refused: str | None = None
        self._pool: Any = None
        self._begun: _Recorded[R] | None = None

    @property
    def refused(self) -> str | None:
        """Why some calls are not replayed, if there is a reason."""
        return self._refused

    @property
    def recordings(self) -> int:
        """How many recordings are held."""
        return sum(found is not None for found in self._recorded.values())

    def __call__(self, *inputs: torch.Tensor, between: Between | None = None) -> R:
        """The function's value at ``inputs``; ``between`` is called with what the first stage yields, before the second."""
        begun, self._begun = self._begun, None
        if not _can_record(inputs) or self._unused > _PATIENCE * self.limit:
            return _run(self.function, inputs, between)
        key = self._key(inputs)
        if key in self._recorded:
            self._recorded.move_to_end(key)
            recorded = self._recorded[key]
            if recorded is None:
                return _run(self.function, inputs, between)
            self._unused = 0
            self.replays += 1
            if recorded is begun and all(map(operator.is_, inputs, recorded.inputs)):
                return recorded.outputs
            return recorded(inputs, between)
        if key not in self._met:
            if len(self._met) > 16 * self.limit:
                self._met.clear()
            self._met.add(key)
            return _run(self.function, inputs, between)
        recording = self._record(inputs)
        self._recorded[key] = recording
        while self.recordings > self.limit:
            self._recorded.popitem(last=False)
        return _run(self.function, inputs, between) if recording is None else recording(inputs, between)

    def buffers(self) -> list[torch.Tensor]:
        """Where the recording that was used last reads its inputs: put there, they are not copied. A call overwrites them.

        None of them, where it is not that of the present :attr:`state` (what it reads may be gone), or has stages.
        """
        key, last = next(reversed(self._recorded.items()), (None, None))
        if last is None or len(last.replays) > 1 or self._unused > _PATIENCE * self.limit or key != self._key(last.inputs):
            return []
        return last.inputs

    def begin(self) -> None:
        """Replay that recording at once, on what its :meth:`buffers` hold.

        A call with these buffers then gives its results, if it has the recording's key; else it was in vain.
        """
        self._begun = next(reversed(self._recorded.values()), None)
        if self._begun is not None:
            self._begun(tuple(self._begun.inputs), None)

    def _key(self, inputs: Sequence[torch.Tensor]) -> Hashable:
        return _signatures(inputs), _arithmetic(), self.state()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedFunction[R]:
        """A copy's tensors are others: it has nothing recorded."""
        twin: GraphedFunction[R] = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__init__(copy.deepcopy(self.function, memo), state=copy.deepcopy(self.state, memo), limit=self.limit)  # type: ignore[misc]
        return twin

    def forget(self) -> None:
        """Free all recordings and their memory."""
        self._recorded.clear()
        self._met.clear()

    def _record(self, inputs: tuple[torch.Tensor, ...]) -> _Recorded[R] | None:
        self._unused += 1
        if self._unused > _PATIENCE * self.limit:
            self._refuse("its shapes, storages or settings are different in every call")
            return None
        try:
            if self._pool is None:
                self._pool = _new_pool()
            return _record(self.function, inputs, self.state, self._pool)
        except LipdpError:
            raise
        except (_RecordingError, RuntimeError) as error:
            self._refuse(str(error).splitlines()[0])
            return None

    def _refuse(self, why: str) -> None:
        if self._refused is None:
            warnings.warn(f"steps are not replayed as a CUDA graph, and take the usual time: {why}", LipdpNotice, stacklevel=4)
        self._refused = why


def _run(function: Callable[..., R | Staged[R]], inputs: Sequence[torch.Tensor], between: Between | None = None) -> R:
    """Call it, through both stages if it has two."""
    result: Any = function(*inputs)
    if not isinstance(result, Generator):
        value: R = result
        return value
    stages: Staged[R] = result
    early = next(stages)
    if between is not None:
        between(early)
    return rest_of(stages)


def rest_of(stages: Staged[R]) -> R:
    """What a function in stages gives, after the first of them."""
    try:
        next(stages)
    except StopIteration as done:
        value: R = done.value
        return value
    raise TypeError("a function in stages yields once")


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a pass over it takes the device longer than the host takes for some launches, or to wait and read one number.

    A function of such a tensor is not worth recording: a replay would begin by copying it.
    """
    return tensor.nbytes >= _LARGE


def _can_record(inputs: tuple[torch.Tensor, ...]) -> bool:
    if not inputs or inputs[0].device.type != "cuda":
        return False
    on_cuda = all(part.device.type == "cuda" and not is_large(part) for part in inputs)
    return on_cuda and not torch.compiler.is_compiling() and not torch.cuda.is_current_stream_capturing()


def _new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


def _signatures(inputs: Sequence[torch.Tensor]) -> Hashable:
    return tuple((part.shape, part.stride(), part.dtype, part.device, part.requires_grad) for part in inputs)


def _arithmetic() -> Hashable:
    """The global switches that choose kernels."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        cuda.matmul.allow_tf32,
        cudnn.allow_tf32,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )


def _record(
    function: Callable[..., R | Staged[R]], inputs: tuple[torch.Tensor, ...], state: Callable[[], Hashable], pool: Any
) -> _Recorded[R]:
    """Rehearse, record, replay, compare."""
    device = inputs[0].device
    buffers = [part.detach().clone().requires_grad_(part.requires_grad) for part in inputs]
    stream = _side_stream(device)
    numbers = torch.cuda.get_rng_state(device)
    token, answers = _recording.set(True), _rehearsed.set(deque())
    try:
        with _uncached_autocast(), _passing_workspaces():
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), _repeatable(state), _never_waiting():
                expected = _run(function, buffers)
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.set_rng_state(numbers, device)
            with _passing_workspaces(), _keeping_garbage():  # workspaces of the rehearsal are ordinary memory, someone else's later
                recording = _recorded_stages(function, buffers, pool, stream)
        torch.cuda.set_rng_state(numbers, device)
        for replay in recording.replays:
            replay()
        if not _agree(recording.outputs, expected):
            raise _RecordingError("a replay does not give what a call gives")
        return recording
    finally:
        _recording.reset(token)
        _rehearsed.reset(answers)
        torch.cuda.set_rng_state(numbers, device)


def _recorded_stages(function: Callable[..., R | Staged[R]], buffers: list[torch.Tensor], pool: Any, stream: Any) -> _Recorded[R]:
    """A graph for each stage. What the first leaves for the second stays where it is while both are recorded."""
    # Other threads (loaders that pin memory) may go on calling CUDA meanwhile.
    options: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = function(*buffers)
        early = next(result) if isinstance(result, Generator) else None
    if not isinstance(result, Generator):
        return _Recorded(buffers, None, result, [graph.replay])
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, **options):
        outputs = rest_of(result)
    return _Recorded(buffers, early, outputs, [graph.replay, second.replay])


@cache
def _side_stream(device: torch.device) -> Any:
    """One for all recordings on a device: libraries keep a workspace for every stream that they ever saw."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same values in memory of their own: one launch, where all are of a kind."""
    new = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    with torch.no_grad():
        if new:
            torch._foreach_copy_(new, list(tensors))
    return new


class Branches:
    """Pieces of work that don't depend on each other, on streams of their own: small kernels of all of them run side by side.

    On CUDA, where they are rehearsed or recorded: elsewhere their memory would go back to streams that nobody waits for. What comes
    after :meth:`join` waits for all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._apart = device.type == "cuda" and is_recording()
        self._used: list[Any] = []

    @contextmanager
    def branch(self) -> Iterator[None]:
        """The next piece."""
        if not self._apart:
            yield
            return
        stream = _branch_stream(self.device, len(self._used) % _BRANCHES, threading.get_ident())
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self._used.append(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Go on once all pieces are done."""
        for stream in self._used:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._used = []


@cache
def _branch_stream(device: torch.device, number: int, thread: int) -> Any:
    """Of a thread's own: what one records is none of another's."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Python frees nothing by itself: older recordings that go while a new one is made would break it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _passing_workspaces() -> Iterator[None]:
    """Workspaces of cuBLAS made for a recording belong to its memory, and are given up with it."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Autocast keeps the half-precision copies of weights while it is on; a recording must make them itself, every time."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Reading a value from the device is an error here. Found in a recording, it would leave CUDA's generator unusable."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_mode("error")
    try:
        yield
    finally:
        _set_sync_mode(before)


def holds(constant: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a tensor that is the same in every call has these values.

    While it is recorded that can't be asked: then the answers are those of the rehearsal just before, in their order.
    """
    rehearsed = _rehearsed.get()
    if _is_captured(constant):
        return rehearsed.popleft() if rehearsed else False
    before = torch.cuda.get_sync_debug_mode() if constant.is_cuda else 0
    if before:
        _set_sync_mode(0)
    try:
        answer = torch.equal(constant, expected)
    finally:
        if before:
            _set_sync_mode(before)
    if rehearsed is not None:
        rehearsed.append(answer)
    return answer


def _is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # "is a prototype": not the user's concern
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _repeatable(state: Callable[[], Hashable]) -> Iterator[None]:
    """What happens in Python must be the same every time: no random numbers of the host, no state of its own."""
    before = _host_randomness(), state()
    yield
    if _host_randomness() != before[0]:
        raise _RecordingError("it draws random numbers on the host")
    if state() != before[1]:
        raise _RecordingError("a call changes the model's settings")


def _host_randomness() -> Hashable:
    of_numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (it is the global generator that is watched)
    return random.getstate(), repr(of_numpy), of_numpy["state"]["key"].tobytes(), torch.get_rng_state().numpy().tobytes()


def _agree(a: Any, b: Any) -> bool:
    for one, other in zip(tree_leaves(a), tree_leaves(b), strict=True):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            x, y = (torch.nan_to_num(part.detach().double()) for part in (one, other))
            if float((x - y).norm()) > _SAME * float(y.norm()) + 1e-30:
                return False
    return True
