"""Weight averaging: free post-processing of the private iterates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lipdp._checks import is_number
from lipdp.errors import ConfigurationError

__all__ = ["Average", "TailAverage", "WeightAverage", "make_average"]


class Average(ABC):
    """A running average of weights; subclasses say how much the present weights count."""

    setting: tuple[str, float]

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.updates = 0
        self.weights = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone() for name, p in parameters.items()}

    @abstractmethod
    def share(self) -> float:
        """How much of the average the present weights become."""

    def update(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the present weights in."""
        share = self.share()
        self.updates += 1
        with torch.no_grad():
            kept = [self.weights[name] for name in parameters]
            torch._foreach_lerp_(kept, [p.to(k.dtype) for p, k in zip(parameters.values(), kept, strict=True)], share)

    def copy_to(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Write the average into ``parameters``."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.weights[name])

    @contextmanager
    def applied_to(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The average in ``parameters`` inside the block; afterwards what was there."""
        kept = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            self.copy_to(parameters)
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(kept[name])

    def state_dict(self) -> dict[str, Any]:
        """The average and how many weights went into it."""
        return {self.setting[0]: self.setting[1], "updates": self.updates, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.updates = int(state["updates"])
        for name, tensor in self.weights.items():
            tensor.copy_(state["weights"][name])


class WeightAverage(Average):
    """Exponential moving average ``a ← d·a + (1−d)·w`` with the start-up correction d_t = min(decay, t/(t+9))."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], decay: float) -> None:
        super().__init__(parameters)
        if not (is_number(decay) and 0 <= decay < 1):
            raise ConfigurationError(f"ema_decay must lie in [0, 1), not {decay!r}")
        self.decay = decay
        self.setting = "decay", decay

    def share(self) -> float:
        """1 − d_t: early on the average follows the weights closely, so that the random initial weights do not linger in it."""
        return 1 - min(self.decay, self.updates / (self.updates + 9))


class TailAverage(Average):
    """The mean of the weights after each of the last ⌈fraction·T⌉ steps; before them, the present weights."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], fraction: float, steps: int) -> None:
        super().__init__(parameters)
        if not (is_number(fraction) and 0 < fraction <= 1):
            raise ConfigurationError(f"tail_average is the last fraction of the run to average over, in (0, 1], not {fraction!r}")
        self.setting = "tail", fraction
        self.first = steps - math.ceil(fraction * steps)

    def share(self) -> float:
        """1/k at the k-th step of the tail."""
        return 1 / max(1, self.updates - self.first + 1)


def make_average(
    parameters: Mapping[str, torch.Tensor], steps: int, ema_decay: float | None, tail_average: float | None
) -> Average | None:
    """The average that was asked for, if any."""
    if ema_decay is not None and tail_average is not None:
        raise ConfigurationError("ema_decay and tail_average are two ways to average the weights: give one of them")
    if tail_average is not None:
        return TailAverage(parameters, tail_average, steps)
    return None if ema_decay is None else WeightAverage(parameters, ema_decay)
