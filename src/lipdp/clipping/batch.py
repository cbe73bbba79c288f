"""What is asked of a batch, checked before anything is computed.

Its style says which parameters are clipped together, each group to its own C_g.

==========  =============================================================================================
flat        one group: all parameters, one norm
per_layer   a group for each module that has parameters of its own
per_group   a group for each name prefix given
==========  =============================================================================================

The whole clipped gradient of an example has norm at most √(Σ_g C_g²). A single number C is divided as C_g = C/√groups, which makes
that C again, whatever the style.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from lipdp.clipping.contribution import Form
from lipdp.errors import ConfigurationError, DataError, LipdpNotice
from lipdp.inputs import Inputs, device_of, owned, plain, rows_of, select

Style = Literal["flat", "per_layer", "per_group"]
Clip = Literal["clip", "automatic"]
MaxNorm = float | torch.Tensor | Mapping[str, float | torch.Tensor]


@dataclass(frozen=True)
class Group:
    """Parameters that are clipped together, to ``max_norm``.

    Attributes:
        name: "all", the module's name or the prefix, as the style has it.
        parameters: their names in the model.
        max_norm: C_g. A tensor stays where it is, and is not read: see :func:`group_bounds`.
    """

    name: str
    parameters: tuple[str, ...]
    max_norm: float | torch.Tensor


def clipping_groups(
    names: Iterable[str], max_norm: MaxNorm, style: Style = "flat", groups: Sequence[str] | None = None
) -> tuple[Group, ...]:
    """The groups that a style makes of these parameter names, with their C_g. Every parameter is in exactly one.

    Args:
        names: of the trainable parameters.
        max_norm: C_g by group name; or C, divided as C/√groups.
        style: "flat", "per_layer", "per_group".
        groups: for "per_group" with a single C: the prefixes that name the groups (a mapping names them itself). A parameter
            belongs to the longest prefix that it, or a module that it is in, is called by.

    Example:
        >>> [group.name for group in clipping_groups(["body.0.weight", "body.0.bias", "head.weight"], 1.0, "per_layer")]
        ['body.0', 'head']
    """
    listed = list(names)
    if style not in get_args(Style):
        raise ConfigurationError(f"style={style!r} is not known; choose one of {', '.join(get_args(Style))}")
    if groups is not None and style != "per_group":
        raise ConfigurationError(f"groups are only used by style='per_group', not by {style!r}")
    if style == "flat":
        if isinstance(max_norm, Mapping):
            raise ConfigurationError("a mapping of max_norm is for style='per_layer' or 'per_group'; style='flat' has one number")
        members = {"all": listed}
    elif style == "per_layer":
        members = _gather(listed, {name: name.rpartition(".")[0] or name for name in listed})
    else:
        prefixes = list(max_norm) if isinstance(max_norm, Mapping) and groups is None else groups
        if not prefixes:
            raise ConfigurationError("style='per_group' needs the groups: a max_norm by prefix, or groups=[prefix, …]")
        members = _gather(listed, {name: _longest(name, prefixes) for name in listed})
        idle = [prefix for prefix in prefixes if prefix not in members]
        if idle:
            raise ConfigurationError(f"group {idle[0]!r} has no trainable parameter; parameters: {', '.join(listed)}")
    return tuple(Group(name, tuple(found), _bound(max_norm, name, list(members))) for name, found in members.items())


def _gather(names: Sequence[str], group_of: Mapping[str, str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(group_of[name], []).append(name)
    return members


def _longest(name: str, prefixes: Sequence[str]) -> str:
    fitting = [prefix for prefix in prefixes if name == prefix or name.startswith(prefix + ".")]
    if not fitting:
        raise ConfigurationError(
            f"parameter {name!r} is in none of the groups {', '.join(prefixes)}; every parameter needs a bound"
        )
    return max(fitting, key=len)


def _bound(max_norm: MaxNorm, group: str, groups: Sequence[str]) -> float | torch.Tensor:
    if isinstance(max_norm, Mapping):
        if set(max_norm) != set(groups):
            raise ConfigurationError(f"max_norm names {', '.join(max_norm)}, but the groups are {', '.join(groups)}")
        value, share = max_norm[group], 1.0
    else:
        value, share = max_norm, math.sqrt(len(groups))
    if isinstance(value, torch.Tensor):
        if value.ndim != 0 or not value.is_floating_point():
            raise ConfigurationError(f"max_norm as a tensor must be one real number (0-dimensional), not {tuple(value.shape)}")
        return value.detach() / share
    if isinstance(value, bool) or not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ConfigurationError(f"max_norm must be a positive finite number, not {value!r}")
    return value / share


def group_bounds(groups: Sequence[Group], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """C_g as one tensor (groups,). A tensor that is negative, infinite or NaN counts as 0, which releases nothing.

    That a number on a device is sound can't be checked without waiting for it; this needs no check.
    """
    # Filled in on the device: a copy from the host would wait for it.
    numbers = {group.max_norm for group in groups if not isinstance(group.max_norm, torch.Tensor)}
    if len(numbers) == 1 and not any(isinstance(group.max_norm, torch.Tensor) for group in groups):
        return torch.full((len(groups),), numbers.pop(), dtype=dtype, device=device)
    bounds = torch.cat(
        [
            group.max_norm.to(device, dtype).reshape(1)
            if isinstance(group.max_norm, torch.Tensor)
            else torch.full((1,), group.max_norm, dtype=dtype, device=device)
            for group in groups
        ]
    )
    return torch.nan_to_num(bounds, nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0)


def clip_factors(norms: torch.Tensor, bounds: torch.Tensor, keep: torch.Tensor, clip: Clip, stability: float) -> torch.Tensor:
    """ν (batch, groups) from norms (batch, groups) and C (groups,); 0 for examples that are masked, or not finite in any group.

    "clip": ν = min(1, C_g/‖g‖); "automatic": ν = C_g/(‖g‖ + γ). Both give ν·‖g‖ ≤ C_g.
    """
    # Where both are 0, so is the gradient; 0/0 must not make a NaN of it.
    factors = bounds / (norms + stability) if clip == "automatic" else torch.where(norms <= bounds, 1.0, bounds / norms)
    counted = torch.isfinite(norms).all(1) & keep
    return torch.where(counted[:, None], factors, torch.zeros_like(factors))


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
