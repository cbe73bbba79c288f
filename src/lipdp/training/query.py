"""What a step asks of the data: a sum of bounded per-example gradients, and where the bound comes from.

The engine is the same for every method; a query says how the sum is computed and proves (or enforces) its sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from lipdp._numerics import arithmetic
from lipdp.bounds import Analysis, analyse
from lipdp.clipping import Clipped, Clipper, check_supported, clipping_groups
from lipdp.clipping import Method as ClippingMethod
from lipdp.clipping.batch import Batch as Microbatch
from lipdp.clipping.clipper import Pending
from lipdp.clipping.verify import forget as forget_verified
from lipdp.errors import ConfigurationError
from lipdp.fingerprint import storages
from lipdp.graphs import GraphedFunction, Watched
from lipdp.inputs import owned
from lipdp.losses import Loss, as_loss
from lipdp.parametrize import Reparametrised, effective_leaves, pull_back
from lipdp.planning.grouping import clip_layers
from lipdp.planning.plan import CLIPPED_GROUP, PrivacyPlan
from lipdp.planning.settings import (
    clipped_rounding,
    has_convolutions,
    per_example_loss,
    proved_rounding,
    rows_within,
    slack_of,
)
from lipdp.program import Program, check_program, find_input_shape
from lipdp.training.batches import microbatches
from lipdp.training.gradients import LayerCounts, Part, Sums, centred_count, microbatch_sum, pending_sum, zeros_like_sum
from lipdp.training.seats import Copies
from lipdp.training.totals import Turn

__all__ = ["Answer", "ClippedQuery", "MixedQuery", "ProvedQuery", "Query", "Sample", "query_of"]

# Numbers of examples on which a program is tried on the device that it will run on.
_TRIED = (3,)
# Bounds of the same model come out of the same arithmetic; anything above this is another model.
_SAME = 1 + 1e-9


Beside = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Digests of a microbatch (inputs, targets, mask), and of the weights that it meets."""


@dataclass(frozen=True)
class Sample:
    """One Poisson sample and how it goes through the model; ``dtypes`` are what the model and the loss take."""

    inputs: Any  # a tensor or Rows, or a tuple or dict of them
    targets: torch.Tensor
    microbatch_size: int
    device: torch.device
    copies: Copies = field(default_factory=Copies)
    dtypes: tuple[Any, torch.dtype] | None = None
    seats: torch.Tensor | None = None  # by seat, which record sits there
    settings: int | None = None  # the number that the query's ``watched`` gives the model's settings, where it has just looked
    beside: Beside | None = None  # digests that a recording computes with the sums
    turn: Turn = field(default_factory=Turn)  # which microbatches are computed here, and how they are added up


@dataclass(frozen=True)
class Answer:
    """What the data say, not yet noised: private.

    Attributes:
        sums: the gradient sum by parameter; as whole numbers, where :attr:`Sample.turn` has units.
        counts: Σ(b_i − ½) by adaptive clipping norm.
        clipped: how many examples were clipped, of how many; where examples are clipped.
        fine: whether the sums are finite; it may still be computed on a device, as they are.
        again: the answer without the records that make it infinite, for where it is not fine.
        seen: the digests of :attr:`Sample.beside` for each microbatch.
    """

    sums: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    clipped: tuple[torch.Tensor, int] | None = None
    fine: torch.Tensor | bool = True
    again: Callable[[], Answer] | None = None
    seen: Sequence[torch.Tensor] = ()


class Query(Protocol):
    """A bounded sum over the sampled examples."""

    @property
    def loss(self) -> Callable[..., torch.Tensor]:
        """One value per example."""
        ...

    @property
    def watched(self) -> Watched:
        """Who numbers the states of the model and the loss."""
        ...

    @property
    def entries(self) -> int | None:
        """Size of the largest activation of one example, where it is known."""
        ...

    @property
    def products(self) -> int | None:
        """Multiplications that a forward pass takes for one example, where every weight is used once."""
        ...

    @property
    def most_rows(self) -> int:
        """Records of a microbatch at most: the plan's slack covers the rounding of so many."""
        ...

    def prove(self) -> None:
        """Bound the model as it is now; raises if the plan promises less."""
        ...

    def rehearse(self, rows: int) -> None:
        """Try a microbatch of this many rows; raises if what would run there is not what was proved."""
        ...

    @property
    def stands(self) -> bool:
        """Whether what was proved still is what would run, as far as classes are concerned."""
        ...

    @property
    def apart(self) -> str:
        """How it is known that records don't meet, see :attr:`PrivacyEngine.apart`."""
        ...

    @property
    def recorded(self) -> bool:
        """Whether :meth:`ask` runs the proved program and nothing of the user's, so that it may begin before it is looked at."""
        ...

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """Group name → sensitivity, with clipping norms at these values."""
        ...

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """The query's answer for these parameters, with clipping norms at these values."""
        ...

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of the parameters from the noised answer; sees no data."""
        ...


def query_of(
    model: torch.nn.Module, loss: Any, plan: PrivacyPlan, input_shape: tuple[int, ...] | None, watched: Watched | None = None
) -> Query:
    """The query that the plan's method stands for. ``watched``: whoever numbers the states of the model and the loss already."""
    if plan.method in ("clipless", "mixed"):
        proved = ProvedQuery(model, as_loss(loss), plan, input_shape, watched)
        return proved if plan.method == "clipless" else MixedQuery(proved, ClippedQuery(model, proved.loss, plan))
    return ClippedQuery(model, per_example_loss(loss), plan, watched)


def _check_names(plan: PrivacyPlan, sizes: Mapping[str, int]) -> None:
    planned = {name for group in plan.groups for name in group.parameters}
    if planned != set(sizes):
        different = sorted(planned ^ set(sizes))
        raise ConfigurationError(
            f"the plan was made for another model: the trainable parameters differ in {', '.join(different[:5])}. Make a new plan."
        )
    for group in plan.groups:
        size = sum(sizes[name] for name in group.parameters)
        if size != group.size:
            raise ConfigurationError(
                f"the plan was made for another model: '{group.name}' has {size} entries here, {group.size} in the plan. Make a "
                "new plan."
            )


def _check_slack(plan: PrivacyPlan, needed: float) -> None:
    if needed > plan.slack * _SAME:
        raise ConfigurationError(
            "the model computes more coarsely than the plan's rounding slack covers. Make a new plan for the model as it is."
        )


class ProvedQuery:
    """Sensitivities proved by the calculus of bounds."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        plan: PrivacyPlan,
        input_shape: tuple[int, ...] | None,
        watched: Watched | None = None,
    ) -> None:
        self.model, self.plan, self.input_shape = model, plan, input_shape
        self.loss: Callable[..., torch.Tensor] = loss
        self._proved_loss = loss
        self.groups = tuple(group for group in plan.groups if group.source == "proved")
        self._analysis: Analysis | None = None
        self._trained: dict[str, torch.Tensor] = {}
        # The engine lets no layer be replaced, so what is none of these now never will be.
        self._has_maps = any(isinstance(module, Reparametrised) and module.maps() for module in model.modules())
        self.watched = Watched(model, loss) if watched is None else watched
        self._settings: int | None = None
        self._beside: Beside | None = None
        self._proofs = 0
        self._values: list[torch.Tensor] = []
        self._graphed: GraphedFunction[Part] = GraphedFunction(self._sum, state=self._state)

    @property
    def entries(self) -> int | None:
        """Over all operations of the analysis."""
        return None if self._analysis is None else max(math.prod(layer.output) for layer in self._analysis.layers)

    @property
    def products(self) -> int | None:
        """Of networks whose activations have one axis."""
        flat = self._analysis is not None and all(len(layer.output) <= 1 for layer in self._analysis.layers)
        return sum(p.numel() for p in self.model.parameters()) if flat else None

    @property
    def apart(self) -> str:
        """By the program: every activation has a row for each record."""
        return "proved"

    @property
    def recorded(self) -> bool:
        """Where its graph is all there is to run."""
        return not self._has_maps and not self.plan.clips

    @property
    def program(self) -> Program:
        """What was proved, and so what runs."""
        assert self._analysis is not None
        return self._analysis.program

    def rehearse(self, rows: int) -> None:
        """The program's outputs beside the module's; elsewhere than on a processor, where other kernels run, gradients too."""
        check_program(self.program, (rows,), gradients=False)
        if any(p.device.type != "cpu" for p in self.model.parameters()):
            check_program(self.program, _TRIED)

    @property
    def stands(self) -> bool:
        """Whether every layer still has the functions that its rule speaks of."""
        return not self.program.has_changed_classes()

    @property
    def most_rows(self) -> int:
        """As many as the plan's slack covers."""
        return rows_within(self._slack, self.plan.slack * _SAME)

    def _slack(self, rows: int) -> float:
        assert self._analysis is not None
        convolutions = has_convolutions(self.model)
        return slack_of(proved_rounding(self._analysis, self.plan.precision, rows, convolutions=convolutions))

    def prove(self) -> None:
        """The calculus, run again; clipping norms that change are taken where they start."""
        self._proofs += 1
        self._values = [*self.model.parameters(), *self.model.buffers()]
        self._analysis = analyse(self.model, self._proved_loss, input_shape=self.input_shape, check=self.plan.method == "clipless")
        if any(group.parameters != (group.name,) for group in self.groups):
            raise ConfigurationError("a proved group is one parameter; this plan was changed. Make a new plan.")
        _check_names(self.plan, {row.name: row.size for row in self._analysis.parameters})
        planned = {group.name: group.sensitivity for group in self.groups}
        for name, bound in self.bounds(dict(self.plan.clips)).items():
            if not bound <= planned[name] * _SAME:
                raise ConfigurationError(
                    f"the plan was made for another model or loss: parameter '{name}' has sensitivity {bound:.6g} here, and "
                    f"{planned[name]:.6g} in the plan. Make a new plan."
                )
        _check_slack(self.plan, self._slack(1))

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """Δ of each proved parameter."""
        assert self._analysis is not None
        enforced = {group.name for group in self.plan.groups if group.source == "clipped"}
        limits = {name: value for name, value in clips.items() if name not in enforced}
        bounds = self._analysis.at_limits(limits) if limits else self._analysis.sensitivities
        return {group.name: bounds[group.name] for group in self.groups}

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """One ordinary backward pass per microbatch; for reparametrised layers it ends at the effective weight."""
        layers = clip_layers(self.model) if clips else {}  # the plan's adaptive norms are among them
        for name in clips.keys() & layers.keys():
            layers[name].max_norm = clips[name]
        counts = LayerCounts({name: layers[name] for name in self.plan.adaptive_clips if name in layers})
        # A parameter of sensitivity 0 gets no noise, so nothing of it may be released: its gradient is not even computed.
        bounds = self.bounds(clips)
        moving = {name: p for name, p in parameters.items() if bounds[name] > 0}
        still = batch.turn.summand({name: zeros_like_sum(p) for name, p in parameters.items() if name not in moving})
        self._settings, self._beside = batch.settings, batch.beside
        total: Sums | None = None
        with self._effective_leaves() as leaves, counts.watching():
            self._trained = {**moving, **{name: leaf for name, leaf in leaves.items() if name in moving}}
            # A recording would have to be made anew for leaves of this step's own, and for clipping norms that change.
            replays = not (leaves or clips)
            if moving:
                total = pending_sum(
                    self.program.fused,
                    self._proved_loss,
                    self._trained,
                    batch.inputs,
                    batch.targets,
                    microbatch_size=batch.microbatch_size,
                    device=batch.device,
                    precision=self.plan.precision,
                    copies=batch.copies,
                    dtypes=batch.dtypes,
                    counts=counts if counts.layers else None,
                    replayed=self._graphed if replays else None,
                    seats=batch.seats,
                    turn=batch.turn,
                )
                if not replays and not bool(total.fine):  # while the leaves are there
                    total = Sums(total.again(), torch.ones_like(total.fine), total.again, total.seen)
        zero = torch.zeros((), dtype=torch.float64, device=batch.device)
        noted = {name: counts.totals.get(name, zero) for name in counts.layers}
        if total is None:
            return Answer(still, noted)
        pending = total
        return Answer(
            still | pending.values,
            noted,
            fine=pending.fine,
            again=lambda: Answer(still | pending.again(), noted),
            seen=pending.seen,
        )

    def _sum(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Part:
        sums, fine, _ = microbatch_sum(self.program.fused, self._proved_loss, self._trained, x, y, mask)
        return sums, fine, [] if self._beside is None else [self._beside((x, y, mask))]

    def _state(self) -> Hashable:
        """What a recording depends on besides its inputs."""
        settings = self.watched() if self._settings is None else ("known", self._settings)
        return settings, self._proofs, tuple(self._trained), storages(self._values), self._beside is None

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The noised gradients of effective weights, pulled back to the parameters: post-processing."""
        return pull_back(self.model, noised) if self._has_maps else dict(noised)

    def _effective_leaves(self) -> AbstractContextManager[dict[str, torch.Tensor]]:
        return effective_leaves(self.model) if self._has_maps else nullcontext({})


class ClippedQuery:
    """Sensitivity enforced: every example's gradient is clipped, group by group."""

    def __init__(
        self, model: torch.nn.Module, loss: Callable[..., torch.Tensor], plan: PrivacyPlan, watched: Watched | None = None
    ) -> None:
        self.model, self.loss, self.plan = model, loss, plan
        self.watched = Watched(model, loss) if watched is None else watched
        self.groups = tuple(group for group in plan.groups if group.source == "clipped")
        # Where parameters are frozen for a pass, it is that state of the model which stays the same from step to step.
        self._whole = not any(phase.frozen for phase in plan.phases) and plan.method != "mixed"
        self._clippers: dict[int, Clipper] = {}

    @property
    def entries(self) -> int | None:
        """Known for tables: then no activation is longer than the longest side of a weight."""
        shape = find_input_shape(self.model)
        flat = shape is not None and len(shape) == 1 and all(p.ndim <= 2 for p in self.model.parameters())
        return max((max(p.shape, default=1) for p in self.model.parameters()), default=1) if flat else None

    @property
    def products(self) -> int | None:
        """Not known without an analysis."""
        return None

    @property
    def apart(self) -> str:
        """As the clippers know it."""
        known = [clipper.apart for clipper in self._clippers.values()]
        return next((how for how in ("alone", "proved") if how in known), "")

    @property
    def recorded(self) -> bool:
        """The module itself runs."""
        return False

    def rehearse(self, rows: int) -> None:
        """Nothing: clipping runs the module itself."""

    @property
    def stands(self) -> bool:
        """Clipping enforces its bound on whatever runs."""
        return True

    @property
    def most_rows(self) -> int:
        """As many as the plan's slack covers."""
        return rows_within(self._slack, self.plan.slack * _SAME)

    def _slack(self, rows: int) -> float:
        return slack_of(clipped_rounding(self.plan.method, self.plan.precision, rows))

    def prove(self) -> None:
        """Refuses layers whose per-example gradients can't be told, and a plan whose groups are not those of its style.

        What was verified of the model before is forgotten: it may have changed since, or this would not be asked.
        """
        forget_verified(self.model)
        self._clippers.clear()
        own = {name for group in self.groups for name in group.parameters}
        with _not_trained([p for name, p in self.model.named_parameters() if p.requires_grad and name not in own]):
            check_supported(self.model)
        trained = {name: p.numel() for name, p in self.model.named_parameters() if p.requires_grad}
        _check_names(self.plan, trained)
        self._check_groups()
        promised = math.hypot(*(group.sensitivity for group in self.groups))
        if self.plan.max_grad_norm is None or self.plan.max_grad_norm > promised * _SAME:
            raise ConfigurationError(
                f"the plan's sensitivity {promised:.6g} is below its max_grad_norm {self.plan.max_grad_norm!r}. Make a new plan."
            )
        _check_slack(self.plan, self._slack(1))

    def _check_groups(self) -> None:
        """The groups are exactly those that the style makes: what is clipped together is bounded together."""
        names = [name for group in self.groups for name in group.parameters]
        norms = {group.name: group.sensitivity for group in self.groups}
        flat = self.plan.clipping_style == "flat"
        groups = clipping_groups(names, sum(norms.values()) if flat else norms, self.plan.clipping_style)
        expected = {CLIPPED_GROUP if flat else group.name: set(group.parameters) for group in groups}
        if {group.name: set(group.parameters) for group in self.groups} != expected:
            raise ConfigurationError("the plan's clipping groups are not those of its style; it was changed. Make a new plan.")

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """C of each group."""
        return {group.name: clips.get(group.name, group.sensitivity) for group in self.groups}

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """Σ_i ν_i·g_i by the plan's method, microbatch by microbatch. On a GPU the last one may still be computed."""
        plan, bounds = self.plan, self.bounds(clips)
        active = [group for group in self.groups if any(name in parameters for name in group.parameters)]
        none = torch.zeros((), dtype=torch.float64, device=batch.device)
        answer = Answer(
            batch.turn.summand({name: zeros_like_sum(p) for name, p in parameters.items()}),
            {group.name: none for group in active if group.name in plan.adaptive_clips},
            (none, len(batch.targets)) if plan.clip == "clip" else None,
        )
        clipping, size = self._clipping(batch.copies.count), max(1, batch.microbatch_size // batch.copies.count)
        norms = {group.name: bounds[group.name] for group in active}
        max_norm = next(iter(norms.values())) if plan.clipping_style == "flat" else norms

        def plus(before: Answer, part: Clipped, add: Callable[..., torch.Tensor] = torch.Tensor.add_) -> Answer:
            """With a microbatch more."""
            sums = {**before.sums}
            for name, gradient in part.sums.items():  # one after another: whole numbers take twice the memory
                sums[name] = add(sums[name], batch.turn.summand({name: gradient})[name])
            counts = {
                group.name: before.counts[group.name] + centred_count(part.norms[:, number], bounds[group.name], part.kept)
                for number, group in enumerate(active)
                if group.name in before.counts
            }
            clipped = before.clipped
            if clipped is not None:
                clipped = clipped[0] + ((part.factors < 1).any(1) & part.kept).sum(), clipped[1]
            return Answer(sums, counts, clipped)

        pending: Pending | None = None
        others = [p for name, p in self.model.named_parameters() if p.requires_grad and name not in parameters]
        on_host = batch.device.type != "cuda"
        settings = batch.settings if on_host and self._whole else None  # elsewhere nobody has looked yet
        with _not_trained(others):
            own = microbatches(batch.inputs, batch.targets, size, batch.device, batch.dtypes, batch.seats, turn=batch.turn)
            for x, y, mask in own:
                with arithmetic(plan.precision, batch.device):
                    answer = answer if pending is None else plus(answer, pending.finish())
                    if batch.copies.augmentation is None:
                        pending = clipping.begin(Microbatch(owned(x), owned(y), mask), max_norm, settings)
                        settings = clipping.seen
                    else:  # whoever makes the copies may give other types
                        pending = clipping.start(batch.copies.rows(x), batch.copies.repeat(y), max_norm, mask=mask)
            if pending is None:
                return answer
            if on_host or batch.turn.units is not None:
                with arithmetic(plan.precision, batch.device):
                    return plus(answer, pending.finish())

        def repaired(before: Answer = answer, pending: Pending = pending) -> Answer:
            with _not_trained(others), arithmetic(plan.precision, batch.device):
                return plus(before, pending.finish(), torch.add)

        return replace(plus(answer, pending.expected(), torch.add), fine=pending.fine, again=repaired)

    def _clipping(self, copies: int) -> Clipper:
        """How this plan clips: one object for all steps, for it records the work on a microbatch on CUDA and replays it."""
        if copies not in self._clippers:
            plan = self.plan
            method: ClippingMethod = "bookkeeping" if plan.method in ("mixed", "clipless") else plan.method  # type: ignore[assignment]
            self._clippers[copies] = Clipper(
                self.model,
                self.loss,
                method,
                clip=plan.clip,
                style=plan.clipping_style,
                stability=plan.stability,
                copies=copies,
                watched=self.watched if self._whole else None,
            )
        return self._clippers[copies]

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """They are the parameters' own."""
        return dict(noised)


class MixedQuery:
    """Proved where there is a proof, clipped elsewhere: both are one Gaussian mechanism."""

    def __init__(self, proved: ProvedQuery, clipped: ClippedQuery) -> None:
        self.loss, self.watched = proved.loss, proved.watched
        self._proved, self._clipped = proved, clipped

    @property
    def entries(self) -> int | None:
        """As the calculus says."""
        return self._proved.entries

    @property
    def products(self) -> int | None:
        """Clipping takes more."""
        return None

    @property
    def apart(self) -> str:
        """Of the clipped part."""
        return self._clipped.apart

    @property
    def recorded(self) -> bool:
        """The module itself runs."""
        return False

    def rehearse(self, rows: int) -> None:
        """The proved part."""
        self._proved.rehearse(rows)

    @property
    def stands(self) -> bool:
        """Of the proved part."""
        return self._proved.stands

    @property
    def most_rows(self) -> int:
        """Of both parts."""
        return min(self._proved.most_rows, self._clipped.most_rows)

    def prove(self) -> None:
        """Both parts."""
        self._proved.prove()
        self._clipped.prove()

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """Of both parts."""
        return {**self._proved.bounds(clips), **self._clipped.bounds(clips)}

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """One pass for each part."""
        enforced = {name for group in self._clipped.groups for name in group.parameters}
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, torch.Tensor] = {}
        share = None
        for query, names in ((self._proved, parameters.keys() - enforced), (self._clipped, parameters.keys() & enforced)):
            if names:
                part = query.ask({name: p for name, p in parameters.items() if name in names}, batch, clips)
                if part.again is not None and not bool(part.fine):
                    part = part.again()
                sums |= part.sums
                counts |= part.counts
                share = part.clipped or share
        return Answer(sums, counts, share)

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The proved part is pulled back through parametrisations; clipped gradients already are the parameters' own."""
        proved = {group.name for group in self._proved.groups}
        return {**noised, **self._proved.gradients({name: g for name, g in noised.items() if name in proved})}


@contextmanager
def _not_trained(parameters: Collection[torch.Tensor]) -> Iterator[None]:
    """Within the block these cost nothing: no gradients are computed for them."""
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
