"""Many private linear heads at once on one matrix of features: the columns of one weight matrix, each with its own settings.

Every step takes all examples (sampling rate 1), so T steps of multiplier σ and a release of statistics of multiplier z are one
Gaussian mechanism, exactly: μ² = T/σ² + 1/z². There is no table of noise, and the features are read once for all settings. Used to
compare sets of features on held-out data; the engine's own runs are those of benchmarks/accuracy/utility.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DELTA = 1e-5
FADE = 1e-9
"""Normalised gradients are those clipped at this: an example whose logits' gradient is shorter fades. A recipe that brings every
gradient to the same length, nn.ClipGradient(…, normalise=True), is another one: examples that float32 can tell nothing more of
then push as hard as all others, in a direction that is rounding. On Fashion-MNIST that costs one to two points."""


def gaussian_mu(epsilon: float, delta: float = DELTA) -> float:
    """The μ of the Gaussian mechanism that is exactly (ε, δ): Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) = δ."""

    def spent(mu: float) -> float:
        phi = [0.5 * math.erfc(-z / math.sqrt(2)) for z in (mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu)]
        return phi[0] - math.exp(epsilon) * phi[1]

    low, high = 1e-3, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) < delta else (low, middle)
    return low


@dataclass(frozen=True)
class Setting:
    """One head's training: ``time`` is the learning rate times the number of steps, ``lr`` in units of the clip C."""

    epsilon: float
    time: float
    clip: float = 0.3
    momentum: float = 0.9
    ema: float = 0.9
    decay: float = 1.0  # the rate falls linearly to (1 − decay) of itself
    normalise: bool = False
    loss: str = "cross_entropy"  # or "squares"

    def noise(self, steps: int, statistics: float | None, scale: float = 1.0, delta: float = DELTA) -> float:
        """σ of a step, after statistics of multiplier z. ``scale`` is for tiny trial runs: noise for so many times the data."""
        left = gaussian_mu(self.epsilon, delta) ** 2 - (0.0 if statistics is None else statistics**-2)
        if left <= 0:
            raise ValueError(f"statistics at multiplier {statistics} cost more than epsilon={self.epsilon}")
        return math.sqrt(steps / left) / scale


def grid(epsilons: Sequence[float], times: Sequence[float], clips: Sequence[float]) -> list[Setting]:
    """Every combination."""
    return [Setting(e, t, c) for e in epsilons for t in times for c in clips]


def train_columns(
    x: Tensor,
    labels: Tensor,
    held_out: Tensor,
    held_labels: Tensor,
    classes: int,
    settings: Sequence[Setting],
    steps: int,
    statistics: float | None,
    seed: int,
    scale: float = 1.0,
    delta: float = DELTA,
) -> list[float]:
    """Held-out accuracies in percent, one for each setting. ``x`` holds rows of norm at most 1."""
    weights = column_weights(x, labels, classes, settings, steps, statistics, seed, scale, delta)
    logits = (held_out @ weights.flatten(1).to(x.dtype)).float().unflatten(1, (len(settings), classes))
    right = (logits.argmax(2) == held_labels[:, None]).float().mean(0)
    return [100 * float(r) for r in right]


def column_weights(
    x: Tensor,
    labels: Tensor,
    classes: int,
    settings: Sequence[Setting],
    steps: int,
    statistics: float | None,
    seed: int,
    scale: float = 1.0,
    delta: float = DELTA,
) -> Tensor:
    """The averaged weights of all heads, (features, settings, classes)."""
    device, count, width = x.device, len(settings), x.shape[1]
    draw = torch.Generator(device).manual_seed(seed)

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)[None, :, None]

    noise = column([s.noise(steps, statistics, scale, delta) for s in settings])
    rate = column([s.time / steps / len(x) for s in settings])
    momentum = column([s.momentum for s in settings])
    floor = column([FADE if s.normalise else s.clip for s in settings])
    decay, ema = column([s.decay for s in settings]), column([s.ema for s in settings])
    weight = torch.zeros(width, count, classes, device=device)
    velocity, average = torch.zeros_like(weight), torch.zeros_like(weight)
    hot = torch.nn.functional.one_hot(labels, classes).float()[:, None]
    losses = {s.loss for s in settings}
    if len(losses) > 1:
        raise ValueError(f"columns that are trained at once share their loss, and these have {losses}")
    squares = losses == {"squares"}
    for step in range(steps):
        low = weight.flatten(1).to(x.dtype)
        gradient = torch.zeros(width, count * classes, device=device)
        for start in range(0, len(x), 16384):
            rows = x[start : start + 16384]
            logits = (rows @ low).float().unflatten(1, (count, classes))
            residual = (logits + 1 / classes if squares else logits.softmax(2)) - hot[start : start + 16384]
            # In units of C: an example's gradient has norm at most 1 in every column.
            residual = residual / torch.maximum(residual.norm(dim=2, keepdim=True), floor)
            gradient += (rows.T @ residual.flatten(1).to(x.dtype)).float()
        noised = gradient.unflatten(1, (count, classes)) + noise * torch.randn(weight.shape, generator=draw, device=device)
        velocity.mul_(momentum).add_(noised)
        weight.sub_(rate * (1 - momentum) * (1 - decay * step / steps) * velocity)
        average += (1 - ema.clamp_max(step / (step + 9))) * (weight - average)
    return average


def best_by_epsilon(settings: Sequence[Setting], scores: Sequence[float]) -> dict[str, tuple[float, Setting]]:
    """The best score for each ε and its setting."""
    best: dict[str, tuple[float, Setting]] = {}
    for setting, score in zip(settings, scores, strict=True):
        key = f"{setting.epsilon:g}"
        if key not in best or score > best[key][0]:
            best[key] = (score, replace(setting))
    return best
