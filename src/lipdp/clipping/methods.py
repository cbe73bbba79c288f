"""The methods: five ways to the same clipped gradient.

With g_i the gradient of example i and ν_i = min(1, C/‖g_i‖), all of them return Σ_i ν_i·g_i.

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
releases the very numbers that it has measured.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from lipdp.clipping.batch import (
    Batch,
    Clipped,
    Flag,
    Method,
    bounds_of,
    check_choice,
    check_choices,
    check_style,
    eager,
    prepare,
    trainable,
    uncompiled,
)
from lipdp.clipping.capture import recording
from lipdp.clipping.contribution import Form
from lipdp.clipping.fast import Computed, Fast, group_norms, squared_norms
from lipdp.clipping.loops import Loops, PerExampleLoss, loss_values, zeros
from lipdp.clipping.parts import even_part, joined, notice_parts, part_of
from lipdp.clipping.styles import Clip, Group, MaxNorm, Style, clipping_groups
from lipdp.clipping.supported import check_supported
from lipdp.clipping.verify import verify_once
from lipdp.graphs import Staged, through
from lipdp.program.dtypes import Types

__all__ = ["Clipped", "Clipping", "Method", "Pending", "PendingParts", "clip_batch", "clipped_gradients", "per_example_norms"]


@uncompiled
def per_example_norms(
    model: torch.nn.Module, loss: PerExampleLoss, x: torch.Tensor, y: torch.Tensor, *, form: Form = "auto", copies: int = 1
) -> torch.Tensor:
    """‖g_i‖₂ of each example's whole gradient (batch,), without materialising gradients where that is dearer.

    Example:
        >>> import torch, lipdp.clipping
        >>> model = torch.nn.Linear(3, 2)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> lipdp.clipping.per_example_norms(model, loss, torch.randn(5, 3), torch.zeros(5, dtype=torch.long)).shape
        torch.Size([5])
    """
    check_choice("form", form, Form)
    parameters = trainable(model)
    check_supported(model)
    types = Types(model, loss)
    x, y = types.inputs(x), types.targets(y)
    batch = prepare(x, y, None, copies)
    if len(x) == 0:
        like = next(iter(parameters.values()))
        return like.new_zeros(0, dtype=_own_dtype(like))
    with eager(model):
        verify_once(model, loss, x, batch.y)
        with torch.enable_grad(), recording(model, len(x), copies) as recorded:
            losses = loss_values(loss, model(x), batch.y, copies)
            contributions = recorded.contributions(losses.sum())
        found = squared_norms(contributions, x.device, form)
        norms = group_norms(found, clipping_groups(parameters, 1.0), len(losses), x.device)[:, 0]
        return norms.to(_own_dtype(next(iter(parameters.values()))))


def clipped_gradients(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: torch.Tensor,
    y: torch.Tensor,
    max_norm: MaxNorm,
    method: Method = "bookkeeping",
    *,
    mask: torch.Tensor | None = None,
    clip: Clip = "clip",
    form: Form = "auto",
    style: Style = "flat",
    groups: Sequence[str] | None = None,
    stability: float = 0.01,
    copies: int = 1,
) -> dict[str, torch.Tensor]:
    """Σ_i ν_i·g_i with ν_i = min(1, C/‖g_i‖): the *sum* of the clipped per-example gradients, by parameter name.

    Args:
        model: any model whose examples don't mix; in the mode it is in.
        loss: ``loss(outputs, targets)`` with one value per example (``reduction="none"``).
        x: inputs, batch first; numbers of another type than the model's are converted, token ids stay whole numbers.
        y: targets.
        max_norm: C; or C_g by group (see ``style``). A 0-dimensional tensor stays on its device.
        method: how; every method gives the same result. "bookkeeping" is the fastest.
        mask: (batch,) of booleans; False leaves an example out.
        clip: "clip": ν = min(1, C/‖g‖); "automatic": ν = C/(‖g‖ + γ), which normalises.
        form: how norms of layers with several positions are computed: "materialise", "gram", "auto": the cheaper by a cost
            model, "measure": the quicker, timed once per shape.
        style: "flat": one norm for all parameters; "per_layer", "per_group": one for each group, clipped to C/√groups or to
            the group's own C_g, so the whole has norm ≤ √ΣC_g² (:func:`clipping_groups`).
        groups: for "per_group": prefixes of parameter names.
        stability: γ of "automatic".
        copies: rows that make up one example (augmentation multiplicity): row i·copies+k of ``x`` is copy k of example i, its
            loss is the mean over them, and the gradient of that is clipped. ``y`` has a row for each example or for each row.

    An example whose gradient is not finite is left out. Sums are rounded to the parameters' type; those of :func:`clip_batch` are
    float64, and of thousands of examples should be noised as such.
    """
    found = clip_batch(
        model,
        loss,
        x,
        y,
        max_norm,
        method,
        mask=mask,
        clip=clip,
        form=form,
        style=style,
        groups=groups,
        stability=stability,
        copies=copies,
    ).sums
    own = {name: _own_dtype(p) for name, p in model.named_parameters()}
    return {name: total.to(own[name]) for name, total in found.items()}


def _own_dtype(parameter: torch.Tensor) -> torch.dtype:
    """A parameter's type, float32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def clip_batch(
    model: torch.nn.Module,
    loss: PerExampleLoss,
    x: torch.Tensor,
    y: torch.Tensor,
    max_norm: MaxNorm,
    method: Method = "bookkeeping",
    *,
    mask: torch.Tensor | None = None,
    clip: Clip = "clip",
    form: Form = "auto",
    style: Style = "flat",
    groups: Sequence[str] | None = None,
    stability: float = 0.01,
    copies: int = 1,
) -> Clipped:
    """:func:`clipped_gradients` with the norms and factors behind it, e.g. for adaptive clipping (which must account for them)."""
    clipping = Clipping(model, loss, method, clip=clip, form=form, style=style, groups=groups, stability=stability, copies=copies)
    return clipping(x, y, max_norm, mask=mask)


@dataclass
class Clipping:
    """How a model's gradients are clipped: the settings of :func:`clip_batch`, to be used for one batch after another."""

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
    _most: int | None = field(default=None, init=False, repr=False, compare=False)  # examples that fit into memory, once known

    def __post_init__(self) -> None:
        check_choices(self.method, self.clip, self.form, self.stability)
        self._types = Types(self.model, self.loss)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, max_norm: MaxNorm, *, mask: torch.Tensor | None = None) -> Clipped:
        """The batch, clipped."""
        return self.start(x, y, max_norm, mask=mask).finish()

    @uncompiled
    def start(
        self, x: torch.Tensor, y: torch.Tensor, max_norm: MaxNorm, *, mask: torch.Tensor | None = None
    ) -> Pending | PendingParts:
        """Begin with a batch. On a GPU, there is time for other work (drawing noise) before the result is waited for.

        A batch that does not fit into the GPU's memory is done in parts, and from then on without trying it as a whole first: the
        result is a sum over examples.
        """
        examples = len(x) // max(1, self.copies)
        if self._most is None or examples <= self._most:
            try:
                return self._start(x, y, max_norm, mask)
            except torch.OutOfMemoryError:
                if examples < 2:
                    raise
            gc.collect()  # only here can the tensors of the attempt go: the exception held on to them
            self._most = -(-examples // 2)
            notice_parts(examples, self._most)
        batch, size = prepare(x, y, mask, self.copies), even_part(examples, self._most)
        *first, last = [part_of(batch, start, size, self.copies) for start in range(0, examples, size)]
        done = [self.start(part.x, part.y, max_norm, mask=part.keep).finish() for part in first]
        return PendingParts(done, self.start(last.x, last.y, max_norm, mask=last.keep))

    def _start(self, x: torch.Tensor, y: torch.Tensor, max_norm: MaxNorm, mask: torch.Tensor | None) -> Pending:
        parameters = self._trainable()
        made = clipping_groups(parameters, max_norm, self.style, self.groups)
        check_style(self.method, self.style)
        batch = prepare(self._types.inputs(x), self._types.targets(y), mask, self.copies)
        bounds = bounds_of(made, parameters, x.device)
        if len(x) == 0:
            check_supported(self.model)
            nothing = zeros(next(iter(parameters.values()))).new_zeros(0, len(made))
            sums = {name: zeros(p) for name, p in parameters.items()}
            return Pending(made, batch, bounds, Computed(sums, nothing, nothing, nothing.any()))
        if self.method in ("naive", "multiloss"):
            return Pending(made, batch, bounds, self._loop(batch, bounds, parameters, made))
        form: Form = "gram" if self.method == "ghost" else self.form
        fast = Fast(self.model, self.loss, parameters, made, self.clip, self.stability, form, self.copies)
        flag = Flag()
        return Pending(made, batch, bounds, self._compute(fast, batch, bounds, flag), fast, flag)

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        return trainable(self.model)

    def _loop(
        self, batch: Batch, bounds: torch.Tensor, parameters: Mapping[str, torch.nn.Parameter], made: tuple[Group, ...]
    ) -> Computed:
        check_supported(self.model)
        loops = Loops(self.model, self.loss, parameters, made, bounds, self.clip, self.stability, self.copies)
        with eager(self.model):
            if self.method == "multiloss":
                verify_once(self.model, self.loss, batch.x, batch.y)
            found = (loops.naive if self.method == "naive" else loops.multiloss)(batch.x, batch.y, batch.keep)
        return Computed(*found, torch.zeros((), dtype=torch.bool))

    def _compute(self, fast: Fast, batch: Batch, bounds: torch.Tensor, flag: Flag) -> Computed:
        return through(self._stages(fast, batch, bounds), flag)

    def _stages(self, fast: Fast, batch: Batch, bounds: torch.Tensor) -> Staged[Computed]:
        """Checked, then computed; nothing is read from the device once the model is verified."""
        check_supported(self.model)
        with eager(self.model):
            verify_once(self.model, self.loss, batch.x, batch.y)
            return (yield from fast.compute(batch.x, batch.y, batch.keep, bounds))


@dataclass
class Pending:
    """A batch that is being clipped."""

    groups: tuple[Group, ...]
    batch: Batch
    bounds: torch.Tensor
    computed: Computed
    fast: Fast | None = None  # what computed it, if it may have to be done again
    flag: Flag = field(default_factory=Flag)  # whether it has to

    @uncompiled
    def finish(self) -> Clipped:
        """Wait for it. Sums that an example without a finite gradient has spoiled are computed again, without it."""
        if self.fast is not None and self.flag.read():
            batch = self.batch
            with eager(self.fast.model):
                self.computed = self.fast.repair(batch.x, batch.y, batch.keep, self.bounds)
        sums, norms, factors, _ = self.computed
        return Clipped(sums, norms, factors, self.groups, self.batch.keep, self.bounds)


@dataclass
class PendingParts:
    """A batch that is clipped in parts, of which the last is still being clipped."""

    done: list[Clipped]
    last: Pending | PendingParts

    def finish(self) -> Clipped:
        """Wait for it."""
        return joined([*self.done, self.last.finish()])
