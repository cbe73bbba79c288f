"""Measuring instead of modelling: which of several ways to the same number is quickest on this machine, timed once per shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping

import torch

__all__ = ["choices", "forget_choices", "quickest"]

_choices: dict[Hashable, str] = {}
_REPEATS = 3


def quickest(key: Hashable, candidates: Mapping[str, Callable[[], object]], untimed: str, device: torch.device) -> str:
    """The name of the quickest candidate for ``key``, timed on the first call and remembered for this process.

    Where nothing can be timed (in a CUDA graph, in a compiled function) the answer is ``untimed``, and nothing is remembered.
    """
    known = _choices.get(key)
    if known is not None:
        return known
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return untimed
    times = {name: _best_time(function, device) for name, function in candidates.items()}
    _choices[key] = min(times, key=times.__getitem__)
    return _choices[key]


def choices() -> dict[Hashable, str]:
    """What was measured so far in this process."""
    return dict(_choices)


def forget_choices() -> None:
    """Measure again from here on."""
    _choices.clear()


def _best_time(function: Callable[[], object], device: torch.device) -> float:
    function()  # allocations, kernels being loaded
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
