"""The privacy plan: everything that is decided before a single record is read, as data and as a table to read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from lipdp._texts import NEIGHBOURS, bound, brief, number, text_table, upwards
from lipdp.clipping.batch import Clip, Style
from lipdp.errors import ConfigurationError
from lipdp.fields import Bound, Count, Probability, Range, Scale, Size, check_fields, parse_json, read
from lipdp.planning.phases import Phase, segments
from lipdp.planning.settings import Method, Precision, Source, check_counts, check_method
from lipdp.privacy import Accountant, AdaptiveClip, Adjacency, Allocation, PrivateRun, Release, Sampling, allocate, noise_energy
from lipdp.privacy.noise import DISTANCE, grid, grid_factor
from lipdp.privacy.runs import Scheme

CLIPPED_GROUP = "all parameters"

_FORMAT = 3
_FORMATS = (1, 2, _FORMAT)
_UNBOUNDED = ("output_norm", "loss_lipschitz"), ("input_norm", "cotangent_norm")  # ∞ is null in JSON: of a plan, of a group


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are bounded and noised together.

    Attributes:
        name: the group's name (that of its parameter where it has one).
        parameters: qualified names of its parameters.
        size: number of scalars.
        sensitivity: Δ, the bound on the group's per-example gradient norm, in exact arithmetic.
        source: "proved": Δ follows from the architecture; "clipped": every example's gradient is clipped to Δ.
        noise_std: standard deviation of the noise on each scalar of the gradient *sum*, rounding slack included.
        input_norm: X, the bound on the activations that reach the group (∞ where nothing is proved).
        cotangent_norm: G, the bound on the cotangents that reach it (∞ where nothing is proved).
    """

    name: str
    parameters: tuple[str, ...]
    size: Size
    sensitivity: Annotated[float, Range(least=0, most=1e30)]
    source: Source
    noise_std: Annotated[float, Range(least=0, most=1e30)]
    input_norm: Bound
    cotangent_norm: Bound

    @property
    def grid(self) -> float:
        """The spacing of the public grid that the noised sum lies on: a power of two, at most 2⁻⁴¹ of the noise (0 without)."""
        return grid(self.noise_std) if self.noise_std > 0 else 0.0

    def __post_init__(self) -> None:
        check_fields(self, f"group {self.name!r}")


@dataclass(frozen=True)
class PrivacyPlan:
    """What a private training run will do and what it will cost; inspectable and serialisable before any data is read.

    Every step samples each record with probability ``sampling_rate`` (if ``sampling`` says nothing else), sums the per-example
    gradients, adds Gaussian noise of ``noise_stds`` to the sum and divides by the constant ``batch_size``. With Δ_d and s_d of the
    groups d, the step is one Gaussian mechanism of multiplier ``σ = (Σ_d Δ_d²/s_d²)^(-1/2)``; ``steps`` of them cost
    ``(epsilon, delta)``.

    Attributes:
        method: how sensitivities are bounded.
        dataset_size: N, a public constant; it only serves to derive q.
        batch_size: b, the *expected* batch size, a public constant.
        steps: T.
        noise_multiplier: σ.
        epsilon: ε of the whole run, by the accountant, at ``delta``.
        delta: δ.
        allocation: how the noise is divided among the groups.
        adjacency: which datasets are neighbours.
        accountant: which analysis of dp-accounting.
        precision: the arithmetic of the forward and backward passes that the slack covers.
        slack: factor on the noise, for rounding: Δ is proved in exact arithmetic.
        rounding: (where, what rounding can add there, relative to Δ): what the slack consists of.
        loss: the loss, as text.
        loss_lipschitz: L, ∞ where it is not known (clipping does not need it).
        output_norm: bound on the network's output, ∞ if there is none.
        groups: the parameter groups.
        max_grad_norm: C, for clipping methods: the bound on an example's whole clipped gradient.
        clipping_style: which parameters are clipped together, see :func:`lipdp.clipping.clipping_groups`.
        clip: "clip", or "automatic" (normalise).
        stability: γ of "automatic".
        noise_weights: (group, weight) for ``allocation="weights"``.
        phases: what changes on the way; one phase where nothing does. σ and the groups' noise are those of factor 1.
        clips: (name, C at the start) of the clipping norms that change: ClipGradient layers, or clipping groups.
        adaptive_clips: those of them that follow a private quantile.
        adaptive: how they do.
        releases: one-off releases beside the steps, paid for by the same (ε, δ).
        sampling: how the records of a step are drawn, see :class:`lipdp.privacy.Sampling`.
        largest_batch: for "truncated_poisson": the largest size of a sample.
        notes: (operation, which bound was used and how tight it is), where the calculus has a choice; of clipping, how records are
            kept apart.
    """

    method: Method
    dataset_size: Count
    batch_size: Count
    steps: Count
    noise_multiplier: Scale
    epsilon: Annotated[float, Range(least=0)]
    delta: Probability
    allocation: Allocation
    adjacency: Adjacency
    accountant: Accountant
    precision: Precision
    slack: Annotated[float, Range(least=1, most=1e30)]
    loss: str
    loss_lipschitz: Bound
    output_norm: Bound
    groups: tuple[ParameterGroup, ...]
    max_grad_norm: Scale | None = None
    clipping_style: Style = "flat"
    clip: Clip = "clip"
    stability: Scale = 0.01
    noise_weights: tuple[tuple[str, Scale], ...] = ()
    phases: tuple[Phase, ...] = (Phase(0),)
    clips: tuple[tuple[str, Scale], ...] = ()
    adaptive_clips: tuple[str, ...] = ()
    adaptive: AdaptiveClip | None = None
    releases: tuple[Release, ...] = ()
    rounding: tuple[tuple[str, Annotated[float, Range(least=0, most=1e30)]], ...] = ()
    sampling: Scheme = "poisson"
    largest_batch: Count | None = None
    notes: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)  # norms as they were when planned

    def __post_init__(self) -> None:
        check_fields(self, "a plan")
        check_method(self.method, self.max_grad_norm)
        check_counts(self.dataset_size, self.batch_size, self.steps, None)
        if not self.groups:
            raise ConfigurationError("a plan without parameter groups trains nothing")
        _once("group", (group.name for group in self.groups))
        _once("parameter of a group", (name for group in self.groups for name in group.parameters))
        _once("clip", (name for name, _ in self.clips))
        _once("adaptive clip", self.adaptive_clips)
        _once("noise weight", (name for name, _ in self.noise_weights))
        if set(self.adaptive_clips) - {name for name, _ in self.clips} or (self.adaptive_clips and self.adaptive is None):
            raise ConfigurationError(
                "a plan's adaptive_clips are among its clips, and come with how they adapt; this one was changed"
            )
        starts = [phase.start for phase in self.phases]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= self.steps:
            raise ConfigurationError(
                f"a plan's phases start at 0 and follow one another within its {self.steps} steps, not {starts}"
            )
        if (self.largest_batch is None) != (self.sampling != "truncated_poisson"):
            raise ConfigurationError("a plan has a largest_batch if its sampling is truncated_poisson, and only then")
        self.run  # noqa: B018 - what it describes is checked as it is made

    @property
    def sampling_rate(self) -> float:
        """q = b/N."""
        return self.batch_size / self.dataset_size

    @property
    def run(self) -> PrivateRun:
        """What the whole run releases, for the accountant."""
        steps = segments(self.phases, self.steps, self.noise_multiplier)
        return PrivateRun(self.sampling_rate, steps, self.releases, self.sampler)

    @property
    def sampler(self) -> Sampling:
        """How the records of a step are drawn, with the sizes that its analysis is for."""
        if self.sampling == "poisson":
            return Sampling()
        return Sampling(self.sampling, self.dataset_size, self.largest_batch or self.batch_size)

    def phase(self, step: int) -> Phase:
        """The phase that a step (counted from 0) is in."""
        if len(self.phases) == 1 and self.phases[0].start <= step:
            return self.phases[0]
        return max((phase for phase in self.phases if phase.start <= step), key=lambda phase: phase.start)

    @property
    def epochs(self) -> float:
        """Expected number of times each record is used."""
        return self.steps * self.sampling_rate

    @property
    def sensitivities(self) -> dict[str, float]:
        """Qualified parameter name → Δ of its group."""
        return {name: group.sensitivity for group in self.groups for name in group.parameters}

    @property
    def noise_stds(self) -> dict[str, float]:
        """Qualified parameter name → standard deviation of the noise on the gradient sum."""
        return {name: group.noise_std for group in self.groups for name in group.parameters}

    @property
    def sensitivity(self) -> float:
        """√(ΣΔ_d²): the bound on one example's whole gradient."""
        return math.sqrt(sum(group.sensitivity**2 for group in self.groups))

    @property
    def noise_energy(self) -> float:
        """Σ_d p_d·s_d²: expected squared norm of the noise of one step."""
        return sum(group.size * group.noise_std**2 for group in self.groups)

    @property
    def signal_to_noise(self) -> float:
        """At best, over the whole run: b·Δ·√T against the norm of a step's noise; below 1 nothing can be learned.

        A batch whose records all pull the same way with all their bound gives a sum of norm b·Δ; noise has the norm √(Σ
        p_d·s_d²), and over T steps a constant signal grows by T and independent noise by √T. Real gradients use a small part of
        that.
        """
        noise = math.sqrt(self.noise_energy)
        return math.inf if noise == 0 else self.batch_size * self.sensitivity * math.sqrt(self.steps) / noise

    @property
    def grid_cost(self) -> float:
        """By how much, relative to itself, the noise is larger because sums are rounded to its grid; it is in ``noise_stds``."""
        return grid_factor(self.noise_multiplier, sum(group.size for group in self.groups if group.sensitivity > 0)) - 1

    @property
    def noise_distance(self) -> float:
        """What the noise's distance from exact noise adds to δ: (1 + e^ε) times that of one value, over all values of all steps."""
        size = sum(group.size for group in self.groups)
        return (1 + math.exp(min(self.epsilon, 700.0))) * DISTANCE * size * self.steps

    @property
    def noise_energies(self) -> dict[Allocation, float]:
        """The noise energy that each allocation would have, at the same privacy."""
        bounds = {group.name: group.sensitivity for group in self.groups}
        sizes = {group.name: group.size for group in self.groups}
        total = math.hypot(*(g.sensitivity / g.noise_std for g in self.groups if g.noise_std > 0)) or math.inf
        known: tuple[Allocation, ...] = ("global", "per_layer", "optimal")
        energies = {name: noise_energy(allocate(bounds, sizes, 1 / total, name), sizes) for name in known}
        return energies if self.allocation != "weights" else {**energies, "weights": self.noise_energy}

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` gives an equal plan back."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        for part, fields in ((content, _UNBOUNDED[0]), *((group, _UNBOUNDED[1]) for group in content["groups"])):
            part.update({field: None for field in fields if math.isinf(part[field])})
        return json.dumps(content, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyPlan:
        """A plan from :meth:`to_json`'s text, every field checked. What it promises, an engine derives again from the model."""
        content: Any = parse_json(text, "a plan")
        if not isinstance(content, dict) or "format" not in content:
            raise ConfigurationError("this is not a plan written by PrivacyPlan.to_json(): it does not say its format")
        number = content.pop("format")
        if type(number) is not int or number not in _FORMATS:
            raise ConfigurationError(f"this plan was written in format {number!r}; this lipdp reads formats up to {_FORMAT}")
        plan: PrivacyPlan = read(cls, content, "the plan")
        return plan


def _once(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigurationError(f"a plan names each {what} once; this one names {name!r} twice")
        seen.add(name)


_ROUNDING = {
    "passes": "in the passes through the network",
    "scaling": "in scaling gradients",
    "sums": "in sums over records",
}


def _power(value: float) -> str:
    """A power of two."""
    return f"2^{math.frexp(value)[1] - 1}" if value > 0 else "–"


def grid_line(plan: PrivacyPlan) -> str:
    """What the noise is and what its grid costs."""
    return (
        f"exact Gaussian noise on public grids: rounding sums to them takes {plan.grid_cost:.1e} of the noise, and its distance "
        f"from exact noise adds {plan.noise_distance:.1e} to delta"
    )


def signal_line(plan: PrivacyPlan) -> str:
    """What the run can learn from, at best."""
    ratio = plan.signal_to_noise
    verdict = (
        "; that is too little to learn anything: take larger batches, fewer parameters or a larger epsilon" if ratio < 1 else ""
    )
    return f"signal to noise over the run, at best: {number(ratio)} ({number(ratio / math.sqrt(plan.steps))} a step){verdict}"


def columns(plan: PrivacyPlan) -> dict[str, Any]:
    """Layer, X, G, Δ, where Δ comes from, noise, its grid, size: a row for each parameter group, for :func:`lipdp._texts.table`."""
    total = sum(group.size for group in plan.groups)
    rows = [
        (
            group.name,
            *map(bound, (group.input_norm, group.cotangent_norm, group.sensitivity)),
            group.source,
            number(group.noise_std),
            _power(group.grid),
            f"{group.size:,}",
        )
        for group in plan.groups
    ]
    whole = ("X", "G", "Δ", "source", "noise std", "grid", "parameters")
    noise = number(math.sqrt(plan.noise_energy / total))
    return {
        "headers": ("parameter", *whole),
        "rows": rows,
        "right": ("X", "G", "Δ", "noise std", "grid", "parameters"),
        "whole": whole,
        "footer": ("whole step", "", "", bound(plan.sensitivity), "", noise, "", f"{total:,}"),
    }


def _extras(plan: PrivacyPlan) -> Iterator[str]:
    """What not every plan has: phases, adaptive clipping, one-off releases; and what the allocations would cost."""
    for place, phase in enumerate(plan.phases if len(plan.phases) > 1 else (), 1):
        frozen = f", frozen: {', '.join(phase.frozen)}" if phase.frozen else ""
        yield f"phase {place}, from step {phase.start}: noise × {phase.noise:.4g}, clipping × {phase.clip:.4g}{frozen}"
    if plan.adaptive is not None:
        yield (
            f"adaptive clipping of {', '.join(plan.adaptive_clips)}: C follows the {plan.adaptive.quantile:.0%} quantile, rate "
            f"{plan.adaptive.rate:g}, count noise {number(plan.adaptive.count_noise or 0.0)}, inside the same multiplier"
        )
    for release in plan.releases:
        what = "noise multiplier" if release.kind == "gaussian" else "epsilon"
        yield f"released once beside the steps: {release.name} ({release.kind}, {what} {release.amount:.4g}), in the same epsilon"
    if len(plan.groups) > 1:
        energies = ", ".join(f"{name} {number(value)}" for name, value in plan.noise_energies.items())
        yield f"noise energy of a step by allocation: {energies}"
    for where, note in plan.notes:
        yield f"{where}: {note}"


def _sampling(plan: PrivacyPlan) -> str:
    """How batches are really drawn."""
    if plan.sampling == "truncated_poisson":
        return f"real Poisson sampling, cut to {plan.largest_batch:,} records at most"
    return "real Poisson sampling" if plan.sampling == "poisson" else "samples of fixed size without replacement"


def render(plan: PrivacyPlan) -> str:
    """The whole plan as text."""
    size = "batch" if plan.sampling == "fixed_size" else "expected batch"
    bounded = (
        f"each gradient clipped to {number(plan.max_grad_norm)}"
        if plan.max_grad_norm is not None
        else f"Lipschitz constant {plan.loss_lipschitz:.4g}; output norm {bound(plan.output_norm)}"
    )
    parts = ", ".join(f"{_ROUNDING.get(name, name)} {value:.1e}" for name, value in plan.rounding)
    lines = [
        f"Privacy plan: epsilon = {upwards(plan.epsilon, 5)} at delta = {brief(plan.delta)}, for {NEIGHBOURS[plan.adjacency]} "
        f"({plan.accountant.upper()}, {_sampling(plan)})",
        f"  {plan.steps:,} steps of {size} {plan.batch_size:,} out of {plan.dataset_size:,} (q = {plan.sampling_rate:.4g}, "
        f"{plan.epochs:.3g} epochs), noise multiplier {plan.noise_multiplier:.4f}, {plan.allocation} allocation",
        f"  {plan.method}: {plan.loss}, {bounded}; {plan.precision}, rounding slack {plan.slack - 1:.1e}",
        *([f"  rounding, at worst: {parts}"] if parts else []),
        *(f"  {line}" for line in (grid_line(plan), signal_line(plan), *_extras(plan))),
        text_table(**columns(plan)),
        "X, G: bounds on activations and cotangents; Δ: on one example's gradient; noise is added to the gradient sum.",
    ]
    return "\n".join(lines)
