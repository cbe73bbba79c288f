"""What can't be trained by per-example clipping, refused by name and with the fix, before anything is computed."""

from __future__ import annotations

import torch

from lipdp.clipping.registry import find_refusal
from lipdp.errors import UnsupportedError

__all__ = ["check_supported"]

_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_REPARAMETRISED = ("WeightNorm", "SpectralNorm")


def check_supported(model: torch.nn.Module) -> None:
    """Raise :class:`~lipdp.errors.UnsupportedError` for the first thing that can't work."""
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise UnsupportedError(f"parameter '{name}' is not initialised (a lazy module). Run one forward pass first.")
        if parameter.requires_grad and parameter.is_complex():
            raise UnsupportedError(
                f"parameter '{name}' is complex; norms and noise are defined for real ones. Use a real parameter of twice the size "
                "and torch.view_as_complex in forward."
            )
    for name, module in model.named_modules():
        why = _refusal(module)
        if why is not None:
            raise UnsupportedError(f"layer '{name}' ({type(module).__name__}) can't be trained by clipping: {why}")


def _refusal(module: torch.nn.Module) -> str | None:
    if type(module).__name__ in _PARALLEL and type(module).__module__.startswith("torch."):
        return "it splits the batch or averages gradients over devices, before they are clipped. Pass the wrapped model (.module)."
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted module does not show the inputs of its layers. Use the module it was scripted from."
    if torch.nn.utils.parametrize.is_parametrized(module):
        return (
            "it uses torch.nn.utils.parametrize; per-example gradients through it are not supported. Remove the parametrisation "
            "(torch.nn.utils.parametrize.remove_parametrizations)."
        )
    if any(type(hook).__name__ in _REPARAMETRISED for hook in module._forward_pre_hooks.values()):
        return (
            "its weight is recomputed from other parameters by a hook (weight_norm, spectral_norm). Remove it "
            "(torch.nn.utils.remove_weight_norm, remove_spectral_norm)."
        )
    return find_refusal(module)
