"""Several processes for a test: a process group of gloo, each rank calls one function; a hang is a failure, not a wait."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

PATIENCE = 600.0
"""Seconds after which a group that is not done counts as hanging."""


def fresh_processes():
    """Where processes come from that have imported everything, and done nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.rank_warmup"])  # imported, and run, once, not in every process
    return context


def _rank(number, count, folder, function, arguments):
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=count, timeout=timedelta(seconds=PATIENCE / 2))
    try:
        outcome = "result", function(*arguments)
    except Exception as error:  # it is told to the test
        traceback.print_exc()
        outcome = "error", (type(error).__name__, str(error))
    Path(folder, f"{number}.pickle").write_bytes(pickle.dumps(outcome))
    # No farewell: a rank whose partner is gone would wait for it.
    os._exit(0)


def run_ranks(count, function, *arguments):
    """What ``function(*arguments)`` gave on each rank: ("result", value), ("error", (class, message)) or ("gone", None)."""
    context = fresh_processes()
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(number, count, folder, function, arguments), daemon=True) for number in range(count)
        ]
        for process in processes:
            process.start()
        try:
            waiting = {process.sentinel for process in processes}
            while waiting:
                ended = connection.wait(waiting, timeout=PATIENCE)
                assert ended, f"{len(waiting)} of {count} ranks hang"
                waiting -= set(ended)
        finally:
            for process in processes:
                process.kill()
                process.join()
        files = [Path(folder, f"{number}.pickle") for number in range(count)]
        return [pickle.loads(file.read_bytes()) if file.exists() else ("gone", None) for file in files]


def results(count, function, *arguments):
    """The results of all ranks, none of which may fail."""
    outcomes = run_ranks(count, function, *arguments)
    assert all(kind == "result" for kind, _ in outcomes), outcomes
    return [value for _, value in outcomes]
