"""The rest of a step, computed on a device before it is known whether it may leave: noise, optimiser, projection, in one recording.

The sums of a step have to pass checks that only the host can read (are they finite, is the model the one that was proved?), and the
host must not wait for them with a device that has nothing to do. So the device goes on: it draws the noise, moves the weights as
the optimiser would, brings them back into their sets and takes a digest of what that gives, all in memory of the recording's own.
Nobody sees it. Once the checks are known and the release is taken and charged, one copy puts it in place (:meth:`Update.commit`);
where one of them fails it is thrown away, and the step is done anew without it.

The optimiser is the user's. What it would do is known for :class:`torch.optim.SGD` as torch has it; any other is called as it is,
by the engine, and only noise is drawn ahead.

Weight averages come last (:class:`WeightAverage`, :class:`TailAverage`): free post-processing of the private iterates, on any
device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from lipdp._checks import is_number
from lipdp._numerics import deferred_checks
from lipdp.errors import ConfigurationError
from lipdp.fingerprint import storages
from lipdp.graphs import GraphedFunction, copies
from lipdp.privacy.mechanism import Draw
from lipdp.training.guards import is_guard
from lipdp.training.watch import Flag, ModelWatch, project_trained


class Average(ABC):
    """A running average of weights; subclasses say how much the present weights count."""

    setting: tuple[str, float]

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.updates = 0
        self.weights = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone() for name, p in parameters.items()}

    @abstractmethod
    def share(self) -> float:
        """How much of the average the present weights become."""

    def update(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the present weights in."""
        share = self.share()
        self.updates += 1
        with torch.no_grad():
            kept = [self.weights[name] for name in parameters]
            torch._foreach_lerp_(kept, [p.to(k.dtype) for p, k in zip(parameters.values(), kept, strict=True)], share)

    def copy_to(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Write the average into ``parameters``."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.weights[name])

    @contextmanager
    def applied_to(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The average in ``parameters`` inside the block; afterwards what was there."""
        kept = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            self.copy_to(parameters)
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(kept[name])

    def state_dict(self) -> dict[str, Any]:
        """The average and how many weights went into it."""
        return {self.setting[0]: self.setting[1], "updates": self.updates, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.updates = int(state["updates"])
        for name, tensor in self.weights.items():
            tensor.copy_(state["weights"][name])


class WeightAverage(Average):
    """Exponential moving average ``a ← d·a + (1−d)·w`` with the start-up correction d_t = min(decay, t/(t+9))."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], decay: float) -> None:
        super().__init__(parameters)
        if not (is_number(decay) and 0 <= decay < 1):
            raise ConfigurationError(f"ema_decay must lie in [0, 1), not {decay!r}")
        self.decay = decay
        self.setting = "decay", decay

    def share(self) -> float:
        """1 − d_t: early on the average follows the weights closely, so that the random initial weights do not linger in it."""
        return 1 - min(self.decay, self.updates / (self.updates + 9))


class TailAverage(Average):
    """The mean of the weights after each of the last ⌈fraction·T⌉ steps; before them, the present weights."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], fraction: float, steps: int) -> None:
        super().__init__(parameters)
        if not (is_number(fraction) and 0 < fraction <= 1):
            raise ConfigurationError(f"tail_average is the last fraction of the run to average over, in (0, 1], not {fraction!r}")
        self.setting = "tail", fraction
        self.first = steps - math.ceil(fraction * steps)

    def share(self) -> float:
        """1/k at the k-th step of the tail."""
        return 1 / max(1, self.updates - self.first + 1)


def make_average(
    parameters: Mapping[str, torch.Tensor], steps: int, ema_decay: float | None, tail_average: float | None
) -> Average | None:
    """The average that was asked for, if any."""
    if ema_decay is not None and tail_average is not None:
        raise ConfigurationError("ema_decay and tail_average are two ways to average the weights: give one of them")
    if tail_average is not None:
        return TailAverage(parameters, tail_average, steps)
    return None if ema_decay is None else WeightAverage(parameters, ema_decay)


_BUFFER = "momentum_buffer"
# Settings of SGD that choose among its ways to compute the same, or that a recording is told in every call.
_NO_MATTER = frozenset({"params", "lr", "initial_lr", "foreach", "fused"})
_ARITHMETIC = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "differentiable")
_Result = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Moved:
    """Weights and momenta as a step would leave them, still being computed.

    Attributes:
        places: the tensors that they are for.
        values: what comes there, in the recording's own memory.
        fine: whether the projected weights are finite; it stays, whatever becomes of the recording.
        words: the watch's digest of the model with these weights.
        tag: what the noise's draw is claimed by.
    """

    places: list[torch.Tensor]
    values: list[torch.Tensor]
    fine: Flag
    words: torch.Tensor
    tag: torch.Tensor | None


class Update:
    """What follows the sums of a step, on CUDA.

    Args:
        model: the model, all of it on one device.
        optimizer: its optimiser.
        watch: takes the digest of what the step leaves.
        parameters: the trained ones, by name.
        batch_size: what noised sums are divided by.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        watch: ModelWatch,
        parameters: Mapping[str, torch.nn.Parameter],
        batch_size: float,
    ) -> None:
        self.model, self.optimizer, self.batch_size = model, optimizer, batch_size
        self._watch = watch
        self._parameters = parameters
        self._all: list[torch.Tensor] = list(parameters.values())
        self._groups: list[list[str]] = []
        self._draw: Draw | None = None
        self._known_rates: tuple[tuple[float, ...], torch.Tensor] = (), torch.empty(0)
        self._graphed: GraphedFunction[_Result] = GraphedFunction(self._work, state=self._state)

    def begin(self, draw: Draw | None, trained: Mapping[str, torch.Tensor]) -> Moved | None:
        """Begin with what follows this draw for the ``trained`` parameters; ``None`` where it is left to the optimiser."""
        if draw is None or not self._is_known(trained):
            return None
        self._draw = draw
        weights, momenta, fine, words, tag = self._graphed(self._rates(), *draw.inputs)
        return Moved([*self._all, *self._momenta()], [*weights, *momenta], fine.clone(), words, tag)

    def commit(self, moved: Moved) -> None:
        """Put it in place: from here on the step is to be seen."""
        with torch.no_grad():
            torch._foreach_copy_(moved.places, moved.values)
        if "step" in vars(self.optimizer):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler's counter in its place notes

    def _work(self, rates: torch.Tensor, *inputs: torch.Tensor) -> _Result:
        """All weights and momenta after the step, whether the weights are finite, digest and tag; the model's own stay."""
        assert self._draw is not None
        noised, tag = self._draw.function(*inputs)
        kept = copies(self._all)
        try:
            with torch.no_grad(), deferred_checks() as conditions:
                momenta = self._move(noised, rates)
                project_trained(self.model)
                weights = copies(self._all)
        finally:  # whatever ends it: weights that have moved would be a release that nobody has charged
            with torch.no_grad():
                torch._foreach_copy_(self._all, kept)
        fine = conditions[0] if conditions else torch.ones((), dtype=torch.bool, device=rates.device)
        return weights, momenta, fine, self._watch.digest_elsewhere(dict(zip(map(id, self._all), weights, strict=True))), tag

    def _state(self) -> Hashable:
        """What a recording depends on besides its inputs."""
        assert self._draw is not None
        settings = [tuple(group[name] for name in _ARITHMETIC) for group in self.optimizer.param_groups]
        names = tuple(map(tuple, self._groups))
        return self._watch.state(), self._draw.depends_on, storages([*self._all, *self._momenta()]), names, tuple(settings)

    # ------------------------------------------------------------------ the optimiser

    def _is_known(self, trained: Mapping[str, torch.Tensor]) -> bool:
        """Whether the optimiser would do what :meth:`_move` does."""
        optimizer = self.optimizer
        everywhere = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
        own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        hooked = any(own) or not all(is_guard(hook) for hooks in everywhere for hook in hooks.values())
        if type(optimizer) is not torch.optim.SGD or hooked:
            return False
        step = vars(optimizer).get("step")
        if step is not None and not (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is torch.optim.SGD.step):
            return False
        known = {id(p): name for name, p in self._parameters.items()}
        names = [[known.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        self._groups = [[name for name in group if name in trained] for group in names]
        return all(map(self._is_plain, optimizer.param_groups, self._groups))

    def _is_plain(self, group: dict[str, Any], names: list[str]) -> bool:
        if group.keys() - _NO_MATTER - set(_ARITHMETIC) or type(group["lr"]) not in (float, int) or group["differentiable"]:
            return False
        kinds = {self._parameters[name].dtype for name in names}  # in half precision the optimiser's steps round otherwise
        if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
            return False
        return not group["momentum"] or all(_BUFFER in self.optimizer.state[self._parameters[name]] for name in names)

    def _momenta(self) -> list[torch.Tensor]:
        groups = zip(self.optimizer.param_groups, self._groups, strict=True)
        moving = [name for group, names in groups if group["momentum"] for name in names]
        return [self.optimizer.state[self._parameters[name]][_BUFFER] for name in moving]

    def _rates(self) -> torch.Tensor:
        """The learning rates of all groups, on the device; float64, as the sums are."""
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        if self._known_rates[0] != rates:
            device = self._all[0].device
            host = torch.tensor(rates, dtype=torch.float64)
            there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
            self._known_rates = rates, there
        return self._known_rates[1]

    def _move(self, noised: Mapping[str, torch.Tensor], rates: torch.Tensor) -> list[torch.Tensor]:
        """A step of SGD on the weights; what becomes of the momenta, whose own memory stays as it is."""
        moved: list[torch.Tensor] = []
        for group, names, rate in zip(self.optimizer.param_groups, self._groups, rates.unbind(), strict=True):
            if not names:
                continue
            weights: list[torch.Tensor] = [self._parameters[name].detach() for name in names]
            sign = -1.0 if group["maximize"] else 1.0
            means = torch._foreach_div([noised[name] for name in names], sign * self.batch_size)
            gradients = [mean.to(weight.dtype) for mean, weight in zip(means, weights, strict=True)]
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
            if group["momentum"]:
                before = [self.optimizer.state[self._parameters[name]][_BUFFER] for name in names]
                momenta = list(torch._foreach_mul(before, group["momentum"]))
                torch._foreach_add_(momenta, gradients, alpha=1 - group["dampening"])
                moved += momenta
                gradients = list(torch._foreach_add(gradients, momenta, alpha=group["momentum"])) if group["nesterov"] else momenta
            torch._foreach_sub_(weights, torch._foreach_mul(gradients, rate.to(weights[0].dtype)))
        return moved
