"""What else runs while a model does. Operations are followed in one thread: another one could read numbers of the batch unseen.

No operation tells where a number has gone, so nobody asks: a thread that has used any processor time during a pass may have had
part in it, and the pass is none that was followed (:mod:`lipdp.clipping.follow`). A pool's threads that wait for work use none. One
that was started meanwhile shows by the numbers that Python gives to its threads, though it has ended. Threads that are known to
draw progress, or to serve a notebook, compute nothing for a model.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

BESIDE = "another thread or process ran beside the model, and may have read numbers of the batch"
# Where threads come from that draw progress bars, serve notebooks and debuggers, write logs, or put batches into pinned memory.
_HARMLESS = frozenset(
    {"tqdm", "rich", "ipykernel", "IPython", "zmq", "debugpy", "_pydevd_bundle", "torch", "tensorboard", "wandb", "mlflow"}
)
_clock_of: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)


class Beside:
    """The other threads of Python, as they were at the beginning."""

    def __init__(self) -> None:
        self._threads = _clocks()
        self._started = _started()

    def who(self, *, started: bool = True) -> str | None:
        """A thread that has run since: its name; ``None`` where there was none. ``started``: also one that began since."""
        if started and _started() != self._started:
            return "one that was started meanwhile"
        for ident, used in _clocks().items():
            if (ident in self._threads or started) and (self._threads.get(ident) != used or used < 0):
                return _name(ident)
        return None


def _clocks() -> dict[int, int]:
    """Processor time of each other thread of Python, but the harmless ones; −1 where the system does not tell."""
    frames = sys._current_frames()
    if len(frames) == 1:  # this one's
        return {}
    others = [ident for ident in frames if ident != threading.get_ident() and not _is_harmless(ident)]
    # None of them can end before this does: a thread ends with Python's lock, which is held here.
    return {ident: -1 if _clock_of is None else time.clock_gettime_ns(_clock_of(ident)) for ident in others}


def _is_harmless(ident: int) -> bool:
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    home = type(thread).__module__
    if home == "threading":
        home = str(getattr(getattr(thread, "_target", None), "__module__", None) or "")
    return home.split(".")[0] in _HARMLESS


def _name(ident: int) -> str:
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    return "one without a name" if thread is None else repr(thread.name)


def _started() -> int:
    """How many threads Python has given a number to, but for those that were given here."""
    global _asked
    state = _api.PyThreadState_New(_api.PyInterpreterState_Get())
    number: int = _api.PyThreadState_GetID(state)
    _api.PyThreadState_Clear(state)
    _api.PyThreadState_Delete(state)
    _asked += 1
    return number - _asked


_asked = 0
_api = ctypes.pythonapi
_api.PyInterpreterState_Get.restype = ctypes.c_void_p
_api.PyThreadState_New.argtypes, _api.PyThreadState_New.restype = [ctypes.c_void_p], ctypes.c_void_p
_api.PyThreadState_GetID.argtypes, _api.PyThreadState_GetID.restype = [ctypes.c_void_p], ctypes.c_uint64
_api.PyThreadState_Clear.argtypes = _api.PyThreadState_Delete.argtypes = [ctypes.c_void_p]


def on_fork(told: Callable[[], None]) -> None:
    """Call this before the process is copied: the copy has all numbers too."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=told)
