"""Canaries: records that a training run would betray first, if it betrayed any.

For proved bounds they are inputs on the ball that the model bounds its inputs to, with the target that makes their gradient
longest, and the input moved by ascent through the proved program. For clipping any input whose gradient reaches the clipping norm
is as good as a gradient of one's own choice. Weights are chosen too, for the guarantee holds for all that lie in their sets.
Nothing of it reads private data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipdp import nn
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.parametrize import Reparametrised, project_
from lipdp.planning.plan import PrivacyPlan
from lipdp.program import find_input_dtype, find_input_shape
from lipdp.program.dtypes import Types
from lipdp.training.methods import query_of
from lipdp.training.query import Sample

_WEAK = 0.8  # of the strongest canary: what is below is left out
_TRIED = 4  # canaries that weights and scales are judged by
_LARGE = 1e4
_GOOD = 0.95  # of what the plan allows: no ascent beyond
_ASCENDED = 32  # canaries that are moved, at most


@dataclass(frozen=True)
class Canaries:
    """Records, and how much of what the plan allows a record they use.

    Attributes:
        inputs: one row each.
        targets: of each.
        rows: what each one contributes to a step's sums, whitened.
        strength: norm of that, or of its part that counts, ÷ the largest that the plan accounts for, 1/σ.
    """

    inputs: Tensor
    targets: Tensor
    rows: Tensor
    strength: tuple[float, ...]

    def of(self, numbers: Sequence[int], strength: Sequence[float]) -> Canaries:
        """Some of them, in this order."""
        chosen = torch.tensor(numbers, dtype=torch.long)
        x, y = (part[chosen.to(part.device)] for part in (self.inputs, self.targets))
        return Canaries(x, y, self.rows[chosen], tuple(strength))


class Contributions:
    """What single records add to the sums of a step, through the very query that the engine asks.

    With ``watched``, only ordinary parameters are looked at: of a reparametrised weight, the optimiser sees what post-processing
    made of the release.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Any,
        plan: PrivacyPlan,
        input_shape: tuple[int, ...] | None = None,
        *,
        watched: bool = True,
    ) -> None:
        self.model, self.plan = model, plan
        self.query = query_of(model, loss, plan, input_shape)
        self.query.prove()
        self.loss = self.query.loss
        self._types = Types(model, self.loss)
        mapped = {id(p) for m in model.modules() if isinstance(m, Reparametrised) and m.maps() for p in m.parameters(recurse=False)}
        hidden = mapped if watched else set()
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in hidden}
        self.device = next(model.parameters()).device
        self._rows = self.query.most_rows
        if not self.parameters:
            raise ConfigurationError(
                "all trained weights of this model are reparametrised: what the optimiser sees of a release is what a pull-back "
                "made of it, and a white-box audit has nothing to compare it with. Audit with access='black', or a projected model."
            )

    def of(self, x: Tensor, y: Tensor, clips: Mapping[str, float] | None = None) -> dict[str, Tensor]:
        """The sum over these records, in float64."""
        norms = dict(self.plan.clips) if clips is None else clips
        dtypes = self._types.of_inputs(x), self._types.of_targets(y)
        batch = Sample(x.to(self.device), y.to(self.device), max(1, min(len(x), self._rows)), self.device, dtypes=dtypes)
        wanted = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        sums = self.query.ask(wanted, batch, norms).sums
        return {name: sums[name].detach().double() for name in self.parameters}

    def rows(self, x: Tensor, y: Tensor, stds: Mapping[str, float], clips: Mapping[str, float] | None = None) -> Tensor:
        """A row for each record: its own contribution, whitened."""
        return torch.stack([self.whiten(self.of(x[i : i + 1], y[i : i + 1], clips), stds) for i in range(len(x))])

    def whiten(self, sums: Mapping[str, Tensor], stds: Mapping[str, float]) -> Tensor:
        """One vector of all parameters that are noised in this step, each divided by its noise; float64, on the processor."""
        parts = [(sums[name].double() / stds[name]).reshape(-1) for name in self.parameters if stds.get(name, 0.0) > 0]
        if not parts:
            raise ConfigurationError("no ordinary parameter of this model gets noise in this step: there is nothing to audit")
        return torch.cat(parts).cpu()


def target_choices(model: torch.nn.Module, loss: Any, x: Tensor, given: Tensor | None) -> Tensor:
    """Targets to choose the worst of: those of the data, or all classes, or numbers that a loss may take."""
    if given is not None and len(given):
        distinct: Tensor = torch.unique(given, dim=0)
        return distinct[:64]
    with torch.no_grad():
        outputs = model(x[:1])
    many = outputs.ndim > 1 and outputs.shape[1] > 1
    classes = torch.arange(min(outputs.shape[1], 64)) if many else torch.tensor([0.0, 1.0])
    shape = tuple(outputs.shape[1:])
    kinds = [classes, torch.tensor([-1.0, 1.0]), *(torch.full((1, *shape), value) for value in (-_LARGE, _LARGE))]
    usable = [kind for kind in kinds if _takes(model, loss, x[:1], kind[:1])]
    if not usable:
        raise ConfigurationError(
            f"no targets are known for the loss {type(loss).__name__} and outputs of shape {tuple(outputs.shape)}: pass data, "
            "whose targets are then used, or targets=."
        )
    return torch.cat([kind for kind in usable if kind.shape[1:] == usable[0].shape[1:] and kind.dtype == usable[0].dtype])


def _takes(model: torch.nn.Module, loss: Any, x: Tensor, y: Tensor) -> bool:
    try:
        with torch.no_grad():
            value = loss(model(x), Types(model, loss).targets(y.to(x.device)))
    except (LipdpError, RuntimeError, ValueError, IndexError, TypeError):
        return False
    return value.shape == (1,) and bool(torch.isfinite(value).all())


def craft(
    contributions: Contributions,
    stds: Mapping[str, float],
    count: int,
    *,
    input_shape: tuple[int, ...] | None = None,
    targets: Tensor | None = None,
    weights: bool = True,
    ascent: int = 8,
    seed: int = 0,
) -> Canaries:
    """Canaries for a model under a plan.

    Args:
        contributions: of the model. Its weights are changed where ``weights`` says so.
        stds: noise by parameter.
        count: how many; as many as there are independent directions at most.
        input_shape: shape of one example, where the model has no BoundedInput.
        targets: to choose from.
        weights: choose the worst of some weights inside their sets, too.
        ascent: steps of gradient ascent on the inputs of canaries that fall short.
        seed: of the directions; they need not be secret.
    """
    model = contributions.model
    shape = find_input_shape(model) if input_shape is None else tuple(input_shape)
    if shape is None:
        raise ConfigurationError("the shape of one example is not known: pass input_shape=, or begin the model with BoundedInput")
    draw = torch.Generator().manual_seed(seed)
    limit = 1 / contributions.plan.noise_multiplier
    starts: list[dict[str, Tensor]] = list(_weight_starts(model, draw)) if weights else [_kept(model)]
    choices: Tensor | None = None
    options = []
    for number, values in enumerate(starts):
        _put(model, values)
        for scale in _scales(model):
            x = _directions(min(count, _TRIED), shape, scale, model, draw)
            choices = target_choices(model, contributions.loss, x, targets) if choices is None else choices
            rows = contributions.rows(x, _worst_targets(contributions, x, choices), stds)
            options.append((float(rows.norm(dim=1).mean()), number, scale))
    _, number, scale = max(options)
    _put(model, starts[number])
    assert choices is not None
    x = _directions(count, shape, scale, model, draw)
    y = _worst_targets(contributions, x, choices)
    rows = contributions.rows(x, y, stds)
    short = (rows.norm(dim=1) < _GOOD * limit).nonzero().flatten().tolist()[:_ASCENDED]
    if ascent and short and x.is_floating_point():
        moved, stronger = x.clone(), rows.clone()
        for i in short:
            moved[i : i + 1], stronger[i] = _ascended(contributions, stds, x[i : i + 1], y[i : i + 1], rows[i], ascent)
        # Ascent may lead all of them to one place, where they can't be told apart.
        if _own_parts(stronger)[2] > _own_parts(rows)[2]:
            x, rows = moved, stronger
    return Canaries(x, y, rows, tuple((rows.norm(dim=1) / limit).tolist()))


def _worst_targets(contributions: Contributions, x: Tensor, choices: Tensor) -> Tensor:
    """For each input the target with the longest gradient in the outputs."""
    own, types = contributions, Types(contributions.model, contributions.loss)
    with torch.enable_grad():
        outputs = own.model(x).detach().requires_grad_()
        lengths = []
        for choice in choices:
            y = types.targets(choice.expand(len(x), *choice.shape).to(x.device))
            (slope,) = torch.autograd.grad(own.loss(outputs, y).sum(), outputs)
            lengths.append(torch.linalg.vector_norm(slope.reshape(len(x), -1).double(), dim=1))
    return choices[torch.stack(lengths).nan_to_num(0.0).argmax(0).cpu()].clone()


def strongest(canaries: Canaries, multiplier: float) -> Canaries:
    """Those that together tell most; the strength of each is that of its own part, orthogonal to the ones before."""
    order, parts, _ = _own_parts(canaries.rows)
    if not float(parts[0]) * multiplier > 1e-6:
        raise ConfigurationError(
            "no canary has a gradient at these weights: nothing can be told from what is released. Pass other targets=, or weights "
            "that are not saturated."
        )
    return canaries.of(order, (parts * multiplier).tolist())


def _own_parts(rows: Tensor) -> tuple[list[int], Tensor, float]:
    """Which rows to take, their parts that are orthogonal to the ones before, and by how many deviations they stand out.

    They are taken as QR with pivoting takes them: the longest first, then always the one with most of its own, as long as that is
    not much less. The sum of k guesses with parts r_i stands out by about Σr_i/√k deviations: k is where that is largest.
    """
    from scipy.linalg import qr

    triangle, order = qr(rows.T.numpy(), mode="r", pivoting=True)
    parts = torch.from_numpy(triangle.copy()).diagonal().abs()
    parts = parts[parts >= _WEAK * float(parts[0])]
    deviations = parts.cumsum(0) / torch.arange(1, len(parts) + 1).sqrt()
    count = int(deviations.argmax()) + 1
    return order[:count].tolist(), parts[:count], float(deviations[count - 1])


def _scales(model: torch.nn.Module) -> tuple[float, ...]:
    """Lengths of inputs to try: where the model bounds them, there; else some."""
    declared = [m.norm for m in model.modules() if isinstance(m, nn.BoundedInput)]
    return (declared[0],) if declared else (1.0, 10.0, 100.0)


def _directions(count: int, shape: tuple[int, ...], scale: float, model: torch.nn.Module, draw: torch.Generator) -> Tensor:
    """Inputs of this length, orthogonal to each other as long as there is room; for token ids, random ones."""
    kind = find_input_dtype(model)
    device = next(model.parameters()).device
    if kind is not None and not kind.is_floating_point:
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)]
        return torch.randint(min(tables, default=2), (count, *shape), generator=draw).to(device)
    size = math.prod(shape)
    rows = torch.zeros(count, size, dtype=torch.float64)
    fits = min(count, size)
    rows[:fits] = torch.eye(size, dtype=torch.float64)[torch.randperm(size, generator=draw)[:fits]] if size <= 8192 else 0.0
    if size > 8192 or count > size:
        start = 0 if size > 8192 else fits
        more = torch.randn(count - start, size, generator=draw, dtype=torch.float64)
        rows[start:] = more / more.norm(dim=1, keepdim=True)
    values = (scale * rows).reshape(count, *shape)
    return values.to(next(p.dtype for p in model.parameters() if p.is_floating_point())).to(device)


def _kept(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _put(model: torch.nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    project_(model)


def _weight_starts(model: torch.nn.Module, draw: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """As they are; much larger; random and large. Constrained ones come back to the rim of their sets."""
    here = _kept(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    yield here
    yield {name: value * _LARGE if name in trained else value for name, value in here.items()}
    drawn = {name: _LARGE * torch.randn(value.shape, generator=draw).to(value) for name, value in here.items()}
    yield {name: drawn[name] if name in trained else value for name, value in here.items()}


def _ascended(
    contributions: Contributions, stds: Mapping[str, float], x: Tensor, y: Tensor, row: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """The input after some steps of ascent on the logarithm of its whitened gradient norm, at the length it has; and its row."""
    model, loss = contributions.model, contributions.loss
    program = getattr(contributions.query, "program", model)
    length = float(x.double().norm())
    best, longest = x, row
    point = x.clone()
    parameters = list(contributions.parameters.items())
    for _ in range(steps):
        leaf = point.detach().clone().requires_grad_()
        try:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                value = loss(program(leaf), y.to(leaf.device)).sum()
                found = torch.autograd.grad(value, [p for _, p in parameters], create_graph=True, allow_unused=True)
                whitened = [
                    (g / stds[name]).square().sum()
                    for (name, _), g in zip(parameters, found, strict=True)
                    if g is not None and stds.get(name, 0) > 0
                ]
                if not whitened:
                    break
                (direction,) = torch.autograd.grad(torch.log(torch.stack(whitened).sum() + 1e-30), leaf, allow_unused=True)
        except RuntimeError:  # no second derivative: the start has to do
            break
        if direction is None or not bool(torch.isfinite(direction).all()) or float(direction.norm()) == 0:
            break
        point = leaf.detach() + direction * (0.5 * length / float(direction.norm()))
        point = point * (length / max(float(point.double().norm()), 1e-30))
        reached = contributions.whiten(contributions.of(point, y), stds)
        if float(reached.norm()) > float(longest.norm()):
            best, longest = point, reached
    return best, longest
