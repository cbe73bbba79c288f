"""Arguments of :func:`lipdp.plan` that belong together: how gradients are clipped, and what changes during the run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipdp._checks import positive
from lipdp.clipping.styles import Clip, Style
from lipdp.errors import ConfigurationError
from lipdp.planning.phases import Factors, read_factors
from lipdp.privacy import AdaptiveClip

__all__ = ["Clipping", "Schedule", "with_earlier_names"]


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped, beside their norm, which is :func:`lipdp.plan`'s ``max_grad_norm``.

    Attributes:
        style: "flat", "per_layer" or "per_group", see :func:`lipdp.clipping.clipping_groups`.
        groups: for "per_group": prefixes of parameter names.
        clip: "clip" scales long gradients down, "automatic" normalises all of them: ν = C/(‖g‖ + γ).
        stability: γ of "automatic".
        clipped: for ``method="mixed"``: prefixes of parameters to clip even where there is a proof.
        adaptive: let clipping norms follow a private quantile: ``max_grad_norm`` for clipping methods, every
            ``nn.ClipGradient(…, adaptive=True)`` for the others. Its cost is inside the step's own mechanism: the same ε.

    Example:
        >>> Clipping(style="per_layer").style
        'per_layer'
    """

    style: Style = "flat"
    groups: Sequence[str] | None = None
    clip: Clip = "clip"
    stability: float = 0.01
    clipped: Sequence[str] = ()
    adaptive: AdaptiveClip | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stability", positive("stability", self.stability))


@dataclass(frozen=True)
class Schedule:
    """What changes during a run, decided before it begins; see :func:`lipdp.training.cosine_schedule` for factors.

    Attributes:
        clip: factor on all clipping norms over the run, e.g. ``((0.0, 1.0), (0.5, 0.5))``: halved from half-time on. The noise
            follows.
        noise: factor on σ over the run; its phases are accounted for one by one.
        freeze: prefix of parameter names → fraction of the run after which they are no longer trained. They get no noise from then
            on and leave the sensitivity.

    Example:
        >>> Schedule(noise=((0, 1), (0.5, 2))).noise
        ((0.0, 1.0), (0.5, 2.0))
    """

    clip: Factors | None = None
    noise: Factors | None = None
    freeze: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            object.__setattr__(self, name, read_factors(f"the {name} schedule", getattr(self, name)))


# As they were called when they were arguments of plan() by themselves.
_OF_CLIPPING = {"clipping_style": "style", "clipping_groups": "groups"} | {
    name: name for name in ("clip", "stability", "clipped", "adaptive")
}
_OF_SCHEDULE = {"clip_schedule": "clip", "noise_schedule": "noise", "freeze": "freeze"}


def with_earlier_names(
    clipping: Clipping | None, schedule: Schedule | None, earlier: Mapping[str, Any]
) -> tuple[Clipping, Schedule]:
    """Both groups, with arguments under the names that they had before there were groups; those are said to be old."""
    unknown = earlier.keys() - _OF_CLIPPING.keys() - _OF_SCHEDULE.keys()
    if unknown:
        raise TypeError(f"plan() got an unexpected keyword argument {min(unknown)!r}")
    for kind, given in ((Clipping, clipping), (Schedule, schedule)):
        if given is not None and not isinstance(given, kind):
            name = kind.__name__
            raise ConfigurationError(f"{name.lower()}={given!r} is no lipdp.{name}: write {name.lower()}=lipdp.{name}(…)")
    if earlier:
        said = ", ".join(
            f"{name}= is {'clipping=lipdp.Clipping' if name in _OF_CLIPPING else 'schedule=lipdp.Schedule'}"
            f"({(_OF_CLIPPING | _OF_SCHEDULE)[name]}=…)"
            for name in earlier
        )
        warnings.warn(f"arguments of plan() are in groups now: {said}", DeprecationWarning, stacklevel=3)
    ours = {_OF_CLIPPING[name]: value for name, value in earlier.items() if name in _OF_CLIPPING}
    theirs = {_OF_SCHEDULE[name]: value for name, value in earlier.items() if name in _OF_SCHEDULE}
    return replace(clipping or Clipping(), **ours), replace(schedule or Schedule(), **theirs)
