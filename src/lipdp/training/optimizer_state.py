"""Saved states of optimisers and learning-rate schedulers: whether a run can go on from them.

They only post-process what was released, so a wrong one costs no privacy. But it could end a run with an error from deep inside of
torch, after a step was paid for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from lipdp.errors import CheckpointError

__all__ = ["check_optimizer_state", "check_scheduler_state", "try_optimizer"]

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
            if isinstance(value, torch.Tensor) and not (value.layout == torch.strided and bool(torch.isfinite(value).all())):
                raise CheckpointError(f"this state's optimizer holds NaN or infinite numbers in {name!r} of parameter {number}")


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
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
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
