"""A saved state: what it may hold, and whether it belongs to an engine. All of it is checked before anything is taken over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lipdp.digest import content_digest
from lipdp.errors import CheckpointError, LipdpError
from lipdp.fields import Range, Scale, Size, check_weights, read
from lipdp.training.averaging import Average
from lipdp.training.optimizer_state import check_optimizer_state
from lipdp.training.plan import PrivacyPlan

__all__ = ["CLIP_RANGE", "STATE_FORMAT", "EngineState", "read_state", "sealed"]

STATE_FORMAT = 3
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
        steps: charged so far.
        one_off: the one-off releases charged so far.
        run: a name drawn for this run alone.
        budget: the file of the budget that pays for it, if one does.
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

    format: Literal[3]
    plan: str
    steps: Size
    one_off: list[str]
    run: str
    budget: str | None
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
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
) -> EngineState:
    """The state, field by field; :class:`~lipdp.errors.CheckpointError` if it is of another format, plan, model or optimiser."""
    if not isinstance(state, dict):
        raise CheckpointError(f"an engine's state is a dictionary, not a {type(state).__name__}")
    if isinstance(number := state.get("format"), int) and number != STATE_FORMAT:
        raise CheckpointError(f"this state has format {number}; this lipdp reads format {STATE_FORMAT}")
    try:
        found: EngineState = read(EngineState, state, "the state")
        other = PrivacyPlan.from_json(found.plan)
    except LipdpError as error:
        raise CheckpointError(f"this is not an engine's state: {error}") from error
    if other != plan:
        raise CheckpointError(
            "this state belongs to another plan (or to a model with other sensitivities): its steps were paid for from "
            "another budget. Use the plan that is stored with it: PrivacyPlan.from_json(state['plan'])."
        )
    _check_account(found, plan)
    _check_clips(found, plan)
    _check_tensors("model", model.state_dict(), found.model)
    check_optimizer_state(optimizer, found.optimizer)
    _check_average(average, found)
    if sealed(state)["digest"] != found.digest:
        raise CheckpointError(
            "this state was changed since an engine made it: its content does not match its digest. Load it as it was saved, and "
            "change weights or the optimiser's settings afterwards."
        )
    return found


def _check_account(state: EngineState, plan: PrivacyPlan) -> None:
    if state.steps > plan.steps:
        raise CheckpointError(f"this state says {state.steps} steps were taken; the plan has {plan.steps}")
    planned = {release.name for release in plan.releases}
    if len(set(state.one_off)) < len(state.one_off) or not set(state.one_off) <= planned:
        raise CheckpointError(f"this state's one_off releases {state.one_off} are not among those of the plan, each once")
    for name in ("key", "trail", *(name for name in ("data", "left") if getattr(state, name) is not None)):
        if not _DIGEST.fullmatch(getattr(state, name)):
            raise CheckpointError(f"this state's {name} is not a hexadecimal number of 256 bits")
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
        check_weights(own, other, f"this state's {what}")
    except LipdpError as error:
        raise CheckpointError(f"{error}: nothing can continue from it") from error


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
