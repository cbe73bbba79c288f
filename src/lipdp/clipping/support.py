"""What clipping can do with a model, layer by layer, before anything is trained: what is fast, what is slow, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lipdp.clipping.adoption import check_supported, place_of_gradients, refusal, trained_layers
from lipdp.clipping.batch import eager, is_compiled, trainable
from lipdp.clipping.checking import checking
from lipdp.clipping.clipper import shown_gradients
from lipdp.clipping.fallback import own_parameters
from lipdp.clipping.layouts import Layouts, layouts_of
from lipdp.clipping.looking import look_at
from lipdp.clipping.past import NotApartError
from lipdp.clipping.restored import left_as_it_was
from lipdp.clipping.verify import check_alone, seeing_all, verify_once
from lipdp.errors import LipdpError, UnsupportedError
from lipdp.inputs import Inputs, plain
from lipdp.program.dtypes import Types

Speed = Literal["fast", "slow", "refused"]
Apart = Literal["proved", "alone", ""]


@dataclass(frozen=True)
class LayerSupport:
    """One layer with parameters to train.

    Attributes:
        layer: its name.
        kind: its class.
        parameters: how many numbers it trains itself.
        speed: "fast": norms from what the layer sees, nothing materialised; "slow": a module is evaluated again for each example,
            and batch × parameters numbers are held; "refused".
        note: why, and what to do about it.
    """

    layer: str
    kind: str
    parameters: int
    speed: Speed
    note: str = ""


@dataclass(frozen=True)
class Support:
    """What :func:`support` found; printed, it is a table.

    Attributes:
        layers: one row for each layer with trainable parameters, and for each that is refused.
        objection: what the self-check says of the model as a whole; empty where it has none, or was not asked.
        apart: how it is known that no record's gradient depends on others: "proved": every operation of a pass keeps them apart
            (:mod:`lipdp.clipping.follow`), and every pass is followed; "alone": that can't be told, so each record is taken by
            itself, slowly; "" where no batch was given to look at.
        meeting: where records may meet, if they may.
    """

    layers: tuple[LayerSupport, ...]
    objection: str = ""
    apart: Apart = ""
    meeting: str = ""

    @property
    def works(self) -> bool:
        """Whether nothing is refused."""
        return not self.objection and all(row.speed != "refused" for row in self.layers)

    def __str__(self) -> str:
        cells = [("layer", "class", "parameters", "", "note")]
        cells += [(row.layer or "(the model)", row.kind, f"{row.parameters:,}", row.speed, row.note) for row in self.layers]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]).rstrip() for line in cells]
        lines.insert(1, "─" * min(120, max(map(len, lines))))
        said = {
            "proved": "Records are kept apart: proved, operation by operation.",
            "alone": f"Records may meet: {self.meeting}. They are taken one by one.",
            "": "",
        }
        return "\n".join([*lines, *(f"\n{part}" for part in (said[self.apart], self.objection) if part)])


def support(
    model: torch.nn.Module,
    x: Inputs | None = None,
    y: torch.Tensor | None = None,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
) -> Support:
    """What clipping methods can do with a model, layer by layer.

    By the model alone it says which layers have a rule. With a few examples ``x`` the model is run, and it is seen where the
    examples are in what every layer gets; with targets ``y`` and a ``loss`` too, all self-checks of the first step are made, and a
    pass is followed, operation by operation. No input is made up for the model: one that it can't take would say nothing of it.

    Args:
        model: the model, in the mode it will be trained in.
        x: inputs of a few examples.
        y: their targets.
        loss: one value per example.

    Example:
        >>> print(support(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))))  # doctest: +ELLIPSIS
        layer  class        parameters           note
        ─...
        0      Linear       16          fast
        1      BatchNorm1d  8           refused  it normalises by the statistics of the batch, ...
    """
    trainable(model)
    layouts, objection, meeting = None, "", None
    refused = {name: why for name, module in model.named_modules() if (why := refusal(module)) is not None}
    if x is not None and not refused:
        layouts, objection, meeting = _looked_at(model, Types(model, loss).inputs(plain(x)), y, loss)
    rows = [_row(model, name, module, layouts, refused.pop(name, None)) for name, module in trained_layers(model).layers]
    rows += [LayerSupport(name, type(model.get_submodule(name)).__name__, 0, "refused", why) for name, why in refused.items()]
    apart: Apart = "" if meeting is None else "alone" if meeting else "proved"
    return Support(tuple(rows), objection, apart, meeting or "")


_TOGETHER = (
    "taken together, each followed through every operation of every pass, which proves that no other has a part in its gradient; "
    "where that can't be proved, each is taken alone, more slowly, and a notice says where (lipdp.clipping.support tells it of "
    "some records, engine.apart of those of a step)"
)
_NAMED = 4  # layers


def planned_notes(model: torch.nn.Module, method: str) -> tuple[tuple[str, str], ...]:
    """(what, how its records are kept apart by a clipping method), as far as the model alone tells it."""
    if method == "naive":
        return (("records", "each is taken alone, in a pass of its own"),)
    slow = [] if method == "multiloss" else [row for row in support(model).layers if row.speed == "slow"]
    names = [f"{row.layer or 'the model'} ({row.kind})" for row in slow[:_NAMED]]
    more = [f"{len(slow) - _NAMED} more"] if len(slow) > _NAMED else []
    again = f"evaluated again for each record, having no norm rule: {', '.join([*names, *more])}"
    return (("records", _TOGETHER), *([("layers", again)] if slow else []))


def _looked_at(model: torch.nn.Module, x: Any, y: torch.Tensor | None, loss: Any) -> tuple[Layouts | None, str, str | None]:
    """Layouts, what is said against the model, and where records may meet (``None``: it was not asked)."""
    try:
        with eager(is_compiled(model)), left_as_it_was(model, loss):
            check_supported(model)
            if y is None or loss is None:
                with checking(model, next(iter(model.parameters())).device):
                    return look_at(model, x), "", None
            targets = Types(model, loss).targets(y)
            try:
                verify_once(model, loss, x, targets)
                with checking(model, next(iter(model.parameters())).device):
                    seeing_all(model, x, lambda: shown_gradients(model, loss, x, targets))
            except NotApartError as error:
                check_alone(model, loss, x, targets, error.reason)
                return layouts_of(model, x), "", str(error.reason)
    except UnsupportedError as error:
        return layouts_of(model, x), str(error), None
    except LipdpError as error:
        return None, str(error), None
    return layouts_of(model, x), "", ""


def _row(model: torch.nn.Module, name: str, module: torch.nn.Module, layouts: Layouts | None, refused: str | None) -> LayerSupport:
    own = sum(p.numel() for p in own_parameters(module).values() if p.requires_grad)
    kind = type(module).__name__
    if refused is not None:
        return LayerSupport(name, kind, own, "refused", refused)
    around = place_of_gradients(model, name, module, layouts)
    if around is None:
        return LayerSupport(name, kind, own, "fast")
    if around == name:
        note = "it has no norm rule: it is evaluated for each example. Register one (lipdp.clipping.norm_rule) to make it fast."
    else:
        whole = type(model.get_submodule(around)).__name__
        note = f"its examples can't be told apart: '{around or 'the model'}' ({whole}) is evaluated for each example."
    return LayerSupport(name, kind, own, "slow", note)
