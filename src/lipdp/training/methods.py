"""Which query a plan's method stands for: of a proved model the sum of gradients as it is, of others a clipped sum.

Both at once, where parts of a model are proved and others clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lipdp._numerics import arithmetic
from lipdp.bounds import Analysis, analyse
from lipdp.errors import ConfigurationError
from lipdp.fingerprint import storages
from lipdp.graphs import Branches, GraphedFunction, Watched
from lipdp.losses import Loss, as_loss
from lipdp.parametrize import Reparametrised, effective_leaves, pull_back
from lipdp.planning.grouping import clip_layers
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import (
    has_convolutions,
    per_example_loss,
    proved_rounding,
    rows_within,
    slack_of,
)
from lipdp.program import Program, check_program
from lipdp.training.batches import gather_into
from lipdp.training.clipped import ClippedQuery
from lipdp.training.gradients import LayerCounts, Part, Sums, microbatch_sum, pending_sum, zeros_like_sum
from lipdp.training.query import SAME, Answer, Beside, Microbatch, Query, Sample, check_names, check_slack

# Numbers of examples on which a program is tried on the device that it will run on.
_TRIED = (3,)


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
        self._bounded: tuple[dict[str, float], dict[str, float]] | None = None  # the last clipping norms, and the bounds at them
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
    def pulls_back(self) -> bool:
        """Where layers are reparametrised."""
        return self._has_maps

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
        return rows_within(self._slack, self.plan.slack * SAME)

    def _slack(self, rows: int) -> float:
        assert self._analysis is not None
        convolutions = has_convolutions(self.model)
        return slack_of(proved_rounding(self._analysis, self.plan.precision, rows, convolutions=convolutions))

    def prove(self) -> None:
        """The calculus, run again; clipping norms that change are taken where they start."""
        self._proofs += 1
        self._values = [*self.model.parameters(), *self.model.buffers()]
        self._bounded = None
        self._analysis = analyse(self.model, self._proved_loss, input_shape=self.input_shape, check=self.plan.method == "clipless")
        if any(group.parameters != (group.name,) for group in self.groups):
            raise ConfigurationError("a proved group is one parameter; this plan was changed. Make a new plan.")
        check_names(self.plan, {row.name: row.size for row in self._analysis.parameters})
        planned = {group.name: group.sensitivity for group in self.groups}
        for name, bound in self.bounds(dict(self.plan.clips)).items():
            if not bound <= planned[name] * SAME:
                raise ConfigurationError(
                    f"the plan was made for another model or loss: parameter '{name}' has sensitivity {bound:.6g} here, and "
                    f"{planned[name]:.6g} in the plan. Make a new plan."
                )
        check_slack(self.plan, self._slack(1))

    def bounds(self, clips: Mapping[str, float]) -> dict[str, float]:
        """Δ of each proved parameter."""
        assert self._analysis is not None
        if self._bounded is not None and self._bounded[0] == clips:
            return self._bounded[1]
        enforced = {group.name for group in self.plan.groups if group.source == "clipped"}
        limits = {name: value for name, value in clips.items() if name not in enforced}
        bounds = self._analysis.at_limits(limits) if limits else self._analysis.sensitivities
        self._bounded = dict(clips), {group.name: bounds[group.name] for group in self.groups}
        return self._bounded[1]

    def begin(self, batch: Sample) -> Microbatch | None:
        """Replay what was recorded last, where it takes all of the batch at once."""
        with arithmetic(self.plan.precision, batch.device):
            buffers = self._graphed.buffers()
        if not buffers or batch.seats is None or batch.microbatch_size != len(buffers[-1]):
            return None
        fits = batch.dtypes == tuple(part.dtype for part in buffers[:-1])
        if not fits or not gather_into(buffers, batch.inputs, batch.targets, batch.seats):
            return None
        self._graphed.begin()
        return buffers[0], buffers[1], buffers[2]

    def ask(self, parameters: Mapping[str, torch.nn.Parameter], batch: Sample, clips: Mapping[str, float]) -> Answer:
        """One ordinary backward pass per microbatch; for reparametrised layers it ends at the effective weight."""
        counts: LayerCounts | None = None
        if clips:  # the plan's adaptive norms are among them
            layers = clip_layers(self.model)
            for name in clips.keys() & layers.keys():
                layers[name].max_norm = clips[name]
            counts = LayerCounts({name: layers[name] for name in self.plan.adaptive_clips if name in layers})
        # A parameter of sensitivity 0 gets no noise, so nothing of it may be released: its gradient is not even computed.
        bounds = self.bounds(clips)
        moving = {name: p for name, p in parameters.items() if bounds[name] > 0}
        still: dict[str, torch.Tensor] = {}
        if len(moving) < len(parameters):
            still = batch.turn.summand({name: zeros_like_sum(p) for name, p in parameters.items() if name not in moving})
        self._settings, self._beside = batch.settings, batch.beside
        total: Sums | None = None
        effective: AbstractContextManager[dict[str, torch.Tensor]] = nullcontext({})
        if self._has_maps:
            effective = effective_leaves(self.model)
        with effective as leaves, nullcontext() if counts is None else counts.watching():
            self._trained = {name: leaves.get(name, p) for name, p in moving.items()}
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
                    counts=counts,
                    replayed=self._graphed if replays else None,
                    begun=batch.begun if replays else None,
                    seats=batch.seats,
                    turn=batch.turn,
                )
                if not replays and not bool(total.fine):  # while the leaves are there
                    total = Sums(total.again(), torch.ones_like(total.fine), total.again, total.seen)
        noted: dict[str, torch.Tensor] = {}
        if counts is not None:
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
        if self._beside is None:
            return microbatch_sum(self.program.fused, self._proved_loss, self._trained, x, y, mask)
        branches = Branches(mask.device)
        with branches.branch():
            seen = self._beside((x, y, mask))
        sums, fine, _ = microbatch_sum(self.program.fused, self._proved_loss, self._trained, x, y, mask)
        branches.join()
        return sums, fine, [seen]

    def _state(self) -> Hashable:
        """What a recording depends on besides its inputs."""
        settings = self.watched() if self._settings is None else ("known", self._settings)
        return settings, self._proofs, tuple(self._trained), storages(self._values), self._beside is None

    def gradients(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The noised gradients of effective weights, pulled back to the parameters: post-processing."""
        return pull_back(self.model, noised) if self._has_maps else dict(noised)


def query_of(
    model: torch.nn.Module, loss: Any, plan: PrivacyPlan, input_shape: tuple[int, ...] | None, watched: Watched | None = None
) -> Query:
    """The query that the plan's method stands for. ``watched``: whoever numbers the states of the model and the loss already."""
    if plan.method in ("clipless", "mixed"):
        proved = ProvedQuery(model, as_loss(loss), plan, input_shape, watched)
        return proved if plan.method == "clipless" else MixedQuery(proved, ClippedQuery(model, proved.loss, plan))
    return ClippedQuery(model, per_example_loss(loss), plan, watched)


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

    @property
    def pulls_back(self) -> bool:
        """Of the proved part."""
        return self._proved.pulls_back

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

    def begin(self, batch: Sample) -> None:
        """It does not: the module itself runs, and is looked at first."""

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
