"""Checks of the release path: is what leaves the engine the planned sum with the planned noise, sampled as accounted?

Every check looks at a run of the real engine from outside, on records that the audit made up, and asks how likely what it sees
would be if the engine did what the plan says. What is less likely than the alarm level ÷ the number of checks is a fault.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp._checks import positive, whole
from lipdp._texts import text_table
from lipdp.audit.canaries import Canaries, Contributions, craft
from lipdp.audit.results import Report
from lipdp.audit.statistics import check_confidence
from lipdp.audit.watching import Step, audited_plan, draw_samples, hold_still, watch_run
from lipdp.errors import ConfigurationError
from lipdp.parametrize import Constrained, project_
from lipdp.planning.plan import PrivacyPlan
from lipdp.program import find_input_shape
from lipdp.training.account import several_runs

_PAIRED = 24  # steps that are compared with each other
_SAMPLED = 2000  # records that are sampled from
_ENTRIES = 400_000  # of noise that a run is long enough for, where the plan is
_LEAST, _RUNS = 10_000, 8  # of noise in all runs together; how many runs, at most
_TINY = 1e-300


@dataclass(frozen=True)
class Check:
    """One property of what is released.

    Attributes:
        name: what should hold.
        p_value: how likely what was seen is, or anything further off, if it does. 0 for what can't happen at all.
        seen: what was seen, in words.
    """

    name: str
    p_value: float
    seen: str


@dataclass(frozen=True)
class ReleaseReport(Report):
    """All checks of a release path.

    Attributes:
        checks: in the order of the path.
        alarm: how often a sound path would be called faulty, at most.
        steps: that were watched.
        seconds: that it took.
    """

    checks: tuple[Check, ...]
    alarm: float
    steps: int
    seconds: float

    @property
    def faults(self) -> tuple[Check, ...]:
        """The checks that failed; each is judged at alarm ÷ (number of checks)."""
        return tuple(check for check in self.checks if not check.p_value >= self.alarm / len(self.checks))

    @property
    def refuted(self) -> bool:
        """Whether something that leaves the engine is not what the plan says."""
        return bool(self.faults)

    def __str__(self) -> str:
        failed = self.faults
        rows = [(c.name, f"{c.p_value:.2g}", "FAULT" if c in failed else "as planned", c.seen) for c in self.checks]
        verdict = f"REFUTED: {'; '.join(c.name for c in failed)}" if failed else "the release path stands"
        body = text_table(("what should hold", "p", "", "seen"), rows, right=("p",))
        return f"release path, {self.steps} steps watched, {self.seconds:.1f} s\n{body}\n{verdict}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**dataclasses.asdict(self), "refuted": self.refuted, "faults": [check.name for check in self.faults]}


def release_path(
    plan: PrivacyPlan,
    model: torch.nn.Module,
    loss: Any,
    *,
    steps: int | None = None,
    alarm: float = 1e-4,
    targets: Tensor | None = None,
    input_shape: tuple[int, ...] | None = None,
    records: int = 256,
    travel: float = 10.0,
) -> ReleaseReport:
    """Watch the engine release made-up records as planned, and check sums, noise, sampling and projection from outside.

    Checked are: no contribution above its bound; noise of the planned strength and shape for every parameter and in every step
    (which also fails if a sum is wrong, or is divided by anything but the expected batch size); no noise used twice, in two steps,
    two parameters or two runs; records sampled independently at the planned rate; weights back in their sets after steps that
    carry them far out. No private data are read.

    Args:
        plan: what is promised.
        model: it is copied, not touched.
        loss: as planned.
        steps: to watch; by default enough for a good look at the noise.
        alarm: how often a sound path may be called faulty.
        targets: to choose from; by default all classes.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        records: made up to train on.
        travel: how far, in lengths of the weights, the noise of a step carries them in the check of projection.
    """
    started = time.monotonic()
    check_confidence(alarm)
    positive("travel", travel)
    own = copy.deepcopy(model)
    project_(own)
    size = sum(p.numel() for p in own.parameters() if p.requires_grad)
    usual = min(plan.steps, max(4, min(64, math.ceil(_ENTRIES / size))))
    audited = audited_plan(plan, steps=usual if steps is None else whole("steps", steps))
    contributions = Contributions(own, loss, audited, input_shape)
    shape = find_input_shape(own) if input_shape is None else tuple(input_shape)
    canaries = craft(contributions, audited.noise_stds, 6, input_shape=shape, targets=targets, ascent=4)
    made_up = _made_up(canaries, whole("records", records))
    with several_runs():
        count = max(2, min(_RUNS, math.ceil(_LEAST / (size * audited.steps))))
        runs = [_residuals(own, loss, audited, made_up, contributions, shape) for _ in range(count)]
        noise = _Residuals([step for one in runs for step in one.by_step])
        checks = [
            *_bounded(contributions, canaries, "at worst-case weights"),
            *_noise_checks(noise, contributions),
            *_repeats(runs),
            *_sampling_checks(own, loss, plan, made_up, shape),
            *_projection_checks(own, loss, audited, made_up, shape, travel),
        ]
    return ReleaseReport(tuple(checks), alarm, count * audited.steps, time.monotonic() - started)


def _made_up(canaries: Canaries, count: int) -> TensorDataset:
    """Records like the canaries, of half their length: contributions that are not all the same, and known."""
    numbers = torch.arange(count) % len(canaries.inputs)
    x = canaries.inputs[numbers.to(canaries.inputs.device)]
    if x.is_floating_point():
        draw = torch.Generator().manual_seed(0)
        x = x * (0.5 + 0.5 * torch.rand(count, *([1] * (x.ndim - 1)), generator=draw)).to(x)
    return TensorDataset(x, canaries.targets[numbers.to(canaries.targets.device)])


# --- sums and noise ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Residuals:
    """What is left of the releases of a run when the known sums are taken away: noise in units of what was planned."""

    by_step: list[dict[str, Tensor]]

    def of(self, name: str) -> Tensor:
        """All steps of one parameter, (steps, entries)."""
        return torch.stack([step[name] for step in self.by_step if name in step])

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for step in self.by_step for name in step))


def _residuals(
    model: torch.nn.Module,
    loss: Any,
    plan: PrivacyPlan,
    records: TensorDataset,
    contributions: Contributions,
    shape: tuple[int, ...] | None,
) -> _Residuals:
    by_step = []
    for step in watch_run(model, loss, plan, records, hold_still(model), input_shape=shape):
        known = _known_sum(contributions, records, step)
        by_step.append(
            {
                name: ((step.released[name] - known[name]) / step.stds[name]).reshape(-1).cpu()
                for name in contributions.parameters
                if step.stds.get(name, 0.0) > 0
            }
        )
    return _Residuals(by_step)


def _known_sum(contributions: Contributions, records: TensorDataset, step: Step) -> dict[str, Tensor]:
    if len(step.chosen) == 0:
        return {name: torch.zeros_like(p, dtype=torch.float64) for name, p in contributions.parameters.items()}
    x, y = (part[step.chosen.to(part.device)] for part in records.tensors)
    return contributions.of(x, y, step.clips)


def _noise_checks(noise: _Residuals, contributions: Contributions) -> Iterator[Check]:
    for name in contributions.parameters:
        if name in noise.names:
            yield _strength(f"noise on {name}", noise.of(name))
            continue
        planned = contributions.plan.noise_stds[name] > 0
        yield Check(f"noise on {name}", 0.0 if planned else 1.0, "it was not released" if planned else "none is planned")
    whole_steps = [torch.cat(list(step.values())) for step in noise.by_step]
    found = [_strength(f"noise in step {number}", values) for number, values in enumerate(whole_steps)]
    worst = min(found, key=lambda check: check.p_value)
    yield dataclasses.replace(worst, name="noise in every step", p_value=min(1.0, worst.p_value * len(whole_steps)))
    yield _gaussian_shape(torch.cat(whole_steps))


def _strength(name: str, values: Tensor) -> Check:
    """Σz² of n standard normal numbers is χ² with n degrees of freedom; both sides count."""
    from scipy.stats import chi2

    flat = values.reshape(-1)
    total, count = float(flat.square().sum()), flat.numel()
    if not math.isfinite(total):
        return Check(name, 0.0, "values that are not finite")
    p = 2 * min(float(chi2.cdf(total, count)), float(chi2.sf(total, count)))
    return Check(name, min(1.0, p), f"{math.sqrt(total / count):.3f} of the planned deviation, {count:,} values")


def _gaussian_shape(values: Tensor) -> Check:
    from scipy.stats import kstest

    flat = values[torch.isfinite(values)][:100_000].numpy()
    found = kstest(flat, "norm") if len(flat) else None
    p, distance = (0.0, 1.0) if found is None else (float(found.pvalue), float(found.statistic))
    return Check("noise is Gaussian", p, f"distance {distance:.4f} from the normal distribution (Kolmogorov–Smirnov)")


# --- noise that is used twice -----------------------------------------------------------------------------------------------------


def _repeats(runs: list[_Residuals]) -> Iterator[Check]:
    first, names = runs[0], runs[0].names
    between = [
        (f"steps {a} and {b}, {name}", first.by_step[a][name], first.by_step[b][name])
        for name in names
        for a in range(min(_PAIRED, len(first.by_step)))
        for b in range(a + 1, min(_PAIRED, len(first.by_step)))
        if name in first.by_step[a] and name in first.by_step[b]
    ]
    yield _uncorrelated("noise of two steps is independent", between)
    sizes = {name: first.of(name) for name in names}
    alike = [
        (f"{a} and {b}", sizes[a].reshape(-1), sizes[b].reshape(-1))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if sizes[a].shape == sizes[b].shape
    ]
    inside = [(f"neighbours in {name}", sizes[name][:, :-1].reshape(-1), sizes[name][:, 1:].reshape(-1)) for name in names]
    yield _uncorrelated("noise of two entries is independent", [*alike, *inside])
    pairs = [(name, a.of(name).reshape(-1), b.of(name).reshape(-1)) for name in names for a, b in itertools.pairwise(runs)]
    yield _uncorrelated("noise of two runs is independent", pairs)


def _uncorrelated(name: str, pairs: list[tuple[str, Tensor, Tensor]]) -> Check:
    """⟨a, b⟩/‖a‖ is standard normal for independent normal vectors, whatever a is; the largest of many, by their number."""
    worst, where, tried = 1.0, "", 0
    for label, a, b in pairs:
        length = float(a.norm())
        if a.numel() == 0 or not math.isfinite(length) or length == 0:
            continue  # its strength is looked at elsewhere
        z = abs(float(a @ b)) / length
        p = math.erfc(z / math.sqrt(2)) if math.isfinite(z) else 0.0
        tried += 1
        if p < worst:
            worst, where = p, f"{label}: correlation {float(a @ b) / max(length * float(b.norm()), _TINY):.3f}"
    seen = f"largest of {tried:,}: {where}" if where else "one value: nothing to compare"
    return Check(name, min(1.0, worst * max(1, tried)), seen)


# --- sampling ---------------------------------------------------------------------------------------------------------------------


def _sampling_checks(
    model: torch.nn.Module, loss: Any, plan: PrivacyPlan, made_up: TensorDataset, shape: tuple[int, ...] | None
) -> Iterator[Check]:
    q = plan.sampling_rate
    count = _SAMPLED
    numbers = torch.arange(count) % len(made_up)
    records = TensorDataset(*(part[numbers.to(part.device)] for part in made_up.tensors))
    wanted = min(plan.steps, max(50, math.ceil(20 / q)), 4000)
    drawn = draw_samples(model, loss, plan, records, wanted, input_shape=shape)
    present = torch.zeros(wanted, count, dtype=torch.float64)
    for number, chosen in enumerate(drawn):
        present[number, chosen] = 1.0
    if q == 1:
        missing = int((present == 0).sum())
        yield Check("every record is in every step", 0.0 if missing else 1.0, f"{missing} of {present.numel():,} are missing")
        return
    from scipy.stats import binomtest

    total = int(present.sum())
    p = float(binomtest(total, present.numel(), q).pvalue)
    yield Check("records are sampled at the planned rate", p, f"{total / present.numel():.5g}, planned {q:.5g}")
    yield _dispersion("each record is sampled anew in every step", present.sum(0), wanted, q)
    yield _dispersion("records are sampled independently of each other", present.sum(1), count, q)


def _dispersion(name: str, counts: Tensor, trials: int, q: float) -> Check:
    """Σ(c − nq)² of independent Binomial(n, q): sampling without replacement makes it small, repeated samples make it large.

    With v = nq(1−q), one term has mean v and variance μ₄ − v², μ₄ = v·(1 + 3(n−2)q(1−q)). Few counts, or rare ones, are far from
    normal, so it is taken as a gamma variable of the same mean and variance, half a unit nearer to what is planned.
    """
    from scipy.stats import gamma

    v = trials * q * (1 - q)
    fourth = v * (1 + 3 * (trials - 2) * q * (1 - q))
    mean, variance = len(counts) * v, len(counts) * max(fourth - v * v, _TINY)
    far = (counts - trials * q).abs()
    low, high = float((far + 0.5).square().sum()), float((far - 0.5).clamp_min(0).square().sum())
    shape, scale = mean**2 / variance, variance / mean
    p = 2 * min(float(gamma.cdf(low, shape, scale=scale)), float(gamma.sf(high, shape, scale=scale)))
    spread = float(far.square().mean()) / v
    return Check(name, min(1.0, p), f"{spread:.3f} of the variance of independent samples")


# --- contributions and weights ----------------------------------------------------------------------------------------------------


def _bounded(contributions: Contributions, canaries: Canaries, where: str) -> Iterator[Check]:
    """Norms of single contributions, group by group, against Δ and the slack for rounding."""
    plan = contributions.plan
    longest = {group.name: 0.0 for group in plan.groups}
    for i in range(len(canaries.inputs)):
        sums = contributions.of(canaries.inputs[i : i + 1], canaries.targets[i : i + 1])
        for group in plan.groups:
            norm = math.sqrt(sum(float(sums[name].square().sum()) for name in group.parameters if name in sums))
            longest[group.name] = max(longest[group.name], norm)
    for group in plan.groups:
        bound = group.sensitivity * plan.slack
        ratio = longest[group.name] / bound if bound else (0.0 if longest[group.name] == 0 else math.inf)
        holds = ratio <= 1 + 1e-6
        yield Check(f"Δ of {group.name}, {where}", float(holds), f"largest contribution {longest[group.name]:.4g}, Δ = {bound:.4g}")


def _projection_checks(
    model: torch.nn.Module,
    loss: Any,
    plan: PrivacyPlan,
    records: TensorDataset,
    shape: tuple[int, ...] | None,
    travel: float,
) -> Iterator[Check]:
    """After steps whose noise carries the weights ``travel`` times their length, they must be in their sets, and Δ must hold."""
    constrained = {name: m for name, m in model.named_modules() if isinstance(m, Constrained)}
    if not constrained:
        return
    for _ in watch_run(model, loss, plan, records, _far(model, plan, travel), input_shape=shape):
        pass
    outside = [name for name, module in constrained.items() if not module.is_inside()]
    yield Check("weights are back in their sets", 0.0 if outside else 1.0, f"outside: {', '.join(outside) or 'none'}")
    if outside:  # nothing is proved there: no bound to compare contributions with
        return
    contributions = Contributions(model, loss, plan, shape)
    reached = craft(contributions, plan.noise_stds, 4, input_shape=shape, weights=False, ascent=8)
    yield from _bounded(contributions, reached, "at weights that training reached")


def _far(model: torch.nn.Module, plan: PrivacyPlan, travel: float) -> torch.optim.Optimizer:
    """SGD whose steps of pure noise are so many times as long as each weight."""
    groups = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = plan.noise_stds[name] * math.sqrt(parameter.numel()) / plan.batch_size
            length = max(1.0, float(parameter.detach().norm()))
            groups.append({"params": [parameter], "lr": travel * length / noise if noise > 0 else 0.0})
    if not groups:
        raise ConfigurationError("the model has no trained parameter: there is nothing to audit")
    return torch.optim.SGD(groups, lr=0.0)
