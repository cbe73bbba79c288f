"""Answers that a device gives later: whether the checks of a step held. They are read once they have arrived."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LateAnswers"]

_MOST = 3  # steps that the host may be ahead of the device


class LateAnswers:
    """Flags of the last few steps, on their way from the device to the host."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, torch.Tensor, Any]] = []
        self._free: list[torch.Tensor] = []

    def expect(self, number: int, flag: torch.Tensor) -> None:
        """The flag of a step is being computed."""
        host = self._free.pop() if self._free else torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(flag.device))
        self._waiting.append((number, host, arrived))

    def failed(self, *, wait: bool) -> list[int]:
        """The steps whose flags have arrived and are false; ``wait``: of all steps. The host never gets far ahead in any case."""
        found = []
        while self._waiting and (wait or len(self._waiting) > _MOST or self._waiting[0][2].query()):
            number, host, arrived = self._waiting.pop(0)
            arrived.synchronize()
            if not bool(host):
                found.append(number)
            self._free.append(host)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> LateAnswers:
        """A copy has nothing to wait for: what was asked will be told to who asked."""
        return LateAnswers()
