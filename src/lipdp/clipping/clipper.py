"""Clipped sums: five ways to the same Σ_i ν_i·g_i.

With g_i the gradient of example i and ν_i = min(1, C/‖g_i‖):

==============  =====================================================================================================
naive           one backward pass per example (nxBP)
multiloss       one forward pass, one backward pass per example's loss
bookkeeping     one backward pass: inputs and cotangents are kept, norms and Σ_i ν_i·g_i are formed from them directly
ghost           the same, with every norm in the Gram form, nothing materialised
reweight        the same for whole gradients, with norms in the cheaper form
auto            bookkeeping
==============  =====================================================================================================

Ghost clipping and ReweightGP, as published, run a second backward pass, of Σ_i ν_i·loss_i. What that adds up is not what was
measured: it is computed anew, and nothing keeps a hook, a clip or mere rounding from making it larger. So here every method
releases the very numbers that it has measured: record (:mod:`lipdp.clipping.record`), contributions
(:mod:`lipdp.clipping.contribution`), norms, weighted sums.

On CUDA a microbatch is done without waiting for the device, so that it can be recorded once for its shape and replayed
(:class:`lipdp.graphs.GraphedFunction`); C is an input of the recording. It goes ahead as if every gradient were finite. Where one
is not, 0·inf = NaN has spoiled the sums; a flag says so, and the batch is done again without that example.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from lipdp._numerics import Undrawn, no_autocast, random_states, seed_all, set_random_states, wide
from lipdp.clipping.adoption import TrainedLayers, check_supported, trained_layers
from lipdp.clipping.batch import (
    Batch,
    Clip,
    Clipped,
    Flag,
    Group,
    MaxNorm,
    Method,
    Style,
    check_choices,
    check_style,
    clip_factors,
    clipping_groups,
    eager,
    even_part,
    group_bounds,
    is_compiled,
    notice_parts,
    part_of,
    prepare,
    trainable,
    uncompiled,
)
from lipdp.clipping.beside import BESIDE
from lipdp.clipping.contribution import Contribution, Form
from lipdp.clipping.follow import ATTEMPTS, follow
from lipdp.clipping.kept import known_before
from lipdp.clipping.layouts import generation, layouts_of
from lipdp.clipping.loops import Loops, PerExampleLoss, followed_losses, zeros
from lipdp.clipping.memories import EARLIER, distrust
from lipdp.clipping.past import NotApartError, Reason
from lipdp.clipping.record import leave_off, recording
from lipdp.clipping.restored import Before
from lipdp.clipping.verify import check_alone, kind_of, seeing_all, show_public, state_of, untrained_tensors, verify_once
from lipdp.errors import LipdpNotice, UnsupportedError
from lipdp.fingerprint import Watched
from lipdp.graphs import GraphedFunction, Staged, is_capturing, is_recording, rest_of
from lipdp.inputs import Inputs, device_of, flattened, owned, plain, rebuilt, rows_of
from lipdp.program.dtypes import Types

__all__ = ["Clipped", "Clipper", "Method", "Pending", "group_norms", "shown_gradients", "squared_norms"]


def shown_gradients(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: Inputs,
    y: torch.Tensor,
    copies: int = 1,
    layers: TrainedLayers | None = None,
    known: Sequence[torch.Tensor] | None = None,
) -> dict[str, Contribution]:
    """Per-example gradients as layers show them, of a pass in which each record was kept apart."""
    layouts = layouts_of(model, x)
    following = follow(x, y, known_before(model, loss) if known is None else known, answering=layouts is None or layouts.answering)
    with torch.enable_grad(), recording(model, rows_of(x), copies, layers, layouts, following) as recorded:
        return recorded.contributions(followed_losses(model, loss, x, y, copies, following).sum())


@contextmanager
def _numbers_of_its_own(device: torch.device) -> Iterator[None]:
    """A single record may decide what the generators that everybody draws from give next: not for the next batch."""
    seed = int(torch.randint(2**62, ()))
    with Undrawn(device):
        seed_all(seed)
        yield


# Where something has run beside every pass: batches, at most, that are taken record by record before one is tried together again.
_PAUSE = 64


class _Computed(NamedTuple):
    """Sums by parameter name, norms and factors (batch, groups), and whether some gradient is not finite, which spoils the sums."""

    sums: dict[str, torch.Tensor]
    norms: torch.Tensor
    factors: torch.Tensor
    spoiled: torch.Tensor

    def copied(self) -> _Computed:
        """Copies that the next replay does not overwrite, in a few kernels for all of them."""
        *sums, norms, factors = torch._foreach_mul([*self.sums.values(), self.norms, self.factors], 1.0)
        return _Computed(dict(zip(self.sums, sums, strict=True)), norms, factors, self.spoiled)


@dataclass
class Clipper:
    """How a model's gradients are clipped: the settings of :func:`clipped_gradients`, for one batch after another.

    Keep one for a model: on CUDA the work on a microbatch is recorded for its shape and replayed. Results are the caller's to keep.
    What the model reads from outside its modules' attributes and the loss's closure (a global number, say) stays as it was when
    recorded. A model that can't be recorded (one notice says why), the loops, and whatever is not on CUDA are called as they are.

    Args:
        model: any model whose examples don't mix; looked at anew when something about it changes.
        loss: ``loss(outputs, targets)`` with one value per example (``reduction="none"``).
        method: how; every method gives the same result. "bookkeeping" is the fastest.
        clip: "clip": ν = min(1, C/‖g‖); "automatic": ν = C/(‖g‖ + γ).
        form: how norms of layers with several positions are computed: "materialise", "gram", "auto", "measure".
        style: which parameters are clipped together: "flat", "per_layer" or "per_group".
        groups: for "per_group": prefixes of parameter names.
        stability: γ of "automatic", above 0.
        copies: rows that make up one example.
        watched: who numbers the states of the model and the loss (and perhaps of more); by default one of its own.

    Example:
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(reduction="none")
        >>> clip = Clipper(model, loss)
        >>> clip(torch.randn(5, 3), torch.zeros(5, dtype=torch.long), 1.0).sums["bias"].shape
        torch.Size([2])
    """

    model: torch.nn.Module
    loss: PerExampleLoss
    method: Method = "bookkeeping"
    _: KW_ONLY
    clip: Clip = "clip"
    form: Form = "auto"
    style: Style = "flat"
    groups: Sequence[str] | None = None
    stability: float = 0.01
    copies: int = 1
    watched: Watched | None = field(default=None, repr=False, compare=False)
    _most: int | None = field(default=None, init=False, repr=False, compare=False)  # examples that fit into memory, once known

    def __post_init__(self) -> None:
        check_choices(self.method, self.clip, self.form, self.stability)
        check_style(self.method, self.style)
        self._types = Types(self.model, self.loss)
        self._watched = Watched(self.model, self.loss) if self.watched is None else self.watched
        self._number: int | None = None
        self.seen: int | None = None  # the number of the state that the last batch has left
        self._made_for: tuple[Group, ...] = ()
        self._grouped: tuple[MaxNorm, tuple[Group, ...]] | None = None  # the last norms, of plain numbers, and their groups
        self._structure: Hashable = None  # of the inputs
        self._checked: set[Hashable] = set()
        self._known: list[torch.Tensor] = []  # before a pass
        self._before: Before | None = None  # what the model and the loss held before a pass
        self.alone: Reason | None = None  # why records are taken one by one, where they are
        self._alone_with: Hashable = None  # the state that was so with
        self._pause, self._left = 1, 0  # where something ran beside: batches until it is tried again, and those left of them
        self._replayed: GraphedFunction[_Computed] = GraphedFunction(self._stages, state=self._state)

    @property
    def apart(self) -> Literal["proved", "alone", ""]:
        """How it is known that no record's gradient depends on others, see :class:`Support`; "" before the first batch."""
        if self.method == "naive" or self.alone is not None:
            return "alone"
        return "" if self._number is None else "proved"

    @property
    def refused(self) -> str | None:
        """Why this is not replayed, if there is a reason."""
        return self._replayed.refused

    @uncompiled
    def __call__(self, x: Inputs, y: torch.Tensor, max_norm: MaxNorm, *, mask: torch.Tensor | None = None) -> Clipped:
        """The batch, clipped."""
        return self.start(x, y, max_norm, mask=mask).finish()

    @uncompiled
    def start(self, x: Inputs, y: torch.Tensor, max_norm: MaxNorm, *, mask: torch.Tensor | None = None) -> Pending:
        """Begin with a batch. On a GPU, there is time for other work (drawing noise) before the result is waited for.

        A batch that does not fit into the GPU's memory is done in parts, and from then on without trying it as a whole first: the
        result is a sum over examples.
        """
        if self._number is None:
            check_supported(self.model)  # what is not initialised can't even be looked at
        x = plain(x)
        return self.begin(prepare(self._types.inputs(x), self._types.targets(y), mask, self.copies), max_norm)

    @uncompiled
    def begin(self, batch: Batch, max_norm: MaxNorm, number: int | None = None) -> Pending:
        """:meth:`start` for a batch in the model's types, in memory of its own, with a target for each row.

        ``number``: of the present state, where :attr:`watched` has just been asked.
        """
        leave_off(self.model)
        examples = len(batch.keep)
        if self._most is None or examples <= self._most:
            try:
                return self._begin(batch, max_norm, self._watched() if number is None else number)
            except torch.OutOfMemoryError:
                if examples < 2:
                    raise
            gc.collect()  # only here can the tensors of the attempt go: the exception held on to them
            self._most = -(-examples // 2)
            notice_parts(examples, self._most)
        size = even_part(examples, self._most)
        *first, last = [part_of(batch, start, size, self.copies) for start in range(0, examples, size)]
        before = [self.begin(replace(part, x=owned(part.x), y=owned(part.y)), max_norm).finish() for part in first]
        pending = self.begin(replace(last, x=owned(last.x), y=owned(last.y)), max_norm)
        return replace(pending, before=[*before, *pending.before])

    def _begin(self, batch: Batch, max_norm: MaxNorm, number: int) -> Pending:
        new, device, self.seen = self._look(number), device_of(batch.x), number
        groups = self._groups_for(max_norm)
        if new and len(batch.keep):
            with eager(self._compiled):
                show_public(self.model, self.loss, batch.x, batch.y)
            self._look(self._watched())
            self._known = known_before(self.model, self.loss)  # with tables that it has made now
        bounds = group_bounds(groups, wide(next(iter(self._parameters.values()))), device)
        flag = Flag()
        if not len(batch.keep):
            nothing = bounds.new_zeros(0, len(groups))
            sums = {name: zeros(p) for name, p in self._parameters.items()}
            computed = _Computed(sums, nothing, nothing, nothing.any())
        elif self.method == "naive" or self._stays_alone():
            computed = self._looped("naive", batch, groups, bounds)
        else:
            replays = self._replayed.replays
            try:
                with nullcontext() if rows_of(batch.x) > 1 else _numbers_of_its_own(device):
                    computed = self._together(batch, groups, bounds, flag)
                self._pause = 1
            except NotApartError as error:
                self._take_alone(batch, error.reason)
                computed, flag = self._looped("naive", batch, groups, bounds), Flag()
            if self._replayed.replays == replays:  # the model's own code ran
                self.seen = self._watched()
                if self.seen != self._number:
                    self._know_again()
        return Pending(self, groups, batch, bounds, computed, flag)

    def _together(self, batch: Batch, groups: tuple[Group, ...], bounds: torch.Tensor, flag: Flag) -> _Computed:
        """The records of a batch in one pass; it is begun anew, with the same random numbers, where another thread ran beside it:
        that may have been by chance. Of a pass that did not keep them apart nothing stays, and no number that it has drawn."""
        device = device_of(batch.x)
        before = random_states(device)
        for attempt in range(ATTEMPTS):
            try:
                if self.method == "multiloss":
                    return self._looped("multiloss", batch, groups, bounds)
                self._made_for = groups
                parts, self._structure = flattened(batch.x)
                computed = self._replayed(*parts, batch.y, batch.keep, bounds, between=flag)
                return computed.copied() if device.type == "cuda" else computed
            except NotApartError as error:
                set_random_states(before, device)
                if BESIDE not in error.reason.what or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _take_alone(self, batch: Batch, reason: Reason) -> None:
        if EARLIER in reason.what:  # by itself, too, a record would meet them
            raise UnsupportedError(f"{type(self.model).__name__} or its loss uses {reason}. Make it a function of its inputs.")
        if self._watched() != self._number or not (self._before is None or self._before.holds()):  # what can't be put back
            raise UnsupportedError(
                f"{type(self.model).__name__} or its loss changes what it holds (a list, a dict, an object of its own) in a pass "
                f"that may let the records of a batch meet: {reason}. A record by itself would find there what was seen of others. "
                "Make it a function of its inputs, or take method='naive'."
            )
        with eager(self._compiled):
            check_alone(self.model, self.loss, batch.x, batch.y, reason)
        self.alone, self._alone_with = reason, state_of(self._untrained)
        self._left, self._pause = self._pause - 1, min(2 * self._pause, _PAUSE)
        warnings.warn(
            f"{type(self.model).__name__} or its loss may let the records of a batch meet: {reason}. So each record is taken by "
            "itself, as method='naive' does: the same gradients, more slowly.",
            LipdpNotice,
            stacklevel=5,
        )

    def _stays_alone(self) -> bool:
        """Whether the records of this batch are taken one by one, as those before were.

        What a model does with its records stays so. What ran beside it may have been there by chance (a server that started, a
        download that ended): the next batch is tried together again, and where that fails the second, fourth, … behind it.
        """
        if self.alone is not None and BESIDE in self.alone.what:
            self._left -= 1
            self.alone = self.alone if self._left >= 0 else None
        return self.alone is not None

    def _groups_for(self, max_norm: MaxNorm) -> tuple[Group, ...]:
        """The groups with these norms; those of numbers that stay the same are made once."""
        if self._grouped is not None and type(max_norm) is float and max_norm == self._grouped[0]:
            return self._grouped[1]
        groups = clipping_groups(self._parameters, max_norm, self.style, self.groups)
        self._grouped = (max_norm, groups) if type(max_norm) is float else None
        return groups

    def _look(self, number: int) -> bool:
        """At the model, once for a batch: what was learned of it stands until something about it changes. Whether it has."""
        new = number != self._number
        if new:
            check_supported(self.model)
            self._grouped, self._compiled = None, is_compiled(self.model)
            self._parameters = trainable(self.model)
            self._layers = trained_layers(self.model)
            self._untrained = untrained_tensors(self.model, self.loss)
            self._checked.clear()
            self._known = known_before(self.model, self.loss)
            self.alone = None
            self._number = number
        if self.alone is not None and self._alone_with != state_of(self._untrained):
            self.alone = None
        return new

    def _verify(self, x: Inputs, y: torch.Tensor) -> None:
        """The self-check, once for a shape of batch."""
        kind = kind_of(x), kind_of(y), rows_of(x)
        if (*kind, state_of(self._untrained), generation(self.model)) in self._checked:
            return
        try:
            if verify_once(self.model, self.loss, x, y):
                self._checked.add((*kind, state_of(self._untrained), generation(self.model)))
        finally:
            self._know_again()

    def _know_again(self) -> None:
        """What the model has come to hold while it ran: tables of its own, or something of the batch."""
        before, self._known = self._known, known_before(self.model, self.loss)
        distrust(before, self._known)

    def _state(self) -> Hashable:
        # Groups by their members only: their C_g are an input.
        number = self._watched() if is_recording() else self._number
        return number, self._structure, tuple(group.parameters for group in self._made_for)

    def _looped(self, method: str, batch: Batch, groups: tuple[Group, ...], bounds: torch.Tensor) -> _Computed:
        loops = Loops(self.model, self.loss, self._parameters, groups, bounds, self.clip, self.stability, self.copies)
        with eager(self._compiled):
            if method == "multiloss":
                self._verify(batch.x, batch.y)
                layouts = layouts_of(self.model, batch.x)
                loops.answering = layouts is None or layouts.answering
                loops.known = self._known
            loops.kept = self._kept if method == "naive" else None
            with self._taken_back(batch.x):
                sums, norms, factors = getattr(loops, method)(batch.x, batch.y, batch.keep)
        return _Computed(sums, norms, factors, torch.zeros((), dtype=torch.bool))

    @contextmanager
    def _taken_back(self, x: Inputs) -> Iterator[None]:
        """Of a pass that fails nothing stays of what the model has put somewhere: a record that is taken alone would find it.

        While a recording is made no number can be read, and none is kept.
        """
        if is_capturing(device_of(x)):
            yield
            return
        if self._before is None or not self._before.is_current():
            self._before = Before(self.model, self.loss)
        try:
            yield
        except BaseException:
            self._before.put_back()
            raise

    def _kept(self) -> Hashable:
        """The settings, and the bytes of all that is not trained, large tensors too."""
        return self._watched(), state_of(self._untrained)

    def _stages(self, *tensors: torch.Tensor, clean: bool = False) -> Staged[_Computed]:
        """One pass over the leaves of the inputs, targets, mask and bounds; nothing is read from the device once it is verified.

        In two stages: whether a gradient is not finite is yielded before the sums are computed, so that it can be read meanwhile.
        ``clean``: examples without a finite gradient are left out.
        """
        *parts, y, keep, bounds = tensors
        x, device = rebuilt(parts, self._structure), parts[0].device

        def shown() -> dict[str, Contribution]:
            self._verify(x, y)
            return shown_gradients(self.model, self.loss, x, y, self.copies, self._layers, self._known)

        with eager(self._compiled):
            with self._taken_back(x):
                contributions = seeing_all(self.model, x, shown)
            form: Form = "gram" if self.method == "ghost" else self.form
            squares = squared_norms(contributions, device, form, as_released=True)
            norms = group_norms(squares, self._made_for, len(keep), device)
            factors = clip_factors(norms, bounds.to(norms.dtype), keep, self.clip, self.stability)
            finite = torch.isfinite(norms)
            spoiled = ~finite.all()
            yield spoiled
            if clean:
                dropped = ~finite.all(1)
                contributions = {name: part.without(dropped) for name, part in contributions.items()}
            return _Computed(self._weighted_sums(contributions, factors), norms, factors, spoiled)

    def _weighted_sums(self, contributions: dict[str, Contribution], factors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Uses up the contributions: what only one of them holds is free for the next sum."""
        sums = {}
        number = {name: k for k, group in enumerate(self._made_for) for name in group.parameters}
        with torch.no_grad(), no_autocast(factors.device):
            for name, parameter in self._parameters.items():
                part = contributions.pop(name, None)  # None: the parameter does not reach the loss
                sums[name] = zeros(parameter) if part is None else part.weighted_sum(factors[:, number[name]]).to(wide(parameter))
        return sums

    def repair(self, batch: Batch, groups: tuple[Group, ...], bounds: torch.Tensor) -> _Computed:
        """The batch again, for one that holds examples whose gradients are not finite: they are left out.

        That takes more memory than the batch did. Where there is none, it is done in halves.
        """
        self._made_for = groups
        try:
            return self._repair(batch, bounds)
        except torch.OutOfMemoryError:
            if len(batch.keep) < 2:
                raise
        gc.collect()  # only here can the tensors of the attempt go: the exception held on to them
        middle = len(batch.keep) // 2
        halves = part_of(batch, 0, middle, self.copies), part_of(batch, middle, len(batch.keep) - middle, self.copies)
        one, other = (self.repair(half, groups, bounds) for half in halves)
        sums = {name: total + other.sums[name] for name, total in one.sums.items()}
        return _Computed(sums, torch.cat([one.norms, other.norms]), torch.cat([one.factors, other.factors]), one.spoiled)

    def _repair(self, batch: Batch, bounds: torch.Tensor) -> _Computed:
        parts, self._structure = flattened(batch.x)
        stages = self._stages(*parts, batch.y, batch.keep, bounds, clean=True)
        next(stages)
        return rest_of(stages)


@dataclass(frozen=True)
class Pending:
    """A batch that is being clipped; of one in parts, the last part.

    Attributes:
        clipper: what does it, and does it again where that is needed.
        groups: of parameters, with their C_g.
        batch: inputs, targets and which examples count.
        bounds: C_g (groups,), on the device.
        computed: sums, norms and factors; not to be used before ``flag`` is read.
        flag: whether some gradient is not finite, so that it has to be done again.
        before: the parts that are done.
    """

    clipper: Clipper
    groups: tuple[Group, ...]
    batch: Batch
    bounds: torch.Tensor
    computed: _Computed
    flag: Flag
    before: list[Clipped] = field(default_factory=list)

    @property
    def fine(self) -> torch.Tensor | bool:
        """Whether all gradients are finite; on a GPU it may still be computed."""
        return True if self.flag.sent is None else ~self.flag.sent

    @uncompiled
    def expected(self) -> Clipped:
        """What it is if :attr:`fine`, without waiting. Good until the clipper begins with another batch."""
        return self._with(self.computed)

    @uncompiled
    def finish(self) -> Clipped:
        """Wait for it. Sums that an example without a finite gradient has spoiled are computed again, without it."""
        return self._with(self.clipper.repair(self.batch, self.groups, self.bounds) if self.flag.read() else self.computed)

    def _with(self, computed: _Computed) -> Clipped:
        parts = [*self.before, Clipped(*computed[:3], self.groups, self.batch.keep, self.bounds)]
        return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[Clipped]) -> Clipped:
    """What clipping them at once would have given."""
    sums = {name: total.clone() for name, total in parts[0].sums.items()}
    for part in parts[1:]:
        torch._foreach_add_(list(sums.values()), [part.sums[name] for name in sums])
    norms, factors, kept = (torch.cat([getattr(part, name) for part in parts]) for name in ("norms", "factors", "kept"))
    return replace(parts[0], sums=sums, norms=norms, factors=factors, kept=kept)


def squared_norms(
    contributions: Mapping[str, Contribution], device: torch.device, form: Form, *, as_released: bool = False
) -> dict[str, torch.Tensor]:
    """(batch,) for each parameter that reaches the loss.

    ``as_released``: of the gradients as weighted sums of the contributions have them, not as a backward pass might.
    """
    with torch.no_grad(), no_autocast(device):
        return {
            name: part.squared_norms_as_released(form) if as_released else part.squared_norms(form)
            for name, part in contributions.items()
        }


def group_norms(squares: Mapping[str, torch.Tensor], groups: Sequence[Group], batch: int, device: torch.device) -> torch.Tensor:
    """(batch, groups): squared norms by parameter, added up group by group."""
    with torch.no_grad():
        if not squares:
            like = torch.empty(0, device=device)
            return torch.zeros(batch, len(groups), device=device, dtype=wide(like))
        if len(groups) == 1:
            return torch.stack(list(squares.values())).sum(0).sqrt()[:, None]
        like = next(iter(squares.values()))
        columns = []
        for group in groups:
            parts = [squares[name] for name in group.parameters if name in squares]
            columns.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(like))
        return torch.stack(columns, 1).sqrt()
