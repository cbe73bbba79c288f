"""Constrained weights: which set a layer's weights live in, and how they are brought back into it after every step."""

from __future__ import annotations

import torch

from lipdp.parametrize import constraint
from lipdp.parametrize.constraint import Bjorck, Constraint, Spectral
from lipdp.parametrize.convolution import AOC, BCOP, SOC, CircularFFT, ConvGeometry, ConvParametrisation
from lipdp.parametrize.maps import (
    Cayley,
    DifferentiableBjorck,
    Householder,
    MatrixExp,
    Parametrisation,
    Polar,
    Reparametrised,
    effective_leaves,
    pull_back,
)

__all__ = [
    "AOC",
    "BCOP",
    "SOC",
    "Bjorck",
    "Cayley",
    "CircularFFT",
    "Constrained",
    "Constraint",
    "ConvGeometry",
    "ConvParametrisation",
    "DifferentiableBjorck",
    "Householder",
    "MatrixExp",
    "Parametrisation",
    "Polar",
    "Reparametrised",
    "Spectral",
    "constraint",
    "effective_leaves",
    "project_",
    "project_outside_",
    "pull_back",
]


class Constrained:
    """Mixin of modules whose own parameters live in a constraint set that their bounds rest on."""

    def project_(self) -> None:
        """Bring this module's own parameters back into their set, in place, so that it holds in floating point."""
        raise NotImplementedError(f"{type(self).__name__} is Constrained and must define project_")

    def is_inside(self) -> bool:
        """Whether this module's own parameters are certainly in their set: by default, whether projecting leaves every bit."""
        assert isinstance(self, torch.nn.Module)
        own = list(self.parameters(recurse=False))
        kept = [parameter.detach().clone() for parameter in own]
        try:
            self.project_()
            return all(map(torch.equal, own, kept))
        finally:
            with torch.no_grad():
                for parameter, values in zip(own, kept, strict=True):
                    parameter.copy_(values)


def project_outside_(model: torch.nn.Module) -> list[str]:
    """Project those layers whose weights are not certainly inside their sets; the others stay as they are, to the last bit.

    For weights from a file: what training left inside stays exactly what it was. The names of the layers that were projected.

    Args:
        model: its :class:`Constrained` layers are looked at one by one; those outside are changed in place.
    """
    moved = []
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Constrained) and not module.is_inside():
                module.project_()
                moved.append(name)
    return moved


def project_(model: torch.nn.Module) -> None:
    """Bring every constrained weight of ``model`` back into its set, certified, in place.

    The engine does so before the first and after every optimiser step. It reads parameters only, never data, so it is free
    post-processing.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Constrained):
                module.project_()
