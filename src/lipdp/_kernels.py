"""Kernels that Triton compiles for a GPU: tried once on each device, and not used where they fail or compute something else."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from lipdp.errors import LipdpNotice


class Kernels:
    """The kernels of one module, for one purpose.

    Args:
        module: its name; it imports Triton.
        purpose: what they are for, in the notice where they are not used.
        right: whether on this device they compute what they should, by known answers or torch's own operations.
        least: compute capability (major) that an NVIDIA GPU has to have; ``None``: any GPU.
        instead: who does their work where they are not used.
    """

    def __init__(
        self,
        module: str,
        purpose: str,
        right: Callable[[torch.device], bool],
        *,
        least: int | None = 0,
        instead: str = "torch does it",
    ) -> None:
        self._name, self._purpose, self._right, self._least, self._instead = module, purpose, right, least, instead
        self._tried: dict[torch.device, bool] = {}

    @cached_property
    def module(self) -> Any:
        """The compiled kernels; None where Triton is not installed."""
        return None if importlib.util.find_spec("triton") is None else importlib.import_module(self._name)

    def on(self, device: torch.device) -> bool:
        """Whether they can be used on this device."""
        if device.type != "cuda":
            return False
        if device not in self._tried:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._tried[device] = self._fit(device) and self.module is not None and self.work(device)
        return self._tried[device]

    def _fit(self, device: torch.device) -> bool:
        if self._least is None:
            return True
        return torch.version.hip is None and (not self._least or torch.cuda.get_device_capability(device)[0] >= self._least)

    def work(self, device: torch.device) -> bool:
        """A trial; where it fails, a notice says so."""
        try:
            trouble = "" if self._right(device) else "they do not compute what they should"
        except Exception as error:  # a compiler that is missing or does not fit
            trouble = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if trouble:
            why = f"the Triton kernels for {self._purpose} are not used on {device}, {self._instead}: {trouble}"
            warnings.warn(why, LipdpNotice, stacklevel=3)
        return not trouble


def power_of_two(value: int, least: int, most: int) -> int:
    """The power of two that holds ``value``, within limits: the side of a tile."""
    return max(least, min(most, 1 << (max(value, 1) - 1).bit_length()))
