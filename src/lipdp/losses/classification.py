"""Cross-entropies, multiclass and binary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lipdp.errors import ConfigurationError, DataError
from lipdp.losses.base import Loss, choice, classes, number, promote, public_weights, reduce, rows


class CrossEntropy(Loss):
    """Cross-entropy at temperature τ: CE(τŷ)/τ, or CE(τŷ) if not `scaled`. L = √2 (× τ unscaled, × max weight).

    Derivation: the gradient of CE(τŷ)/τ is p − q, p the softmax and q the target distribution (smoothed or not);
    two points of the simplex are at most √2 apart. With weights it is Σ_k w_k q_k·p − w⊙q = W(p − q'), W ≤ max w.
    T positions: T such vectors side by side, √(2T) for their sum, √(2T)/T = √(2/T) for their mean.
    Smoothing ε brings the corners nearer: √((1−ε+a)² + (1−a)² + (K−2)a²), a = ε/K, is what `lipschitz_for` gives.

    Outputs (batch, K) or (batch, K, T, …). Targets: class numbers (batch, T, …), or probabilities shaped as the
    outputs. Probabilities are clamped to [0, 1] and rows that sum to more than 1 are divided by their sum: less than 1
    only makes the gradient smaller. Positions of class `ignore_index` count as 0; the mean still divides by T.

    Args:
        tau: temperature, > 0.
        label_smoothing: share ε of the target spread evenly over the K classes, as in torch.
        class_weights: K fixed public weights ≥ 0; the value of an example is multiplied by its class's, nothing more.
        scaled: divide by τ.
        reduction: over positions: "mean", "sum", or "none" to refuse outputs that have positions.
        ignore_index: a class number that is not one (padding), or None.
    """

    hyperparameters: ClassVar[tuple[str, ...]] = (
        "tau",
        "label_smoothing",
        "class_weights",
        "scaled",
        "reduction",
        "ignore_index",
    )
    _weight: Tensor | None

    def __init__(
        self,
        tau: float = 1.0,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | Tensor | None = None,
        scaled: bool = True,
        reduction: Literal["mean", "sum", "none"] = "mean",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        self.tau = number("tau", tau)
        self.label_smoothing = number("label_smoothing", label_smoothing, zero=True)
        if self.label_smoothing > 1:
            raise ConfigurationError(f"label_smoothing={label_smoothing} must be in [0, 1]: it is a share.")
        weight, numbers = (None, None) if class_weights is None else public_weights("class_weights", class_weights)
        if numbers is not None and len(numbers) < 2:
            raise ConfigurationError("class_weights must have one weight per class, for at least 2 classes.")
        self.class_weights = numbers
        self.register_buffer("_weight", weight, persistent=False)
        self.scaled = bool(scaled)
        self.reduction = choice("reduction", reduction, ("mean", "sum", "none"))
        self.ignore_index = ignore_index

    @property
    def _scale(self) -> float:
        return (1.0 if self.scaled else self.tau) * (max(self.class_weights) if self.class_weights else 1.0)

    @property
    def lipschitz(self) -> float:
        """√2·max w (× τ if not scaled); infinite for a sum over an unknown number of positions."""
        return math.inf if self.reduction == "sum" else math.sqrt(2) * self._scale

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        if outputs < 2 or (self.class_weights and len(self.class_weights) != outputs):
            wanted = f"{len(self.class_weights)} (one per class weight)" if self.class_weights else "at least 2"
            raise ConfigurationError(
                f"CrossEntropy needs {wanted} outputs and the network has {outputs}: change the last layer"
                f"{', or the weights' if self.class_weights else ', or use BCE for one output'}."
            )
        if self.reduction == "none" and positions not in (None, 1):
            raise ConfigurationError(
                f"CrossEntropy(reduction='none') can't give one value per example for {positions} positions: "
                "choose reduction='mean' or 'sum'."
            )
        smoothing, a = self.label_smoothing, self.label_smoothing / outputs
        one = math.hypot(1 - smoothing + a, 1 - a, math.sqrt(outputs - 2) * a) * self._scale
        if self.reduction == "sum":
            return math.inf if positions is None else one * math.sqrt(positions)
        return one / math.sqrt(positions or 1)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each example, (batch,)."""
        z = promote(outputs)
        if z.ndim < 2 or z.shape[1] < 2 or (self.reduction == "none" and z.ndim > 2):
            raise DataError(
                f"CrossEntropy(reduction={self.reduction!r}) can't take outputs of shape {tuple(z.shape)}: give "
                "(batch, K), K ≥ 2, or (batch, K, positions…) with reduction='mean' or 'sum'; for one output use BCE."
            )
        K = z.shape[1]
        weight = None
        if self._weight is not None and self.class_weights is not None:
            if len(self.class_weights) != K:
                raise DataError(f"CrossEntropy has {len(self.class_weights)} class weights for {K} outputs.")
            weight = self._weight.to(z.dtype).clamp(0.0, max(self.class_weights))
        cost = -F.log_softmax(self.tau * z, dim=1)
        costs = cost if weight is None else cost * weight.view(-1, *[1] * (z.ndim - 2))
        mask = None
        if targets.is_floating_point():
            if targets.shape != z.shape:
                raise DataError(
                    f"Floating-point targets are probabilities and must have the outputs' shape {tuple(z.shape)}, not "
                    f"{tuple(targets.shape)}. If they are class numbers, convert them with .long()."
                )
            q = torch.nan_to_num(targets.to(z.dtype), nan=0.0).clamp(0.0, 1.0)
            q = q / q.sum(1, keepdim=True).clamp(min=1.0)
            values = (q * costs).sum(1)
        else:
            y = classes(self, z, targets, self.ignore_index)
            if self.ignore_index is not None:
                mask = y != self.ignore_index
                y = torch.where(mask, y, 0)
            values = costs.gather(1, y.unsqueeze(1)).squeeze(1)
        if self.label_smoothing:
            values = (1 - self.label_smoothing) * values + self.label_smoothing / K * costs.sum(1)
        if mask is not None:
            values = torch.where(mask, values, 0.0)
        return reduce(values / self.tau if self.scaled else values, self.reduction)


class BCE(Loss):
    """Binary cross-entropy of logits at temperature τ, divided by τ. L = max(1, pos_weight) for one logit.

    Per logit: (1/τ)·[w·y·softplus(−τŷ) + (1−y)·softplus(τŷ)].
    Derivation: its derivative is (1−y)σ(τŷ) − w·y·σ(−τŷ), between −w and 1 for y in [0, 1].
    K logits: K such entries side by side, √K·max(1, w) for the sum and 1/√K of it for the mean.

    Targets: 0/1 or probabilities, one per logit, clamped to [0, 1] (so −1/+1 labels work too).

    Args:
        tau: temperature, > 0.
        pos_weight: fixed public weight w ≥ 0 of the positive term; or one per logit.
        reduction: over the K logits of an example, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("tau", "pos_weight", "reduction")
    _weight: Tensor

    def __init__(
        self,
        tau: float = 1.0,
        pos_weight: float | Sequence[float] | Tensor = 1.0,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        self.tau = number("tau", tau)
        weight, numbers = public_weights("pos_weight", pos_weight)
        self.pos_weight = numbers[0] if len(numbers) == 1 else numbers
        self.register_buffer("_weight", weight, persistent=False)
        self.reduction = choice("reduction", reduction, ("mean", "sum"))

    def _over(self, logits: int) -> float:
        weights = self.pos_weight if isinstance(self.pos_weight, tuple) else None
        if weights is not None and len(weights) != logits:
            raise ConfigurationError(
                f"BCE has {len(weights)} pos_weights and the network {logits} outputs: give one weight, or one each."
            )
        total = math.hypot(*(max(1.0, w) for w in weights)) if weights else math.sqrt(logits) * self._largest
        return total / logits if self.reduction == "mean" else total

    @property
    def _largest(self) -> float:
        return max(1.0, *self.pos_weight) if isinstance(self.pos_weight, tuple) else max(1.0, self.pos_weight)

    @property
    def lipschitz(self) -> float:
        """max(1, pos_weight), that of one logit; infinite for a sum over an unknown number of logits."""
        if isinstance(self.pos_weight, tuple):
            return self._over(len(self.pos_weight))
        return math.inf if self.reduction == "sum" else self._largest

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        return self._over(outputs * (positions or 1))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        if self._weight.shape[0] not in (1, z.shape[1]):
            raise DataError(f"BCE has {self._weight.shape[0]} pos_weights for {z.shape[1]} outputs per example.")
        y = y.clamp(0.0, 1.0)
        weight = self._weight.to(z.dtype).clamp(0.0, self._largest)
        z = self.tau * z
        values = -weight * y * F.logsigmoid(z) - (1 - y) * F.logsigmoid(-z)  # −logsigmoid(x) is softplus(−x)
        return reduce(values / self.tau, self.reduction)
