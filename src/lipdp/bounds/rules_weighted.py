"""Rules of affine layers, as modules and functions: dense, convolution, transposed convolution.

A trained weight that nothing constrains has ℓ = ∞, and still a finite Δ; a frozen one counts with its certified norm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.calculus import Bound, Call, ParameterRef, Transfer, rule, rule_for_function, times
from lipdp.bounds.operator_norm import (
    affordable,
    as_tuple,
    certified_norm,
    conv_norm_circular,
    grid_for,
    multiplicity,
    padding_sides,
    tighter_norm,
)

_UNCONSTRAINED = "its weights are trained without a constraint, so its operator norm is unbounded"
ConvNd = torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d
ConvTransposeNd = torch.nn.ConvTranspose1d | torch.nn.ConvTranspose2d | torch.nn.ConvTranspose3d
Value = torch.Tensor | ParameterRef | None


def bias_norm(bias: Value) -> float:
    """‖b‖₂ of a frozen bias; ∞ for one that training moves freely; 0 for none."""
    if bias is None:
        return 0.0
    if isinstance(bias, ParameterRef) or bias.requires_grad:
        return math.inf
    return float(torch.linalg.vector_norm(bias.detach().double())) * (1 + 1e-12)


def weighted_transfer(
    x: Bound,
    output_shape: tuple[int, ...],
    *,
    gain: float,
    weight_factor: float,
    bias: float | None,
    positions: int,
    exact: bool = True,
    why_infinite: str = "",
    names: tuple[str, str] = ("weight", "bias"),
    rows: bool = False,
    note: str = "",
) -> Transfer:
    """An affine layer applied at T positions: y = A(W)x + b.

    ‖y‖ ≤ gain·X + √T·B. The weight's gradient is at most weight_factor·G; the bias is added at T positions, so its gradient
    is a sum of T cotangents, at most √T·G by Cauchy–Schwarz. With ``rows`` it acts on each row by itself: r ← gain·r + B.
    """
    norm = times(gain, x.norm) + (math.sqrt(positions) * bias if bias else 0.0)
    row = times(gain, x.row_norm) + (bias or 0.0) if rows else math.inf
    parameters = {names[0]: weight_factor}
    if bias is not None:
        parameters[names[1]] = parameters.get(names[1], 0.0) + math.sqrt(positions)
    bound = Bound(norm, output_shape, row)
    return Transfer(bound, (gain,), parameters, exact=exact, why_infinite=why_infinite, note=note)


def _named(weight: Value, bias: Value) -> tuple[str, str]:
    """Names of a function's parameters; constants get one that no parameter has (their entries are dropped below)."""
    first, second = (value.name if isinstance(value, ParameterRef) else "" for value in (weight, bias))
    return first, second


def _only_named(transfer: Transfer, names: tuple[str, str]) -> Transfer:
    kept = {name: factor for name, factor in transfer.parameters.items() if name and name in names}
    return Transfer(
        transfer.output, transfer.gains, kept, exact=transfer.exact, why_infinite=transfer.why_infinite, note=transfer.note
    )


def _function_operands(call: Call) -> tuple[Any, Value, Value]:
    x, weight, bias = call.argument(0, "input"), call.argument(1, "weight"), call.argument(2, "bias")
    if not isinstance(x, Bound) or isinstance(weight, Bound) or isinstance(bias, Bound) or weight is None:
        raise call.refuse("activations come first; weight and bias are parameters or constants")
    return x, weight, bias


def _is_free(weight: torch.Tensor | ParameterRef) -> bool:
    return isinstance(weight, ParameterRef) or weight.requires_grad


def _tensor(weight: torch.Tensor | ParameterRef) -> torch.Tensor:
    return (weight.tensor if isinstance(weight, ParameterRef) else weight).detach()


def _dense(x: Bound, call: Call, weight: torch.Tensor | ParameterRef, bias: Value, names: tuple[str, str]) -> Transfer:
    """Δ_W = G·X: at T positions the gradient is Σ_t δ_t ⊗ x_t, and ‖Σ_t δ_t ⊗ x_t‖_F ≤ Σ‖δ_t‖‖x_t‖ ≤ G·X."""
    return weighted_transfer(
        x,
        call.output_shape,
        gain=math.inf if _is_free(weight) else float(certified_norm(_tensor(weight))),
        weight_factor=x.norm,
        bias=None if bias is None else bias_norm(bias),
        positions=x.positions(),
        why_infinite=_UNCONSTRAINED,
        names=names,
        rows=True,
    )


@rule(torch.nn.Linear)
def _linear(module: torch.nn.Linear, call: Call) -> Transfer:
    return _dense(call.inputs[0], call, module.weight, module.bias, ("weight", "bias"))


@rule_for_function(F.linear)
def _linear_function(call: Call) -> Transfer:
    x, weight, bias = _function_operands(call)
    assert weight is not None
    if _tensor(weight).ndim != 2:
        raise call.refuse("only a weight of two dimensions is supported")
    names = _named(weight, bias)
    return _only_named(_dense(x, call, weight, bias, names), names)


def conv_multiplicity(module: ConvNd, spatial: Sequence[int]) -> int:
    """m of a torch convolution over an input of these spatial sizes."""
    pads = padding_sides(module.padding, module.kernel_size, module.dilation)
    return multiplicity(spatial, module.kernel_size, module.stride, module.dilation, pads, module.padding_mode)


def transposed_multiplicity(
    spatial: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> int:
    """m of the convolution that a transposed convolution is the adjoint of: it reads outputs, at its inputs' positions."""
    return multiplicity(outputs, kernel, stride, dilation, [(p, p) for p in padding], "zeros", spatial)


# Norms of convolutions that are not trained, by all that they follow from: a model is analysed several times.
_FROZEN: dict[tuple[object, ...], tuple[float, str]] = {}
_MOST_FROZEN = 256


def _frozen_norm(
    kernel: torch.Tensor, m: int, groups: int, stride: Sequence[int], dilation: Sequence[int], circular: Sequence[int] | None
) -> tuple[float, str]:
    """A certified norm of a convolution that is not trained, by the tightest way there is, and which one that is.

    ``circular`` is the image's size where padding is circular and outputs are one turn of the image. The kernel is known again by
    its numbers themselves, not by its name.
    """
    numbers = kernel.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    settings = (m, groups, tuple(stride), tuple(dilation), None if circular is None else tuple(circular))
    key = (hashlib.blake2b(numbers).digest(), kernel.dtype, tuple(kernel.shape), *settings)
    if key not in _FROZEN:
        if len(_FROZEN) >= _MOST_FROZEN:
            _FROZEN.clear()
        _FROZEN[key] = _certified_frozen_norm(kernel, m, groups, stride, dilation, circular)
    return _FROZEN[key]


def _certified_frozen_norm(
    kernel: torch.Tensor, m: int, groups: int, stride: Sequence[int], dilation: Sequence[int], circular: Sequence[int] | None
) -> tuple[float, str]:
    counted = math.sqrt(m) * float(certified_norm(kernel.reshape(groups, kernel.shape[0] // groups, -1)).max())
    note = f"norm by counting: √{m}·‖K‖"
    if circular is not None:
        if max(dilation) > 1 or max(stride) > 1 or not affordable(kernel, groups, math.prod(circular)):
            return counted, note
        exact = conv_norm_circular(kernel, circular, groups)
        return min((counted, note), (exact, f"norm on images of this size, from their own frequencies; counting: {counted:.4g}"))
    if grid_for(kernel, groups) == 0:
        return counted, note
    return tighter_norm(kernel, groups, counted, note, 1 if max(dilation) > 1 else stride)


def _conv(
    x: Bound,
    call: Call,
    weight: torch.Tensor | ParameterRef,
    bias: Value,
    names: tuple[str, str],
    *,
    m: int,
    groups: int,
    stride: Sequence[int],
    dilation: Sequence[int],
    mode: str = "zeros",
) -> Transfer:
    """Stored kernel K: ‖y‖ ≤ √m·max_g‖K_g‖₂·X and Δ_K = √m·G·X (each input element is read at most m times).

    A transposed convolution is the adjoint of one whose matrix is (in × out/groups·k): the same norm, and the same sum of
    products for the gradient, with the parts of input and cotangent exchanged.
    """
    gain, note, spatial = math.inf, "", x.shape[1:]
    if not _is_free(weight):
        kernel = _tensor(weight)
        if mode == "zeros" or (mode == "circular" and call.output_shape[1:] == spatial):
            gain, note = _frozen_norm(kernel, m, groups, stride, dilation, spatial if mode == "circular" else None)
        else:
            gain = math.sqrt(m) * float(certified_norm(kernel.reshape(groups, kernel.shape[0] // groups, -1)).max())
            note = f"norm by counting: √{m}·‖K‖"
    return weighted_transfer(
        x,
        call.output_shape,
        gain=gain,
        weight_factor=times(math.sqrt(m), x.norm),
        bias=None if bias is None else bias_norm(bias),
        positions=math.prod(call.output_shape[1:]),
        exact=False,
        why_infinite=_UNCONSTRAINED,
        names=names,
        note=note,
    )


def _module_conv(module: ConvNd | ConvTransposeNd, call: Call, m: int) -> Transfer:
    return _conv(
        call.inputs[0],
        call,
        module.weight,
        module.bias,
        ("weight", "bias"),
        m=m,
        groups=module.groups,
        stride=module.stride,
        dilation=module.dilation,
        mode=module.padding_mode,
    )


@rule(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
def _conv_module(module: ConvNd, call: Call) -> Transfer:
    return _module_conv(module, call, conv_multiplicity(module, channels_and_spatial(call, len(module.kernel_size))))


def _conv_function(axes: int, call: Call) -> Transfer:
    x, weight, bias = _function_operands(call)
    assert weight is not None
    tensor = _tensor(weight)
    kernel, groups = tuple(tensor.shape[2:]), int(call.argument(6, "groups", 1))
    stride, dilation = as_tuple(call.argument(3, "stride", 1), axes), as_tuple(call.argument(5, "dilation", 1), axes)
    pads = padding_sides(call.argument(4, "padding", 0), kernel, dilation)
    m = multiplicity(channels_and_spatial(call, axes), kernel, stride, dilation, pads)
    names = _named(weight, bias)
    return _only_named(_conv(x, call, weight, bias, names, m=m, groups=groups, stride=stride, dilation=dilation), names)


@rule(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
def _transposed_module(module: ConvTransposeNd, call: Call) -> Transfer:
    spatial = channels_and_spatial(call, len(module.kernel_size))
    arguments = (module.kernel_size, module.stride, module.padding, module.dilation)
    m = transposed_multiplicity(spatial, call.output_shape[1:], *arguments)  # type: ignore[arg-type]
    return _module_conv(module, call, m)


def _transposed_function(axes: int, call: Call) -> Transfer:
    x, weight, bias = _function_operands(call)
    assert weight is not None
    tensor, groups = _tensor(weight), int(call.argument(6, "groups", 1))
    stride, padding = as_tuple(call.argument(3, "stride", 1), axes), as_tuple(call.argument(4, "padding", 0), axes)
    dilation = as_tuple(call.argument(7, "dilation", 1), axes)
    spatial, kernel = channels_and_spatial(call, axes), tuple(tensor.shape[2:])
    m = transposed_multiplicity(spatial, call.output_shape[1:], kernel, stride, padding, dilation)
    names = _named(weight, bias)
    return _only_named(_conv(x, call, weight, bias, names, m=m, groups=groups, stride=stride, dilation=dilation), names)


def _register(axes: int, plain: Any, transposed: Any) -> None:
    @rule_for_function(plain)
    def _plain(call: Call) -> Transfer:
        return _conv_function(axes, call)

    @rule_for_function(transposed)
    def _transposed(call: Call) -> Transfer:
        return _transposed_function(axes, call)


_register(1, F.conv1d, F.conv_transpose1d)
_register(2, F.conv2d, F.conv_transpose2d)
_register(3, F.conv3d, F.conv_transpose3d)


def channels_and_spatial(call: Call, axes: int) -> tuple[int, ...]:
    """The spatial sizes of the input, which must be (channels, …) for each example.

    torch's pools also take examples without channels: (batch, H, W) is then *one* image of "batch" channels. The window
    still covers H and W, which the shape (H, W) of one example would not tell.
    """
    x = call.inputs[0]
    if len(x.shape) != axes + 1:
        raise call.refuse(
            f"examples of shape {x.shape} have no channel dimension, so torch takes the batch for channels; this layer needs "
            f"(channels, {', '.join('DHW'[-axes:])}). Unsqueeze dimension 1 first."
        )
    return x.shape[1:]
