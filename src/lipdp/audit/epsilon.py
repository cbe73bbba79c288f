"""Auditing a training run: a lower bound on its ε, from guesses about records that were put in, or not, by the toss of a coin."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp._checks import positive, whole
from lipdp._texts import source
from lipdp.audit.canaries import Canaries, Contributions, craft, strongest
from lipdp.audit.results import AuditResult, bounds_of_guesses
from lipdp.audit.statistics import check_confidence
from lipdp.audit.watching import MakeOptimizer, Step, audited_plan, hold_still, watch_run
from lipdp.errors import ConfigurationError
from lipdp.parametrize import project_
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.suggest import suggest_optimizer
from lipdp.privacy.budget import AnyBudget
from lipdp.program import find_input_shape
from lipdp.program.dtypes import Types
from lipdp.training.account import several_runs
from lipdp.training.batches import check_dataset, gather_tensors

Access = Literal["white", "black"]
Progress = Callable[[int, int], None]

_MOST_CANARIES, _MOST_ENTRIES = 1024, 2**25  # entries of all contributions together


def run(
    plan: PrivacyPlan,
    model: torch.nn.Module,
    loss: Any,
    data: Any = None,
    *,
    access: Access = "white",
    canaries: int | None = None,
    guesses: int = 100_000,
    repetitions: int | None = None,
    seconds: float = 120.0,
    confidence: float = 0.999,
    alarm: float = 1e-4,
    steps: int | None = None,
    sampling: bool = True,
    optimizer: MakeOptimizer | None = None,
    targets: Tensor | None = None,
    public: bool = False,
    budget: AnyBudget = None,
    input_shape: tuple[int, ...] | None = None,
    progress: Progress | None = None,
) -> AuditResult:
    """Audit a plan: train as it says, with canaries in the data or not by fair coins, and guess the coins from what comes out.

    The runs are the engine's own (:class:`lipdp.PrivacyEngine`, its samples, its cryptographic noise), on a copy of the model. What
    is reported is a *lower* bound on ε that holds with the confidence, and whether the guesses refute what the plan promises.

    *White-box*: the guesser sees every released sum, and knows which of the other records are in each batch: what the guarantee
    is against. By default the optimiser holds the weights still, and they are chosen so that canaries are as strong as the plan
    allows. Each guess looks at the part of its canary that no earlier one shares (QR): under the plan it has noise of its own
    there, so that guesses are independent, and right with probability (1 + δ(0))/2 at most, δ(ε) being the run's. Bounds that
    assume no independence are from a guesser who sees the releases and nothing of the other coins, as their theorems demand.

    *Black-box*: the guesser sees the last weights only, and looks at the canaries' losses.

    Args:
        plan: what is promised.
        model: it is copied, not touched.
        loss: as planned.
        data: records beside the canaries; none are needed. Training on private ones costs what the plan says, in every repetition:
            give a budget.
        access: "white" or "black".
        canaries: in a run; by default as many as there is room for.
        guesses: how many to make: runs are repeated until then (each is on canaries of its own coins),
        repetitions: or so many times,
        seconds: or until this much time has passed; one run is made in any case.
        confidence: of each bound.
        alarm: the plan counts as refuted where its guesses had at most this probability.
        steps: audit a run of fewer steps than planned, against what those cost.
        sampling: ``False``: all records in every step, against what that costs. It sees faults of the noise with fewer guesses.
        optimizer: makes the optimiser of the audited run from the model; by default one that holds the weights (white-box), or
            :func:`lipdp.suggest_optimizer`'s (black-box).
        targets: to choose the worst target of; by default all classes, or those of the data.
        public: the data are public. Otherwise the result says that it is not private: the guesser knows them, and subtracts them.
        budget: the account of the data; every repetition is charged to it.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        progress: told (guesses made, guesses wanted).

    Example:
        >>> import torch, lipdp
        >>> from lipdp import losses, nn
        >>> model = nn.Sequential(nn.BoundedInput((64,)), torch.nn.Linear(64, 2, bias=False))
        >>> plan = lipdp.plan(model, losses.CrossEntropy(), dataset_size=64, batch_size=64, delta=1e-5, epsilon=4.0, steps=1)
        >>> result = lipdp.audit.run(plan, model, losses.CrossEntropy(), guesses=2_000)
        >>> 1.5 < result.epsilon <= 4.0 and not result.refuted
        True
    """
    started = time.monotonic()
    if access not in ("white", "black"):
        raise ConfigurationError(f"access is {access!r}: 'white' (every released sum) or 'black' (the last weights)")
    wanted, limit = whole("guesses", guesses), positive("seconds", seconds)
    check_confidence(confidence)
    check_confidence(alarm)
    audited = audited_plan(plan, steps=steps, sampling=sampling)
    setting = _prepare(audited, model, loss, data, access, canaries, targets, optimizer, input_shape)
    tally = _Tally(len(setting.canaries.inputs))
    runs = -(-wanted // tally.canaries) if repetitions is None else whole("repetitions", repetitions)
    with several_runs():
        while tally.runs < runs and (tally.runs == 0 or time.monotonic() - started < limit):
            tally.add(*setting.one_run(budget))
            if progress is not None:
                progress(tally.runs * tally.canaries, runs * tally.canaries)
    scores, blind, coins = tally.joined()
    if access == "black":  # half of them are guessed in
        scores = blind = scores - scores.median()
    bounds, p_value = bounds_of_guesses(scores, blind, coins, audited, confidence, independent=access == "white")
    return AuditResult(
        epsilon=bounds[0].epsilon,
        claimed=audited.epsilon,
        delta=audited.delta,
        confidence=confidence,
        assumes=bounds[0].assumes,
        bounds=bounds,
        p_value=p_value,
        alarm=alarm,
        access=access,
        method=plan.method,
        steps=audited.steps,
        sampling_rate=audited.sampling_rate,
        canaries=tally.canaries,
        runs=tally.runs,
        guesses=len(coins),
        correct=int(((scores > 0) == coins).sum()),
        strength=sum(setting.canaries.strength) / tally.canaries,
        privacy="no data were read" if data is None else source(public),
        seconds=time.monotonic() - started,
    )


@dataclass
class _Tally:
    """Scores of who knows the other coins, scores of who does not, and coins of all runs."""

    canaries: int
    runs: int = 0
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, scores: Tensor, blind: Tensor, coins: Tensor) -> None:
        """One more run."""
        self.runs += 1
        self.parts.append((scores, blind, coins))

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Runs on records of their own are one experiment: each record is in one of them."""
        scores, blind, coins = (torch.cat(part) for part in zip(*self.parts, strict=True))
        return scores, blind, coins


@dataclass
class _Setting:
    """All that an audit's runs have in common."""

    plan: PrivacyPlan
    model: torch.nn.Module
    loss: Any
    weights: dict[str, Tensor]
    contributions: Contributions
    canaries: Canaries
    known: tuple[Tensor, Tensor]
    access: Access
    optimizer: MakeOptimizer
    input_shape: tuple[int, ...] | None
    _sight: _Sight | None = None

    def one_run(self, budget: AnyBudget) -> tuple[Tensor, Tensor, Tensor]:
        """A run with fresh coins: two scores for each canary (above 0: guessed in), the second made blindly, and the coins."""
        coins = torch.tensor([secrets.randbits(1) for _ in range(len(self.canaries.inputs))], dtype=torch.bool)
        inside = coins.nonzero().flatten()
        records = TensorDataset(
            torch.cat([self.known[0], self.canaries.inputs[inside]]), torch.cat([self.known[1], self.canaries.targets[inside]])
        )
        self.model.load_state_dict(self.weights)
        optimizer = self.optimizer(self.model)
        watching = watch_run(
            self.model,
            self.loss,
            self.plan,
            records,
            optimizer,
            budget=budget,
            input_shape=self.input_shape,
            before_step=self._look if self.access == "white" else None,
        )
        if self.access == "black":
            before = self._losses()
            for _ in watching:
                pass
            moved = before - self._losses()
            return moved, moved, coins
        scores, blind = torch.zeros(2, len(coins), dtype=torch.float64)
        for step in watching:
            informed, alone = self._score(step, inside)
            scores += informed
            blind += alone
        return scores, blind, coins

    def _losses(self) -> Tensor:
        x, y, loss = self.canaries.inputs, self.canaries.targets, self.contributions.loss
        with torch.no_grad():
            values: Tensor = loss(self.model(x), Types(self.model, loss).targets(y.to(x.device)))
        return values.detach().double().cpu()

    def _look(self, stds: Mapping[str, float], clips: Mapping[str, float]) -> None:
        """What the canaries would contribute at these weights; computed again only where something has moved."""
        moved = self._sight is None or self._sight.is_other(self.model, stds, clips)
        if moved:
            rows = self.contributions.rows(self.canaries.inputs, self.canaries.targets, stds, clips)
            self._sight = _Sight.of(rows, self.model, stds, clips)

    def _score(self, step: Step, inside: Tensor) -> tuple[Tensor, Tensor]:
        """log P(step | canary in)/P(step | canary out) for each canary, given all that is known of the others; and given nothing.

        With G the whitened contributions, Gᵀ = QR: the whitened sum less what is known is QRc + z, c telling who is in the batch,
        and Qᵀz is standard normal. Row i reads R_ii·c_i + Σ_{j>i} R_ij·c_j + z_i; c_j is known to whom knows the other records. To
        whom does not it is a coin times a sample, of mean q/2 and variance (q/2)(1 − q/2), and adds that to the noise.
        """
        assert self._sight is not None
        sight, count = self._sight, len(self.known[0])
        released = self.contributions.whiten(step.released, step.stds)
        chosen = step.chosen
        own = chosen[chosen < count]
        if len(own):
            sums = self.contributions.of(self.known[0][own], self.known[1][own], step.clips)
            released = released - self.contributions.whiten(sums, step.stds)
        present = torch.zeros(len(self.canaries.inputs), dtype=torch.float64)
        present[inside[chosen[chosen >= count] - count]] = 1.0
        size = sight.triangle.diagonal()
        read, others = sight.basis.T @ released, sight.triangle - torch.diag(size)
        q = self.plan.sampling_rate
        share = q / 2
        spread = 1 + share * (1 - share) * others.square().sum(1)

        def ratio(rest: Tensor, variance: Tensor | float) -> Tensor:
            likelihood = (size * rest - size.square() / 2) / variance
            if q == 1:
                return likelihood
            return torch.logaddexp(likelihood + torch.log(torch.tensor(q)), torch.log1p(torch.tensor(-q)))

        return ratio(read - others @ present, 1.0), ratio(read - share * others.sum(1), spread)


@dataclass(frozen=True)
class _Sight:
    """Contributions as an orthonormal basis and a triangle, and what they were taken at."""

    basis: Tensor
    triangle: Tensor
    stds: dict[str, float]
    clips: dict[str, float]
    weights: list[Tensor]

    @classmethod
    def of(cls, rows: Tensor, model: torch.nn.Module, stds: Mapping[str, float], clips: Mapping[str, float]) -> _Sight:
        basis, triangle = torch.linalg.qr(rows.T)
        signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0).double()
        weights = [p.detach().clone() for p in model.parameters()]
        return cls(basis * signs, triangle * signs[:, None], dict(stds), dict(clips), weights)

    def is_other(self, model: torch.nn.Module, stds: Mapping[str, float], clips: Mapping[str, float]) -> bool:
        same = self.stds == dict(stds) and self.clips == dict(clips)
        return not (same and all(_near(a, b) for a, b in zip(self.weights, model.parameters(), strict=True)))


def _near(a: Tensor, b: Tensor) -> bool:
    """Equal but for what a projection does to weights at the rim of their set: contributions are the same to five digits."""
    return float((a - b.detach()).norm()) <= 1e-5 * float(a.norm())


def _prepare(
    plan: PrivacyPlan,
    model: torch.nn.Module,
    loss: Any,
    data: Any,
    access: Access,
    canaries: int | None,
    targets: Tensor | None,
    optimizer: MakeOptimizer | None,
    input_shape: tuple[int, ...] | None,
) -> _Setting:
    own = copy.deepcopy(model)
    project_(own)
    contributions = Contributions(own, loss, plan, input_shape, watched=access == "white")
    stds = plan.noise_stds
    size = sum(p.numel() for name, p in contributions.parameters.items() if stds[name] > 0)
    room = max(1, min(_MOST_CANARIES, _MOST_ENTRIES // size, size // 2))
    count = room if canaries is None else min(whole("canaries", canaries), size)
    shape = find_input_shape(own) if input_shape is None else tuple(input_shape)
    room_of_inputs = count if shape is None or canaries is not None else min(count, 4 * torch.Size(shape).numel())
    known = None
    if data is not None:
        known = gather_tensors(data, torch.arange(check_dataset(data)))
        shape = tuple(known[0].shape[1:]) if shape is None else shape
        targets = known[1] if targets is None else targets
    hold = access == "white" and optimizer is None
    chosen = craft(contributions, stds, room_of_inputs, input_shape=shape, targets=targets, weights=hold)
    chosen = strongest(chosen, plan.noise_multiplier)
    sight = _Sight.of(chosen.rows, own, stds, dict(plan.clips)) if access == "white" else None
    if known is None:  # one record that everybody knows: no run is on nothing
        known = torch.zeros_like(chosen.inputs[:1]), chosen.targets[:1].clone()
    device = chosen.inputs.device
    known = known[0].to(device).to(chosen.inputs.dtype), known[1].to(chosen.targets.device).to(chosen.targets.dtype)
    weights = {name: value.detach().clone() for name, value in own.state_dict().items()}
    make = optimizer or (hold_still if access == "white" else lambda m: suggest_optimizer(m, plan)[0])
    return _Setting(plan, own, loss, weights, contributions, chosen, known, access, make, shape, sight)
