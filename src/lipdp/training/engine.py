"""The engine: one private step after another, as planned and never more."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lipdp.bounds import analyse
from lipdp.errors import CheckpointError, ConfigurationError, LipdpWarning
from lipdp.losses import Loss, as_loss
from lipdp.parametrize import project_
from lipdp.privacy.ledger import Ledger
from lipdp.privacy.mechanism import add_noise
from lipdp.privacy.randomness import derive_seed, fresh_seed, generator
from lipdp.privacy.sampling import poisson_indices
from lipdp.training.averaging import WeightAverage
from lipdp.training.batches import Batch, check_dataset, gather
from lipdp.training.gradients import gradient_sum
from lipdp.training.plan import PrivacyPlan

__all__ = ["PrivacyEngine"]

_STATE_FORMAT = 1
_DEFAULT_MICROBATCH = 2048
# Bounds of the same model come out of the same arithmetic; anything above this is another model.
_SAME = 1 + 1e-9


class PrivacyEngine:
    """Private training as a loop of your own::

        engine = lipdp.PrivacyEngine(model, loss, optimizer, plan)
        for batch in engine.batches(train):     # real Poisson batches, as many as the plan pays for
            engine.step(*batch)
        engine.epsilon

    A step sums the per-example gradients over fixed-shape microbatches, adds the planned noise once, divides by the constant
    expected batch size, and hands the result to the optimiser; then weights go back into their constraint sets. ``step``
    returns nothing: a training loss would be another query about the private data.

    The engine analyses the model again and refuses a plan that promises smaller sensitivities than it finds.

    Args:
        model: the model; its constrained weights are projected at once.
        loss: the loss that was planned for.
        optimizer: any torch optimiser over the model's parameters (but LBFGS, which evaluates the loss several times a step).
        plan: from :func:`lipdp.plan`.
        seed: makes the run repeatable. It is as secret as the data: whoever knows it can subtract the noise. ``None`` (the
            default) draws one from the operating system.
        microbatch_size: rows that go through the model at once; caps the memory. It changes no result but rounding.
        device: where to compute; by default where the model is.
        ema_decay: keep an exponential moving average of the weights (post-processing, free); see :meth:`averaged`.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan,
        *,
        seed: int | None = None,
        microbatch_size: int | None = None,
        device: torch.device | str | None = None,
        ema_decay: float | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        if microbatch_size is not None and (not isinstance(microbatch_size, int) or microbatch_size < 1):
            raise ConfigurationError(f"microbatch_size must be a whole number of at least 1, not {microbatch_size!r}")
        self.model = model
        self.loss = as_loss(loss)
        self.optimizer = optimizer
        self.plan = plan
        self.microbatch_size = microbatch_size or min(plan.batch_size, _DEFAULT_MICROBATCH)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_model(input_shape)
        self._check_optimizer()
        if device is not None:
            model.to(device)
            self.loss.to(device)
        self.device = next(iter(self._parameters.values())).device
        project_(model)
        # The modes under which the bounds were proved; they are restored at every step.
        self._modes = [(module, module.training) for module in model.modules()]
        self.ledger = Ledger(
            noise_multiplier=plan.noise_multiplier,
            sampling_rate=plan.sampling_rate,
            limit=plan.steps,
            delta=plan.delta,
            planned_epsilon=plan.epsilon,
            accountant=plan.accountant,
            adjacency=plan.adjacency,
        )
        self.average = None if ema_decay is None else WeightAverage(self._parameters, ema_decay)
        self._key = self._derive_key(fresh_seed() if seed is None else seed)

    # ------------------------------------------------------------------ what was spent

    @property
    def steps(self) -> int:
        """Steps taken so far (charged to the budget)."""
        return self.ledger.releases

    @property
    def epsilon(self) -> float:
        """ε spent so far, at the plan's δ."""
        return self.ledger.epsilon

    # ------------------------------------------------------------------ the loop

    def batches(self, train: Any) -> Iterator[Batch]:
        """Poisson batches of ``train`` for the steps that are left: every record enters each with probability q.

        Each batch is a function of the run's secret key and the step number, so a resumed run sees the same ones. ``train``
        may differ in size from ``plan.dataset_size`` (neighbouring datasets do): q stays the plan's.
        """
        size = check_dataset(train)
        if abs(size - self.plan.dataset_size) > 0.01 * self.plan.dataset_size:
            warnings.warn(
                f"the dataset has {size} records, the plan says {self.plan.dataset_size}: batches will have "
                f"{self.plan.sampling_rate * size:.0f} records on average instead of {self.plan.batch_size}. The guarantee holds, "
                "but the learning rate was probably chosen for the other size.",
                LipdpWarning,
                stacklevel=2,
            )
        while self.ledger.remaining > 0:
            draw = generator(self._key, self.steps, "sample")
            yield gather(train, poisson_indices(size, self.plan.sampling_rate, draw))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One private step on a Poisson batch (of any size, 0 included)."""
        if self.ledger.remaining == 0:
            self.ledger.charge()  # raises
        if len(inputs) != len(targets):
            raise ConfigurationError(f"{len(inputs)} inputs but {len(targets)} targets")
        for module, mode in self._modes:
            module.training = mode
        number = self.steps
        with self._model_randomness(number):
            sums = gradient_sum(
                self.model,
                self.loss,
                self._parameters,
                inputs,
                targets,
                microbatch_size=self.microbatch_size,
                device=self.device,
                precision=self.plan.precision,
            )
        noised = self._release(sums, number)
        # From here on it is post-processing: nothing below reads data.
        for name, parameter in self._parameters.items():
            parameter.grad = (noised[name] / self.plan.batch_size).to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        project_(self.model)
        if self.average is not None:
            self.average.update(self._parameters)

    def _release(self, sums: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """The one place where something about the data leaves: charged first, then noised."""
        self.ledger.charge()
        # The optimiser's settings are part of the noise's key: two runs from one seed that differ in, say, the learning rate
        # must not share noise, or the difference of their releases would be free of it.
        settings = repr([{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups])
        draw = generator(self._key, number, f"noise {settings}", self.device)
        return add_noise(sums, self.plan.noise_stds, draw)

    @contextmanager
    def _model_randomness(self, number: int) -> Iterator[None]:
        """Dropout and the like draw from a stream of (key, step): a resumed run repeats it."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self._key, number, "model"))
            yield

    # ------------------------------------------------------------------ weights to use

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """The model with its averaged weights (projected into their sets) inside the block; itself where none are kept."""
        if self.average is None or self.steps == 0:
            yield self.model
            return
        kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        self.average.copy_to(self._parameters)
        project_(self.model)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(kept[name])

    def use_average(self) -> None:
        """Replace the weights by their average for good (at the end of a run)."""
        if self.average is not None and self.steps > 0:
            self.average.copy_to(self._parameters)
            project_(self.model)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs. It holds the run's secret key: keep it as safe as the data."""
        return {
            "format": _STATE_FORMAT,
            "plan": self.plan.to_json(),
            "steps": self.steps,
            "key": f"{self._key:x}",
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. All of it is checked before anything is changed."""
        self._check_state(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.ledger.releases = int(state["steps"])
        self._key = int(state["key"], 16)

    def _check_state(self, state: dict[str, Any]) -> None:
        missing = {"format", "plan", "steps", "key", "model", "optimizer", "average"} - set(state)
        if missing:
            raise CheckpointError(f"this is not an engine's state: it lacks {', '.join(sorted(missing))}")
        if state["format"] != _STATE_FORMAT:
            raise CheckpointError(f"this state has format {state['format']}; this lipdp reads format {_STATE_FORMAT}")
        if PrivacyPlan.from_json(state["plan"]) != self.plan:
            raise CheckpointError(
                "this state belongs to another plan (or to a model with other sensitivities): its steps were paid for from "
                "another budget. Use the plan that is stored with it: PrivacyPlan.from_json(state['plan'])."
            )
        own = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        other = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        if own != other:
            different = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
            raise CheckpointError(f"this state belongs to another model: {', '.join(different[:5])} differ(s)")
        if not 0 <= int(state["steps"]) <= self.plan.steps:
            raise CheckpointError(f"this state says {state['steps']} steps were taken; the plan has {self.plan.steps}")
        if (state["average"] is None) != (self.average is None):
            raise CheckpointError("this state was made with another ema_decay setting (one keeps an average, the other doesn't)")

    # ------------------------------------------------------------------ checks

    def _derive_key(self, seed: int) -> int:
        """The run's secret key: the seed, bound to the plan and the initial weights.

        Runs that differ in either never share noise even if they share the seed.
        """
        digest = hashlib.sha256(f"{seed}|{self.plan.to_json()}".encode())
        for parameter in self._parameters.values():
            digest.update(parameter.detach().to("cpu", torch.float64).numpy().tobytes())
        return int.from_bytes(digest.digest()[:16], "big")

    def _check_model(self, input_shape: tuple[int, ...] | None) -> None:
        analysis = analyse(self.model, self.loss, input_shape=input_shape)
        planned, found = self.plan.sensitivities, analysis.sensitivities
        if set(planned) != set(found):
            different = sorted(set(planned) ^ set(found))
            raise ConfigurationError(
                f"the plan was made for another model: the trainable parameters differ in {', '.join(different[:5])}. Make a "
                "new plan."
            )
        for name, bound in found.items():
            if bound > planned[name] * _SAME:
                raise ConfigurationError(
                    f"the plan was made for another model or loss: parameter '{name}' has sensitivity {bound:.6g} here, and "
                    f"{planned[name]:.6g} in the plan. Make a new plan."
                )
        sizes = {group.name: group.size for group in self.plan.groups}
        for row in analysis.parameters:
            if sizes.get(row.name) != row.size:
                raise ConfigurationError(f"the plan was made for another model: '{row.name}' has {row.size} entries here")
        if analysis.slack() > self.plan.slack * _SAME:
            raise ConfigurationError(
                "the model computes more coarsely than the plan's rounding slack covers. Make a new plan for the model as it is."
            )

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates the loss several times a step, and each time is a query; use another optimiser"
            )
        ours = {id(p) for p in self.model.parameters()}
        theirs = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not all(id(p) in ours for p in theirs):
            raise ConfigurationError(
                "the optimiser holds parameters that are not the model's. Make it from model.parameters(), once the model is final."
            )
        idle = [name for name, p in self._parameters.items() if id(p) not in {id(q) for q in theirs}]
        if idle:
            warnings.warn(
                f"the optimiser does not train {', '.join(idle[:3])}{'…' if len(idle) > 3 else ''}: noise is spent on them for "
                "nothing. Freeze them (requires_grad_(False)) before planning.",
                LipdpWarning,
                stacklevel=3,
            )
