"""Weight averaging: free post-processing of the private iterates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lipdp.errors import ConfigurationError

__all__ = ["WeightAverage"]


class WeightAverage:
    """Exponential moving average ``a ← d·a + (1−d)·w`` with the start-up correction d_t = min(decay, t/(t+9))."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigurationError(f"ema_decay must lie in [0, 1), not {decay!r}")
        self.decay = decay
        self.updates = 0
        self.weights = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone() for name, p in parameters.items()}

    def update(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the present weights in."""
        # Early on the average follows the weights closely, so that the random initial weights do not linger in it.
        decay = min(self.decay, self.updates / (self.updates + 9))
        self.updates += 1
        with torch.no_grad():
            for name, parameter in parameters.items():
                self.weights[name].lerp_(parameter.to(self.weights[name].dtype), 1 - decay)

    def copy_to(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Write the average into ``parameters``."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.weights[name])

    def state_dict(self) -> dict[str, Any]:
        """The average and how many weights went into it."""
        return {"decay": self.decay, "updates": self.updates, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.decay, self.updates = float(state["decay"]), int(state["updates"])
        for name, tensor in self.weights.items():
            tensor.copy_(state["weights"][name])
