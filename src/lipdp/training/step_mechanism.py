"""The mechanism of a step: which noise, at which clipping norms; and what the released counts do to those norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lipdp.errors import ConfigurationError
from lipdp.fields import Range
from lipdp.planning.phases import NoiseSettings, Phase
from lipdp.planning.plan import PrivacyPlan
from lipdp.privacy.mechanism import Draw, add_noise, draw_on_device
from lipdp.privacy.randomness import Stream
from lipdp.training.query import Answer, Query
from lipdp.training.state import CLIP_RANGE

_SAME = 1 + 1e-9
_COUNT = "clip count of "
_SCALE = Range(least=1e-30, most=1e30)


@dataclass(frozen=True)
class StepSettings:
    """What holds in one step.

    Attributes:
        phase: the plan's phase.
        clips: clipping norms that change, by name.
        stds: noise on the gradient sum, by parameter; frozen ones are left out.
        count_std: noise on each count.
    """

    phase: Phase
    clips: Mapping[str, float]
    stds: Mapping[str, float]
    count_std: float


class StepMechanism:
    """One Gaussian mechanism a step, of the multiplier that is accounted for, whatever the clipping norms are by then.

    Bounds Δ_d follow from the present norms C, noise from the bounds: when C halves, so does the noise, in the same step.
    """

    def __init__(self, plan: PrivacyPlan, query: Query) -> None:
        self.plan, self.query = plan, query
        self.clips = dict(plan.clips)
        self.shares: dict[str, float] = {}
        self.settings = NoiseSettings(
            multiplier=plan.noise_multiplier,
            slack=plan.slack,
            allocation=plan.allocation,
            weights=dict(plan.noise_weights) or None,
            adaptive=plan.adaptive,
            counts=len(plan.adaptive_clips),
        )
        self._known: tuple[tuple[Phase, dict[str, float]], StepSettings] | None = None

    def forget(self) -> None:
        """The bounds have been proved anew."""
        self._known = None

    def at(self, step: int) -> StepSettings:
        """Bounds and noise of a step."""
        phase = self.plan.phase(step)
        clips = {name: value * phase.clip for name, value in self.clips.items()}
        if self._known is not None and self._known[0] == (phase, clips):
            return self._known[1]
        for name, value in clips.items():
            self._representable(f"the clipping norm {name!r}", value, step)
        bounds = self.query.bounds(clips)
        live = [group for group in self.plan.groups if not set(group.parameters) <= set(phase.frozen)]
        kept = {group.name: bounds[group.name] for group in live}
        sizes = {group.name: group.size for group in live}
        stds = self.settings.stds(kept, sizes, phase.noise)
        planned = {group.name: group.noise_std for group in self.plan.groups}
        if phase == self.plan.phases[0] and clips == dict(self.plan.clips):
            stds = planned  # the plan's own figures, which the engine has checked
        for name, bound in kept.items():
            if bound:
                self._representable(f"the sensitivity of {name!r}", bound, step)
                self._representable(f"the noise of {name!r}", stds[name], step)
        real = self.settings.real_multiplier(kept, sizes, {name: stds[name] for name in kept}, phase.noise)
        if not real * _SAME >= self.plan.noise_multiplier * phase.noise:
            raise ConfigurationError(
                f"the plan's noise has the multiplier {real:.6g}, less than the {self.plan.noise_multiplier * phase.noise:.6g} "
                "that it accounts for. Make a new plan."
            )
        by_name = {name: stds[group.name] for group in live for name in group.parameters if name not in phase.frozen}
        settings = StepSettings(phase, clips, by_name, self.settings.count_noise * phase.noise)
        self._known = (phase, clips), settings
        return settings

    @staticmethod
    def _representable(what: str, value: float, step: int) -> None:
        if value not in _SCALE:
            raise ConfigurationError(
                f"{what} would be {value:g} in step {step}, too far from 1 for floating point: noise has to be {_SCALE}. Use less "
                "extreme bounds, factors or allocations."
            )

    def draw(self, answer: Answer, settings: StepSettings, stream: Stream) -> dict[str, torch.Tensor]:
        """Everything the data said with its noise, in one draw. Nothing is changed by it: a draw that nobody sees is no release."""
        return add_noise(*_drawn(answer, settings), stream)

    def draw_on_device(self, answer: Answer, settings: StepSettings, stream: Stream) -> Draw | None:
        """The same draw, to be made as a part of something else on the device; ``None`` where it can't be."""
        return draw_on_device(*_drawn(answer, settings), stream)

    def follow(self, noised: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The noised sums of what was released; adaptive norms follow the counts beside them."""
        sums = dict(noised)
        adaptive = self.plan.adaptive
        for name in self.plan.adaptive_clips:
            if adaptive is not None and _COUNT + name in sums:
                released = float(sums.pop(_COUNT + name))
                start = dict(self.plan.clips)[name]
                self.shares[name] = adaptive.share(released)
                self.clips[name] = min(
                    max(adaptive.updated(self.clips[name], released), CLIP_RANGE.least * start), CLIP_RANGE.most * start
                )
        return sums


def _drawn(answer: Answer, settings: StepSettings) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """All sums of a step that get noise, and how much."""
    counts = {_COUNT + name: value for name, value in answer.counts.items()}
    return {**answer.sums, **counts}, {**settings.stds, **dict.fromkeys(counts, settings.count_std)}
