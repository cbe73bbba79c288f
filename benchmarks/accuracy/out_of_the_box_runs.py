"""One run of the out-of-the-box table: a recipe, a budget, a part of the training set; what is written down of it."""

from __future__ import annotations

import gc
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from grid import base_recipe
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.certify import certified_accuracy
from lipdp.certify.radii import chord_radius
from lipdp.clipping import clip_batch
from lipdp.data import DatasetInfo
from lipdp.diagnose import diagnose
from lipdp.recipes import Prepared, Recipe, Result, prepare
from lipdp.recipes.pareto import CERTIFIED, history_line
from lipdp.training import Callback, fit
from lipdp.training.callbacks import Run

HELD_OUT, BATCH, DELTA, EVALUATIONS, PROBED = 0.1, 8192, 1e-5, 6, 512
ROWS = 2500  # judged at once
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

    @property
    def task(self) -> tuple[str, str, float]:
        """What the cells of all methods share."""
        return self.dataset, self.network, self.epsilon


@dataclass(frozen=True)
class Job:
    """A run: a trial on held-out records (``number`` is its round), or a final on the test set (its seed).

    ``choice`` counts how often the cell's settings have been chosen: finals of earlier choices are kept, but no longer count.
    """

    cell: Cell
    kind: str
    number: int
    settings: dict[str, Any]
    steps: int
    choice: int = 0


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


def judged(model: torch.nn.Module, part: TensorDataset, *, proved: bool) -> dict[str, float]:
    """Accuracy; with ``proved`` also certified accuracies, by the layers' constraints: ‖W‖ ≤ 1, so ℓ ≤ 1 on the unit sphere.

    :func:`lipdp.certify` takes the norms that the weights really have, which are a little smaller, and takes longer for it.
    """
    correct, radii = [], []
    for x, y in zip(*(torch.split(tensor, ROWS) for tensor in part.tensors), strict=True):
        with torch.no_grad():
            top = model(x).double().topk(2, dim=1)
        correct.append(top.indices[:, 0] == y)
        flat = x.flatten(1)
        lengths = (flat - flat.mean(1, keepdim=True)).norm(dim=1).double()
        margins = (top.values[:, 0] - top.values[:, 1] - ROUNDING).clamp_min(0) * correct[-1]
        radii.append(chord_radius(margins / math.sqrt(2), lengths, 1.0))
    found = {"accuracy": float(torch.cat(correct).double().mean())}
    shares = certified_accuracy(torch.cat(radii), RADII) if proved else {}
    return found | {f"{CERTIFIED}{radius:g}": share for radius, share in shares.items()}


class _Judge(Callback):
    """Held-out records at each evaluation, all figures from one pass: averaging and projecting the weights is most of the work."""

    def __init__(self, held_out: TensorDataset, *, proved: bool) -> None:
        self._held_out, self._proved = held_out, proved

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        with run.engine.averaged() as model:
            found = judged(model, self._held_out, proved=self._proved)
        for name, value in found.items():
            run.history.metrics.setdefault(name if name.startswith(CERTIFIED) else f"validation_{name}", []).append(value)


_parts: dict[tuple[str, str, str], tuple[TensorDataset, TensorDataset, DatasetInfo]] = {}


def data_parts(dataset: str, kind: str, device: str, limit: int | None) -> tuple[TensorDataset, TensorDataset, DatasetInfo]:
    """(to learn from, to judge by, description), on the device; kept for the process's next run."""
    if (dataset, kind, device) not in _parts:
        learn, test, info = data.load(dataset)
        if kind == "trial":
            learn, test = data.split(learn, HELD_OUT)
        held = [TensorDataset(*(tensor[:limit].to(device) for tensor in part.tensors)) for part in (learn, test)]
        _parts[dataset, kind, device] = held[0], held[1], info
    return _parts[dataset, kind, device]


def perform(job: Job, noise_file: str, device: str, threads: int, limit: int | None = None, batch: int = BATCH) -> str:
    """Do it; the line to be written."""
    started = time.monotonic()
    torch.set_num_threads(threads)
    gc.collect()  # a model and its recorded steps point at each other, and hold the device's memory
    cell, noise = job.cell, Noise(Path(noise_file))
    learn, judge, info = data_parts(cell.dataset, job.kind, device, limit)
    records = len(learn)
    # A thousandth of a step less, so that rounding can't make it one more.
    recipe = base_recipe(*cell.family).changed(job.settings).but(batch_size=batch, epochs=(job.steps - 1e-3) * batch / records)
    sigma = noise.sigma(records, batch, job.steps, cell.epsilon)
    seed = 1000 * (job.kind == "final") + job.number
    # The accountant of the plan is the fast one; the ε that is written down is the table's.
    ready = prepare(recipe, info, noise_multiplier=sigma, dataset_size=records, accountant="rdp", seed=seed)
    assert ready.plan.steps == job.steps
    trial = job.kind == "trial"
    proved = cell.method == "clipless"  # by Lipschitz layers: only they come with certificates
    history = fit(
        ready.model, ready.loss, ready.optimizer, ready.plan, learn, callbacks=[_Judge(judge, proved=proved)] if trial else [],
        seed=seed, device=device, scheduler=ready.scheduler, ema_decay=recipe.ema_decay, evaluations=EVALUATIONS, settle=True,
        input_shape=info.shape,
    )  # fmt: skip
    history.metrics["epsilon"] = [
        noise.spent(records, batch, job.steps, cell.epsilon, int(step)) for step in history.metrics["step"]
    ]
    history.epsilon = history.metrics["epsilon"][-1]
    trained = time.monotonic()
    figures = judged(ready.model, judge, proved=proved)
    result = Result(recipe.name, figures["accuracy"], history.epsilon, DELTA, job.steps, trained - started, ready.plan.method, seed,
                    history, ready.model, ready.plan)  # fmt: skip
    certified = {} if trial else {float(name.removeprefix(CERTIFIED)): v for name, v in figures.items() if name != "accuracy"}
    line = history_line(recipe, result, evaluated_on="validation" if trial else "test", certified=certified)
    line |= {"kind": job.kind, "number": job.number, "budget": cell.epsilon, "network": cell.network, "sigma": sigma}
    line |= {"changes": job.settings, "choice": job.choice, "device": device.partition(":")[0], "table_method": cell.method}
    if not trial and job.number == 0:
        try:
            line["tightness"] = _clipped(ready, recipe, learn) if recipe.max_grad_norm else _proved(ready, learn)
        except Exception as error:  # the run is done, and its result stands without this
            line["without_tightness"] = repr(error)
    return json.dumps({**line, "total_seconds": round(time.monotonic() - started, 2)}, default=str)


def untrained(cell: Cell, noise_file: str, steps: int, limit: int | None = None) -> dict[str, Any]:
    """How much of their bounds the first gradients use: on the initial weights, with the cell's recipe and noise."""
    learn, _, info = data_parts(cell.dataset, "final", "cpu", limit)
    recipe = base_recipe(*cell.family).but(epochs=(steps - 1e-3) * BATCH / len(learn))
    sigma = Noise(Path(noise_file)).sigma(len(learn), BATCH, steps, cell.epsilon)
    ready = prepare(recipe, info, noise_multiplier=sigma, dataset_size=len(learn), accountant="rdp", seed=0)
    return _clipped(ready, recipe, learn) if recipe.max_grad_norm else _proved(ready, learn)


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
