"""Types of numbers: what data come in, and what a model and a loss take. What can be converted is, where rows are looked at.

Inputs: floating-point numbers and whole ones (pixels, counts, booleans) become the model's floating-point type; token ids stay
whole numbers. Which of the two whole numbers are is the model's to say: by an embedding, by a :class:`lipdp.nn.BoundedInput`, or by
what it does with zeros of that type. Nothing here depends on the values of the data.

Of several inputs (a tuple or dict), whole numbers stay whole: they are ids, masks and positions; bytes are pixels where the model
does not take them as such.

Targets: floating-point ones become the type of the model's outputs, whole ones int64 where they are class numbers.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from lipdp._numerics import HALF, Undrawn
from lipdp.errors import DataError
from lipdp.inputs import Inputs, call, flattened, leaves, mapped, rebuilt
from lipdp.program.program import TABLES, find_input_dtype

_WHOLE = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
# Losses of torch by what their targets are. Those of lipdp convert themselves, and others' are not known.
_CLASSES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, torch.nn.MultiMarginLoss)
_NUMBERS = (
    torch.nn.MSELoss,
    torch.nn.L1Loss,
    torch.nn.SmoothL1Loss,
    torch.nn.HuberLoss,
    torch.nn.BCELoss,
    torch.nn.BCEWithLogitsLoss,
    torch.nn.SoftMarginLoss,
    torch.nn.MultiLabelSoftMarginLoss,
    torch.nn.PoissonNLLLoss,
    torch.nn.KLDivLoss,
)


def model_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """The type that the model computes in: that of its first floating-point parameter, or buffer; ``None`` if it has neither."""
    for kind in ("_parameters", "_buffers"):  # as they are held: it is asked in every step, and mostly the first one answers
        for module in model.modules():
            for tensor in getattr(module, kind).values():
                if tensor is not None and tensor.is_floating_point():
                    return cast(torch.dtype, tensor.dtype)
    return None


class Types:
    """What becomes of the data's types on their way into a model and its loss. Each question is decided once.

    Args:
        model: the model.
        loss: the loss; ``None`` where targets are compared, not learned from.
    """

    def __init__(self, model: torch.nn.Module, loss: Any = None) -> None:
        self.model, self.loss = model, loss
        self._decided: dict[Any, Any] = {}

    def inputs(self, x: Inputs) -> Any:
        """Inputs as the model takes them."""
        return mapped(lambda leaf, dtype: leaf.to(dtype), x, self.of_inputs(x))

    def targets(self, y: torch.Tensor) -> torch.Tensor:
        """Targets as the loss takes them."""
        return y.to(self.of_targets(y))

    def of_inputs(self, x: Any) -> Any:
        """The types that inputs like ``x`` (tensors, or rows of them) have to be, in its structure; an error for what can't be
        converted.
        """
        native = model_dtype(self.model)
        parts, structure = flattened(x)
        key = structure, native, tuple([(part.dtype, part.layout, part.shape[1:]) for part in parts])
        if key not in self._decided:
            for part in parts:
                _refuse_odd("inputs", part, complex_too=False)
            self._decided[key] = self._decide(x, native) if structure is None else self._decide_several(x, native)
        return self._decided[key]

    def _decide_several(self, x: Any, native: torch.dtype | None) -> Any:
        real = torch.get_default_dtype() if native is None else native

        def types(pixels: torch.dtype) -> Any:
            return mapped(lambda part: _of_several(part.dtype, real, pixels), x)

        as_ids, as_pixels = types(torch.int64), types(real)
        has_bytes = any(part.dtype == torch.uint8 for part in leaves(x))
        shapes = [tuple(part.shape[1:]) for part in leaves(x)]
        if has_bytes and not self._takes(as_ids, shapes) and self._takes(as_pixels, shapes):
            return as_pixels
        return as_ids

    def of_targets(self, y: Any) -> torch.dtype:
        """The type that targets like ``y`` have to be."""
        native = model_dtype(self.model) or torch.get_default_dtype()
        key = "targets", native, y.dtype, y.layout, y.ndim
        if key not in self._decided:
            self._decided[key] = self._decide_targets(y, native)
        return cast(torch.dtype, self._decided[key])

    def _decide_targets(self, y: Any, native: torch.dtype) -> torch.dtype:
        given: torch.dtype = y.dtype
        _refuse_odd("targets", y)
        if given.is_floating_point:
            if isinstance(self.loss, _CLASSES) and y.ndim == 1:
                raise DataError(
                    f"{type(self.loss).__name__} takes class numbers, whole ones, and the targets are of type {_name(given)}. If "
                    "they are class numbers, convert them with .long()."
                )
            return _nearest_float(given, native)
        if isinstance(self.loss, _NUMBERS):
            return native
        if given == torch.bool and not (self.loss is None or isinstance(self.loss, _CLASSES)):
            return given  # a mask, perhaps: losses of lipdp know what to do, and others' may want one
        return torch.int64

    def _decide(self, x: Any, native: torch.dtype | None) -> torch.dtype:
        given: torch.dtype = x.dtype
        shape, ids = tuple(x.shape[1:]), find_input_dtype(self.model)
        if given.is_complex:
            if _bounded_first(self.model) or not self._takes(given, [shape]):
                _refuse_odd("inputs", x)
            return given
        if given.is_floating_point:
            wanted = given if native is None else native
            if ids is not None and not self._takes(wanted, [shape]):
                raise DataError(
                    f"the model looks its inputs up in a table of embeddings, and they are of type {_name(given)}, not whole "
                    "numbers. If they are token ids, convert them with .long()."
                )
            return wanted
        if ids is not None:
            return ids
        looks_up = any(isinstance(module, TABLES) for module in self.model.modules())
        if (looks_up or not _bounded_first(self.model)) and self._takes(given, [shape]):
            return given
        return torch.get_default_dtype() if native is None else native

    def _takes(self, dtypes: Any, shapes: list[tuple[int, ...]]) -> bool:
        """Whether the model can compute with zeros of these types. It is the same afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        like = next((t for t in (*self.model.parameters(), *self.model.buffers())), torch.zeros(()))
        with torch.no_grad(), Undrawn(like.device):
            try:
                self.model.eval()
                kinds, structure = flattened(dtypes)
                zeros = [
                    torch.zeros(2, *shape, dtype=dtype, device=like.device) for dtype, shape in zip(kinds, shapes, strict=True)
                ]
                call(self.model, rebuilt(zeros, structure))
            except Exception:  # whatever it says: it does not take them
                return False
            finally:
                for module, mode in modes:
                    module.training = mode
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
        return True


def _of_several(given: torch.dtype, real: torch.dtype, pixels: torch.dtype) -> torch.dtype:
    """The type of one of several inputs."""
    if given.is_complex or given == torch.bool:
        return given
    if given.is_floating_point:
        return real
    return pixels if given == torch.uint8 else torch.int64


def _nearest_float(given: torch.dtype, native: torch.dtype) -> torch.dtype:
    """The model's type; targets of a model in half precision stay in float32, where they have more digits."""
    return torch.float32 if native in HALF and given not in HALF else native


def _bounded_first(model: torch.nn.Module) -> bool:
    """Whether the first layer that says what it takes is one that bounds real numbers (:class:`lipdp.nn.BoundedInput`)."""
    first = next((module for module in model.modules() if isinstance(getattr(module, "input_shape", None), tuple)), None)
    return getattr(first, "real_input", False) is True


def _refuse_odd(what: str, values: Any, *, complex_too: bool = True) -> None:
    """Refuses what no conversion makes numbers of a model's type of."""
    dtype: torch.dtype = values.dtype
    if dtype.is_complex and complex_too:
        raise DataError(
            f"the {what} are complex numbers ({_name(dtype)}), which can't become real ones by themselves. Give real and imaginary "
            "parts, or modulus and phase, as features: torch.view_as_real(x)."
        )
    if not (dtype.is_floating_point or dtype.is_complex or dtype in _WHOLE):
        raise DataError(f"the {what} are of type {_name(dtype)}, which can't be converted. Give plain numbers: x.dequantize().")
    if values.layout != torch.strided:
        raise DataError(f"the {what} are a tensor of layout {_name(values.layout)}: give a dense one, x.to_dense().")


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
