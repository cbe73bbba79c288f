"""Tokens that a model chooses by their contents (``x[mask]``, ``nonzero``): as many as there are examples, in one batch, by chance.

Shapes can't tell them from a batch, whatever contents are tried. The operations can: those whose output has a size that depends on
values carry a tag in torch. What is called after such an operation, inside the module that it stands in, is not believed to have
examples in any dimension. That module is evaluated again for each example, in every step, and its outputs are compared. Where it
has no trained layer behind the operation, what it gives is used outside: the same then holds for the module around it.

A size may also come from values that Python has read (``tolist``, ``int``). What was read for what is not to be told: many models
look whether a mask is full. Such a model is looked at with more contents (:mod:`lipdp.clipping.layouts`), so that sizes which
follow them show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Suspects"]


def _chooses(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the size of its output depends on values."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:
        return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    return True


class _Readings(TorchFunctionMode):
    """Whether all values of a tensor are read at once: a number by itself is an operation, which others see."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.any |= func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
        return func(*args, **(kwargs or {}))


class Suspects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, a model is run, and modules are noted that are called after tokens were chosen.

    Attributes:
        names: these modules.
        choosing: those that tokens were chosen in.
        read: whether Python has read values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.choosing: set[str] = set()
        self.read = False
        self._modules = dict(model.named_modules())
        self._trained = {name: any(p.requires_grad for p in module.parameters()) for name, module in self._modules.items()}
        self._stack: list[str] = []
        self._since: list[bool] = []  # whether tokens were chosen in each of these modules, and are about
        self._doubted: list[bool] = []  # whether a trained module was called in each of them since then

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._stack and _chooses(func, args):
            self._since[-1] = True
        self.read |= torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, it is known which module is being run."""
        handles = []
        for name, module in self._modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
                handles.append(module.register_forward_hook(self._leave, prepend=True))
        readings = _Readings()
        try:
            with readings, self:
                yield
        finally:
            self.read |= readings.any
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            if any(self._since):
                self.names.add(name)
            for level, since in enumerate(self._since):
                self._doubted[level] |= since and self._trained[name]
            self._stack.append(name)
            self._since.append(False)
            self._doubted.append(False)

        return hook

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        name, chosen, doubted = self._stack.pop(), self._since.pop(), self._doubted.pop()
        if chosen:
            self.choosing.add(name)
        if chosen and not doubted and self._since:
            self._since[-1] = True  # what it has chosen is used outside
