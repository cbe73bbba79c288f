"""Bounds hold for the model that was analysed, with weights inside their sets. This notices when it no longer is that model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.parametrize import Constrained

__all__ = ["ModelWatch", "constant_buffers", "project_trained"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelWatch:
    """Remembers a model's layers, modes, settings and values at the moment its bounds were proved."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._modes = [(module, module.training) for module in model.modules()]
        self._structure = self._present_structure()
        self.values: list[Any] = []

    def restore_modes(self) -> None:
        """Training and evaluation modes as they were when the bounds were proved."""
        for module, mode in self._modes:
            module.training = mode

    def check_structure(self) -> None:
        """Layers and trained parameters may not change any more."""
        if self._present_structure() != self._structure:
            raise ConfigurationError(
                "layers or parameters of the model were replaced, frozen or unfrozen after the engine was made, and its bounds are "
                "those of the model before. Make a new plan and a new engine for the model as it is."
            )

    @property
    def changed(self) -> bool:
        """Whether some value or setting is not what :meth:`remember` saw."""
        return self._present_values() != self.values

    def remember(self) -> None:
        """The present values are proved."""
        self.values = self._present_values()

    def forget(self) -> None:
        """No values are proved until :meth:`remember`."""
        self.values = []

    def _present_structure(self) -> list[Any]:
        trained = [(name, id(p)) for name, p in self.model.named_parameters() if p.requires_grad]
        return [[(name, id(module)) for name, module in self.model.named_modules()], trained]

    def _present_values(self) -> list[Any]:
        """Signs of the layers' settings and of all values: sums of their bits as whole numbers, exact on every device."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        words = [(torch.view_as_real(t) if t.is_complex() else t).detach() for t in tensors]
        device = tensors[0].device
        sums = [w.view(_WORDS[w.element_size()]).sum().to(device) for w in words]
        return [str(self.model), *torch.stack(sums).tolist()]


def project_trained(model: torch.nn.Module) -> None:
    """As :func:`lipdp.parametrize.project_`, but frozen weights, which have not moved, stay as they are to the last bit."""
    with torch.no_grad():
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if isinstance(module, Constrained) and any(p.requires_grad for p in own):
                frozen = [(p, p.clone()) for p in own if not p.requires_grad]
                module.project_()
                for parameter, kept in frozen:
                    parameter.copy_(kept)


@contextmanager
def constant_buffers(model: torch.nn.Module) -> Iterator[None]:
    """A buffer that the forward pass updates would carry data out without noise."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    after = dict(model.named_buffers())
    changed = [name for name, kept in before.items() if not torch.equal(after[name], kept)]
    for name in changed:
        after[name].copy_(before[name])
    if changed:
        raise UnsupportedError(
            f"the forward pass changes the buffer '{changed[0]}': state that is updated from the data is a release that nothing "
            "accounts for. It was put back and no step was taken. Make it constant, or remove it."
        )
