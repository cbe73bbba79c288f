"""A self-check before norms are trusted: on a few examples, are they what the naive loop finds? And does each stand alone?

Norms are computed from what layers show. A parameter that is used behind its layer's back (``h @ self.embedding.weight.T``), a
dimension that is not the batch, examples that influence each other: each would make the norms too small without a sound, and
the guarantee with them. All of them show up here, at the cost of a few passes, once per model. On a few examples:

* in evaluation mode, each example's gradient is that of the example alone;
* in training mode (if the model is in it), with the same random numbers: each example's gradient is that of its own loss, it
  stays the same when the *other* examples are replaced, and no buffer keeps something of the data;
* both again with perturbed parameters: a product with a matrix of zeros (an adapter at its start) would hide what it multiplies.

This shows that gradients are the right ones, on these examples. That no record depends on another is not left to examples: every
pass is followed, operation by operation (:mod:`lipdp.clipping.follow`).
"""

from __future__ import annotations

import math
import secrets
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.nn import Parameter

from lipdp._checks import named
from lipdp._numerics import HALF
from lipdp.clipping.adoption import take_larger
from lipdp.clipping.checking import (
    checking,
    fitting,
    in_double_if_refused,
    made_up,
    others_like,
    put_back,
    same_randomness,
)
from lipdp.clipping.contribution import Contribution
from lipdp.clipping.follow import follow
from lipdp.clipping.kept import known_before
from lipdp.clipping.layouts import HiddenGradientError, UnseenLayerError, generation, layouts_of, renew
from lipdp.clipping.looking import look_at
from lipdp.clipping.loops import PerExampleLoss, loss_values, public_record
from lipdp.clipping.past import Reason
from lipdp.clipping.record import Recording, recording
from lipdp.clipping.restored import left_as_it_was
from lipdp.digest import Tag, same_bits
from lipdp.errors import UnsupportedError
from lipdp.fingerprint import fingerprint, nothing_kept, reachable_tensors
from lipdp.inputs import Inputs, call, device_of, joined, leaves, mapped, named_leaves, owned, rows_of, select

T = TypeVar("T")
_EXAMPLES = 3
_COMPARED, _TOLERANCE = 16, 1e-2  # losses of this many records, alone and together
_KEY = secrets.token_bytes(32)  # of this process: nobody can aim at a collision
_KNOWN = 64  # verdicts that are kept of a model
_verified: weakref.WeakKeyDictionary[torch.nn.Module, set[Any]] = weakref.WeakKeyDictionary()
# Numbers of a parameter's few gradients that are held rather than made anew for each comparison.
_HELD = 2**18


def untrained_tensors(model: torch.nn.Module, loss: PerExampleLoss) -> list[torch.Tensor]:
    """What the two may read besides the weights that are trained: buffers, frozen parameters, tensors in attributes."""
    return [tensor for tensor in reachable_tensors(model, loss) if not isinstance(tensor, Parameter) or not tensor.requires_grad]


def state_of(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Stands for what is in the tensors: on a processor their bytes, which writing through ``.data`` changes and no version counts;
    elsewhere how often they were written to."""
    if not tensors:
        return None
    tag = Tag(_KEY)
    for tensor in tensors:
        if tensor.device.type == "cpu" and not tensor.is_quantized:
            tag.update(tensor)
    return tag.finish(), tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _signature(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> Any:
    """Whatever a verdict rests on but the values of weights: settings, hooks, functions, closures, state, data, layouts."""
    state = state_of(untrained_tensors(model, loss))
    return kind_of(x), kind_of(y), fingerprint(model, loss), state, generation(model)


def kind_of(x: Inputs) -> Hashable:
    """What kind of data: names, shapes of an example and types."""
    if isinstance(x, torch.Tensor):
        return x.shape[1:], x.dtype
    return tuple((name, leaf.shape[1:], leaf.dtype) for name, leaf in named_leaves(x))


def verify_once(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> bool:
    """:func:`verify`, unless this was done for the same model, loss and kind of data.

    Whether it is verified now. A batch in which no example has a gradient shows nothing, and nothing of it is released: the next
    one is looked at.
    """
    known = _verified.setdefault(model, set())
    if len(known) > _KNOWN:
        known.clear()
    if _signature(model, loss, x, y) in known:
        return True
    with left_as_it_was(model, loss):  # a scale, say, of the first records: the pass itself would not show it
        telling = telling_rows(model, loss, x, y)
        # Of a batch in which no example has a gradient, what is refused is refused, and no more is learned from it.
        found = verify(model, loss, x, y, telling or range(min(_EXAMPLES, rows_of(x))))
    if not telling:
        return False
    if not found:
        raise UnsupportedError(
            "examples of this batch have gradients, and by themselves they have none that is finite, so whether each is what it "
            "would be alone can't be told: does a layer normalise over the batch? Use layers that treat examples alone, or "
            "method='naive', which takes every example by itself."
        )
    known.add(_signature(model, loss, x, y))  # as it is afterwards: to look at a model, its state is written to and put back
    return True


def check_alone(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor, reason: Reason) -> None:
    """Raise if records have other losses in this batch than alone: to take them one by one would train another model.

    For those that may meet, but do not here, it is the same model, and private whatever later batches hold. In training mode only a
    model whose losses are not random can be asked.
    """
    rows = torch.arange(rows_of(x))[:: max(1, rows_of(x) // _COMPARED)]

    def losses(part: torch.Tensor | slice) -> torch.Tensor:
        try:
            inputs, targets = owned(select((x, y), part))
            with left_as_it_was(model, loss, weights=True):
                return loss_values(loss, call(model, fitting(model, inputs)), targets).detach()
        finally:
            put_back(buffers)

    with checking(model, device_of(x)):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        for training in (True, False):
            if not training:
                model.eval()
            together = losses(slice(None))
            if training and not torch.equal(together, losses(slice(None))):
                continue
            try:
                alone = torch.cat([losses(row.reshape(1)) for row in rows])
            except Exception as error:  # whatever it raises
                raise UnsupportedError(
                    f"records of a batch may meet, {reason}, and the model can't be evaluated on one by itself: it mixes the "
                    f"examples. Use layers that treat examples alone (GroupNorm, LayerNorm). It raised {named(error)}"
                ) from error
            together = together[rows.to(together.device)]
            off = (together - alone).abs() > _TOLERANCE * (together.abs() + alone.abs()) + 1e-6
            if bool((off & torch.isfinite(together)).any()):
                raise UnsupportedError(
                    f"the loss of an example in its batch of {rows_of(x)} is another than alone: something mixes the examples, "
                    f"{reason}. Use layers that treat examples alone (GroupNorm, LayerNorm)."
                )


def show_public(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> None:
    """A made-up record passes through before any other does: whoever keeps the first one it sees (a scale) has nobody's.

    What the model can't take is no concern here.
    """
    with checking(model, device_of(x)), nothing_kept(model), suppress(Exception):
        inputs, targets = public_record(x, y)
        loss_values(loss, call(model, fitting(model, inputs)), targets)


def seeing_all(model: torch.nn.Module, x: Inputs, compute: Callable[[], T]) -> T:
    """``compute()``; where that calls a layer which was not called when the model was looked at, again without its word.

    The few examples of then had no use for it (an expert that none of them is sent to), so nothing is known of its dimensions. The
    gradients of its parameters are those of a module around it from now on, which is evaluated for each example.
    """
    while True:
        try:
            return compute()
        except UnseenLayerError as error:
            layouts = layouts_of(model, x)
            if layouts is None or not take_larger(model, error.parameters, layouts):
                raise
            renew(model)


def forget(model: torch.nn.Module) -> None:
    """No verdict about this model stands any more."""
    _verified.pop(model, None)


def verify(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor, telling: Sequence[int] | None = None) -> bool:
    """Raise if per-example gradients are not what they should be. False if nothing could be compared (nothing is finite).

    The model is the same afterwards: parameters, buffers, modes, random numbers. ``telling``: :func:`telling_rows`, if known.
    """
    rows = telling_rows(model, loss, x, y) if telling is None else telling
    few, targets = select(x, torch.tensor(rows, dtype=torch.long)), select(y, torch.tensor(rows, dtype=torch.long))
    if not rows:
        return False
    with checking(model, device_of(x)):
        layouts = look_at(model, fitting(model, x))
    first: HiddenGradientError | None = None
    while True:
        try:
            return in_double_if_refused(_verify, model, loss, few, targets)
        except Exception as error:
            if layouts.answering and layouts.answered:  # perhaps by an answer that these examples would not give
                layouts.answering = False
                renew(model)
                continue
            if not isinstance(error, HiddenGradientError):
                raise
            first = first or error
            if not take_larger(model, error.parameters, layouts):
                raise first from None
            renew(model)


def _verify(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> bool:
    inputs, targets = _few(x, y)
    inputs = fitting(model, inputs)
    check = _Check(model, loss, inputs, targets, others_like(inputs))
    compared = False
    with checking(model, device_of(x)):
        for perturbed in (False, True):
            if perturbed:
                _perturb(model)
            if any(module.training for module in model.modules()):
                compared = check.in_training() or compared
            modes = [(module, module.training) for module in model.modules()]
            model.eval()
            compared = check.alone() or compared
            for module, mode in modes:
                module.training = mode
    return compared


def telling_rows(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> list[int]:
    """Up to three examples that have a finite gradient, not zero. None: no example of the batch has one.

    Most often the first three do. Where labels are left out or numbers are missing they may not, and would show nothing: then the
    others are divided in halves. Losses are added with random weights, so that a sum of gradients is not zero by chance. Of a model
    whose gradients can't be taken like this, the first three are taken; where these show nothing, it is refused.
    """
    try:
        return _search_telling(model, loss, x, y)
    except RuntimeError:
        return list(range(min(_EXAMPLES, rows_of(x))))


def _search_telling(model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor) -> list[int]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    with checking(model, device_of(x)):
        same_randomness()
        inputs = fitting(model, x)
        with follow(
            inputs, y, known_before(model, loss), answering=False, strict=False
        ).following():  # for tables that are made once, and kept
            values = loss_values(loss, call(model, inputs), y).detach()
        finite = torch.nonzero(torch.isfinite(values)).flatten().cpu()
        if not len(finite):
            return []
        same_randomness()  # without the others: 0·NaN is NaN
        losses = loss_values(loss, call(model, fitting(model, select(x, finite))), select(y, finite))
        weights = torch.rand(len(losses), generator=torch.Generator().manual_seed(0)).to(losses) + 0.5

        def largest(rows: list[int]) -> float:
            total = (losses[rows] * weights[rows]).sum()
            found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
            sizes = [g.detach().abs().max() for g in found if g is not None and g.numel()]
            return float(torch.stack([size.to(losses.device, torch.float64) for size in sizes]).sum()) if sizes else 0.0

        def search(rows: list[int], wanted: int) -> list[int]:
            if not rows or wanted <= 0 or (size := largest(rows)) == 0:
                return []
            if len(rows) == 1:
                return rows if math.isfinite(size) else []
            left = search(rows[: len(rows) // 2], wanted)
            return left + search(rows[len(rows) // 2 :], wanted - len(left))

        everyone = list(range(len(losses)))
        telling = [row for row in everyone[:_EXAMPLES] if 0 < largest([row]) < math.inf]
        telling += search(everyone[_EXAMPLES:], _EXAMPLES - len(telling))
        if not telling and largest(everyone) != 0:  # gradients that are not finite hide those that are
            telling = everyone[:_EXAMPLES]
    return [int(finite[row]) for row in telling]


def _few(x: Inputs, y: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """A few examples; if there is one only, or they are all the same, one is made up, so that mixing shows."""
    if all(bool((leaf == leaf[:1]).all()) for leaf in leaves(x)):
        return joined([x, made_up(select(x, slice(0, 1)))]), torch.cat([y, y[:1]])
    return x, y


def _perturb(model: torch.nn.Module) -> None:
    """Every trainable parameter a little off, none zero; nothing is written in place, so the old values can be put back."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            fan = parameter[0].numel() if parameter.ndim > 1 else 16
            typical = float(parameter.detach().double().square().mean().sqrt()) if parameter.numel() else 0.0
            size = 0.3 * max(min(typical, 1.0), 1 / math.sqrt(max(fan, 1)))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.device, parameter.dtype)
            parameter.data = parameter.detach() + size * noise


class _Check:
    """The comparisons, on a few examples."""

    def __init__(self, model: torch.nn.Module, loss: PerExampleLoss, x: Inputs, y: torch.Tensor, others: Inputs) -> None:
        self.model, self.loss, self.x, self.y, self.others = model, loss, x, y, others
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @contextmanager
    def _recorded(self, x: Inputs) -> Iterator[tuple[Recording, torch.Tensor]]:
        """A pass as it is made in a step, questions answered, and its losses."""
        layouts = layouts_of(self.model, x)
        answering = layouts is None or layouts.answering
        following = follow(x, self.y, known_before(self.model, self.loss), answering=answering, strict=False)
        with recording(self.model, rows_of(x), layouts=layouts) as recorded:
            try:
                with following.following():
                    losses = loss_values(self.loss, call(self.model, x), self.y)
            finally:
                if layouts is not None:
                    layouts.answered |= following.answered
            yield recorded, losses

    def _shown(self, x: Inputs) -> _Shown:
        """Gradients as layers show them."""
        with self._recorded(x) as (recorded, losses):
            return _Shown(recorded.contributions(losses.sum()))

    def _gradient(self, value: torch.Tensor, retain_graph: bool = False) -> dict[str, torch.Tensor]:
        found = torch.autograd.grad(value, list(self.parameters.values()), retain_graph=retain_graph, allow_unused=True)
        return {name: g for name, g in zip(self.parameters, found, strict=True) if g is not None}

    def _compare(self, shown: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], message: str) -> bool:
        compared, different = _compare(shown, own)
        if different:
            raise HiddenGradientError(message.format(name=different[0]), [self.parameters[name] for name in different])
        return compared

    def alone(self) -> bool:
        """Each example's gradient is that of the example alone. Whether anything finite and nonzero was compared."""
        shown = self._shown(self.x)
        compared = False
        for i in range(rows_of(self.x)):
            one, target = owned(select((self.x, self.y), slice(i, i + 1)))
            value = loss_values(self.loss, call(self.model, one), target).sum()
            compared = self._compare(shown.of(i), self._gradient(value), _ALONE) or compared
        return compared

    def in_training(self) -> bool:
        """In training mode, with the same random numbers throughout. Whether anything was compared."""
        compared = False
        named = list(self.model.named_buffers())
        buffers = [(buffer, buffer.clone()) for _, buffer in named]
        changed = mapped(lambda own, other: torch.cat([own[:1], other[1:]]), self.x, self.others)
        seen, states = [], []
        for x in (self.x, changed):
            same_randomness()
            with self._recorded(x) as (recorded, losses):
                shown = _Shown(recorded.contributions(losses.sum(), retain_graph=True))
                for i in range(rows_of(x)):
                    compared = self._compare(shown.of(i), self._gradient(losses[i], retain_graph=True), _HIDDEN) or compared
            seen.append(shown)
            states.append([buffer.clone() for buffer, _ in buffers])
            put_back(buffers)
        _, different = _compare(seen[0].of(0), seen[1].of(0))
        if different:
            raise UnsupportedError(_MIXED.format(name=different[0]))
        for (name, _), one, other in zip(named, *states, strict=True):
            numbers = [part for part in (one, other) if part.layout == torch.strided and not part.is_quantized]
            if not same_bits(one, other) and all(bool(torch.isfinite(part).all()) for part in numbers):
                raise UnsupportedError(
                    f"buffer '{name}' is updated from the data in the forward pass, without any privacy. Freeze it, or put its "
                    "module in evaluation mode."
                )
        return compared


class _Shown:
    """The gradients of a few examples as layers show them, in factored form: of a large model, they are not held themselves."""

    def __init__(self, parts: Mapping[str, Contribution]) -> None:
        self.parts = parts
        self._held: dict[str, torch.Tensor] = {}

    def of(self, example: int) -> _OfExample:
        """By parameter name."""
        return _OfExample(self, example)

    def one(self, name: str, example: int) -> torch.Tensor:
        """A parameter's gradient: made anew where it is large."""
        found = self._held.get(name)
        if found is None:
            found = self.parts[name].materialise()
            if found.numel() > _HELD:
                return found[example].clone()  # lets the others go
            self._held[name] = found
        return found[example]


class _OfExample(Mapping[str, torch.Tensor]):
    """The gradients of one example, each made when it is asked for."""

    def __init__(self, shown: _Shown, example: int) -> None:
        self._shown, self._example = shown, example

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._shown.parts:
            raise KeyError(name)
        return self._shown.one(name, self._example)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown.parts)

    def __len__(self) -> int:
        return len(self._shown.parts)


_HIDDEN = (
    "the per-example gradient of '{name}' as seen from its layer differs from that of the example's own loss. Either the parameter "
    "is also used outside its own layer's forward (e.g. a tied weight used by hand: call the layer instead), or some layer mixes "
    "the examples of a batch, or its first dimension is not the batch (use batch_first=True)."
)
_ALONE = _HIDDEN.replace("the example's own loss", "the example alone")
_MIXED = (
    "the per-example gradient of '{name}' changes in training mode when the other examples of the batch are replaced: some layer "
    "mixes the examples (batch statistics?). Use layers that treat examples alone (GroupNorm, LayerNorm), or put it in evaluation "
    "mode."
)


def _compare(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> tuple[bool, list[str]]:
    """Where b is not a, parameter by parameter, relative to its gradient and to a hundredth of the whole.

    And whether anything could be compared: an example without a finite gradient is dropped anyway.
    """
    names = list(dict.fromkeys([*a, *b]))
    if not names:
        return False, []
    measured = [_sizes(a.get(name), b.get(name)) for name in names]
    found: list[list[float]] = torch.stack([sizes for sizes, _ in measured]).tolist()  # the one reading
    if not all(math.isfinite(size) for row in found for size in row[:2]):
        return False, []
    whole = max(math.hypot(*(row[k] for row in found)) for k in (0, 1))
    tolerance = 0.1 if any(half for _, half in measured) else 1e-3
    sizes = zip(names, found, strict=True)
    different = [name for name, (one, other, off) in sizes if off > tolerance * (max(one, other) + 0.01 * whole)]
    return whole > 0, different


def _sizes(one: torch.Tensor | None, other: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """‖one‖, ‖other‖ and that of their difference, in float64 (a gradient that is missing is zero); whether one is coarse."""
    like = one if one is not None else other
    assert like is not None
    x = torch.zeros_like(like, dtype=torch.float64) if one is None else one.detach().double()
    y = torch.zeros_like(like, dtype=torch.float64) if other is None else other.detach().double()
    half = any(part is not None and part.dtype in HALF for part in (one, other))
    return torch.stack([torch.linalg.vector_norm(part) for part in (x, y, x - y)]), half
