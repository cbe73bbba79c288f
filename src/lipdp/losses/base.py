"""The base class of losses, and what they share: checks of hyper-parameters, outputs and targets."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lipdp._checks import whole
from lipdp.behaviour import changed_methods
from lipdp.errors import ConfigurationError, DataError, UnsupportedError


class Loss(nn.Module):
    """A loss that returns one value per example and knows its Lipschitz constant in the outputs.

    To write one, define `forward(outputs, targets) -> (batch,)` and `lipschitz`; override `_constant` where the number
    of outputs, or a bound on their norm, sharpens the constant. The bound must hold for every target, and the value of
    an example must depend on that example only.
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ()
    """Names set once, at construction: the constant depends on them."""

    @property
    def lipschitz(self) -> float:
        """sup ‖∂loss/∂ŷ‖₂ over targets, outputs and their number K; `math.inf` where no constant holds for all K."""
        raise UnsupportedError(
            f"{type(self).__name__} does not define its Lipschitz constant: define the property `lipschitz`, a bound "
            "on the 2-norm of the gradient of one example's value with respect to that example's outputs."
        )

    def lipschitz_for(self, outputs: int, norm: float = math.inf, *, positions: int | None = None) -> float:
        """Return the constant for `outputs` network outputs per example with ‖ŷ‖₂ ≤ `norm`; at most `lipschitz`.

        `outputs` counts all the scalars of an example's output. For outputs of shape (batch, K, T, …) give either
        that, or K and `positions`, the product of the rest: `CrossEntropy` is sharper, or finite, when it knows them.
        """
        self._check_behaviour()
        outputs = whole("outputs", outputs)
        positions = None if positions is None else whole("positions", positions)
        if math.isnan(norm) or norm < 0:
            raise ConfigurationError(f"norm={norm} is not a bound on a norm: give a number ≥ 0, or math.inf.")
        return min(self._constant(outputs, norm, positions), self.lipschitz)

    def _constant(self, outputs: int, norm: float, positions: int | None) -> float:
        return self.lipschitz

    def _check_behaviour(self) -> None:
        """The constant must be said of the functions that run: by the class that defines them, with nothing hooked in."""
        order = type(self).__mro__
        defines = next(position for position, cls in enumerate(order) if "lipschitz" in vars(cls))
        # Where that class leaves forward open, the first one below it that fills it in speaks for itself.
        says = next(
            (cls for cls in reversed(order[: defines + 1]) if getattr(cls, "forward", None) is not nn.Module.forward), type(self)
        )
        changed = changed_methods(self, says, ("_constant", "lipschitz_for"))
        if changed:
            raise UnsupportedError(
                f"{type(self).__name__} changes {changed[0]} and inherits the Lipschitz constant of {says.__name__}, which is "
                f"that of {says.__name__}'s own functions. Define the property `lipschitz` beside it."
            )
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(self, hook, None) for hook in hooks):
            raise UnsupportedError(
                f"{type(self).__name__} has hooks, which can change what it computes; its constant would not hold."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).hyperparameters and name in self.__dict__:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} is fixed: the Lipschitz constant depends on it, and a plan may already "
                f"have been made with it. Make a new {type(self).__name__}."
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Show the hyper-parameters that are not the defaults."""
        defaults = {name: p.default for name, p in inspect.signature(type(self).__init__).parameters.items()}
        shown = ((name, getattr(self, name)) for name in self.hyperparameters)
        return ", ".join(f"{name}={value!r}" for name, value in shown if defaults.get(name, inspect.Parameter.empty) != value)


def public_weights(name: str, value: float | Sequence[float] | Tensor) -> tuple[Tensor, tuple[float, ...]]:
    """Check fixed weights ≥ 0, one or several; return them as a tensor and as numbers."""
    try:
        tensor = torch.as_tensor(value).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{name}={value!r} must be a number or a list of numbers.") from error
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    values = tuple(float(weight) for weight in tensor.tolist()) if tensor.ndim == 1 else ()
    if not values or not all(0 <= weight < math.inf for weight in values) or max(values) == 0:
        raise ConfigurationError(
            f"{name} must be numbers ≥ 0, finite and not all 0, in one dimension. They are public constants: choose "
            "them without looking at the private labels."
        )
    return tensor, values


# ------------------------------------------------------------------------------------------------ outputs and targets


def promote(outputs: Tensor) -> Tensor:
    """Outputs in float32 at least."""
    if not outputs.is_floating_point() or outputs.ndim < 1:
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} and type {outputs.dtype} can't be a network's: give a "
            "floating-point tensor whose first dimension is the batch."
        )
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def rows(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as (batch, K), element by element; NaN targets become 0, infinite ones the largest number."""
    z = promote(outputs)
    z = z.flatten(1) if z.ndim > 1 else z.unsqueeze(1)
    y = targets.flatten(1) if targets.ndim > 1 else targets.reshape(-1, 1)
    if z.shape != y.shape:  # broadcasting (batch,) with (batch, 1) would mix the examples
        raise DataError(
            f"{type(loss).__name__} needs one target per output: outputs are {tuple(outputs.shape)}, targets are "
            f"{tuple(targets.shape)}. Give the targets the shape of the outputs."
        )
    return z, torch.nan_to_num(y.to(z.dtype), nan=0.0)


def single(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and ±1 targets of a one-output network, both (batch,)."""
    z, y = rows(loss, outputs, targets)
    if z.shape[1] != 1:
        raise DataError(
            f"{type(loss).__name__} is for one output per example, and the outputs are {tuple(outputs.shape)}. "
            "Use a network with one output, or the Multiclass loss of the same name."
        )
    return z.squeeze(1), torch.where(y.squeeze(1) > 0, 1.0, -1.0).to(z.dtype)


def vectors(loss: Loss, outputs: Tensor) -> Tensor:
    """Outputs as (batch, K) with K ≥ 2, as they should already be."""
    z = promote(outputs)
    if z.ndim != 2 or z.shape[1] < 2:
        raise DataError(
            f"{type(loss).__name__} needs outputs of shape (batch, K) with K ≥ 2 classes, and got "
            f"{tuple(outputs.shape)}. With one output use a binary loss; flatten other dimensions in the network."
        )
    return z


def classes(loss: Loss, outputs: Tensor, targets: Tensor, ignore_index: int | None = None) -> Tensor:
    """Class numbers as int64 of shape (batch, …) for outputs (batch, K, …), in range.

    The range is checked on the CPU only: elsewhere reading the answer would stall the device, and indexing with a
    wrong class is an assertion failure there.
    """
    expected = outputs.shape[:1] + outputs.shape[2:]
    if targets.is_floating_point() or targets.is_complex() or targets.shape != expected:
        raise DataError(
            f"{type(loss).__name__} on outputs {tuple(outputs.shape)} needs class numbers of shape {tuple(expected)}, "
            f"and got {targets.dtype} of shape {tuple(targets.shape)}. Convert or reshape the targets."
        )
    y = targets.long()
    if y.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = (y < 0) | (y >= outputs.shape[1])
        if ignore_index is not None:
            wrong = wrong & (y != ignore_index)
        try:
            with _disable_current_modes():  # clipping follows what Python reads of a batch: a check that passes tells nothing
                refused = bool(wrong.any())
        except RuntimeError:  # under vmap or a fake tensor there is nothing to read; indexing still checks
            refused = False
        if refused:
            bool(wrong.any())  # that it fails is to be seen: somebody may catch the error, and go on otherwise
            raise DataError(
                f"Some target is not a class of the network: {type(loss).__name__} got {outputs.shape[1]} outputs, so "
                f"classes must be 0 to {outputs.shape[1] - 1}. Renumber the labels or add outputs."
            )
    return y


def one_hot(z: Tensor, y: Tensor) -> Tensor:
    """(batch, K) indicators of the classes y, in the type of z."""
    return torch.zeros_like(z).scatter(1, y.unsqueeze(1), 1.0)


def unit(y: Tensor) -> tuple[Tensor, Tensor]:
    """Direction (0 for a zero row) and norm of each row, safe for very large and very small rows."""
    scale = y.abs().amax(1, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
    scaled = y / scale
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / norm.clamp(min=torch.finfo(y.dtype).tiny), scale * norm


def reduce(values: Tensor, reduction: str) -> Tensor:
    """Sum or average everything but the batch."""
    values = values.flatten(1) if values.ndim > 1 else values.unsqueeze(1)
    return values.mean(1) if reduction == "mean" else values.sum(1)


def predict(outputs: torch.Tensor) -> torch.Tensor:
    """The class with the largest output; for one output, whether it is positive.

    Args:
        outputs: (batch, K); or (batch, 1) or (batch,) of a network with one output, for classes 0 and 1.
    """
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        return (outputs.reshape(len(outputs)) > 0).long()
    return outputs.argmax(dim=1)
