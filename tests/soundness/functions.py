"""A module from a function, so that tests can attack what people write in ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Forward(torch.nn.Module):
    """``Forward(lambda m, x: x + m.p, p=Parameter(…))``: a module whose forward is the given function of itself and x."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self._function = function
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(self, x)
