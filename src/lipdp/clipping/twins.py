"""Recurrent and attention layers as the user wrote them, evaluated by twins whose inner products can be watched.

torch's ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and ``nn.MultiheadAttention`` run as one fused operation that shows no cotangents of
its parts. While a forward pass is recorded, such a module's forward is replaced by an equivalent one made of matrix products;
afterwards the module is as it was. Parameters, names and state_dict are untouched throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lipdp.behaviour import ByClass

if TYPE_CHECKING:
    from lipdp.clipping.capture import Recording

__all__ = ["find_twin", "twin_of"]

Twin = Callable[["Recording", str], Callable[..., Any]]
_twins: ByClass[Twin] = ByClass()


def twin_of(*classes: type[torch.nn.Module]) -> Callable[[Twin], Twin]:
    """Register a factory of watched forwards for these classes."""

    def register(factory: Twin) -> Twin:
        for cls in classes:
            _twins[cls] = factory
        return factory

    return register


def find_twin(module: torch.nn.Module) -> Twin | None:
    """The twin of the module's class (or of a base class that computes the same), if it has trainable parameters of its own."""
    if not any(p.requires_grad for p in module.parameters(recurse=False)):
        return None
    return _twins.find(module)
