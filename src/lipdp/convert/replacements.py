"""What takes the place of each ordinary layer. Every replacement keeps the shapes, so each can be decided by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from lipdp import nn
from lipdp.bounds.registry import has_rule
from lipdp.bounds.rules_modules import as_tuple
from lipdp.bounds.way_out import way_out
from lipdp.convert import tokens
from lipdp.convert.report import Decision, Where

__all__ = ["ACTIVATIONS", "FUNCTIONS", "decide"]


ACTIVATIONS: tuple[type[torch.nn.Module], ...] = (
    torch.nn.ReLU, torch.nn.ReLU6, torch.nn.LeakyReLU, torch.nn.PReLU, torch.nn.RReLU, torch.nn.ELU, torch.nn.CELU, torch.nn.SELU,
    torch.nn.GELU, torch.nn.SiLU, torch.nn.Mish, torch.nn.Hardswish, torch.nn.Softplus,
)  # fmt: skip

# Functions and methods, as the module that does the same. The module's arguments are those of the call, by name.
FUNCTIONS: dict[Any, Callable[..., torch.nn.Module]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"), lambda **_: torch.nn.ReLU()),
    F.relu6: lambda **_: torch.nn.ReLU6(),
    F.leaky_relu: lambda negative_slope=0.01, **_: torch.nn.LeakyReLU(negative_slope),
    F.elu: lambda alpha=1.0, **_: torch.nn.ELU(alpha),
    F.celu: lambda alpha=1.0, **_: torch.nn.CELU(alpha),
    F.selu: lambda **_: torch.nn.SELU(),
    F.gelu: lambda approximate="none", **_: torch.nn.GELU(approximate),
    F.silu: lambda **_: torch.nn.SiLU(),
    F.mish: lambda **_: torch.nn.Mish(),
    F.hardswish: lambda **_: torch.nn.Hardswish(),
    F.softplus: lambda beta=1, threshold=20, **_: torch.nn.Softplus(beta, threshold),
    F.max_pool2d: lambda kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False, **_: (
        torch.nn.MaxPool2d(kernel_size, stride or None, padding, dilation, return_indices, ceil_mode)
    ),
    F.avg_pool2d: lambda kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None, **_: (
        torch.nn.AvgPool2d(kernel_size, stride or None, padding, ceil_mode, count_include_pad, divisor_override)
    ),
    F.adaptive_avg_pool2d: lambda output_size, **_: torch.nn.AdaptiveAvgPool2d(output_size),
    F.adaptive_max_pool2d: lambda output_size, return_indices=False, **_: torch.nn.AdaptiveMaxPool2d(output_size, return_indices),
    F.dropout: lambda p=0.5, **_: torch.nn.Dropout(p),
    F.dropout2d: lambda p=0.5, **_: torch.nn.Dropout2d(p),
}

Weighted = torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.ConvTranspose2d
Twin = nn.SpectralLinear | nn.SpectralConv1d | nn.SpectralConv2d | nn.SpectralConv3d | nn.SpectralConvTranspose2d


def decide(module: torch.nn.Module, where: Where) -> Decision | None:
    """What becomes of ``module``; ``None`` if it stays and there is nothing to say."""
    for classes, rule in _RULES.items():
        if isinstance(module, classes) and type(module).__module__.startswith("torch.nn"):
            return rule(module, where)
    trained = any(parameter.requires_grad for parameter in module.parameters())
    if not has_rule(module) and way_out(module):
        return Decision("not converted", module, way_out(module))
    if not has_rule(module):
        return Decision("not converted", module, "nothing bounds it: give its class a rule (lipdp.bounds.rule), or replace it")
    if trained and type(module).__module__.startswith("torch.nn"):
        return Decision("not converted", module, "its weights stay unconstrained: put lipdp.nn.Boundary around it, or replace it")
    return None


def _linear(module: torch.nn.Linear, where: Where) -> Decision:
    bias = module.bias is not None
    like: Mapping[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
    return _weighted(nn.SpectralLinear(module.in_features, module.out_features, bias, **like), module, where)


def _conv(module: torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d, where: Where) -> Decision:
    twin = (nn.SpectralConv1d, nn.SpectralConv2d, nn.SpectralConv3d)[len(module.kernel_size) - 1](
        module.in_channels,
        module.out_channels,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        module.bias is not None,
        module.padding_mode,
        device=module.weight.device,
        dtype=module.weight.dtype,
    )
    return _weighted(twin, module, where)


def _conv_transpose(module: torch.nn.ConvTranspose2d, where: Where) -> Decision:
    twin = nn.SpectralConvTranspose2d(
        module.in_channels,
        module.out_channels,
        module.kernel_size,  # type: ignore[arg-type]
        module.stride,  # type: ignore[arg-type]
        module.padding,  # type: ignore[arg-type]
        module.output_padding,  # type: ignore[arg-type]
        module.groups,
        module.bias is not None,
        module.dilation,  # type: ignore[arg-type]
        device=module.weight.device,
        dtype=module.weight.dtype,
    )
    with torch.no_grad():
        made = twin(module.weight.new_zeros(1, *where.shape)).shape[1:]
    if tuple(made) != where.output:
        return Decision("not converted", module, "it is called with output_size=: use output_padding instead")
    return _weighted(twin, module, where)


def _weighted(twin: Twin, module: Weighted, where: Where) -> Decision:
    notes = []
    outputs = module.out_features if isinstance(module, torch.nn.Linear) else module.out_channels
    positions = math.prod(where.output) // outputs
    if module.bias is not None and positions > 1:
        notes.append(f"its bias is added at {positions} places and costs √{positions}: bias=False is cheaper")
    if where.copy_weights:
        notes.append("weights copied and projected")
        with torch.no_grad():
            twin.weight.copy_(module.weight)
            if module.bias is not None and twin.bias is not None:
                twin.bias.copy_(module.bias)
        twin.project_()
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(module.get_parameter(name).requires_grad)
    return Decision("replaced", twin, "; ".join(notes))


def _activation(module: torch.nn.Module, where: Where) -> Decision:
    """GroupSort keeps the gradient's norm where ReLU and its like lose some of it."""
    channels = where.shape[where.features % (len(where.shape) + 1) - 1]
    if channels % 2 == 0:
        return Decision("replaced", nn.GroupSort(2, dim=where.features))
    note = f"{channels} channels are odd: GroupSort(2) needs an even number"
    if isinstance(module, torch.nn.PReLU | torch.nn.RReLU):
        return Decision("replaced", torch.nn.ReLU(), note)
    if getattr(module, "inplace", False):
        vars(module)["inplace"] = False  # it is the conversion's own copy
    return Decision("kept", module, note)


def _max_pool(module: torch.nn.MaxPool2d, where: Where) -> Decision:
    if module.return_indices:
        return Decision("not converted", module, "return_indices=True has no bound")
    if module.ceil_mode or as_tuple(module.dilation, 2) != (1, 1):
        return Decision("kept", module, "L2NormPool2d has no ceil_mode and no dilation")
    kernel, stride, padding = (as_tuple(v, 2) for v in (module.kernel_size, module.stride, module.padding))
    overlap = math.prod(math.ceil(k / s) for k, s in zip(kernel, stride, strict=True))
    note = f"windows overlap: bounds grow by up to {math.sqrt(overlap):.3g} here; a stride of the window's size costs nothing"
    pool = nn.L2NormPool2d(kernel, stride, padding)
    return Decision("replaced", pool, note if overlap > 1 else "")


def _avg_pool(module: torch.nn.AvgPool2d, where: Where) -> Decision:
    kernel, stride, padding = (as_tuple(v, 2) for v in (module.kernel_size, module.stride, module.padding))
    if module.ceil_mode or any(padding) or any(s < k for k, s in zip(kernel, stride, strict=True)):
        return Decision("kept", module, "ScaledAvgPool2d needs windows that do not overlap, without padding")
    return Decision("replaced", nn.ScaledAvgPool2d(kernel, stride), "times √window")


def _adaptive_pool(module: torch.nn.AdaptiveAvgPool2d | torch.nn.AdaptiveMaxPool2d, where: Where) -> Decision:
    if where.shape == where.output:
        return Decision("removed", None, f"images already have the size {where.output[1:]}")
    if any(size % out for size, out in zip(where.shape[1:], where.output[1:], strict=True)):
        note = f"images of {where.shape[1:]} do not divide into {where.output[1:]} windows"
        return Decision("kept" if has_rule(module) else "not converted", module, note)
    height, width = (size // out for size, out in zip(where.shape[1:], where.output[1:], strict=True))
    if isinstance(module, torch.nn.AdaptiveAvgPool2d):
        return Decision("replaced", nn.ScaledAvgPool2d((height, width)), "times √window")
    if module.return_indices:
        return Decision("not converted", module, "return_indices=True has no bound")
    return Decision("replaced", nn.L2NormPool2d((height, width)))


def _norm(module: torch.nn.Module, where: Where) -> Decision:
    """Centring over the same features, without the division by a standard deviation, whose slope has no useful bound."""
    dims: tuple[int, ...] | None = None
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        dims = tuple(range(-len(module.normalized_shape), 0))
    elif isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
        dims = tuple(range(2, len(where.shape) + 1))
    averaged = math.prod(where.shape if dims is None else where.shape[dims[0] if dims[0] < 0 else dims[0] - 1 :])
    if averaged == 1:
        return Decision("removed", None, "centring one number would leave nothing of it")
    mixing = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    return Decision("replaced", nn.LayerCentering(dims), "over each example, never the batch" if mixing else "without scaling")


def _dropout(module: torch.nn.Dropout, where: Where) -> Decision:
    module.inplace = False
    if not 0 < module.p < 1:
        return Decision("removed", None, f"p={module.p:g}")
    return Decision("kept", module, f"it multiplies the sensitivities around it by {1 / (1 - module.p):.3g}: consider removing it")


def _softmax(module: torch.nn.Module, where: Where) -> Decision | None:
    if where.last:
        return Decision("removed", None, "lipdp's losses take logits")
    if has_rule(module):
        return None
    return Decision("not converted", module, "nothing bounds it here: use torch.softmax, or give its class a rule")


_RULES: dict[tuple[type[torch.nn.Module], ...], Callable[[Any, Where], Decision | None]] = {
    (torch.nn.Linear,): _linear,
    (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d): _conv,
    (torch.nn.ConvTranspose2d,): _conv_transpose,
    (torch.nn.Embedding,): tokens.embedding,
    (torch.nn.EmbeddingBag,): tokens.embedding_bag,
    (torch.nn.MultiheadAttention,): tokens.attention,
    (torch.nn.TransformerEncoderLayer,): tokens.encoder_layer,
    (torch.nn.TransformerEncoder,): tokens.encoder,
    ACTIVATIONS: _activation,
    (torch.nn.MaxPool2d,): _max_pool,
    (torch.nn.AvgPool2d,): _avg_pool,
    (torch.nn.AdaptiveAvgPool2d, torch.nn.AdaptiveMaxPool2d): _adaptive_pool,
    (
        torch.nn.modules.batchnorm._BatchNorm,
        torch.nn.modules.instancenorm._InstanceNorm,
        torch.nn.LayerNorm,
        torch.nn.GroupNorm,
        torch.nn.RMSNorm,
    ): _norm,
    (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d): _dropout,
    (torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.Sigmoid): _softmax,
}
