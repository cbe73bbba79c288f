"""What an estimator chooses for a table: a private head from public numbers (features, reach, steps), ranges nobody declared.

Rows are brought to norm 1 and the gradient at the outputs is clipped to C, so one record moves the sum of gradients by Δ = C.
All records are in every step (sampling rate 1). In units of Δ/N, T steps at rates η_t carry the weights M = Σ η_t far at most,
and their noise, of multiplier σ = σ₁·√T, adds √(Σ η_t²)·σ/N ≈ M·σ₁/N to each output: whatever T is, the noise of the outputs is
M·σ₁/N, where σ₁ is the noise of one single release. Outputs are fitted to values of size 1, so M = κ·N/σ₁ makes the noise κ of
them: κ = 0.3 for classes, 0.1 for numbers.

Features for classes: the columns themselves beside a kernel of half the width that :func:`kernel_width` says. Features for numbers:
the columns, a kernel of the usual width, and one that is a sum over single columns (of half its usual width), with residuals
clipped to C = 0.1 where classes have 0.3: a target fills little of its declared range, and noise is in proportion to C. What else
was tried, on which tables, is told in docs/history.md and `benchmarks/tables/`.

Momentum leaves M as it is (a step's share of it is η/(1 − β)), and is stable for rates 2(1 + β)/(1 − β) = 38 times as large as
those of plain steps, whose limit is 2 where rows have norm 1. For numbers it is taken where plain steps would go faster than 2;
for classes, whose clipped residuals hold more, faster than 20 at N·ε per output of 1000 and more. Where κ asks for a rate above 30
(much ε), it is 30: faster steps would throw away what was learned.

Tables of categories, and of many columns: a row of m categories has norm √m whatever it says, so bringing rows to norm 1 takes
from the weights what the noise does not take from them; and fitting 0 and 1 by squares whose gradients are clipped takes rare
classes for outliers. A line on the rows as they are, by cross-entropy, every record's gradient clipped to 1, does better on
tables that the estimators are not judged on (AUROC at ε = 1 / 3, one split: celeba's 39 categories 95.3 / 96.2 against 92.3 /
90.9 by a line on the sphere; campaign's 62 columns 83.1 / 85.3 against 81.3 / 80.9; drawn categories 3 points at 400 rows, 1 at
2,000), and worse on small tables of few numbers (yeast, skin). Its 200 steps are on a tenth of the records each, at rates that
add up to 3·N/32: thrice what 20 epochs in batches of 64 at a rate of 0.1 add up to.

**Ranges** that nobody declared are found privately: two quantiles of each column, paid for from a share of ε. Each end is one
exponential mechanism (:func:`lipdp.privacy.private_quantile`), with pure ε of its own; they add up. Nothing being known of a
column's scale, its values are looked at through t = asinh(x/u), u = 1e-6, which is increasing (so a quantile of t is t of a
quantile), and has every scale from u to 1e12 on a public interval of length 83. What the quantiles leave out is covered by widening
the range by a quarter on both sides: values beyond it count as its ends.

Equal values leave a quantile no room: between a thousand zeros there is nothing to choose. So each t is moved by a random amount
of at most 1e-3, drawn for each record by itself (a part in a thousand of the value). Neighbouring datasets stay neighbours, so ε
is the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from lipdp import models, nn
from lipdp._checks import choose
from lipdp._texts import brief, number
from lipdp.errors import LipdpWarning
from lipdp.estimators.base import Choice
from lipdp.estimators.schema import Categorical, Numeric, Schema
from lipdp.privacy import Adjacency, generator, private_quantile
from lipdp.privacy.budget import AnyBudget
from lipdp.training import PrivacyPlan

Method = Literal["auto", "linear", "kernel", "network", "clipping"]
METHODS = ("linear", "kernel", "network", "clipping")

_NOISE = {"linear": 0.1, "network": 0.3}  # κ
_CURVED: dict[str, dict[str, Any]] = {
    "classes": {"noise": 0.3, "width": 0.5, "sums": None},
    "numbers": {"noise": 0.1, "width": 1.0, "sums": 0.2, "clip": 0.1},
}  # κ, width of the kernel in usual ones, width of a kernel of single columns; C
_CLIPPED = {"steps": 200, "clip": 1.0, "share": 0.1, "reach": 3 / 32}  # of "clipping": share of the records in a step; Σ rates ÷ N
_WIDE = 40  # columns: more, and a kernel sees all rows at about the same distance
_STEPS, _CLIP, _FEATURES, _HIDDEN, _MOMENTUM = 100, 0.3, 1000, 64, 0.9
_FEW, _MANY = 100, 1000  # records times ε per output: numbers get a line below; classes may get momentum from there on
_STABLE = 30.0  # the largest rate, on the mean gradient of rows of norm 1: with momentum 38 is the limit
_UNSTABLE = {"classes": 20.0, "numbers": 2.0}  # rate of plain steps, on the mean gradient of rows of norm 1


def choose_method(given: str, *, records: int, outputs: int, epsilon: float, schema: Schema) -> Choice:
    """The method and its settings, from public numbers alone.

    Categories: a kernel of width s sees two rows that differ in m of many categorical columns at a distance of √(2m), so nearly all
    rows are equally far from each other, and nothing carries over from one to the next; the same goes for many columns of
    numbers. A line has a weight for each of them.

    Args:
        given: "auto", or the method that the user wants.
        records: N.
        outputs: classes, or 1.
        epsilon: what is left for training.
        schema: the columns; their kinds count, not their ranges.
    """
    wanted = choose("method", given, ("auto", *METHODS))
    each = records * epsilon / max(1, outputs)
    kind = "classes" if outputs > 1 else "numbers"
    unstable = _UNSTABLE[kind] if outputs == 1 or each >= _MANY else math.inf
    settings = {"steps": _STEPS, "clip": _CLIP, "share": 1.0, "unstable": unstable}
    clipped = {**settings, **_CLIPPED}
    curved = {**settings, **_CURVED[kind]}
    if wanted != "auto":
        return Choice(wanted, "as asked for", {"clipping": clipped, "kernel": curved}.get(wanted, settings))
    categories = sum(isinstance(column, Categorical) for column in schema.columns)
    if outputs > 1 and (2 * categories > len(schema.columns) or len(schema.columns) > _WIDE):
        what = f"{categories} of the {len(schema.columns)} columns are categories"
        return Choice(
            "clipping",
            f"{what if 2 * categories > len(schema.columns) else f'{len(schema.columns)} columns are many'}: a weight for each of "
            "them says more than a kernel, to which all rows are about equally far apart",
            clipped,
        )
    if outputs == 1 and each < _FEW:
        return Choice(
            "linear", f"N·ε is {number(each, 3)}, below {_FEW}: too little for curves, a line is what can be learned", settings
        )
    if 2 * categories > len(schema.columns):
        return Choice("linear", f"{categories} of the {len(schema.columns)} columns are categories: a weight for each", settings)
    return Choice(
        "kernel",
        f"{len(schema.columns)} column{'s' * (len(schema.columns) != 1)}, mostly numbers: fixed public random features beside them "
        "bend the boundary, and cost no more noise than a line",
        curved,
    )


def make_model(choice: Choice, schema: Schema, outputs: int) -> torch.nn.Module:
    """The network of a method: fixed public features of a row, and a head whose gradients are bounded, by proof or by clipping."""
    clip = choice.settings["clip"]
    if choice.method == "clipping":
        line = torch.nn.Linear(schema.width, outputs)
        torch.nn.init.zeros_(line.weight)
        torch.nn.init.zeros_(line.bias)
        return nn.Sequential(nn.BoundedInput((schema.width,), norm=schema.radius), line)
    options: dict[str, Any] = {"radius": schema.radius, "clip": clip}
    if choice.method == "kernel":
        options |= {"fourier": _FEATURES, "scale": choice.settings["width"] * kernel_width(schema), "line": True}
        options["sums"] = choice.settings["sums"]
    elif choice.method == "network":
        options |= {"hidden": (_HIDDEN,), "hidden_clip": clip}
    return models.create("tabular", input_shape=(schema.width,), classes=outputs, **options)


def kernel_width(schema: Schema) -> float:
    """0.4·√(numbers + 2·categories): two different categories are √2 apart, the ends of a range 2, usual numbers less than 1."""
    return 0.4 * math.sqrt(sum(2 if isinstance(column, Categorical) else 1 for column in schema.columns))


def make_optimizer(
    choice: Choice, model: torch.nn.Module, plan: PrivacyPlan
) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler | None]:
    """SGD along half a cosine, whose rates, with what momentum makes of them, add up to κ·N/σ₁ in units of Δ/N.

    For "clipping", at one rate for all steps.
    """
    if choice.method == "clipping":
        return torch.optim.SGD(model.parameters(), lr=choice.settings["reach"] * plan.dataset_size / plan.steps), None
    single = plan.noise_multiplier / math.sqrt(plan.steps)
    noise = choice.settings["noise"] if choice.method == "kernel" else _NOISE[choice.method]
    reach = noise * plan.dataset_size / single
    rate = min(2 * reach / plan.steps, _STABLE * plan.sensitivity)  # half a cosine adds up to half of its start
    momentum = _MOMENTUM if choice.method in ("linear", "kernel") and rate / plan.sensitivity > choice.settings["unstable"] else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * (1 - momentum) / plan.sensitivity, momentum=momentum)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)


_UNIT, _LARGEST = 1e-6, 1e12
_REACH = math.asinh(_LARGEST / _UNIT)
_MOVED = 1e-3
_LOW, _HIGH, _WIDER = 0.1, 0.9, 0.25
_ROUGH = 0.1  # share of the records by which a quantile may be off before it is said


def rank_error(epsilon: float) -> float:
    """By how many records a quantile of pure ε is off, up to one case in twenty.

    The exponential mechanism's utility is the rank (moved by 0.9 at most by a record), so it is below the best one by more than
    2·0.9·(ln(R) + ln 20)/ε with probability 1/20; 1/R, the room at the best rank against all the room, is taken as 1/10,000.
    """
    return 2 * 0.9 * (math.log(10_000) + math.log(20)) / epsilon


def private_ranges(
    columns: Mapping[Any, np.ndarray[Any, Any]],
    epsilon: float,
    *,
    adjacency: Adjacency,
    budget: AnyBudget,
    size: int,
    seed: int | None = None,
) -> dict[Any, Numeric]:
    """A range for each column of numbers, ε-DP together (δ = 0); NaN counts as large.

    Args:
        columns: values by column, one of each for a record.
        epsilon: of all of them together.
        adjacency: which datasets are neighbours.
        budget: the account of the data, charged for each end before it is drawn.
        size: N, public: what the error is compared with, to say beforehand when ranges will be rough.
        seed: what a reproducible fit, which is not private, draws from; by default fresh keys of the operating system.
    """
    if not columns:
        return {}
    each = epsilon / (2 * len(columns))
    off = rank_error(each) / size
    if off > _ROUGH:
        warnings.warn(
            f"{len(columns)} range{'s are' if len(columns) > 1 else ' is'} found from {size} records with ε = {brief(epsilon)}: "
            f"each end may be off by {min(100.0, 100 * off):.0f} % of the records. Declare what is public: schema={{column: (low, "
            "high), …}, target=(low, high) for y; on the command line --schema FILE. That costs no privacy.",
            LipdpWarning,
            stacklevel=4,
        )
    found = {}
    moves = np.random.default_rng(seed)
    for place, (name, values) in enumerate(columns.items()):
        seen = np.arcsinh(np.nan_to_num(values.astype(np.float64), nan=_LARGEST, posinf=_LARGEST, neginf=-_LARGEST) / _UNIT)
        seen = seen + moves.uniform(-_MOVED, _MOVED, len(seen))
        ends = []
        for share in (_LOW, _HIGH):
            draw = None if seed is None else generator(seed, place, f"range {share}")
            released = private_quantile(
                seen, share, (-_REACH, _REACH), epsilon=each, adjacency=adjacency, generator=draw, budget=budget
            )
            ends.append(released.value)
        low, high = (_UNIT * math.sinh(end) for end in sorted(ends))
        room = _WIDER * (high - low)
        found[name] = Numeric(low - room, high + room)
    return found
