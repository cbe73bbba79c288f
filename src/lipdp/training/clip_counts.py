"""How many examples stay below the clipping norm: the second half of adaptive clipping's query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from lipdp.errors import UnsupportedError
from lipdp.nn import ClipGradient
from lipdp.privacy.adaptive import COUNT_SENSITIVITY

__all__ = ["LayerCounts", "centred_count"]


def centred_count(norms: torch.Tensor, clip: float, mask: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Σ_i (b_i − ½), with b_i the share of example i's copies whose norm is at most C; masked examples do not count.

    b_i lies in [0, 1], so one example moves the sum by at most ½. A norm that is not finite counts as above.
    """
    below = (norms <= clip).to(torch.float64).reshape(-1, copies).mean(1)
    return torch.where(mask, below - COUNT_SENSITIVITY, torch.zeros_like(below)).sum()


class LayerCounts:
    """Counts at ClipGradient layers, over the microbatches of one step."""

    def __init__(self, layers: Mapping[str, ClipGradient]) -> None:
        self.layers = layers
        self.totals: dict[str, torch.Tensor] = {}
        self._norms: dict[str, list[torch.Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, the layers note the norms that pass them."""
        with ExitStack() as stack:
            self._norms = {name: stack.enter_context(layer.observed()) for name, layer in self.layers.items()}
            yield

    def collect(self, mask: torch.Tensor, copies: int) -> None:
        """Take in what one backward pass of a microbatch showed."""
        for name, norms in self._norms.items():
            if len(norms) > 1:
                raise UnsupportedError(
                    f"the adaptive ClipGradient '{name}' is used {len(norms)} times in one pass; which of its cotangents should "
                    "the quantile be of? Use a layer of its own at each place."
                )
            if norms:
                found = centred_count(norms[0], self.layers[name].max_norm, mask, copies)
                self.totals[name] = self.totals[name] + found if name in self.totals else found
            norms.clear()

    def discard(self) -> None:
        """Forget norms that are not to be counted (of a pass that is made a second time)."""
        for norms in self._norms.values():
            norms.clear()
