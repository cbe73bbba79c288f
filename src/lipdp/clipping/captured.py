"""Clipping one microbatch after another as a CUDA graph: the same kernels, launched at once.

Of a step on small microbatches, most of the time goes into launching kernels: the forward and backward pass, and two or three small
ones for each layer's norms. All of it (:meth:`Fast.compute <lipdp.clipping.fast.Fast.compute>`) is recorded once for a shape of
microbatch and replayed. C is an input of the recording, so a schedule or an adaptive C needs no new one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from lipdp.clipping.batch import Batch, Flag
from lipdp.clipping.fast import Computed, Fast
from lipdp.clipping.methods import Clipping
from lipdp.fingerprint import Watched
from lipdp.graphs import GraphedFunction, Staged, is_recording

__all__ = ["CapturedClipping"]


@dataclass
class CapturedClipping(Clipping):
    """:func:`lipdp.clipping.clip_batch` with these settings, for many microbatches of a few shapes; replayed on CUDA.

    Results are those of ``clip_batch``, and the caller's to keep. Elsewhere than on CUDA, for the loops (naive, multiloss), and for
    a model that can't be recorded (one notice says why), it *is* ``clip_batch``. A replay waits once for the device, to learn
    whether every gradient was finite; a batch in which one was not is done again without it.

    What the model reads from outside its modules' attributes and the loss's closure (a global number, say) stays as it was when
    recorded.

    Example:
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(reduction="none")
        >>> clip = CapturedClipping(model, loss)
        >>> clip(torch.randn(5, 3), torch.zeros(5, dtype=torch.long), 1.0).sums["bias"].shape
        torch.Size([2])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._watched = Watched(self.model, self.loss)
        self._parameters: dict[int, dict[str, torch.nn.Parameter]] = {}
        self._graphed: GraphedFunction[Computed] = GraphedFunction(self._recorded, state=self._state)

    @property
    def refused(self) -> str | None:
        """Why this is not replayed, if there is a reason."""
        return self._graphed.refused

    def _state(self) -> Hashable:
        # Groups by their members only: their C_g are an input.
        number = self._watched() if is_recording() else self._number
        return number, tuple(group.parameters for group in self._present.groups)

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        self._number = self._watched()  # once a call
        if self._number not in self._parameters:
            self._parameters = {self._number: super()._trainable()}
        return self._parameters[self._number]

    def _compute(self, fast: Fast, batch: Batch, bounds: torch.Tensor, flag: Flag) -> Computed:
        self._present = fast
        found = self._graphed(batch.x, batch.y, batch.keep, bounds, between=flag)
        return _copied(found) if batch.x.device.type == "cuda" else found

    def _recorded(self, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, bounds: torch.Tensor) -> Staged[Computed]:
        return self._stages(self._present, Batch(x, y, keep), bounds)


def _copied(found: Computed) -> Computed:
    """Copies that the next replay does not overwrite, in a few kernels for all of them."""
    *sums, norms, factors = torch._foreach_mul([*found.sums.values(), found.norms, found.factors], 1.0)
    return Computed(dict(zip(found.sums, sums, strict=True)), norms, factors, found.spoiled)
