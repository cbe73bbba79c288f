"""What a step asks of a model whose gradients are clipped: the sum of what is left of each record's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from lipdp._numerics import arithmetic
from lipdp.clipping import Clipped, Clipper, check_supported, clipping_groups
from lipdp.clipping import Method as ClippingMethod
from lipdp.clipping.batch import Batch as Microbatch
from lipdp.clipping.clipper import Pending
from lipdp.clipping.verify import forget as forget_verified
from lipdp.errors import ConfigurationError
from lipdp.graphs import Watched
from lipdp.inputs import owned
from lipdp.planning.plan import CLIPPED_GROUP, PrivacyPlan
from lipdp.planning.settings import (
    clipped_rounding,
    rows_within,
    slack_of,
)
from lipdp.program import find_input_shape
from lipdp.training.batches import microbatches
from lipdp.training.gradients import centred_count, zeros_like_sum
from lipdp.training.query import SAME, Answer, Sample, check_names, check_slack


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

    @property
    def pulls_back(self) -> bool:
        """Clipped gradients are the parameters' own."""
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
        return rows_within(self._slack, self.plan.slack * SAME)

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
        check_names(self.plan, trained)
        self._check_groups()
        promised = math.hypot(*(group.sensitivity for group in self.groups))
        if self.plan.max_grad_norm is None or self.plan.max_grad_norm > promised * SAME:
            raise ConfigurationError(
                f"the plan's sensitivity {promised:.6g} is below its max_grad_norm {self.plan.max_grad_norm!r}. Make a new plan."
            )
        check_slack(self.plan, self._slack(1))

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

    def begin(self, batch: Sample) -> None:
        """It does not: the module itself runs, and is looked at first."""

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """Σ_i ν_i·g_i by the plan's method, microbatch by microbatch. On a GPU the last one may still be computed."""
        plan, bounds = self.plan, self.bounds(clips)
        active = [group for group in self.groups if not parameters.keys().isdisjoint(group.parameters)]
        none = torch.zeros((), dtype=torch.float64, device=batch.device)
        answer = Answer(
            {},
            {group.name: none for group in active if group.name in plan.adaptive_clips},
            (none, len(batch.targets)) if plan.clip == "clip" else None,
        )
        clipping, size = self._clipping(batch.copies.count), max(1, batch.microbatch_size // batch.copies.count)
        norms = {group.name: bounds[group.name] for group in active}
        max_norm = next(iter(norms.values())) if plan.clipping_style == "flat" else norms

        def plus(before: Answer, part: Clipped, add: _Add = torch.Tensor.add_, first: _Own = torch.Tensor.clone) -> Answer:
            """With a microbatch more, which may lie in a recording's memory: until the next one, its sums are what ``first`` is."""
            sums = {**before.sums}
            for name, gradient in part.sums.items():  # one after another: whole numbers take twice the memory
                total = batch.turn.summand({name: gradient})[name]
                sums[name] = add(sums[name], total) if name in sums else first(total)
            counts = {
                group.name: before.counts[group.name] + centred_count(part.norms[:, number], bounds[group.name], part.kept)
                for number, group in enumerate(active)
                if group.name in before.counts
            }
            clipped = before.clipped
            if clipped is not None:
                clipped = clipped[0] + ((part.factors < 1).any(1) & part.kept).sum(), clipped[1]
            return Answer(sums, counts, clipped)

        def whole(answer: Answer) -> Answer:
            """For all parameters, in their order: with zeros for those that nobody has a gradient for."""
            missing = batch.turn.summand({name: zeros_like_sum(p) for name, p in parameters.items() if name not in answer.sums})
            return replace(answer, sums={name: (missing if name in missing else answer.sums)[name] for name in parameters})

        pending: Pending | None = None
        others = [p for name, p in self.model.named_parameters() if p.requires_grad and name not in parameters]
        on_host = batch.device.type != "cuda"
        settings = batch.settings if on_host and self._whole else None  # elsewhere nobody has looked yet
        first = _as_it_is if on_host else torch.Tensor.clone  # nothing is recorded on a processor
        with _not_trained(others):
            own = microbatches(batch.inputs, batch.targets, size, batch.device, batch.dtypes, batch.seats, turn=batch.turn)
            for x, y, mask in own:
                with arithmetic(plan.precision, batch.device):
                    answer = answer if pending is None else plus(answer, pending.finish(), first=first)
                    if batch.copies.augmentation is None:
                        pending = clipping.begin(Microbatch(owned(x), owned(y), mask), max_norm, settings)
                        settings = clipping.seen
                    else:  # whoever makes the copies may give other types
                        pending = clipping.start(batch.copies.rows(x), batch.copies.repeat(y), max_norm, mask=mask)
            if pending is None:
                return whole(answer)
            if on_host or batch.turn.units is not None:
                with arithmetic(plan.precision, batch.device):
                    return whole(plus(answer, pending.finish(), first=_as_it_is))

        def repaired(before: Answer = answer, pending: Pending = pending) -> Answer:
            with _not_trained(others), arithmetic(plan.precision, batch.device):
                return whole(plus(before, pending.finish(), torch.add, _as_it_is))

        return replace(whole(plus(answer, pending.expected(), torch.add, _as_it_is)), fine=pending.fine, again=repaired)

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


_Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Own = Callable[[torch.Tensor], torch.Tensor]


def _as_it_is(total: torch.Tensor) -> torch.Tensor:
    return total


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
