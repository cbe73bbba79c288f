"""What is asked of a batch, checked before anything is computed."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from lipdp.clipping.contribution import Form
from lipdp.clipping.styles import Clip, Group, Style
from lipdp.errors import ConfigurationError, DataError, LipdpNotice
from lipdp.inputs import Inputs, device_of, owned, plain, rows_of, select

__all__ = [
    "FLAT",
    "Batch",
    "Clipped",
    "Flag",
    "Method",
    "check_choice",
    "check_choices",
    "check_style",
    "eager",
    "even_part",
    "is_compiled",
    "notice_parts",
    "part_of",
    "prepare",
    "trainable",
    "uncompiled",
]

Method = Literal["naive", "multiloss", "reweight", "ghost", "bookkeeping", "auto"]
F = TypeVar("F", bound=Callable[..., Any])
FLAT = ("reweight", "ghost")


@dataclass(frozen=True)
class Clipped:
    """What clipping a batch gives. Only ``sums``, noised, may be released: all else is private.

    Attributes:
        sums: Σ_i ν_i·g_i by parameter name, in float64.
        norms: ‖g_i‖ (batch, groups).
        factors: ν_i (batch, groups); 0 for an example that is left out.
        groups: of parameters that are clipped together, in the order of the columns above.
        kept: the mask (batch,).
        bounds: C_g (groups,).
    """

    sums: dict[str, torch.Tensor]
    norms: torch.Tensor
    factors: torch.Tensor
    groups: tuple[Group, ...]
    kept: torch.Tensor
    bounds: torch.Tensor

    @property
    def within(self) -> torch.Tensor:
        """How many of the kept examples have ‖g_i‖ ≤ C_g (groups,): for adaptive clipping, which must account for it."""
        return ((self.norms <= self.bounds) & self.kept[:, None]).sum(0)


@dataclass(frozen=True)
class Batch:
    """Inputs and targets row by row, and which examples count."""

    x: Inputs
    y: torch.Tensor
    keep: torch.Tensor


class Flag:
    """One number on its way from the device: read without waiting for what was launched after it."""

    def __init__(self) -> None:
        self.sent: torch.Tensor | None = None  # where it is computed
        self._value: torch.Tensor | None = None
        self._event: Any = None

    def __call__(self, value: torch.Tensor) -> None:
        """Send for it."""
        self.sent = value
        if value.device.type != "cuda":
            self._value = value
            return
        self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._value.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def read(self) -> bool:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._value is not None and bool(self._value)


def check_choice(name: str, value: str, known: object) -> None:
    """One of the words that a Literal allows."""
    if value not in get_args(known):
        raise ConfigurationError(f"{name}={value!r} is not known; choose one of {', '.join(get_args(known))}")


def check_choices(method: Method, clip: Clip, form: Form, stability: float) -> None:
    """The settings of :func:`lipdp.clipping.clip_batch`."""
    for name, value, known in (("method", method, Method), ("clip", clip, Clip), ("form", form, Form)):
        check_choice(name, value, known)
    if not (math.isfinite(stability) and stability > 0):
        raise ConfigurationError(f"stability must be a positive number, not {stability!r}")


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By name; a model has some."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigurationError(f"{type(model).__name__} has no trainable parameters")
    return parameters


def prepare(x: Inputs, y: torch.Tensor, mask: torch.Tensor | None, copies: int) -> Batch:
    """The batch with a target for each row, in memory of its own; refuses shapes that can't be meant."""
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise ConfigurationError(f"copies must be a whole number of at least 1, not {copies!r}")
    x = plain(x)
    rows, device = rows_of(x), device_of(x)
    if rows % copies:
        raise DataError(f"{rows} rows are no whole number of examples with copies={copies} rows each")
    examples = rows // copies
    if len(y) not in (examples, rows):
        raise DataError(f"{rows} inputs but {len(y)} targets" + (f" (copies={copies})" if copies > 1 else ""))
    if copies > 1 and len(y) == examples:
        y = y.repeat_interleave(copies, dim=0)
    if mask is None:
        keep = torch.ones(examples, dtype=torch.bool, device=device)
    elif mask.shape != (examples,) or mask.dtype != torch.bool:
        raise DataError(f"mask must be ({examples},) of booleans, not {tuple(mask.shape)} of {mask.dtype}")
    else:
        keep = mask.to(device)
    return Batch(owned(x), owned(y), keep)


def check_style(method: str, style: Style) -> None:
    """Methods that scale an example's whole gradient."""
    if method in FLAT and style != "flat":
        raise ConfigurationError(
            f"method={method!r} scales an example's whole gradient: it only clips style='flat'. Use method='bookkeeping'."
        )


def uncompiled(function: F) -> F:
    """Inside a function that torch.compile compiles, the decorated one runs as it is: hooks and graphs are its business."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            disable: Callable[[F], F] = torch.compiler.disable
            return disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile has been given a part of it."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())


def eager(compiled: bool) -> AbstractContextManager[Any]:
    """A compiled model is run uncompiled: a compiled graph shows nothing of its layers."""
    if compiled and not torch.compiler.is_compiling():
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


def even_part(examples: int, most: int) -> int:
    """The size of even parts of ``most`` examples at most: all of one shape but perhaps the last."""
    count = -(-examples // most)
    return -(-examples // count)


def part_of(batch: Batch, start: int, size: int, copies: int) -> Batch:
    """Examples ``start`` to ``start + size``, with all their copies."""
    rows = slice(start * copies, (start + size) * copies)
    return Batch(select(batch.x, rows), batch.y[rows], batch.keep[start : start + size])


def notice_parts(examples: int, most: int) -> None:
    """Say so once: smaller microbatches would save the attempt, and be as fast."""
    warnings.warn(
        f"a batch of {examples} examples does not fit into the GPU's memory: it is clipped in parts of {most}, with the same "
        "result. With a microbatch_size of that or less it is not tried in vain.",
        LipdpNotice,
        stacklevel=4,
    )
