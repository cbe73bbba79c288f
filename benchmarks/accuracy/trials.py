"""One private training run on public features, as fast as a GPU allows: what benchmarks/accuracy/search.py repeats.

It computes what lipdp's engine does (real Poisson samples, per-example bounds, one Gaussian release a step), without its checks and
in bfloat16. So its figures choose settings; what is reported comes from benchmarks/accuracy/utility.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Config = dict[str, Any]


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float, normalise: bool) -> Tensor:
        ctx.bound, ctx.floor = bound, 1e-12 if normalise else bound
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wide = grads[0].float()
        norms = wide.flatten(1).norm(dim=1).clamp_min(ctx.floor)
        return (wide * (ctx.bound / norms).reshape(-1, *([1] * (wide.ndim - 1)))).to(grads[0].dtype), None, None


def _ball(x: Tensor) -> Tensor:
    return x / x.flatten(1).norm(dim=1).clamp_min(1.0).reshape(-1, *([1] * (x.ndim - 1)))


class Head:
    """Plain weights between boundaries: linear, hidden layers ("mlp"), or a 1×1 convolution first ("conv")."""

    def __init__(
        self, config: Config, shape: Sequence[int], classes: int, generator: torch.Generator, device: torch.device
    ) -> None:
        self.config = config
        sizes = [int(s) for s in shape]
        self.weights: list[Tensor] = []
        width = math.prod(sizes)
        if config["head"] == "conv":
            filters, gain = int(config["hidden"]), config["init"]
            self.weights.append(gain * torch.randn(filters, sizes[0], generator=generator, device=device))
            width = filters * math.prod(s // 2 if config["pool"] else s for s in sizes[1:])
        elif config["head"] == "mlp":
            for _ in range(config["depth"]):
                # A unit input gives activations of size about init; behind a ball, the next layer's input has norm 1 again.
                gain = config["init"]
                self.weights.append(gain * torch.randn(int(config["hidden"]), width, generator=generator, device=device))
                width = int(config["hidden"])
        self.weights.append(torch.zeros(classes, width, device=device))
        for weight in self.weights:
            weight.requires_grad_()
        self.bounds = [config["clip_hidden"]] * (len(self.weights) - 1) + [config["clip"]]

    def logits(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Of rows (R, D), or for "conv" (R, positions, channels)."""
        last = len(weights) - 1
        for number, weight in enumerate(weights):
            low = weight.to(x.dtype)
            conv = self.config["head"] == "conv" and number == 0
            z = (x if conv else x.flatten(1)) @ low.T
            if number == last:
                return _Clip.apply(z.float(), self.bounds[last], self.config["normalise"])
            x = F.relu(_Clip.apply(z, self.bounds[number], self.config["normalise"]))
            if conv and self.config["pool"]:
                side = math.isqrt(x.shape[1])
                x = x.reshape(len(x), side // 2, 2, side // 2, 2, x.shape[2]).mean((2, 4))
            x = _ball(x.float()).to(low.dtype)
        raise AssertionError

    def multipliers(self, sigma: float) -> list[float]:
        """s_d/Δ_d of every weight for a step of multiplier σ: Σ(Δ_d/s_d)² = σ⁻²."""
        sizes = [weight.numel() for weight in self.weights]
        kind = self.config["allocation"]
        shares = {
            "global": [bound**2 for bound in self.bounds],
            "per_layer": [1.0 for _ in self.bounds],
            "optimal": [bound * math.sqrt(size) for bound, size in zip(self.bounds, sizes, strict=True)],
        }[kind]
        return [sigma * math.sqrt(sum(shares) / share) for share in shares]


def run_trial(
    config: Config, inputs: Sequence[Tensor], labels: Sequence[Tensor], classes: int, sigma: float, seed: int, flip: bool
) -> dict[str, float]:
    """Train on the first part with noise multiplier σ, and give accuracies on the second, in percent, of the averaged weights."""
    x, held_out = inputs
    device = x.device
    draw = torch.Generator(device).manual_seed(seed)
    head = Head(config, x.shape[2:], classes, draw, device)
    if config["head"] == "conv":
        x, held_out = (part.flatten(3).transpose(2, 3).contiguous() for part in inputs)
    multipliers = head.multipliers(sigma)
    momenta = [torch.zeros_like(weight) for weight in head.weights]
    averages = [weight.detach().clone() for weight in head.weights]
    rates = [config["lr"] * config["lr_hidden"]] * (len(head.weights) - 1) + [config["lr"]]
    copies, steps, batch = x.shape[1], config["steps"], config["batch"]
    q = batch / len(x)
    for step in range(steps):
        chosen = torch.nonzero(torch.rand(len(x), generator=draw, device=device) < q).flatten()
        rows = x[chosen].flatten(0, 1)
        targets = labels[0][chosen].repeat_interleave(copies)
        gradients: Sequence[Tensor] = [torch.zeros_like(weight) for weight in head.weights]
        if len(chosen):
            losses = F.cross_entropy(head.logits(rows, head.weights) * config["tau"], targets, reduction="sum") / config["tau"]
            gradients = torch.autograd.grad(losses, head.weights)
        rate = _schedule(config["schedule"], step / steps)
        decay = min(config["ema"], step / (step + 9))
        with torch.no_grad():
            for number, weight in enumerate(head.weights):
                noise = multipliers[number] * torch.randn(weight.shape, generator=draw, device=device)
                update = (gradients[number].float() / (copies * head.bounds[number]) + noise) / batch
                momenta[number].mul_(config["momentum"]).add_(update)
                weight.sub_(rates[number] * rate * momenta[number])
                averages[number].lerp_(weight, 1 - decay)
    return _accuracies(head, averages, held_out, labels[1], flip)


def _schedule(kind: str, done: float) -> float:
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done if kind == "linear" else 1.0


def _accuracies(head: Head, weights: Sequence[Tensor], x: Tensor, labels: Tensor, flip: bool) -> dict[str, float]:
    """Of the image alone, of the image and its mirror, of all copies: logits averaged."""
    copies = x.shape[1]
    with torch.no_grad():
        logits = torch.cat([head.logits(part.flatten(0, 1), weights).reshape(len(part), copies, -1) for part in x.split(1024)])
    choices: dict[str, list[int]] = {"one": [0], "all": list(range(copies))}
    if flip and copies > 1:
        choices["flip"] = [0, copies // 2]
    return {name: 100 * float((logits[:, kept].mean(1).argmax(1) == labels).float().mean()) for name, kept in choices.items()}
