"""Where a plan and a model meet: parameter groups, each with a bound and where it comes from; clipping norms that may change;
and whether a plan makes sense for a model, which no field says alone. What a plan promises is derived again, never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lipdp import nn
from lipdp._checks import positive
from lipdp.bounds import Analysis, analyse
from lipdp.clipping import check_supported, clipping_groups
from lipdp.clipping.batch import Style, check_style
from lipdp.errors import ConfigurationError
from lipdp.losses import as_loss
from lipdp.planning.phases import Clipping, matches
from lipdp.planning.plan import CLIPPED_GROUP, ParameterGroup, PrivacyPlan
from lipdp.planning.settings import ROUNDOFF, STATISTICS, Method, model_roundoff, per_example_loss

MaxNorm = float | Mapping[str, float]


def make_groups(
    model: torch.nn.Module,
    loss: Any,
    method: Method,
    *,
    max_grad_norm: MaxNorm | None,
    clipping: Clipping,
    input_shape: tuple[int, ...] | None,
) -> tuple[tuple[ParameterGroup, ...], Analysis | None]:
    """The groups (without noise yet) and, where something is proved, the analysis that proves it."""
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    clipped, style, prefixes = clipping.clipped, clipping.style, clipping.groups
    if clipped and method != "mixed":
        raise ConfigurationError("clipped= chooses the parameters that method='mixed' clips; other methods prove or clip them all")
    if method == "clipless":
        analysis = analyse(model, as_loss(loss), input_shape=input_shape)
        return _proved(analysis), analysis
    assert max_grad_norm is not None
    check_style(method, style)
    if method != "mixed":
        per_example_loss(loss)
        check_supported(model)
        return _clipped(trained, max_grad_norm, style, prefixes), None
    analysis = analyse(model, as_loss(loss), input_shape=input_shape, check=False)
    for prefix in clipped:
        if not any(matches(name, prefix) for name in trained):
            raise ConfigurationError(
                f"clipped names {prefix!r}, and no trained parameter is called that; they are {', '.join(trained)}"
            )
    proved = [group for group in _proved(analysis, finite=True) if not any(matches(group.name, prefix) for prefix in clipped)]
    names = {group.name for group in proved}
    rest = {name: size for name, size in trained.items() if name not in names}
    if not rest or not proved:
        other = "clipless" if not rest else "bookkeeping"
        raise ConfigurationError(
            f"method='mixed' has nothing to {'clip' if not rest else 'prove'} in this model: use method={other!r}, which does the "
            "same for all parameters."
        )
    return (*proved, *_clipped(rest, max_grad_norm, style, prefixes)), analysis


def _proved(analysis: Analysis, finite: bool = False) -> tuple[ParameterGroup, ...]:
    """One group for each parameter with a proved bound."""
    return tuple(
        ParameterGroup(
            name=row.name,
            parameters=(row.name,),
            size=row.size,
            sensitivity=row.sensitivity,
            source="proved",
            noise_std=0.0,
            input_norm=row.input_norm,
            cotangent_norm=row.cotangent_norm,
        )
        for row in analysis.parameters
        if math.isfinite(row.sensitivity) or not finite
    )


def _clipped(
    trained: Mapping[str, int], max_norm: MaxNorm, style: Style, prefixes: Sequence[str] | None
) -> tuple[ParameterGroup, ...]:
    """The groups that a clipping style makes."""
    limits = clipping_groups(trained, max_norm, style, prefixes)
    return tuple(
        ParameterGroup(
            name=CLIPPED_GROUP if style == "flat" else group.name,
            parameters=group.parameters,
            size=sum(trained[name] for name in group.parameters),
            sensitivity=float(group.max_norm),
            source="clipped",
            noise_std=0.0,
            input_norm=math.inf,
            cotangent_norm=math.inf,
        )
        for group in limits
    )


def clip_layers(model: torch.nn.Module) -> dict[str, nn.ClipGradient]:
    """The model's ClipGradient layers, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.ClipGradient)}


def clips_of(
    model: torch.nn.Module,
    groups: Sequence[ParameterGroup],
    method: Method,
    clipping: Clipping,
    *,
    scheduled: bool,
) -> tuple[tuple[str, float], ...]:
    """(name, C) of the clipping norms that change during the run: adaptive ones, or all of them where there is a schedule."""
    layers, adaptive = clip_layers(model), clipping.adaptive
    enforced = {group.name: group.sensitivity for group in groups if group.source == "clipped"}
    marked = {name: layer for name, layer in layers.items() if layer.adaptive}
    if method in ("clipless", "mixed") and marked and adaptive is None:
        raise ConfigurationError(
            f"the ClipGradient '{next(iter(marked))}' is adaptive: say how, with "
            "plan(clipping=lipdp.Clipping(adaptive=lipdp.privacy.AdaptiveClip(quantile=…)))"
        )
    if adaptive is not None and clipping.clip == "automatic" and enforced:
        raise ConfigurationError(
            "adaptive clipping has nothing to adapt with clip='automatic': every gradient is normalised, whatever its norm. Use "
            "one of the two."
        )
    if adaptive is not None and not marked and not enforced:
        raise ConfigurationError(
            "adaptive= adapts clipping norms, and this plan has none: put nn.ClipGradient(C, adaptive=True) into the model, or use "
            "a clipping method."
        )
    if scheduled and not layers and not enforced:
        raise ConfigurationError(
            "the clip schedule changes clipping norms, and this plan has none: put nn.ClipGradient(C) into the model, or use a "
            "clipping method."
        )
    chosen = layers if scheduled else marked if adaptive is not None else {}
    inner = {name: layer.max_norm for name, layer in chosen.items()} if method in ("clipless", "mixed") else {}
    outer = enforced if scheduled or adaptive is not None else {}
    both = sorted(inner.keys() & outer.keys())
    if both:
        raise ConfigurationError(f"a clipping group and a ClipGradient layer are both called {both[0]!r}; rename one")
    return (*inner.items(), *outer.items())


def adaptive_names(model: torch.nn.Module, groups: Sequence[ParameterGroup], clips: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """Those of the changing clipping norms that follow a quantile: marked layers, and all clipping groups."""
    marked = {name for name, layer in clip_layers(model).items() if layer.adaptive}
    marked |= {group.name for group in groups if group.source == "clipped"}
    return tuple(name for name, _ in clips if name in marked)


def weights_by_group(groups: Sequence[ParameterGroup], weights: Mapping[str, float]) -> dict[str, float]:
    """The weight of each group: that of the longest prefix of its name."""
    by_group = {}
    for group in groups:
        fitting = [prefix for prefix in weights if matches(group.name, prefix)]
        if not fitting:
            raise ConfigurationError(f"allocation gives no weight for {group.name!r}; name it, or a module it is in")
        by_group[group.name] = positive(f"the noise weight of {group.name!r}", weights[max(fitting, key=len)])
    idle = [prefix for prefix in weights if not any(matches(group.name, prefix) for group in groups)]
    if idle:
        raise ConfigurationError(f"allocation names {idle[0]!r}, and no parameter group is called that")
    return by_group


_SAME = 1e-9


def check_plan_fits(plan: PrivacyPlan, model: torch.nn.Module) -> None:
    """Refuse a plan whose parts contradict one another, or name what the model does not have.

    Bounds, noise and ε are not looked at here: a query proves the first, :class:`~lipdp.training.update.StepMechanism`
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
