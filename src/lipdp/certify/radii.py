"""Certified radii: how far an input may move before the decision can change. And the other side of a certificate, attacks.

Projected gradient descent in L2 gives an upper bound on the robust accuracy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lipdp._numerics import arithmetic, unit_roundoff
from lipdp.certify.constants import Network, freeze
from lipdp.errors import ConfigurationError, DataError
from lipdp.losses import predict
from lipdp.program.dtypes import Types

# Rounding reaches what is computed at x and at x'; a margin through two outputs.
_AT_BOTH, _OF_MARGIN = 2.0, 2 * math.sqrt(2.0)


def certify(
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    *,
    input_lipschitz: float = 1.0,
    batch_size: int = 1024,
) -> torch.Tensor:
    """For each example a radius: no perturbation of smaller L2 norm changes the model's decision. 0 where it is wrong.

    With K outputs that are ℓ-Lipschitz together, the difference of two of them is √2·ℓ-Lipschitz (it is
    (e_i − e_j)·ŷ, and ‖e_i − e_j‖ = √2), so the largest output stays the largest within ``(ŷ₁ − ŷ₂)/(√2·ℓ)``; the sign of a
    single output stays within ``|ŷ|/ℓ``. Where the last layer is a matrix, ŷ = W·h, the difference of outputs i and j has its
    own constant ‖w_i − w_j‖·ℓ_h, at most √2·ℓ, and the least of ``(ŷ₁ − ŷ_j)/(‖w₁ − w_j‖·ℓ_h)`` counts. ℓ comes from the
    calculus of bounds, with the certified norm of each layer's present weights; cotangent clipping plays no part, and dropout is
    off, as in evaluation.

    *Sphere.* Scaling z to norm R is not Lipschitz near 0, but its geometry is simple: a perturbation of norm ρ < r₀ = ‖z‖
    turns z by an angle of at most θ = arcsin(ρ/r₀), so the scaled point moves by at most the chord 2R·sin(θ/2). With
    m = (ŷ₁ − ŷ₂)/(√2·ℓ) on the sphere and s = m/2R, the decision stays while sin(θ/2) < s:
    ρ = r₀·sin(2·arcsin s) = 2·r₀·s·√(1 − s²) for s ≤ √½ (θ = 90°), ρ = r₀ beyond that (all of the ball around z that does not
    contain 0), and ∞ for s ≥ 1 (no two points of the sphere are far enough apart). A front of constant ℓ_f divides ρ. Several
    scalings one behind the other are gone through from the last to the first: what one allows is what the next may use.
    The *ball* is 1-Lipschitz, so ρ ≥ m; and it is a sphere to inputs that are longer than R as long as they stay so, for
    perturbations up to r₀ − R: the larger of the two counts.

    *Rounding* makes radii smaller: from every margin, and from what enters every scaling, is taken what rounding may add at x and
    at the point it is moved to (:func:`lipdp.bounds.rounding.forward_error`: by the sizes that the bounds allow inside the network,
    large ones that cancel too, with roundings taken as independent); ℓ is multiplied by (1+u)^operations.

    Args:
        model: any model of the calculus, also with unconstrained weights. Constrained weights must lie inside their sets.
        x: a batch of inputs. Those of another type than the model's are converted, and radii are around them as given: rounding
            takes a part. Whole numbers (pixels) count as real ones, with neighbours in between.
        y: the true classes; for one output, positive means the positive class. ``None``: radii of the decisions as they are.
        input_lipschitz: the preprocessing's Lipschitz constant (per-channel scaling by 1/σ_c: 1/min σ_c), for radii in the
            units of the raw input.
        batch_size: how many examples are evaluated at a time.

    Returns:
        The radii, of shape (batch,), in float64.

    Example:
        >>> import torch, lipdp
        >>> from lipdp import nn
        >>> model = nn.Sequential(nn.BoundedInput((2,), norm=5.0), nn.SpectralLinear(2, 2, bias=False))
        >>> _ = model[1].weight.data.copy_(torch.eye(2))
        >>> x = torch.tensor([[3.0, 1.0], [1.0, 3.0]])
        >>> [round(r, 4) for r in certify(model, x, torch.tensor([0, 0])).tolist()]    # (3 − 1)/√2; the second is wrong
        [1.4142, 0.0]
    """
    network, types, pieces = _opened(model, x, y, input_lipschitz, batch_size)
    given, x = x, types.inputs(x)
    targets = None if y is None else types.targets(y).to(x.device)
    radii = [_radii(network, x[piece], None if targets is None else targets[piece]) for piece in pieces]
    if not radii:
        return torch.zeros(0, dtype=torch.float64, device=x.device)
    return _before_conversion(torch.cat(radii), given, x) / input_lipschitz


def certified_accuracy(radii: torch.Tensor, thresholds: Sequence[float]) -> dict[float, float]:
    """For each threshold, the share of examples that are classified rightly and certified beyond it: radius > threshold.

    Args:
        radii: of :func:`certify`, one for each example.
        thresholds: the radii to look at.

    Example:
        >>> certified_accuracy(torch.tensor([0.0, 0.5, 2.0, 3.0]), (0.0, 1.0))
        {0.0: 0.75, 1.0: 0.5}
    """
    if radii.ndim != 1 or len(radii) == 0:
        raise DataError(f"certified_accuracy needs the radii of some examples, not a tensor of shape {tuple(radii.shape)}")
    return {float(threshold): float((radii > threshold).double().mean()) for threshold in thresholds}


def certified_auroc(
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    thresholds: Sequence[float],
    *,
    input_lipschitz: float = 1.0,
    batch_size: int = 1024,
) -> dict[float, float]:
    """For each radius r, an AUROC that remains whatever moves *every* example by at most r in L2 norm: for binary tasks.

    The score s is the output, or the second output less the first; a perturbation of norm r changes it by at most m(r): the
    constant ℓ (√2·ℓ for a difference) times how far the input can move behind the model's scaling, which for the sphere is the
    chord of :func:`certify`. Pairs of a positive and a negative example whose order is then certain, s⁺ − m⁺ > s⁻ + m⁻, count.

    Args:
        model: as in :func:`certify`, with one output or two.
        x: a batch of inputs.
        y: positive (above 0) or not.
        thresholds: the radii.
        input_lipschitz: as in :func:`certify`.
        batch_size: as in :func:`certify`.

    Example:
        >>> import torch
        >>> from lipdp import nn
        >>> model = nn.Sequential(nn.BoundedInput((1,), norm=5.0), nn.SpectralLinear(1, 1, bias=False))
        >>> _ = model[1].weight.data.fill_(1.0)
        >>> certified_auroc(model, torch.tensor([[2.0], [1.0], [0.0]]), torch.tensor([1, 0, 0]), (0.0, 0.75, 1.5))
        {0.0: 1.0, 0.75: 0.5, 1.5: 0.0}
    """
    if any(not (isinstance(r, int | float) and 0 <= r < math.inf) for r in thresholds):
        raise ConfigurationError(f"radii must be at least 0, not {thresholds!r}")
    network, types, pieces = _opened(model, x, y, input_lipschitz, batch_size)
    positive = y.reshape(len(x)).to(x.device) > 0
    if not bool(positive.any()) or bool(positive.all()):
        raise DataError("an AUROC needs examples of both classes")
    given, x = x, types.inputs(x)
    kept = {}
    for radius in thresholds:
        reach = _after_conversion(float(radius) * input_lipschitz, given, x)
        limits = [_score_limits(network, x[piece], reach[piece]) for piece in pieces]
        low, high = (torch.cat(part) for part in zip(*limits, strict=True))
        others = high[~positive].sort().values
        kept[float(radius)] = float(torch.searchsorted(others, low[positive], side="left").double().mean()) / len(others)
    return kept


def _after_conversion(radius: float, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """How far the converted inputs may move when those that were given move by ``radius``."""
    growth, rounded = _conversion(given, x)
    return growth * torch.full((len(x),), radius, dtype=torch.float64, device=x.device) + rounded


def _score_limits(network: Network, x: torch.Tensor, reach: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest score of each example when it moves by ``reach``, rounding included."""
    seen = _look(network, x)
    outputs = seen.outputs
    if outputs.ndim > 2 or len(outputs) != len(x) or outputs[0].numel() > 2:
        raise ConfigurationError(
            f"the model gives outputs of shape {tuple(outputs.shape)}; a certified AUROC is for one output, or two classes"
        )
    wide = outputs.double().reshape(len(x), -1)
    single = wide.shape[1] == 1
    scores = wide[:, 0] if single else wide[:, 1] - wide[:, 0]
    steepness = network.lipschitz if single else float(_pairs(network, wide)[1, 0])
    largest = _largest(seen.entering) + float(reach.max())
    for scaling, lengths in zip(network.scalings, seen.lengths, strict=True):
        moved = reach * scaling.front.lipschitz * network.slack + _AT_BOTH * scaling.front.rounding(largest)
        reach = moved if scaling.ball else _chord(moved, lengths, scaling.radius)
        reach = reach.clamp_max(2 * scaling.radius)
    change = steepness * network.slack * reach + (_AT_BOTH if single else _OF_MARGIN) * network.rest.rounding(largest)
    return scores - change * (1 + 1e-12), scores + change * (1 + 1e-12)


def _chord(moved: torch.Tensor, length: torch.Tensor, radius: float) -> torch.Tensor:
    """How far the scaling of z, of norm ``length``, to the sphere moves when z does: 2R·sin(arcsin(moved/length)/2)."""
    share = (moved / length.clamp_min(1e-300)).clamp_max(1.0)
    turned = 2 * radius * torch.sin(torch.arcsin(share) / 2) * (1 + 1e-12)
    return torch.where(moved < length, turned, 2 * radius)


def _opened(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor | None, input_lipschitz: float, batch_size: int
) -> tuple[Network, Types, list[slice]]:
    """The network with its constants, the types that it takes, and which examples are evaluated at a time; or what is wrong."""
    if not (isinstance(input_lipschitz, int | float) and 0 < input_lipschitz < math.inf):
        raise ConfigurationError(f"input_lipschitz must be a positive finite number, not {input_lipschitz!r}")
    if batch_size < 1:
        raise ConfigurationError(f"batch_size must be at least 1, not {batch_size}")
    types = Types(model)
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or not types.of_inputs(x).is_floating_point:
        what = f"a tensor of {x.dtype} and shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise DataError(f"certify needs a batch of inputs with real entries, not {what}")
    if y is not None and tuple(y.shape) not in ((len(x),), (len(x), 1)):
        raise DataError(f"certify needs one target for each of the {len(x)} inputs, not a tensor of shape {tuple(y.shape)}")
    network = freeze(model, tuple(x.shape[1:]), types.of_inputs(x))
    return network, types, [slice(start, start + batch_size) for start in range(0, len(x), batch_size)]


def _before_conversion(radii: torch.Tensor, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Radii around the inputs as they were given, from those around what they were rounded to."""
    growth, rounded = _conversion(given, x)
    return radii if growth == 1 else ((radii - rounded) / growth * (1 - 1e-12)).clamp_min(0.0)


def _conversion(given: torch.Tensor, x: torch.Tensor) -> tuple[float, torch.Tensor | float]:
    """(a, b): the converted inputs move by a·‖δ‖ + b at most where those that were given move by δ.

    With fl(z) the rounding, |fl(z) − z| ≤ u·|z| + s for each entry (s: the smallest normal number, below which it may become 0):
    ‖fl(z + δ) − fl(z)‖ ≤ (1 + u)·‖δ‖ + 2u·‖z‖ + 2s·√n.
    """
    if given.is_floating_point() and torch.promote_types(given.dtype, x.dtype) == x.dtype:
        return 1.0, 0.0  # nothing was rounded, here or at any point nearby
    u, smallest = unit_roundoff(x.dtype), torch.finfo(x.dtype).smallest_normal
    return 1 + u, (2 * u * _norms(given) + 2 * smallest * math.sqrt(given[0].numel())) * (1 + 1e-9)


@dataclass(frozen=True)
class _Seen:
    """A batch on its way: norms of the inputs, of what enters each scaling, and the outputs."""

    entering: torch.Tensor
    lengths: tuple[torch.Tensor, ...]
    outputs: torch.Tensor


def _look(network: Network, x: torch.Tensor) -> _Seen:
    lengths, z = [], x
    with torch.no_grad(), arithmetic("float32", x.device):
        outputs = network.model(x)
        for scaling in network.scalings:
            z = scaling.front.module(z)
            lengths.append(_norms(z))
            z = scaling.layer(z)
    return _Seen(_norms(x), tuple(lengths), outputs)


def _largest(lengths: torch.Tensor) -> float:
    """Of those that are finite; others have no certificate."""
    finite = lengths[torch.isfinite(lengths)]
    return float(finite.max()) if len(finite) else 0.0


def _radii(network: Network, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    seen = _look(network, x)
    outputs = seen.outputs
    if outputs.ndim > 2 or len(outputs) != len(x):
        raise ConfigurationError(
            f"the model gives outputs of shape {tuple(outputs.shape)}; certificates are for one decision per example: outputs of "
            "shape (batch, classes), (batch, 1) or (batch,)."
        )
    if not bool(torch.isfinite(outputs).all()):
        raise DataError("the model's outputs are not all finite: look for inputs or weights that are infinite or not a number")
    right = _right(outputs, y)
    # Radii of exact arithmetic first: with them it is known how large inputs get, and with that how far rounding leads.
    exact = _through(network, seen, right, None)
    return _through(network, seen, right, _largest(seen.entering) + _largest(exact)) * (1 - 1e-12)


def _through(network: Network, seen: _Seen, right: torch.Tensor, largest: float | None) -> torch.Tensor:
    """Radii at the input, from the outputs back; ``largest``: norm of the inputs that rounding is counted for (``None``: exact)."""
    single = seen.outputs.ndim == 1 or seen.outputs.shape[1] == 1
    rounded = 0.0 if largest is None else (_AT_BOTH if single else _OF_MARGIN) * network.rest.rounding(largest)
    allowed = (_allowed(network, seen.outputs, rounded) * right).nan_to_num(0.0, posinf=math.inf)  # ∞ where it is wrong: 0
    for scaling, lengths in reversed(list(zip(network.scalings, seen.lengths, strict=True))):
        turned = chord_radius(allowed, lengths, scaling.radius)
        if scaling.ball:
            stays = torch.where(torch.isinf(turned), math.inf, (lengths - scaling.radius).clamp_min(0.0))
            turned = torch.maximum(allowed, torch.minimum(turned, stays))
        off = 0.0 if largest is None else _AT_BOTH * scaling.front.rounding(largest)
        constant = torch.as_tensor(scaling.front.lipschitz * network.slack, device=turned.device)
        allowed = _ratio((turned - off).clamp_min(0.0), constant)
    return allowed


def chord_radius(distance: torch.Tensor, length: torch.Tensor, radius: float) -> torch.Tensor:
    """How far z, of norm ``length``, may move so that its scaling to the sphere moves by less than ``distance``."""
    share = distance / (2 * radius)
    inner = share.clamp_max(math.sqrt(0.5))
    turned = 2 * length * inner * torch.sqrt(1 - inner.square())
    return torch.where(share >= 1, math.inf, turned)


def _allowed(network: Network, outputs: torch.Tensor, rounded: float) -> torch.Tensor:
    """How far the input, or what is behind the scaling, may move before a decision changes; ``rounded`` comes off each margin."""
    wide = outputs.double()
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        margins = (wide.reshape(len(wide)).abs() - rounded).clamp_min(0.0)
        return _ratio(margins, torch.as_tensor(network.lipschitz * network.slack, device=wide.device))
    largest, decision = wide.max(dim=1, keepdim=True)
    margins = (largest - wide - rounded).clamp_min(0.0)
    steepness = _pairs(network, wide)[decision[:, 0]] * network.slack
    return _ratio(margins, steepness).scatter(1, decision, math.inf).amin(dim=1)


def _pairs(network: Network, outputs: torch.Tensor) -> torch.Tensor:
    """(K, K): the constants of the differences of two outputs."""
    classes, general = outputs.shape[1], math.sqrt(2.0) * network.lipschitz
    known = outputs.new_full((classes, classes), general)
    return known if network.pairs is None else torch.minimum(known, network.pairs.to(known))


def _targets(outputs: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """One for each example; refuses what are no classes of the model."""
    y = given.reshape(len(outputs)).to(outputs.device)
    several = outputs.ndim > 1 and outputs.shape[1] > 1
    if several and (y.is_floating_point() or bool(((y < 0) | (y >= outputs.shape[1])).any())):
        raise DataError(
            f"targets must be class numbers from 0 to {outputs.shape[1] - 1}, for a model of {outputs.shape[1]} outputs; got "
            f"{str(y.dtype).removeprefix('torch.')}"
        )
    return y


def _right(outputs: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    if y is None:
        return torch.ones(len(outputs), dtype=torch.bool, device=outputs.device)
    classes = _targets(outputs, y)
    return predict(outputs) == (classes > 0 if outputs.ndim == 1 or outputs.shape[1] == 1 else classes)


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(tensor.double().reshape(len(tensor), -1), dim=1)
    return norms


def _ratio(margin: torch.Tensor, steepness: torch.Tensor) -> torch.Tensor:
    """margin/steepness; ∞ where a positive margin meets a function that is constant."""
    return torch.where(margin > 0, margin / steepness, 0.0)  # a number above 0 by 0 is ∞


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
        target = predict(own(x)) if y is None else _targets(own(x), y)
    radii = radii.reshape(-1, *([1] * (x.ndim - 1)))
    generator = torch.Generator().manual_seed(seed)
    best, lowest = x.clone(), _margin(own, x, target).detach()

    def tried(point: torch.Tensor) -> torch.Tensor:
        nonlocal best, lowest
        margin = _margin(own, point, target)
        lower = margin.detach() < lowest
        lowest = torch.where(lower, margin.detach(), lowest)
        best = torch.where(lower.reshape(radii.shape), point.detach(), best)
        return margin

    for run in range(restarts):
        delta = torch.zeros_like(x) if run == 0 else radii * _unit(torch.randn(x.shape, generator=generator).to(x))
        for step in range(steps):
            delta = delta.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(tried(x + delta).sum(), delta)
            moved = delta.detach() - 2 * radii * (1 - step / steps) * _unit(gradient)
            delta = moved * (radii / _lengths(moved).clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1.0)
        with torch.no_grad():
            tried(x + delta)
    return best.detach()


def _margin(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far each decision is on the right side."""
    outputs = model(x)
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        flat = outputs.reshape(len(x))
        return torch.where(target > 0, flat, -flat)
    right: torch.Tensor = outputs.gather(1, target[:, None])[:, 0]
    others: torch.Tensor = outputs.scatter(1, target[:, None], float("-inf")).amax(dim=1)
    return right - others


def _lengths(x: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1)
    return norms.reshape(-1, *([1] * (x.ndim - 1)))


def _unit(x: torch.Tensor) -> torch.Tensor:
    norms = _lengths(x)
    return x / torch.where(norms > 0, norms, 1.0)
