"""Shadow models: trained like the model under attack, on other records of the same kind."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from lipdp._checks import whole
from lipdp._files import written_whole
from lipdp._numerics import Undrawn
from lipdp.errors import CheckpointError, ConfigurationError, DataError
from lipdp.planning.plan import PrivacyPlan
from lipdp.training.account import several_runs
from lipdp.training.batches import check_dataset
from lipdp.training.fit import fit

__all__ = ["train_shadows"]

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
