"""Cross-entropies and losses of regression, element by element; and torch's own, which they take the place of.

K is the number of scalars that an example's output has. Least squares serve for classification, too: they are what a linear head
under noise fits soonest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipdp._checks import one_of, positive
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.losses.base import Loss, classes, one_hot, promote, public_weights, reduce, rows, unit, vectors


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

    hyperparameters: ClassVar[tuple[str, ...]] = ("tau", "label_smoothing", "class_weights", "scaled", "reduction", "ignore_index")
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
        self.tau = positive("tau", tau)
        self.label_smoothing = positive("label_smoothing", label_smoothing, zero=True)
        if self.label_smoothing > 1:
            raise ConfigurationError(f"label_smoothing={label_smoothing} must be in [0, 1]: it is a share.")
        weight, numbers = (None, None) if class_weights is None else public_weights("class_weights", class_weights)
        if numbers is not None and len(numbers) < 2:
            raise ConfigurationError("class_weights must have one weight per class, for at least 2 classes.")
        self.class_weights = numbers
        self.register_buffer("_weight", weight, persistent=False)
        self.scaled = bool(scaled)
        self.reduction = one_of("reduction", reduction, ("mean", "sum", "none"))
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
        self.tau = positive("tau", tau)
        weight, numbers = public_weights("pos_weight", pos_weight)
        self.pos_weight = numbers[0] if len(numbers) == 1 else numbers
        self.register_buffer("_weight", weight, persistent=False)
        self.reduction = one_of("reduction", reduction, ("mean", "sum"))

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


class _Elementwise(Loss):
    """A sum or mean over K outputs of functions whose derivative is at most `slope`: √K·slope, or slope/√K."""

    hyperparameters: ClassVar[tuple[str, ...]] = ("reduction",)

    def __init__(self, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        self.reduction = one_of("reduction", reduction, ("mean", "sum"))

    @property
    def _slope(self) -> float:
        return 1.0

    @property
    def lipschitz(self) -> float:
        """The constant for K = 1 of the mean; infinite for a sum over an unknown number of outputs."""
        return math.inf if self.reduction == "sum" else self._slope

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        K = outputs * (positions or 1)
        return self._slope * math.sqrt(K if self.reduction == "sum" else 1 / K)


class MAE(_Elementwise):
    """Mean absolute error |ŷ − y|. L = 1/√K averaged over the K outputs, √K summed.

    Derivation: each entry of the gradient is in [−1, 1] (divided by K in the mean), whatever the target.

    Args:
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Absolute error of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        return reduce((z - y).abs(), self.reduction)


class Huber(_Elementwise):
    """Huber loss: d²/2 where |d| = |ŷ − y| ≤ δ, δ(|d| − δ/2) beyond. L = δ√K summed over the K outputs, δ/√K averaged.

    Derivation: each entry of the gradient is d clamped to [−δ, δ] (divided by K in the mean), whatever the target.

    Args:
        delta: δ > 0, in units of the outputs: where the square turns into a line, and the line's slope.
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("delta", "reduction")

    def __init__(self, delta: float = 1.0, reduction: Literal["mean", "sum"] = "sum") -> None:
        super().__init__(reduction)
        self.delta = positive("delta", delta)

    @property
    def _slope(self) -> float:
        return self.delta

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Huber loss of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        return reduce(F.huber_loss(z, y, reduction="none", delta=self.delta), self.reduction)


class SmoothL1(_Elementwise):
    """Smooth L1: d²/(2β) where |d| = |ŷ − y| < β, |d| − β/2 beyond. L = √K summed over the K outputs, 1/√K averaged.

    Derivation: it is the Huber loss of δ = β divided by β: each entry of the gradient is d/β clamped to [−1, 1].

    Args:
        beta: β ≥ 0, in units of the outputs: where the square turns into a line of slope 1; 0 is the absolute error.
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("beta", "reduction")

    def __init__(self, beta: float = 1.0, reduction: Literal["mean", "sum"] = "sum") -> None:
        super().__init__(reduction)
        self.beta = positive("beta", beta, zero=True)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Smooth L1 loss of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        return reduce(F.smooth_l1_loss(z, y, reduction="none", beta=self.beta), self.reduction)


class MSE(Loss):
    """Squared error ‖ŷ − y‖², with ‖y‖ ≤ Y enforced. L = 2(X + Y) for a network with ‖ŷ‖ ≤ X; mean: divided by K.

    Derivation: the gradient is 2(ŷ − y), of norm at most 2(‖ŷ‖ + ‖y‖). There is no constant for an unbounded network.

    Targets: shaped as the outputs. A target outside the ball of radius `target_norm` is projected on it, per example,
    so the constant can't be broken by one large target; it changes what is learned from that example.

    Args:
        target_norm: public bound Y on the norm of an example's target; `math.inf` for no bound and no constant
            (enough for the clipping methods).
        reduction: over the K outputs of an example, "mean" or "sum".
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ("target_norm", "reduction")

    def __init__(self, target_norm: float, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        self.target_norm = positive("target_norm", target_norm, zero=True, infinite=True)
        self.reduction = one_of("reduction", reduction, ("mean", "sum"))

    @property
    def lipschitz(self) -> float:
        """Infinite: it takes a bound on the outputs, see `lipschitz_for`."""
        return math.inf

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        total = 2 * (norm + self.target_norm)
        return total / (outputs * (positions or 1)) if self.reduction == "mean" else total

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Squared error of each example, (batch,)."""
        z, y = rows(self, outputs, targets)
        if math.isfinite(self.target_norm):
            direction, norm = unit(y)
            y = torch.where(norm <= self.target_norm, y, self.target_norm * direction)
        return reduce((z - y).square(), self.reduction)


class Squares(Loss):
    """Half the squared distance to the centred indicator of the class, ½‖ŷ − (e_y − 1/K)‖². L = X + √(1 − 1/K) for ‖ŷ‖ ≤ X.

    Derivation: the gradient is ŷ − (e_y − 1/K), and ‖e_y − 1/K‖² = 1 − 2/K + K/K² = 1 − 1/K. There is no constant for an
    unbounded network: put `lipdp.nn.ClipGradient` behind its last layer.

    Where each step brings noise of one size into the outputs, it matters how large they have to become. A fit of squares ends at
    outputs of size 1, where residuals are small and a small clip, with its little noise, no longer binds; that of a cross-entropy
    at some ten times that, after as many times the steps (or learning rate), each with its noise.

    Targets: class numbers (batch,).
    """

    @property
    def lipschitz(self) -> float:
        """Infinite: it takes a bound on the outputs, see `lipschitz_for`."""
        return math.inf

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        if outputs < 2 or (positions or 1) != 1:
            raise ConfigurationError(
                f"Squares needs outputs of shape (batch, K) with K ≥ 2 classes, and the network has {outputs} outputs at "
                f"{positions or 1} positions: change the last layer"
            )
        return norm + math.sqrt(1 - 1 / outputs)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared distance of each example, (batch,)."""
        z = vectors(self, outputs)
        wanted = one_hot(z, classes(self, z, targets)) - 1 / z.shape[1]
        return (z - wanted).square().sum(1) / 2


def _bce(loss: nn.BCEWithLogitsLoss) -> Loss:
    if loss.weight is not None:
        raise UnsupportedError(
            "BCEWithLogitsLoss(weight=…) weights positions of the batch, so an example's value depends on where it "
            "stands. Drop it; pos_weight is supported."
        )
    return BCE(pos_weight=1.0 if loss.pos_weight is None else loss.pos_weight, reduction="sum")


_OF_TORCH: dict[type, Callable[[Any], Loss]] = {
    nn.CrossEntropyLoss: lambda loss: CrossEntropy(1.0, loss.label_smoothing, loss.weight, True, "none", loss.ignore_index),
    nn.BCEWithLogitsLoss: _bce,
    nn.L1Loss: lambda loss: MAE("sum"),
    nn.SmoothL1Loss: lambda loss: SmoothL1(loss.beta, "sum"),
    nn.HuberLoss: lambda loss: Huber(loss.delta, "sum"),
    nn.MSELoss: lambda loss: MSE(math.inf, "sum"),
}


def as_loss(loss: object) -> Loss:
    """Return `loss` if it is one of lipdp's, or the lipdp loss equal to a known torch loss with `reduction="none"`.

    Losses that torch computes element by element are summed over the K outputs of an example. `MSELoss` has no bound
    on its targets, hence the constant ∞: fine for clipping, and for a proved sensitivity there is `MSE(target_norm)`.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise UnsupportedError(f"{loss.__name__} is a class, not a loss: pass an instance of it.")
    if type(loss) not in _OF_TORCH:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise UnsupportedError(
            f"{name} is not a loss whose Lipschitz constant is known. Use one of lipdp.losses, one of torch's "
            f"{', '.join(known.__name__ for known in _OF_TORCH)} with reduction='none', or subclass lipdp.losses.Loss: "
            "define forward(outputs, targets), one value per example, and the property `lipschitz`, a bound on the "
            "2-norm of that value's gradient in the outputs."
        )
    reduction = getattr(loss, "reduction", "none")
    if reduction != "none":
        raise ConfigurationError(
            f"{type(loss).__name__}(reduction={reduction!r}) mixes the examples of a batch. Make it with "
            "reduction='none': lipdp sums over examples itself."
        )
    return _OF_TORCH[type(loss)](loss)
