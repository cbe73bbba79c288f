"""Whether a saved state belongs to an engine: checked before anything of it is taken over."""

from __future__ import annotations

from typing import Any

import torch

from lipdp.errors import CheckpointError
from lipdp.privacy.randomness import KEY_BYTES
from lipdp.training.averaging import Average
from lipdp.training.plan import PrivacyPlan

__all__ = ["STATE_FORMAT", "check_state"]

STATE_FORMAT = 3
_KEYS = {"key", "trail", "data", "kept", "left", "private"}
_CONTENT = {"format", "plan", "steps", "one_off", "run", "budget", "proved", "clips", "model", "optimizer", "average", *_KEYS}


def check_state(
    state: dict[str, Any],
    plan: PrivacyPlan,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
) -> None:
    """Raises :class:`~lipdp.errors.CheckpointError` if ``state`` is of another format, plan, model, optimiser or average."""
    if state.get("format", STATE_FORMAT) != STATE_FORMAT:
        raise CheckpointError(f"this state has format {state['format']}; this lipdp reads format {STATE_FORMAT}")
    missing = _CONTENT - set(state)
    if missing:
        raise CheckpointError(f"this is not an engine's state: it lacks {', '.join(sorted(missing))}")
    if PrivacyPlan.from_json(state["plan"]) != plan:
        raise CheckpointError(
            "this state belongs to another plan (or to a model with other sensitivities): its steps were paid for from "
            "another budget. Use the plan that is stored with it: PrivacyPlan.from_json(state['plan'])."
        )
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    other = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    if own != other:
        different = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        raise CheckpointError(f"this state belongs to another model: {', '.join(different[:5])} differ(s)")
    groups = optimizer.state_dict()["param_groups"], state["optimizer"]["param_groups"]
    sizes = [[len(group["params"]) for group in part] for part in groups]
    lacking = sorted({key for own, other in zip(*groups, strict=False) for key in own.keys() - other.keys()} - {"initial_lr"})
    if sizes[0] != sizes[1] or lacking:
        raise CheckpointError(
            "this state belongs to another optimiser: "
            + (f"it lacks the setting {lacking[0]!r}" if lacking else f"its parameters are grouped {sizes[1]}, not {sizes[0]}")
        )
    for name in ("key", "trail", *(name for name in ("data", "left") if state[name] is not None)):
        if len(bytes.fromhex(state[name])) != KEY_BYTES:
            raise CheckpointError(f"this state's {name} is damaged: it has {KEY_BYTES} bytes")
    if not isinstance(state["private"], bool) or not isinstance(state["kept"], str):
        raise CheckpointError("this state does not say whether its run is private, or how its records are kept")
    if not 0 <= int(state["steps"]) <= plan.steps:
        raise CheckpointError(f"this state says {state['steps']} steps were taken; the plan has {plan.steps}")
    if set(state["clips"]) != {name for name, _ in plan.clips} or any(not float(c) > 0 for c in state["clips"].values()):
        raise CheckpointError("this state's clipping norms are not those of the plan")
    if (state["average"] is None) != (average is None):
        raise CheckpointError("this state was made with another ema_decay setting (one keeps an average, the other doesn't)")
    if average is not None and state["average"].get(average.setting[0]) != average.setting[1]:
        name, value = average.setting
        raise CheckpointError(f"this state was made with ema_decay or tail_average other than {name}={value}; pass the same")
