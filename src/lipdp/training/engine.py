"""The engine: one private step after another, as planned and never more."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lipdp.bounds.trace import find_input_shape
from lipdp.errors import CheckpointError, ConfigurationError, DataError, LipdpError, LipdpWarning
from lipdp.parametrize import project_
from lipdp.privacy._checks import whole
from lipdp.privacy.accounting import epsilon as epsilon_of
from lipdp.privacy.ledger import Ledger
from lipdp.privacy.mechanism import add_noise, effective_multiplier
from lipdp.privacy.randomness import derive_seed, fresh_seed, generator
from lipdp.privacy.sampling import poisson_indices
from lipdp.training.averaging import WeightAverage
from lipdp.training.batches import Batch, check_dataset, gather
from lipdp.training.plan import PrivacyPlan, describe_loss
from lipdp.training.query import query_of
from lipdp.training.watch import ModelWatch, constant_buffers, project_trained

__all__ = ["PrivacyEngine"]

_STATE_FORMAT = 1
_MOST_ROWS = 2048
# Activations of so many rows stay in a processor's cache: measured 1.5 times as fast as 2048 on a small convolutional network.
_MOST_ROWS_ON_CPU = 256
_SAME = 1 + 1e-9
# The same accountant on another machine may round otherwise; more than this is another budget.
_SAME_EPSILON = 1 + 1e-6


def _even_rows(batch_size: int, device: torch.device) -> int:
    """Rows of a microbatch such that a Poisson batch, at four deviations above its mean, fills a few of them evenly."""
    most = batch_size + 4 * math.sqrt(batch_size)
    return math.ceil(most / math.ceil(most / (_MOST_ROWS_ON_CPU if device.type == "cpu" else _MOST_ROWS)))


class PrivacyEngine:
    """Private training as a loop of your own::

        engine = lipdp.PrivacyEngine(model, loss, optimizer, plan)
        for batch in engine.batches(train):     # real Poisson batches, as many as the plan pays for
            engine.step(*batch)
        engine.epsilon

    A step sums the per-example gradients over fixed-shape microbatches, adds the planned noise once, divides by the constant
    expected batch size, and hands the result to the optimiser; then weights go back into their constraint sets. ``step``
    returns nothing: a training loss would be another query about the private data.

    The engine analyses the model again and refuses a plan that promises smaller sensitivities than it finds, less noise than
    its multiplier says, or a smaller ε than its steps cost. Weights or layers' settings that are changed between steps are
    noticed: the model is then analysed and projected again before anything is computed.

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
        loss: Any,
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
        self.optimizer = optimizer
        self.plan = plan
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._input_shape = find_input_shape(model) if input_shape is None else tuple(input_shape)
        self._query = query_of(model, loss, plan, self._input_shape)
        self.loss = self._query.loss
        self._check_plan()
        self._check_optimizer()
        secret = fresh_seed() if seed is None else whole("seed", seed, least=0)
        if device is not None:
            model.to(device)
        self.device = next(iter(self._parameters.values())).device
        self.microbatch_size = microbatch_size or _even_rows(plan.batch_size, self.device)
        if isinstance(self.loss, torch.nn.Module):
            self.loss.to(self.device)
        project_(model)
        self._watch = ModelWatch(model)
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
        self._key = self._derive_key(secret)
        self._trail = ""  # a digest of the optimiser's settings in all steps so far
        self._drawn = 0  # batches drawn so far
        self._watch.remember()

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

        Each batch is for one step. It is a function of the run's secret key and its number, so a resumed run sees the same
        ones, and no number is drawn twice: batches may be fetched ahead or left out. ``train`` may differ in size from
        ``plan.dataset_size`` (neighbouring datasets do): q stays the plan's.
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
        while (number := max(self._drawn, self.steps)) < self.plan.steps:
            self._drawn = number + 1
            draw = generator(self._key, number, "sample")
            yield gather(train, poisson_indices(size, self.plan.sampling_rate, draw))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One private step on a Poisson batch (of any size, 0 included)."""
        if self.ledger.remaining == 0:
            self.ledger.charge()  # raises
        self._check_batch(inputs, targets)
        self._watch.restore_modes()
        self._watch.check_structure()
        if self._watch.changed:
            self._check_plan()
            project_(self.model)
            self._watch.remember()
        number = self.steps
        with self._model_randomness(number), constant_buffers(self.model):
            sums = self._query.sums(self._parameters, inputs, targets, microbatch_size=self.microbatch_size, device=self.device)
        noised = self._release(sums, number)
        # From here on it is post-processing: nothing below reads data. Gradients that someone left behind may have.
        self.optimizer.zero_grad(set_to_none=True)
        self._watch.forget()  # until the projection is done, in case something below fails
        gradients = self._query.gradients({name: total / self.plan.batch_size for name, total in noised.items()})
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        project_trained(self.model)
        self._watch.remember()
        if self.average is not None:
            self.average.update(self._parameters)

    def _release(self, sums: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """The one place where something about the data leaves: charged first, then noised."""
        self.ledger.charge()
        # The optimiser's settings so far are part of the noise's key: two runs from one seed that differ in, say, the learning
        # rate of some step must not share noise from there on, or the difference of their releases would be free of it.
        settings = [sorted((k, repr(v)) for k, v in group.items() if k != "params") for group in self.optimizer.param_groups]
        self._trail = hashlib.sha256(f"{self._trail}|{type(self.optimizer).__name__}|{settings}".encode()).hexdigest()
        draw = generator(self._key, number, f"noise {self._trail}", self.device)
        return add_noise(sums, self.plan.noise_stds, draw)

    @contextmanager
    def _model_randomness(self, number: int) -> Iterator[None]:
        """Dropout and the like draw from a stream of (key, step): a resumed run repeats it."""
        seed = derive_seed(self._key, number, "model")
        on_cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_cuda else []):
            # Not torch.manual_seed: where CUDA is installed but unused, it queues another call (with its stack) for ever.
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
            yield

    # ------------------------------------------------------------------ weights to use

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """The model with its averaged weights (projected into their sets) inside the block; itself where none are kept."""
        if self.average is None or self.steps == 0:
            yield self.model
            return
        kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self.average.copy_to(self._parameters)
            project_trained(self.model)
            yield self.model
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(kept[name])

    def use_average(self) -> None:
        """Replace the weights by their average for good (at the end of a run)."""
        if self.average is not None and self.steps > 0:
            self.average.copy_to(self._parameters)
            project_trained(self.model)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact continuation needs, as a copy. It holds the run's secret key: keep it as safe as the data."""
        # A copy, for a step counter that went back over weights that did not would allow steps nobody paid for.
        return copy.deepcopy(
            {
                "format": _STATE_FORMAT,
                "plan": self.plan.to_json(),
                "steps": self.steps,
                "key": f"{self._key:x}",
                "trail": self._trail,
                "proved": self._watch.values,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": None if self.average is None else self.average.state_dict(),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. A state that does not fit is an error, and then nothing has changed."""
        try:
            self._check_state(state)
        except CheckpointError:
            raise
        except (LipdpError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"this is not an engine's state: {error}") from error
        before = self.state_dict()
        try:
            self._load(state)
        except Exception as error:
            self._load(before)
            raise CheckpointError(f"this state does not fit the engine: {error}. Nothing was changed.") from error

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.ledger.releases = self._drawn = int(state["steps"])
        self._key, self._trail, self._watch.values = int(state["key"], 16), str(state["trail"]), list(state["proved"])

    def _check_state(self, state: dict[str, Any]) -> None:
        missing = {"format", "plan", "steps", "key", "trail", "proved", "model", "optimizer", "average"} - set(state)
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
        groups = self.optimizer.state_dict()["param_groups"], state["optimizer"]["param_groups"]
        sizes = [[len(group["params"]) for group in part] for part in groups]
        lacking = sorted({key for own, other in zip(*groups, strict=False) for key in own.keys() - other.keys()} - {"initial_lr"})
        if sizes[0] != sizes[1] or lacking:
            raise CheckpointError(
                "this state belongs to another optimiser: "
                + (f"it lacks the setting {lacking[0]!r}" if lacking else f"its parameters are grouped {sizes[1]}, not {sizes[0]}")
            )
        int(state["key"], 16)
        if not 0 <= int(state["steps"]) <= self.plan.steps:
            raise CheckpointError(f"this state says {state['steps']} steps were taken; the plan has {self.plan.steps}")
        if (state["average"] is None) != (self.average is None):
            raise CheckpointError("this state was made with another ema_decay setting (one keeps an average, the other doesn't)")
        if self.average is not None and state["average"]["decay"] != self.average.decay:
            raise CheckpointError(
                f"this state was made with ema_decay={state['average']['decay']}, not {self.average.decay}; pass the same"
            )

    # ------------------------------------------------------------------ checks

    def _derive_key(self, seed: int) -> int:
        """The run's secret key: the seed, bound to the plan, the layers and the initial weights.

        Runs that differ in any of them never share noise even if they share the seed.
        """
        digest = hashlib.sha256(f"{seed}|{self.plan.to_json()}|{self.model}".encode())
        for parameter in self._parameters.values():
            digest.update(parameter.detach().to("cpu", torch.float64).numpy().tobytes())
        return int.from_bytes(digest.digest()[:16], "big")

    def _check_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            raise DataError(f"a batch is two tensors, not {type(inputs).__name__} and {type(targets).__name__}")
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)}: both need one row for each "
                "example"
            )
        # Bounds are those of examples of one shape: on larger images a bias, say, has a larger gradient.
        if self._input_shape is not None and tuple(inputs.shape[1:]) != self._input_shape:
            raise DataError(f"the plan is for examples of shape {self._input_shape}, not {tuple(inputs.shape[1:])}")

    def _check_plan(self) -> None:
        """Trust nothing in the plan but what follows from the model, the loss and the accountant."""
        plan = self.plan
        if describe_loss(self.loss) != plan.loss:
            raise ConfigurationError(
                f"the plan was made for the loss {plan.loss}, not {describe_loss(self.loss)}. Make a new plan."
            )
        found = self._query.bounds()
        stds = {group.name: group.noise_std for group in plan.groups}
        multiplier = effective_multiplier({name: bound * plan.slack for name, bound in found.items()}, stds)
        if multiplier * _SAME < plan.noise_multiplier:
            raise ConfigurationError(
                f"the plan's noise has the multiplier {multiplier:.6g}, less than the {plan.noise_multiplier:.6g} that it "
                "accounts for. Make a new plan."
            )
        spent = epsilon_of(
            noise_multiplier=plan.noise_multiplier,
            sampling_rate=plan.sampling_rate,
            steps=plan.steps,
            delta=plan.delta,
            accountant=plan.accountant,
            adjacency=plan.adjacency,
        )
        if spent > plan.epsilon * _SAME_EPSILON:
            raise ConfigurationError(
                f"the plan's {plan.steps} steps cost epsilon {spent:.6g}, not the {plan.epsilon:.6g} it says. Make a new plan."
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
