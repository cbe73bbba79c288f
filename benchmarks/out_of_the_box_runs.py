"""One run of the out-of-the-box table: a recipe, a budget, a part of the training set; what is written down of it."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.certify import certified_accuracy, certify
from lipdp.certify.radii import chord_radius
from lipdp.clipping import clip_batch
from lipdp.data import DatasetInfo
from lipdp.diagnose import diagnose
from lipdp.recipes.grid import base_recipe
from lipdp.recipes.pareto import CERTIFIED, history_line
from lipdp.recipes.recipe import Prepared, Recipe, Result, prepare
from lipdp.recipes.spaces import changed
from lipdp.training import Callback, evaluate, fit
from lipdp.training.callbacks import Run

HELD_OUT, BATCH, DELTA, EVALUATIONS, PROBED = 0.1, 8192, 1e-5, 6, 512
ROUNDING = 1e-4  # of logits of size 1 at most, in float32
RADII = (0.1, 0.25, 0.5, 1.0)  # of the raw pixels in [0, 1], L2


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    dataset: str
    network: str
    method: str
    epsilon: float

    @property
    def family(self) -> tuple[str, str, str]:
        """What cells of different budgets share."""
        return self.dataset, self.network, self.method


@dataclass(frozen=True)
class Job:
    """A run: a trial on held-out records (``number`` is its round), or a final on the test set (its seed)."""

    cell: Cell
    kind: str
    number: int
    settings: dict[str, Any]
    steps: int


class Noise:
    """σ by PLD for (records, steps, ε), and the ε spent at each evaluation: made beforehand, for it takes longer than a run."""

    def __init__(self, file: Path) -> None:
        self.table = json.loads(file.read_text())

    @staticmethod
    def key(records: int, batch: int, steps: int, epsilon: float) -> str:
        return f"{records}|{batch}|{steps}|{epsilon:g}"

    def sigma(self, records: int, batch: int, steps: int, epsilon: float) -> float:
        return float(self.table[self.key(records, batch, steps, epsilon)]["sigma"])

    def spent(self, records: int, batch: int, steps: int, epsilon: float, step: int) -> float:
        return float(self.table[self.key(records, batch, steps, epsilon)]["spent"][str(step)])


def evaluated_steps(steps: int) -> list[int]:
    """Where :func:`lipdp.fit` evaluates."""
    every = max(1, round(steps / EVALUATIONS))
    return [step for step in range(1, steps + 1) if step == steps or (step % every == 0 and steps - step >= every // 2)]


class _Certificates(Callback):
    """Certified accuracy of held-out records at each evaluation, by the layers' constraints: ‖W‖ ≤ 1, so ℓ ≤ 1 on the unit sphere.

    :func:`lipdp.certify` takes the norms that the weights really have, a second's work: the finals do that.
    """

    def __init__(self, held_out: TensorDataset) -> None:
        self._x, self._y = (tensor[:2000] for tensor in held_out.tensors)
        flat = self._x.flatten(1)
        self._lengths = (flat - flat.mean(1, keepdim=True)).norm(dim=1).double()

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        with run.engine.averaged() as model, torch.no_grad():
            outputs = model(self._x).double()
        top = outputs.topk(2, dim=1)
        margins = (top.values[:, 0] - top.values[:, 1] - ROUNDING).clamp_min(0) * (top.indices[:, 0] == self._y)
        radii = chord_radius(margins / math.sqrt(2), self._lengths, 1.0)
        for radius, share in certified_accuracy(radii, RADII).items():
            run.history.metrics.setdefault(f"{CERTIFIED}{radius:g}", []).append(share)


_parts: dict[tuple[str, str, str], tuple[TensorDataset, TensorDataset, DatasetInfo]] = {}


def _data(dataset: str, kind: str, device: str, limit: int | None) -> tuple[TensorDataset, TensorDataset, DatasetInfo]:
    """(to learn from, to judge by, description), on the device; kept for the process's next run."""
    if (dataset, kind, device) not in _parts:
        learn, test, info = data.load(dataset)
        if kind == "trial":
            learn, test = data.split(learn, HELD_OUT)
        held = [TensorDataset(*(tensor[:limit].to(device) for tensor in part.tensors)) for part in (learn, test)]
        _parts[dataset, kind, device] = held[0], held[1], info
    return _parts[dataset, kind, device]


def perform(job: Job, noise_file: str, device: str, threads: int | None, limit: int | None = None, batch: int = BATCH) -> str:
    """Do it; the line to be written."""
    if threads:
        torch.set_num_threads(threads)
    started = time.monotonic()
    cell, noise = job.cell, Noise(Path(noise_file))
    learn, judge, info = _data(cell.dataset, job.kind, device, limit)
    records = len(learn)
    # A thousandth of a step less, so that rounding can't make it one more.
    recipe = changed(base_recipe(*cell.family), job.settings).but(batch_size=batch, epochs=(job.steps - 1e-3) * batch / records)
    sigma = noise.sigma(records, batch, job.steps, cell.epsilon)
    seed = 1000 * (job.kind == "final") + job.number
    # The accountant of the plan is the fast one; the ε that is written down is the table's.
    ready = prepare(recipe, info, noise_multiplier=sigma, dataset_size=records, accountant="rdp", seed=seed)
    assert ready.plan.steps == job.steps
    trial = job.kind == "trial"
    hooks = [_Certificates(judge)] if trial and cell.method == "clipless" else []
    history = fit(
        ready.model, ready.loss, ready.optimizer, ready.plan, learn, validation=judge if trial else None, callbacks=hooks,
        seed=seed, device=device, scheduler=ready.scheduler, ema_decay=recipe.ema_decay, evaluations=EVALUATIONS, settle=True,
        input_shape=info.shape,
    )  # fmt: skip
    history.metrics["epsilon"] = [
        noise.spent(records, batch, job.steps, cell.epsilon, int(step)) for step in history.metrics["step"]
    ]
    history.epsilon = history.metrics["epsilon"][-1]
    trained = time.monotonic()
    figures = evaluate(ready.model, ready.loss, judge, device=device, batch_size=2048)
    result = Result(recipe.name, figures["accuracy"], history.epsilon, DELTA, job.steps, trained - started, ready.plan.method, seed,
                    history, ready.model, ready.plan)  # fmt: skip
    certified = {} if trial or cell.method != "clipless" else certified_accuracy(certify(ready.model, *judge.tensors), RADII)
    line = history_line(recipe, result, evaluated_on="validation" if trial else "test", certified=certified)
    line |= {"kind": job.kind, "number": job.number, "budget": cell.epsilon, "network": cell.network, "sigma": sigma}
    line |= {"changes": job.settings, "device": device.partition(":")[0]}
    if not trial and job.number == 0:
        line["tightness"] = _proved(ready, learn) if cell.method == "clipless" else _clipped(ready, recipe, learn)
    return json.dumps({**line, "total_seconds": round(time.monotonic() - started, 2)}, default=str)


def untrained(cell: Cell, noise_file: str, steps: int, limit: int | None = None) -> dict[str, Any]:
    """How much of their bounds the first gradients use: on the initial weights, with the cell's recipe and noise."""
    learn, _, info = _data(cell.dataset, "final", "cpu", limit)
    recipe = base_recipe(*cell.family).but(epochs=(steps - 1e-3) * BATCH / len(learn))
    sigma = Noise(Path(noise_file)).sigma(len(learn), BATCH, steps, cell.epsilon)
    ready = prepare(recipe, info, noise_multiplier=sigma, dataset_size=len(learn), accountant="rdp", seed=0)
    return _proved(ready, learn) if cell.method == "clipless" else _clipped(ready, recipe, learn)


def _proved(ready: Prepared, learn: TensorDataset) -> dict[str, Any]:
    """mean ‖g‖/Δ by parameter, at the end of training. The datasets are public, which is why it may be shown."""
    found = diagnose(ready.model, ready.loss, learn, public=True, plan=ready.plan, examples=PROBED)
    rows = {row.name: {"share": row.tightness, "bound": row.bound, "size": row.size, "snr": row.snr} for row in found.rows}
    return {"whole": found.whole.tightness, "snr": found.whole.snr, "size": found.whole.size, "parameters": rows}


def _clipped(ready: Prepared, recipe: Recipe, learn: TensorDataset) -> dict[str, Any]:
    """mean min(‖g‖, C)/C: the same share of the bound, where clipping makes the bound."""
    assert recipe.max_grad_norm is not None
    limit = recipe.max_grad_norm
    x, y = (tensor[:PROBED] for tensor in learn.tensors)
    found = clip_batch(ready.model, ready.loss, x, y, limit)
    norms = found.norms.flatten().double()
    size = sum(p.numel() for p in ready.model.parameters())
    signal = math.sqrt(sum(float(total.double().square().sum()) for total in found.sums.values())) / len(x)
    noise = next(iter(ready.plan.noise_stds.values())) * math.sqrt(size) / ready.plan.batch_size
    return {"whole": float(norms.clamp_max(limit).mean()) / limit, "clipped": float((norms > limit).double().mean()),
            "median_norm": float(norms.median()), "snr": signal / noise, "size": size}  # fmt: skip
