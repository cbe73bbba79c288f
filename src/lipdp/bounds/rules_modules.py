"""Rules of torch's own layers that have weights, windows or shapes. Trainable ones are unconstrained: their ℓ is ∞."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lipdp.bounds.bound import Bound, Transfer, times
from lipdp.bounds.operator_norm import certified_norm
from lipdp.bounds.registry import Call, rule
from lipdp.bounds.windows import average_gain, has_empty_window, multiplicity, same_padding
from lipdp.errors import UnsupportedError

__all__ = ["as_tuple", "bias_norm", "channels_and_spatial", "conv_multiplicity", "weighted_transfer"]

_UNCONSTRAINED = "its weights are trained without a constraint, so its operator norm is unbounded"


def as_tuple(value: int | Sequence[int], length: int) -> tuple[int, ...]:
    """One number per axis."""
    return (value,) * length if isinstance(value, int) else tuple(value)


def bias_norm(bias: torch.Tensor | None) -> float:
    """‖b‖₂ of a frozen bias; ∞ for one that training moves freely; 0 for none."""
    if bias is None:
        return 0.0
    if bias.requires_grad:
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
) -> Transfer:
    """An affine layer applied at T positions: y = A(W)x + b.

    ‖y‖ ≤ gain·X + √T·B. The weight's gradient is at most weight_factor·G; the bias is added at T positions, so its gradient
    is a sum of T cotangents, at most √T·G by Cauchy–Schwarz.
    """
    norm = times(gain, x.norm) + (math.sqrt(positions) * bias if bias else 0.0)
    parameters = {"weight": weight_factor}
    if bias is not None:
        parameters["bias"] = math.sqrt(positions)
    return Transfer(Bound(norm, output_shape), (gain,), parameters, exact=exact, why_infinite=why_infinite)


@rule(torch.nn.Linear)
def _linear(module: torch.nn.Linear, call: Call) -> Transfer:
    """Δ_W = G·X: at T positions the gradient is Σ_t δ_t ⊗ x_t, and ‖Σ_t δ_t ⊗ x_t‖_F ≤ Σ‖δ_t‖‖x_t‖ ≤ G·X."""
    x = call.inputs[0]
    free = module.weight.requires_grad
    return weighted_transfer(
        x,
        call.output_shape,
        gain=math.inf if free else float(certified_norm(module.weight)),
        weight_factor=x.norm,
        bias=None if module.bias is None else bias_norm(module.bias),
        positions=x.positions(),
        why_infinite=_UNCONSTRAINED,
    )


ConvNd = torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d


def conv_multiplicity(module: ConvNd, spatial: Sequence[int]) -> int:
    """m of a torch convolution over an input of these spatial sizes."""
    if isinstance(module.padding, str):
        pads = [
            same_padding(k, d) if module.padding == "same" else (0, 0)
            for k, d in zip(module.kernel_size, module.dilation, strict=True)
        ]
    else:
        pads = [(p, p) for p in module.padding]
    return multiplicity(spatial, module.kernel_size, module.stride, module.dilation, pads, module.padding_mode)


@rule(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
def _conv(module: ConvNd, call: Call) -> Transfer:
    """Stored kernel K: ‖y‖ ≤ √m·max_g‖K_g‖₂·X and Δ_K = √m·G·X (each input element is read at most m times)."""
    x = call.inputs[0]
    spatial = channels_and_spatial(call, len(module.kernel_size))
    root = math.sqrt(conv_multiplicity(module, spatial))
    free = module.weight.requires_grad
    kernels = module.weight.detach().reshape(module.groups, module.out_channels // module.groups, -1)
    return weighted_transfer(
        x,
        call.output_shape,
        gain=math.inf if free else root * float(certified_norm(kernels).max()),
        weight_factor=times(root, x.norm),
        bias=None if module.bias is None else bias_norm(module.bias),
        positions=math.prod(call.output_shape[1:]),
        exact=False,
        why_infinite=_UNCONSTRAINED,
    )


@rule(torch.nn.Identity, torch.nn.Flatten, torch.nn.Unflatten, torch.nn.PixelShuffle, torch.nn.PixelUnshuffle)
def _rearrange(module: torch.nn.Module, call: Call) -> Transfer:
    """A permutation of the entries of each example (the trace has checked that the batch dimension stays)."""
    if isinstance(module, torch.nn.Flatten):
        call.dims(module.start_dim)
    if isinstance(module, torch.nn.Unflatten):
        call.dims(module.dim)
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


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


@rule(torch.nn.ZeroPad1d, torch.nn.ZeroPad2d, torch.nn.ZeroPad3d)
def _zero_pad(module: torch.nn.ZeroPad2d, call: Call) -> Transfer:
    if any(module.padding[2 * len(call.inputs[0].shape) :]):
        raise call.refuse("it pads the batch dimension")
    if module.value != 0:
        raise call.refuse(f"it pads with {module.value}, not with zeros")
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


def _axes(module: torch.nn.Module) -> int:
    one, two = (torch.nn.MaxPool1d, torch.nn.AvgPool1d), (torch.nn.MaxPool2d, torch.nn.AvgPool2d)
    return 1 if isinstance(module, one) else 2 if isinstance(module, two) else 3


@rule(torch.nn.MaxPool1d, torch.nn.MaxPool2d, torch.nn.MaxPool3d)
def _max_pool(module: torch.nn.MaxPool2d, call: Call) -> Transfer:
    """Each output copies one input, and an input is copied at most m times: ‖y‖² ≤ m‖x‖², and so for cotangents."""
    if module.return_indices:
        raise call.refuse("return_indices=True is not supported")
    x = call.inputs[0]
    axes = _axes(module)
    spatial, outputs = channels_and_spatial(call, axes), call.output_shape[1:]
    kernel, stride = as_tuple(module.kernel_size, axes), as_tuple(module.stride, axes)
    padding, dilation = as_tuple(module.padding, axes), as_tuple(module.dilation, axes)
    if has_empty_window(spatial, kernel, stride, dilation, padding, outputs):
        raise call.refuse("some window covers padding only and answers −∞. Use less padding, or ceil_mode=False.")
    m = multiplicity(spatial, kernel, stride, dilation, [(p, p) for p in padding], "zeros", outputs)
    return Transfer(Bound(math.sqrt(m) * x.norm, call.output_shape), (math.sqrt(m),), exact=m == 1)


@rule(torch.nn.AvgPool1d, torch.nn.AvgPool2d, torch.nn.AvgPool3d)
def _avg_pool(module: torch.nn.AvgPool2d, call: Call) -> Transfer:
    x = call.inputs[0]
    axes = _axes(module)
    spatial, outputs = channels_and_spatial(call, axes), call.output_shape[1:]
    kernel, stride = as_tuple(module.kernel_size, axes), as_tuple(module.stride, axes)
    gain = average_gain(
        spatial,
        kernel,
        stride,
        as_tuple(module.padding, axes),
        outputs,
        module.count_include_pad,
        getattr(module, "divisor_override", None),
    )
    return Transfer(Bound(gain * x.norm, call.output_shape), (gain,), exact=False)


@rule(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
def _batch_norm(module: torch.nn.BatchNorm2d, call: Call) -> Transfer:
    """Evaluation mode with public statistics: y_c = γ_c(x_c − μ_c)/√(v_c+ε) + β_c, a diagonal affine map."""
    if module.training or module.running_mean is None or module.running_var is None:
        raise UnsupportedError(
            f"{call.where} normalises by the statistics of the batch: it mixes examples, so one example's influence can't be "
            "bounded. Use lipdp.nn.LayerCentering or a GroupNorm, or freeze it: .eval() with public statistics."
        )
    x = call.inputs[0]
    positions = max(1, math.prod(x.shape[1:]))
    mean, std = module.running_mean.double(), (module.running_var.double() + module.eps).sqrt()
    gamma, beta = module.weight, module.bias
    if (gamma is not None and gamma.requires_grad) or (beta is not None and beta.requires_grad):
        gain, norm = math.inf, math.inf
    else:
        scale = (torch.ones_like(mean) if gamma is None else gamma.detach().double()) / std
        shift = (torch.zeros_like(mean) if beta is None else beta.detach().double()) - scale * mean
        gain = float(scale.abs().max())
        norm = times(gain, x.norm) + math.sqrt(positions) * float(shift.norm())
    worst = float(((x.norm + math.sqrt(positions) * mean.abs()) / std).max())
    parameters = {} if gamma is None else {"weight": worst, "bias": math.sqrt(positions)}
    return Transfer(Bound(norm, call.output_shape), (gain,), parameters, exact=False, why_infinite="its scale is trained freely")
