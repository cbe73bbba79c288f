"""How tight the operator norms of a model's convolutions are: what a plan says beside its sensitivities."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from lipdp.bounds.calculus import Shape
from lipdp.bounds.propagate import forward_pass, program_of

__all__ = ["ConvolutionNote", "convolution_notes", "lower_norm"]

_CONVOLUTION = torch.nn.modules.conv._ConvNd


@dataclass(frozen=True)
class ConvolutionNote:
    """Which bound of a convolution's operator norm the calculus used, and what the norm is at least with its present weights.

    Attributes:
        layer: qualified name of the layer.
        bound: ℓ as used (∞ for weights that are trained without a constraint).
        found: a lower estimate of the norm now, by power iteration on inputs of the size the layer gets.
        how: which bound it is.
    """

    layer: str
    bound: float
    found: float
    how: str

    @property
    def tightness(self) -> float:
        """found ÷ bound: 1 is sharp; 0 where the bound is infinite."""
        return self.found / self.bound if 0 < self.bound < math.inf else 0.0

    def __str__(self) -> str:
        if math.isinf(self.bound):
            return f"norm unbounded (trained without a constraint); {self.found:.3g} now"
        return f"{self.how or 'norm as certified'}; norm now {self.found:.3g} of at most {self.bound:.3g}, {self.tightness:.0%}"


def lower_norm(layer: torch.nn.Module, shape: Shape, iterations: int = 10) -> float:
    """A lower estimate of the operator norm of an affine layer on inputs of this shape: power iteration, in float32.

    ``v ← JᵀJv/‖·‖``; then ‖Jv‖ ≤ ‖J‖ for the unit vector v, whatever it is. It approaches from below, so it supports no
    guarantee; it tells how much of a bound is used.
    """
    work = copy.deepcopy(layer).to(torch.float32).requires_grad_(False)
    device = next(work.parameters()).device
    vector = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    largest = 0.0
    with torch.no_grad():
        still = work(torch.zeros_like(vector))
    with torch.enable_grad():
        for _ in range(iterations):
            vector = (vector / torch.linalg.vector_norm(vector).clamp_min(1e-30)).detach().requires_grad_()
            image = work(vector) - still
            largest = max(largest, float(torch.linalg.vector_norm(image.detach())))
            (vector,) = torch.autograd.grad(image, vector, image.detach())
    return largest


def convolution_notes(model: torch.nn.Module, *, input_shape: Shape | None = None) -> tuple[ConvolutionNote, ...]:
    """A note for every convolution of ``model``, in the order of execution; see :class:`ConvolutionNote`.

    Args:
        model: as for :func:`~lipdp.bounds.analyse`.
        input_shape: shape of one example; by default that of the model's :class:`~lipdp.nn.BoundedInput`.

    Example:
        >>> import torch
        >>> from lipdp import nn
        >>> from lipdp.bounds import convolution_notes
        >>> _ = torch.manual_seed(0)
        >>> layer = nn.SpectralConv2d(4, 4, 3, padding=1, bias=False)
        >>> (note,) = convolution_notes(nn.Sequential(nn.BoundedInput((4, 8, 8)), layer))
        >>> note.layer, note.bound, 0.3 < note.tightness < 0.95
        ('1', 1.0, True)
    """
    if not any(isinstance(module, _CONVOLUTION) for module in model.modules()):
        return ()
    program = program_of(model, input_shape)
    forward = forward_pass(program, math.inf)
    notes: dict[str, ConvolutionNote] = {}
    for node, transfer in forward.transfers.items():
        layer: Any = program.modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, _CONVOLUTION) and str(node.target) not in notes:
            shape = program.shapes[forward.sources[node][0]][0]
            notes[str(node.target)] = ConvolutionNote(str(node.target), transfer.gains[0], lower_norm(layer, shape), transfer.note)
    return tuple(notes.values())
