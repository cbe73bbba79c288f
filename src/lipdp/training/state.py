"""A saved state: what it may hold, and whether it belongs to an engine. All of it is checked before anything is taken over.

Of optimisers and learning-rate schedulers too: whether a run can go on from them.

They only post-process what was released, so a wrong one costs no privacy. But it could end a run with an error from deep inside of
torch, after a step was paid for.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lipdp.digest import content_digest
from lipdp.errors import CheckpointError, LipdpError
from lipdp.fields import Count, Range, Scale, Size, check_weights, read
from lipdp.planning.plan import PrivacyPlan
from lipdp.training.book import MARK
from lipdp.training.shards import local
from lipdp.training.update import Average

_LARGEST = 1e300


def check_optimizer_state(optimizer: torch.optim.Optimizer, other: Mapping[str, Any]) -> None:
    """Refuse a state of other groups of parameters or other settings, and numbers that are not finite."""
    own = optimizer.state_dict()
    groups: Any = other.get("param_groups")
    if other.keys() != own.keys() or not isinstance(other["state"], dict) or not _are_groups(groups):
        raise CheckpointError("this state's optimizer is not the state of an optimiser with its groups of parameters")
    sizes = [[group["params"] for group in part] for part in (own["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        counts = [[len(numbers) for numbers in part] for part in sizes]
        raise CheckpointError(f"this state belongs to another optimiser: its parameters are grouped {counts[1]}, not {counts[0]}")
    for mine, theirs in zip(own["param_groups"], groups, strict=True):
        lacking = sorted(mine.keys() - theirs.keys() - {"initial_lr"})
        if lacking:
            raise CheckpointError(f"this state belongs to another optimiser: it lacks the setting {lacking[0]!r}")
        for name, value in theirs.items():
            if name != "params":
                _check_like(f"the optimiser's setting {name!r}", mine.get(name, 0.0), value)
    known = {number for numbers in sizes[0] for number in numbers}
    strange = [number for number in other["state"] if type(number) is not int or number not in known]
    if strange:
        raise CheckpointError(f"this state belongs to another optimiser: it has no parameter {strange[0]!r}")
    for number, entry in other["state"].items():
        if not isinstance(entry, dict):
            raise CheckpointError(f"this state's optimizer keeps a {type(entry).__name__} for parameter {number}, not its state")
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and not (value.layout == torch.strided and _is_finite(value)):
                raise CheckpointError(f"this state's optimizer holds NaN or infinite numbers in {name!r} of parameter {number}")


def _is_finite(value: torch.Tensor) -> bool:
    """Of a divided one, this rank's part."""
    return bool(torch.isfinite(local(value)).all())


def _are_groups(groups: Any) -> bool:
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    if not all(isinstance(name, str) for group in groups for name in group):
        return False
    numbers = [group.get("params") for group in groups]
    return all(isinstance(own, list) and all(type(number) is int for number in own) for own in numbers)


def _check_like(what: str, own: Any, other: Any) -> None:
    """Refuse a setting of another kind than one's own: numbers may differ, and have to be finite; what is no number is the same."""
    if isinstance(own, torch.Tensor):
        fits = isinstance(other, torch.Tensor) and other.shape == own.shape and bool(torch.isfinite(other).all())
    elif isinstance(own, int | float) and not isinstance(own, bool):
        fits = isinstance(other, int | float) and not isinstance(other, bool) and abs(other) <= _LARGEST
    elif isinstance(own, list | tuple):
        fits = isinstance(other, list | tuple) and len(own) == len(other)
        for number, (mine, theirs) in enumerate(zip(own, other, strict=True) if fits else ()):
            _check_like(f"{what}[{number}]", mine, theirs)
    elif isinstance(own, dict):
        fits = isinstance(other, dict) and own.keys() == other.keys()
        for name in own if fits else ():
            _check_like(f"{what}[{name!r}]", own[name], other[name])
    else:
        fits = type(own) is type(other) and own == other
    if not fits:
        raise CheckpointError(f"{what} is {_shown(other)} in this state, and {_shown(own)} here: make it the same before loading")


def _shown(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def try_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a state that the optimiser can't go on from: one step of a copy, with gradients of zero, has to work.

    Of an optimiser that is not torch's own (or made from one of them) nothing is known; that one is left alone.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")]
    kind: Any = next((kind for kind in kinds if kind is not torch.optim.Optimizer and "step" in vars(kind)), None)
    if kind is None:
        return
    probe = kind.__new__(kind)
    probe.__setstate__(copy.deepcopy({name: getattr(optimizer, name) for name in ("defaults", "state", "param_groups")}))
    parameters = [p for group in probe.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        kind.step(probe)
    except Exception as error:  # whatever a garbled state leads to
        raise CheckpointError(f"the optimiser can't go on from this state's optimizer: {error!r}") from error
    if not all(map(_is_finite, parameters)):
        raise CheckpointError("this state's optimizer makes NaN or infinite weights of finite ones, without any gradient")


def check_scheduler_state(scheduler: torch.optim.lr_scheduler.LRScheduler, other: Any) -> None:
    """Refuse a state of another scheduler, and one that it can't go on from: a step of a copy has to work."""
    own = scheduler.state_dict()
    if not isinstance(other, dict) or other.keys() != own.keys():
        raise CheckpointError("this state was made with another learning-rate scheduler; pass the same")
    _check_like("the scheduler's state", own, other)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its optimiser takes no steps
            probe = copy.deepcopy(scheduler)
            probe.load_state_dict(copy.deepcopy(other))
            probe.step()
        for group in probe.optimizer.param_groups:
            _check_like("the learning rate that the scheduler sets", 0.0, float(group["lr"]))
    except CheckpointError:
        raise
    except Exception as error:  # whatever a garbled state leads to
        raise CheckpointError(f"the learning-rate scheduler can't go on from this state: {error!r}") from error


Format = Literal[8]
STATE_FORMAT: int = get_args(Format)[0]
# A clipping norm that follows a quantile stays within these factors of where it started: noise alone can't lead it astray.
CLIP_RANGE = Range(least=1e-6, most=1e6)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NONCE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class EngineState:
    """What :meth:`lipdp.PrivacyEngine.state_dict` holds. Bounds and noise are no part of it: they are derived from the rest.

    Attributes:
        format: of the state.
        plan: as JSON.
        steps: that led to the weights.
        batches: the number behind the last batch that a step was made with: more than steps where some were left out.
        one_off: the one-off releases that led to the weights.
        charged: the number behind the last step that was charged: more than steps where the engine was rewound.
        charged_one_off: the one-off releases that were charged.
        rows: of a microbatch; ``None`` where nothing has fixed it, before the first step.
        run: a name drawn for this run alone.
        budget: the file of the budget that pays for it, if one does.
        book: the mark of the file that its releases are noted in, if they are (:mod:`lipdp.training.book`).
        key: the run's secret, in hexadecimal.
        private: whether the secret came from the operating system.
        trail: digest of what the noise of all steps so far depended on.
        data: digest of the records that the run is bound to, once they were seen.
        kept: how their dataset keeps them.
        left: of a reproducible run: digest of the weights as its last step left them.
        clips: the clipping norms that change, as they are now.
        model: weights and buffers.
        optimizer: the optimiser's state.
        average: of the weights, where one is kept.
        digest: of all of this: a number that goes back over weights that did not would allow steps that nobody paid for.
    """

    format: Format
    plan: str
    steps: Size
    batches: Size
    one_off: list[str]
    charged: Size
    charged_one_off: list[str]
    rows: Count | None
    run: str
    budget: str | None
    book: str | None
    key: str
    private: bool
    trail: str
    data: str | None
    kept: str
    left: str | None
    clips: dict[str, Scale]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    average: dict[str, Any] | None
    digest: str


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """The state with its digest."""
    content = {name: value for name, value in state.items() if name != "digest"}
    return {**content, "digest": content_digest(_plain(content)).hex()}


def _plain(value: Any) -> Any:
    """What is neither data nor a container of data counts with its type: such a state can't be written to a file anyway."""
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value, key=lambda key: (type(key).__name__, repr(key)))}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    known = value is None or isinstance(value, torch.Tensor | bytes | str | bool | int | float | complex)
    return value if known else f"{type(value).__module__}.{type(value).__qualname__}"


def read_state(
    state: Any,
    plan: PrivacyPlan,
    model: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    average: Average | None,
) -> EngineState:
    """The state, field by field; :class:`~lipdp.errors.CheckpointError` if it is of another format, plan, model or optimiser.

    ``model``: the model's own ``state_dict()``. What is divided among ranks is checked in this rank's part.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"an engine's state is a dictionary, not a {type(state).__name__}")
    if isinstance(number := state.get("format"), int) and number != STATE_FORMAT:
        age = "an older" if number < STATE_FORMAT else "a newer"
        raise CheckpointError(
            f"this state has format {number}; this lipdp reads format {STATE_FORMAT}: {age} version has saved it. Go on with that "
            "version; or take the weights (the state's 'model') into a new run, whose epsilon comes on top."
        )
    try:
        checked: EngineState = read(EngineState, state, "the state")
        other = PrivacyPlan.from_json(checked.plan)
    except LipdpError as error:
        raise CheckpointError(f"this is not an engine's state: {error}") from error
    if other != plan:
        raise CheckpointError(
            "this state belongs to another plan (or to a model with other sensitivities): its steps were paid for from "
            "another budget. Use the plan that is stored with it: PrivacyPlan.from_json(state['plan'])."
        )
    _check_account(checked, plan)
    _check_clips(checked, plan)
    _check_tensors("model", model, checked.model)
    check_optimizer_state(optimizer, checked.optimizer)
    _check_average(average, checked)
    return checked


def check_seal(state: dict[str, Any]) -> None:
    """Refuse a state that is not what an engine made. Of a divided state every rank has to ask."""
    if sealed(state)["digest"] != state["digest"]:
        raise CheckpointError(
            "this state was changed since an engine made it: its content does not match its digest. Load it as it was saved, and "
            "change weights or the optimiser's settings afterwards."
        )


def _check_account(state: EngineState, plan: PrivacyPlan) -> None:
    if state.steps > plan.steps:
        raise CheckpointError(f"this state says {state.steps} steps were taken; the plan has {plan.steps}")
    if not state.steps <= state.batches <= plan.steps:
        raise CheckpointError(f"this state says that {state.batches} batches led to its {state.steps} steps of {plan.steps}")
    if not state.steps <= state.charged <= plan.steps:
        raise CheckpointError(
            f"this state says that {state.charged} of {plan.steps} steps were charged, and that it has {state.steps}"
        )
    planned = {release.name for release in plan.releases}
    if len(set(state.one_off)) < len(state.one_off) or not set(state.one_off) <= set(state.charged_one_off) <= planned:
        raise CheckpointError(f"this state's one_off releases {state.one_off} are not among those of the plan, each once")
    for name in ("key", "trail", *(name for name in ("data", "left") if getattr(state, name) is not None)):
        if not _DIGEST.fullmatch(getattr(state, name)):
            raise CheckpointError(f"this state's {name} is not a hexadecimal number of 256 bits")
    if state.book is not None and not MARK.fullmatch(state.book):
        raise CheckpointError("this state's book is not the mark of one")
    if not _NONCE.fullmatch(state.run):
        raise CheckpointError("this state's run is not a name that an engine draws")


def _check_clips(state: EngineState, plan: PrivacyPlan) -> None:
    starts = dict(plan.clips)
    if state.clips.keys() != starts.keys():
        raise CheckpointError("this state's clips, its clipping norms, are not those of the plan")
    for name, norm in state.clips.items():
        moved = norm / starts[name]
        if not (moved in CLIP_RANGE if name in plan.adaptive_clips else moved == 1):
            raise CheckpointError(f"this state's clipping norm {name!r} is {norm:g}, where no step of the plan can have led it")


def _check_tensors(what: str, own: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    try:
        check_weights(_local(own), _local(other), f"this state's {what}")
    except LipdpError as error:
        raise CheckpointError(f"{error}: nothing can continue from it") from error


def _local(tensors: Any) -> Any:
    """This rank's parts of them."""
    if not isinstance(tensors, Mapping):
        return tensors
    return {name: local(value) if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}


def _check_average(average: Average | None, state: EngineState) -> None:
    if (state.average is None) != (average is None):
        raise CheckpointError("this state was made with another ema_decay setting (one keeps an average, the other doesn't)")
    if average is None or state.average is None:
        return
    name, value = average.setting
    theirs = state.average.get(name)
    if state.average.keys() != {name, "updates", "weights"} or not isinstance(theirs, float | int) or theirs != value:
        raise CheckpointError(f"this state was made with ema_decay or tail_average other than {name}={value}; pass the same")
    try:
        updates = read(Size, state.average["updates"], "the state's average.updates")
        weights = read(dict[str, Any], state.average["weights"], "the state's average.weights")
    except LipdpError as error:
        raise CheckpointError(str(error)) from error
    if updates > state.steps:
        raise CheckpointError(f"this state's average is of {updates} weights, more than its {state.steps} steps")
    _check_tensors("average", average.weights, weights)
