"""Projected gradient descent in L2: the other side of a certificate, an upper bound on the robust accuracy."""

from __future__ import annotations

import copy

import torch

from lipdp.errors import ConfigurationError, DataError
from lipdp.losses import predict
from lipdp.program.dtypes import Types

__all__ = ["attack"]


def attack(
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    radius: float | torch.Tensor = 1.0,
    *,
    steps: int = 50,
    restarts: int = 2,
    seed: int = 0,
) -> torch.Tensor:
    """Inputs within ``radius`` of ``x`` (L2, per example) on which the model does as badly as gradient descent finds.

    Descends on the margin (true output minus the largest other one; of a single output, its signed value), which, unlike a
    loss, never saturates. The first run starts at x, the others at random points of the ball; steps shrink like
    1 − t/steps and every iterate is projected on the ball. The best point of all runs is returned: where the model
    decides differently on it, x is shown not to be robust at this radius. Where it does not, nothing is shown:
    that takes :func:`certify`.

    Args:
        model: any classifier; evaluated in evaluation mode, on a copy.
        x: a batch of inputs; of another type than the model's, they are converted, and the points found are of the model's.
        y: the true classes; ``None``: the model's own decisions.
        radius: one for all, or one for each example.
        steps: gradient steps of each run.
        restarts: runs.
        seed: of the random starting points.
    """
    if steps < 1 or restarts < 1:
        raise ConfigurationError(f"an attack needs at least one step and one run, not steps={steps}, restarts={restarts}")
    types = Types(model)
    if not isinstance(x, torch.Tensor) or not types.of_inputs(x).is_floating_point:
        what = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise DataError(f"an attack moves inputs with real entries, not {what}: token ids can't be moved by a little")
    x, y = types.inputs(x), None if y is None else types.targets(y)
    radii = torch.as_tensor(radius, dtype=x.dtype, device=x.device).expand(len(x))
    if not bool(((radii >= 0) & torch.isfinite(radii)).all()):
        raise ConfigurationError("the attack's radius must be finite and not negative")
    own = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        target = predict(own(x)) if y is None else _targets(own(x), y.reshape(len(x)).to(x.device))
    radii = radii.reshape(-1, *([1] * (x.ndim - 1)))
    generator = torch.Generator().manual_seed(seed)
    best, lowest = x.clone(), _margin(own, x, target).detach()
    for run in range(restarts):
        start = torch.zeros_like(x)
        if run > 0:
            start = radii * _unit(torch.randn(x.shape, generator=generator).to(x))
        delta = start
        for step in range(steps):
            delta = delta.detach().requires_grad_(True)
            margin = _margin(own, x + delta, target)
            lower = margin.detach() < lowest
            lowest = torch.where(lower, margin.detach(), lowest)
            best = torch.where(lower.reshape(radii.shape), (x + delta).detach(), best)
            (gradient,) = torch.autograd.grad(margin.sum(), delta)
            moved = delta.detach() - 2 * radii * (1 - step / steps) * _unit(gradient)
            delta = moved * (radii / _norms(moved).clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1.0)
        with torch.no_grad():
            margin = _margin(own, x + delta, target)
            lower = margin < lowest
            lowest = torch.where(lower, margin, lowest)
            best = torch.where(lower.reshape(radii.shape), x + delta, best)
    return best.detach()


def _targets(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Refuses what are no classes of the model."""
    several = outputs.ndim > 1 and outputs.shape[1] > 1
    if several and (y.is_floating_point() or bool(((y < 0) | (y >= outputs.shape[1])).any())):
        raise DataError(
            f"targets must be class numbers from 0 to {outputs.shape[1] - 1}, for a model of {outputs.shape[1]} outputs; got "
            f"{str(y.dtype).removeprefix('torch.')}"
        )
    return y


def _margin(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far each decision is on the right side."""
    outputs = model(x)
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        flat = outputs.reshape(len(x))
        return torch.where(target > 0, flat, -flat)
    right: torch.Tensor = outputs.gather(1, target[:, None])[:, 0]
    others: torch.Tensor = outputs.scatter(1, target[:, None], float("-inf")).amax(dim=1)
    return right - others


def _norms(x: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1)
    return norms.reshape(-1, *([1] * (x.ndim - 1)))


def _unit(x: torch.Tensor) -> torch.Tensor:
    norms = _norms(x)
    return x / torch.where(norms > 0, norms, 1.0)
