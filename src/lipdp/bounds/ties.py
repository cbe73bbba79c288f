"""Parameters that several layers share, or that share memory: every bound must hold for the one tensor there is."""

from __future__ import annotations

import re

import torch

from lipdp.errors import UnsupportedError
from lipdp.program import Program

__all__ = ["refuse_ties"]


def refuse_ties(program: Program) -> None:
    """Refuse a weight that lives in two different sets, and tensors that overlap in memory.

    A constrained layer brings its weights back into its own set after every step. If two layers with different sets own one tensor,
    projecting on the second leaves the first set again, so neither bound holds. Layers of the same class and settings have the same
    set. Two tensors in the same memory are one tensor under two names: a projection or a step on one moves the other.
    """
    owners: dict[int, list[tuple[str, torch.nn.Module]]] = {}
    for name, module in program.modules.items():
        for local, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((f"{name}.{local}" if name else local, module))
    for sharing in owners.values():
        constrained = [(name, module) for name, module in sharing if hasattr(module, "project_")]
        for name, module in constrained[1:]:
            first, other = constrained[0]
            local = name.rpartition(".")[2]
            if _set_of(module, local) != _set_of(other, local) or first.rpartition(".")[2] != local:
                raise UnsupportedError(
                    f"'{first}' ({type(other).__name__}) and '{name}' ({type(module).__name__}) are one parameter in two different "
                    "constraint sets: bringing it into the second leaves the first, and its bound does not hold. Tie layers of "
                    "the same class and settings, or do not tie them."
                )
    _refuse_overlaps(program)


def _set_of(module: torch.nn.Module, local: str) -> tuple[type, str]:
    """What the set of a parameter follows from: the class and its settings; a bias says nothing of the weight beside it."""
    settings = module.extra_repr()
    return type(module), settings if local == "bias" else re.sub(r"bias(_norm)?=[^,]*(, )?", "", settings)


def _refuse_overlaps(program: Program) -> None:
    places: list[tuple[int, int, str, bool]] = []
    seen: set[int] = set()
    for name, tensor in (*program.model.named_parameters(), *program.model.named_buffers()):
        if id(tensor) in seen or tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_meta:
            continue
        seen.add(id(tensor))
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        places.append((start, start + extent * tensor.element_size(), name, tensor.requires_grad))
        if tensor.requires_grad and tensor.numel() > extent:
            raise UnsupportedError(
                f"parameter '{name}' uses some of its memory several times (an expanded view): one entry's gradient is the sum of "
                "several. Make it contiguous: torch.nn.Parameter(tensor.clone())."
            )
    places.sort()
    reach, before, trained = 0, "", False
    for start, end, name, requires_grad in places:
        if start < reach and (trained or requires_grad):
            raise UnsupportedError(
                f"'{before}' and '{name}' share memory, but are different tensors: a step or projection on one moves the other "
                "behind the bounds' back. Use one parameter in both places, or clone one of them."
            )
        if end > reach:
            reach, before, trained = end, name, requires_grad
