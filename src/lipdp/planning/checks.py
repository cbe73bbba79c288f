"""Whether a plan makes sense for a model: what no field says alone. What a plan promises is derived again, never read."""

from __future__ import annotations

import math

import torch

from lipdp.errors import ConfigurationError
from lipdp.planning.decide import STATISTICS
from lipdp.planning.grouping import clip_layers
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import ROUNDOFF, model_roundoff

__all__ = ["check_plan_fits"]

_SAME = 1e-9


def check_plan_fits(plan: PrivacyPlan, model: torch.nn.Module) -> None:
    """Refuse a plan whose parts contradict one another, or name what the model does not have.

    Bounds, noise and ε are not looked at here: a query proves the first, :class:`~lipdp.training.step_mechanism.StepMechanism`
    derives the second from them, and the accountant the third.
    """
    for check in (_sources, _norms, _weights, _adaptive, _frozen, _releases):
        _refuse(check(plan))
    _refuse(_clips(plan, model))
    if ROUNDOFF[plan.precision] < model_roundoff(model):
        _refuse(f"its precision is {plan.precision}, and the model's numbers are coarser than that: its slack is not theirs")


def _refuse(why: str) -> None:
    if why:
        raise ConfigurationError(f"this plan was changed, or made for another model: {why}. Make a new plan.")


def _sources(plan: PrivacyPlan) -> str:
    allowed = {"clipless": {"proved"}, "mixed": {"proved", "clipped"}}.get(plan.method, {"clipped"})
    strange = [group for group in plan.groups if group.source not in allowed]
    if strange:
        return f"its method {plan.method!r} has no groups that are {strange[0].source}, such as {strange[0].name!r}"
    if plan.method in ("reweight", "ghost") and plan.clipping_style != "flat":
        return f"its method {plan.method!r} clips whole gradients, and its clipping_style is {plan.clipping_style!r}"
    return ""


def _norms(plan: PrivacyPlan) -> str:
    clipped = {group.name: group.sensitivity for group in plan.groups if group.source == "clipped"}
    whole = math.hypot(*clipped.values())
    if plan.max_grad_norm is not None and not math.isclose(plan.max_grad_norm, whole, rel_tol=_SAME):
        return f"its max_grad_norm is {plan.max_grad_norm:.6g}, and its groups are clipped to {whole:.6g} together"
    for name, start in plan.clips:
        if name in clipped and not math.isclose(start, clipped[name], rel_tol=_SAME):
            return f"its clips start {name!r} at {start:.6g}, and the group's sensitivity is {clipped[name]:.6g}"
    return ""


def _weights(plan: PrivacyPlan) -> str:
    names, wanted = {name for name, _ in plan.noise_weights}, {group.name for group in plan.groups}
    if plan.allocation != "weights" and names:
        return f"it has noise_weights, which allocation={plan.allocation!r} does not use"
    if plan.allocation == "weights" and names != wanted:
        return f"its noise_weights and its groups differ in {', '.join(sorted(names ^ wanted)[:3])}"
    return ""


def _adaptive(plan: PrivacyPlan) -> str:
    if not plan.adaptive_clips or plan.adaptive is None:
        return ""
    if plan.adaptive.count_noise is None:
        return "its adaptive clipping has no count_noise, so that counts would be released as they are"
    if plan.adaptive.batch_size != plan.batch_size:
        return f"its adaptive clipping is for batches of {plan.adaptive.batch_size}, not of {plan.batch_size}"
    return ""


def _frozen(plan: PrivacyPlan) -> str:
    known = {name for group in plan.groups for name in group.parameters}
    for phase in plan.phases:
        strange = set(phase.frozen) - known
        if strange:
            return f"from step {phase.start} on it freezes {min(strange)!r}, and no group has a parameter of that name"
        if known <= set(phase.frozen):
            return f"from step {phase.start} on it freezes every parameter, and there is nothing left to train"
    return ""


def _releases(plan: PrivacyPlan) -> str:
    kinds = {release.name: release.kind for release in plan.releases}
    if kinds.get(STATISTICS, "gaussian") != "gaussian":
        return f"its release of {STATISTICS!r} is a Gaussian mechanism, and not of kind {kinds[STATISTICS]!r}"
    return ""


def _clips(plan: PrivacyPlan, model: torch.nn.Module) -> str:
    layers = set(clip_layers(model)) if plan.method in ("clipless", "mixed") else set()
    groups = {group.name for group in plan.groups if group.source == "clipped"}
    strange = [name for name, _ in plan.clips if name not in layers | groups]
    return f"its clips name {strange[0]!r}, which is neither a clipping group nor a ClipGradient layer" if strange else ""
