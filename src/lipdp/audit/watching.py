"""The runs that audits make: one watched from outside, and shadow models.

Of a watched run it is seen what its optimiser is handed in every step, and what could be told from it. Shadow models are trained
like the model under attack, on other records of the same kind.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lipdp._checks import whole
from lipdp._files import written_whole
from lipdp._numerics import Undrawn
from lipdp.errors import CheckpointError, ConfigurationError, DataError, LipdpWarning
from lipdp.planning.plan import PrivacyPlan
from lipdp.privacy.accounting import run_epsilon
from lipdp.privacy.budget import AnyBudget
from lipdp.training.account import several_runs
from lipdp.training.batches import check_dataset, gather
from lipdp.training.engine import PrivacyEngine
from lipdp.training.fit import fit

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """One step, as somebody sees it who sees all weights.

    Attributes:
        released: the noised sum by parameter: what the optimiser was handed, times the expected batch size.
        chosen: the numbers of the records in the batch. Auditors put the records there, and may know.
        stds: the planned noise of this step by parameter.
        clips: clipping norms that change, as they were.
    """

    released: Mapping[str, Tensor]
    chosen: Tensor
    stds: Mapping[str, float]
    clips: Mapping[str, float]


def hold_still(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimiser that leaves the weights where they are: each step is then a draw of one and the same mechanism."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def audited_plan(plan: PrivacyPlan, *, steps: int | None = None, sampling: bool = True) -> PrivacyPlan:
    """The plan of an audit: the same mechanism in every step, for fewer steps, or with all records in each.

    What it costs is accounted anew; one-off releases beside the steps are left out, for nothing of them is watched.
    """
    count = plan.steps if steps is None else steps
    if not (isinstance(count, int) and 1 <= count <= plan.steps):
        raise ConfigurationError(f"steps must be a whole number from 1 to the plan's {plan.steps}, not {steps!r}")
    shorter = dataclasses.replace(
        plan,
        steps=count,
        phases=tuple(phase for phase in plan.phases if phase.start < count),
        dataset_size=plan.dataset_size if sampling else plan.batch_size,
        releases=(),
    )
    cost = run_epsilon(shorter.run, plan.delta, plan.accountant, plan.adjacency)
    return dataclasses.replace(shorter, epsilon=cost)


def watch_run(
    model: torch.nn.Module,
    loss: Any,
    plan: PrivacyPlan,
    records: TensorDataset,
    optimizer: torch.optim.Optimizer,
    *,
    budget: AnyBudget = None,
    input_shape: tuple[int, ...] | None = None,
    before_step: Callable[[Mapping[str, float], Mapping[str, float]], None] | None = None,
) -> Iterator[Step]:
    """Every step of a real run of the engine on these records: its samples, its noise, its division, its projection.

    ``before_step`` is called with the step's noise and clipping norms while the weights are those that its gradients are taken at.
    """
    handed: dict[str, Tensor] = {}
    named = {id(p): name for name, p in model.named_parameters()}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        handed.clear()
        for group in optimizer.param_groups:
            handed.update({named[id(p)]: p.grad.detach().double() for p in group["params"] if p.grad is not None})

    hook = optimizer.register_step_pre_hook(note)
    try:
        with PrivacyEngine(model, loss, optimizer, plan, budget=budget, input_shape=input_shape) as engine:
            samples = engine.samples(records)
            while (chosen := _next(samples)) is not None:
                stds, clips = engine.noise_stds, engine.clipping
                if before_step is not None:
                    before_step(stds, clips)
                engine.step(*gather(records, chosen), sample=chosen)
                yield Step({name: g * plan.batch_size for name, g in handed.items()}, chosen, stds, clips)
    finally:
        hook.remove()


def draw_samples(
    model: torch.nn.Module,
    loss: Any,
    plan: PrivacyPlan,
    records: TensorDataset,
    count: int,
    *,
    input_shape: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """The first samples of a real run, as numbers of records. No step is taken, so that nothing is released."""
    with PrivacyEngine(model, loss, hold_still(model), plan, input_shape=input_shape) as engine:
        samples = engine.samples(records)
        return [chosen for chosen in (_next(samples) for _ in range(count)) if chosen is not None]


def _next(samples: Iterator[Tensor]) -> Tensor | None:
    """The next sample. An audit's records are not as many as the plan's: no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the dataset has", category=LipdpWarning)
        return next(samples, None)


MakeShadow = Callable[[], tuple[torch.nn.Module, Any, torch.optim.Optimizer]]


def train_shadows(
    make: MakeShadow,
    plan: PrivacyPlan,
    pool: Any,
    count: int,
    folder: str | Path,
    *,
    workers: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[torch.nn.Module]:
    """Train ``count`` models with :func:`lipdp.fit`, each on its own random part of a pool of records.

    A call that was interrupted is continued by the same call: models that are in the folder are read, and one that was begun goes
    on from its checkpoint.

    Args:
        make: returns a fresh model, its loss and its optimiser. With several workers, a function at the top of a module.
        plan: of each shadow's run: that of the model under attack.
        pool: records that the model under attack was not trained on, nor is tried on; at least ``plan.dataset_size`` of them.
        count: how many models.
        folder: where they are kept.
        workers: processes that train at the same time.
        seed: of the parts.
        progress: told (models done, models wanted).
    """
    size, wanted = check_dataset(pool), whole("count", count)
    if size < plan.dataset_size:
        raise DataError(f"the pool has {size} records, and a shadow is trained on {plan.dataset_size}: give a larger pool")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(wanted) if not _file(place, number).exists()]
    done = wanted - len(missing)

    def tell(more: int) -> None:
        if progress is not None:
            progress(done + more, wanted)

    tell(0)
    if whole("workers", workers) == 1:
        for number, shadow in enumerate(missing, 1):
            _train(make, plan, pool, place, shadow, seed)
            tell(number)
    else:
        _check_sendable(make)
        # Not forked: a forked process shares keys, and the engine refuses that.
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            workers, spawned, torch.set_num_threads, (max(1, torch.get_num_threads() // workers),)
        ) as processes:
            jobs = [processes.submit(_train, make, plan, pool, place, shadow, seed) for shadow in missing]
            try:
                for number, job in enumerate(as_completed(jobs), 1):
                    job.result()
                    tell(number)
            except BaseException:
                processes.shutdown(wait=False, cancel_futures=True)  # those under way are finished, and kept
                raise
    return [_read(make, _file(place, number), seed, number) for number in range(wanted)]


def _check_sendable(make: MakeShadow) -> None:
    try:
        pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"make can't be sent to other processes ({error}): give a function at the top of a module, or workers=1"
        ) from error


def _file(folder: Path, number: int) -> Path:
    return folder / f"shadow-{number}.pt"


def _train(make: MakeShadow, plan: PrivacyPlan, pool: Any, folder: Path, number: int, seed: int) -> None:
    file, checkpoint = _file(folder, number), folder / f"shadow-{number}.ckpt"
    part = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed * 1_000_003 + number))[: plan.dataset_size]
    with Undrawn():
        torch.manual_seed(seed * 1_000_003 + number)
        model, loss, optimizer = make()
    with several_runs():
        fit(model, loss, optimizer, plan, Subset(pool, part.tolist()), checkpoint=checkpoint, resume=True, evaluations=1)
    with written_whole(file) as stream:
        torch.save({"seed": seed, "number": number, "weights": model.state_dict()}, stream)
    checkpoint.unlink(missing_ok=True)


def _read(make: MakeShadow, file: Path, seed: int, number: int) -> torch.nn.Module:
    content = torch.load(file, weights_only=True)
    if not isinstance(content, dict) or (content.get("seed"), content.get("number")) != (seed, number):
        raise CheckpointError(f"'{file}' is a shadow of another seed; choose another folder, or remove it")
    model = make()[0]
    try:
        model.load_state_dict(content["weights"])
    except RuntimeError as error:
        raise ConfigurationError(f"'{file}' holds the weights of another model ({error}); choose another folder") from error
    return model
