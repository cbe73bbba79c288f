"""Which run of the out-of-the-box table is next, and the processes that do them: within a time limit, whatever fails.

Rounds of trials go over all cells before the next round begins, and only rounds that all methods have been through count: they are
tuned with the same effort. A round begins only if it and the finals fit into the time that is left, by what runs have taken.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import statistics
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from out_of_the_box_runs import Cell, Job, perform

SEEDS = 3
TUNED = {
    "clipless": ("temperature", "options.clip", "learning_rate"),
    "boundaries": ("temperature", "options.clip", "options.conv_clip", "learning_rate"),
    "bookkeeping": ("temperature", "max_grad_norm", "learning_rate"),
}
SPREAD = math.log(1.7)  # deviation of a change, of a setting's logarithm
RESERVE = 1.1  # the first finals also measure how tight bounds are
GRACE = 15.0  # seconds that a run may go on past the limit

Runs = list[dict[str, Any]]


def method_of(run: Mapping[str, Any]) -> str:
    """As the table calls it; the plan's method of networks between boundaries is "clipless", too."""
    return str(run.get("table_method", run["method"]))


def cell_of(run: Mapping[str, Any]) -> Cell:
    return Cell(run["dataset"], run["network"], method_of(run), run["budget"])


def read_runs(folder: Path) -> Runs:
    """All runs so far."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def counted_trials(runs: Runs, cell: Cell) -> Runs:
    """The cell's trials of rounds that its network has been through with all methods, on this dataset and at this budget."""
    peers = [run for run in runs if run["kind"] == "trial" and cell_of(run).task == cell.task]
    numbers = [{run["number"] for run in peers if method_of(run) == method} for method in {method_of(run) for run in peers}]
    return [run for run in peers if method_of(run) == cell.method and all(run["number"] in done for done in numbers)]


def counted_finals(runs: Runs, cell: Cell) -> Runs:
    """The cell's finals with the settings that were chosen last, by seed."""
    finals = [run for run in runs if run["kind"] == "final" and cell_of(run) == cell]
    last = max((run.get("choice", 0) for run in finals), default=0)
    return sorted((run for run in finals if run.get("choice", 0) == last), key=lambda run: run["number"])


def cut_torn_line(file: Path) -> None:
    """What a kill has left of a line would make the file unreadable: that run is done again."""
    if file.exists() and not (content := file.read_bytes()).endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])


def proposed(cell: Cell, number: int, starts: Sequence[Mapping[str, Any]], known: Runs, steps: Sequence[int]) -> Job:
    """The cell's trial of this round; ``known`` are the trials of its family, at all budgets.

    First the starts; then what has gained most over the first one, at whichever budget: as it is if it was found at another one,
    else with each setting changed a little.
    """
    if number < len(starts) or not known:
        return Job(cell, "trial", number, dict(starts[min(number, len(starts) - 1)]), steps[0])
    draw = random.Random(f"{cell} {number}")
    first = {run["budget"]: run["accuracy"] for run in known if run["number"] == 0}
    best = max(known, key=lambda run: (run["accuracy"] - first.get(run["budget"], 1.0), run["budget"] == cell.epsilon))
    settings, length = dict(best["changes"]), best["steps"]
    if all((run["changes"], run["steps"]) != (settings, length) for run in known if run["budget"] == cell.epsilon):
        return Job(cell, "trial", number, settings, length)
    for name in (name for name in TUNED[cell.method] if name in settings):
        settings[name] = float(f"{settings[name] * math.exp(draw.gauss(0, SPREAD)):.3g}")
    if "options.activation" in settings and draw.random() < 0.1:
        settings["options.activation"] = {"relu": "tanh", "tanh": "relu"}[settings["options.activation"]]
    return Job(cell, "trial", number, settings, draw.choice(list(steps)) if draw.random() < 0.3 else length)


class Schedule:
    """A round of trials for all cells after another, then each cell's finals.

    Cells with finals have made their choice and get no more trials, unless they are to be tuned again: then a better choice gets
    finals of its own.
    """

    def __init__(
        self, cells: Sequence[Cell], runs: Runs, starts: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]],
        *, trials: int, steps: Sequence[int], workers: int, device: str, again: bool = False,
    ) -> None:  # fmt: skip
        self.cells, self.starts, self.steps, self.trials, self.workers, self.device = cells, starts, steps, trials, workers, device
        wanted = set(cells)
        self.runs = [run for run in runs if cell_of(run) in wanted]
        self.begun = {(cell_of(run), run["kind"], run["number"], run.get("choice", 0)) for run in self.runs}
        self.running: list[Job] = []
        self.finishing = False
        self.tuned = [cell for cell in cells if again or not counted_finals(self.runs, cell)]
        self.chosen = {cell: finals[0] for cell in cells if cell not in self.tuned and (finals := counted_finals(self.runs, cell))}

    def begin(self, job: Job) -> None:
        self.begun.add((job.cell, job.kind, job.number, job.choice))
        self.running.append(job)

    def end(self, job: Job, run: dict[str, Any] | None) -> None:
        """``None``: it failed, and is not tried again before the next call of the program."""
        self.running.remove(job)
        if run is not None:
            self.runs.append(run)

    def seconds(self, cells: Sequence[Cell]) -> float:
        """What a run of each of these will take all workers together, by what trials have taken on this device."""
        times: dict[tuple[str, str, str], list[float]] = {}
        for run in self.runs:
            if run["kind"] == "trial" and run["device"] == self.device:
                times.setdefault(cell_of(run).family, []).append(run["total_seconds"])
        # The lower one: a process's first run also loads libraries and data.
        usual = [statistics.median_low(times[cell.family]) for cell in cells if cell.family in times]
        if not usual:
            return 0.0
        return statistics.fmean(usual) * len(cells) / self.workers + max(usual)  # the last ones leave workers idle

    def next(self, left: float) -> Job | None:
        """The run to begin now, with so many seconds left; ``None`` if there is none, or none before others have ended."""
        if not self.finishing:
            if (trial := self._next_trial(left)) is not None:
                return trial
            if any(job.kind == "trial" for job in self.running):
                return None  # finals are chosen among all trials
            self.finishing = True
            self.chosen |= {cell: best for cell in self.tuned if (best := self._choose(cell)) is not None}
        return next((job for job in self.finals() if left > self.seconds([job.cell]) - GRACE), None)

    def _next_trial(self, left: float) -> Job | None:
        for number in range(self.trials):
            open_cells = [cell for cell in self.tuned if (cell, "trial", number, 0) not in self.begun]
            if open_cells:
                # Those that are still to be chosen for may need finals of all seeds.
                finals = [*(job.cell for job in self.finals()), *(cell for cell in self.tuned for _ in range(SEEDS))]
                if number > 0 and left < self.seconds(open_cells) + RESERVE * self.seconds(finals):
                    return None
                cell = open_cells[0]
                known = [run for run in self.runs if run["kind"] == "trial" and cell_of(run).family == cell.family]
                return proposed(cell, number, self.starts[cell.family], known, self.steps)
        return None

    def finals(self) -> list[Job]:
        """Those that have not begun, of the cells that have been chosen for."""
        jobs = [
            Job(cell, "final", seed, best["changes"], best["steps"], best.get("choice", 0))
            for seed in range(SEEDS)
            for cell, best in self.chosen.items()
        ]
        return [job for job in jobs if (job.cell, job.kind, job.number, job.choice) not in self.begun]

    def _choose(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's best trial; a new choice where its finals were of another one."""
        trials, finals = counted_trials(self.runs, cell), counted_finals(self.runs, cell)
        if not trials:
            return None
        best = max(trials, key=lambda run: run["accuracy"])
        if not finals or all(best[name] == finals[0][name] for name in ("changes", "steps")):
            return best if not finals else finals[0]
        return {**best, "choice": finals[0].get("choice", 0) + 1}


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    noise: str
    device: str
    threads: int
    limit: int | None
    batch: int


def _end_with_parent() -> None:
    """A worker whose parent was killed would go on with its run, for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _serve(end: Connection, settings: Settings) -> None:
    """One run after another, in a process that has loaded libraries and data once."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while (job := end.recv()) is not None:
        try:
            end.send((perform(job, settings.noise, settings.device, settings.threads, settings.limit, settings.batch), None))
        except Exception:
            end.send((None, traceback.format_exc()))


class _Worker:
    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()  # so that its death is noticed
        self.job: Job | None = None

    def answer(self) -> tuple[str | None, str | None]:
        """(line of the run, ``None``), or (``None``, what went wrong)."""
        try:
            answer: tuple[str | None, str | None] = self.end.recv()
            return answer
        except (EOFError, ConnectionError):
            self.process.join()
            return None, f"the process ended with {self.process.exitcode}"

    def stop(self) -> None:
        """At once if it is in the middle of a run."""
        if self.job is None and self.process.is_alive():
            self.end.send(None)
            self.process.join(5)
        self.process.terminate()


def work(
    schedule: Schedule, settings: Settings, target: Path, seconds: float
) -> Iterator[tuple[float, Job, dict[str, Any] | None]]:
    """Do the runs and append each to ``target``; what fails goes to ``failed.txt`` beside it. Yields (time, job, run)."""
    began = time.monotonic()
    cut_torn_line(target)
    workers = [_Worker(settings) for _ in range(schedule.workers)]
    try:
        while True:
            for worker in workers:
                left = seconds - (time.monotonic() - began)
                if worker.job is None and left > 0 and (job := schedule.next(left)) is not None:
                    schedule.begin(job)
                    worker.job = job
                    worker.end.send(job)
            busy = [worker for worker in workers if worker.job is not None]
            late = seconds + GRACE - (time.monotonic() - began)
            ready = wait([worker.end for worker in busy], timeout=max(0.0, late)) if busy else []
            if not ready:
                return
            for number, worker in enumerate(workers):
                if worker.end in ready and worker.job is not None:
                    job, worker.job = worker.job, None
                    line, error = worker.answer()
                    if line is None:
                        with (target.parent / "failed.txt").open("a") as file:
                            file.write(f"{job}\n{error}\n")
                        if not worker.process.is_alive():
                            workers[number] = _Worker(settings)
                    else:
                        with target.open("a") as file:
                            file.write(line + "\n")
                    run = None if line is None else json.loads(line)
                    schedule.end(job, run)
                    yield time.monotonic() - began, job, run
    finally:
        for worker in workers:
            worker.stop()
