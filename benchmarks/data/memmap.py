"""How fast samples of a large file are drawn and read, beside reading as such, and how much memory it takes.

    python benchmarks/data/memmap.py --records 1e7 --features 100 --output benchmarks/results/data/memmap.json

Writes a file of float32 rows (removed afterwards), then measures: reading all of it in order; reading sorted random rows, as many
as a sample has, by numpy alone; samples as a run has them (Poisson, drawn and read); the checks before a run and binding it to
the data; one record at a time. numpy has both files mapped as a whole, here they are never. Memory is what the process holds by
itself (anonymous) and in all, from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lipdp._numerics import keep_freed_memory
from lipdp.data import Stored
from lipdp.privacy import Stream, poisson_indices
from lipdp.privacy.randomness import derive_key
from lipdp.training.batches import check_finite, gather
from lipdp.training.known import digest_records, read_ahead

ROUND = 16  # samples


def memory() -> dict[str, float]:
    """MB that the process holds: by itself, and with the files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return {name: int(size) / 1024 for name, size in sizes.items()}


def timed(work: Iterable[object]) -> npt.NDArray[np.float64]:
    """Seconds that it takes to go through it, on the clock and of the processor; nothing is kept."""
    started = np.array([time.perf_counter(), time.process_time()])
    deque(work, maxlen=0)
    return np.array([time.perf_counter(), time.process_time()]) - started


def written(folder: str, records: int, features: int) -> tuple[str, str]:
    """Rows of random numbers, the same block over and over with another first column."""
    files = f"{folder}/x.npy", f"{folder}/y.npy"
    x = np.lib.format.open_memmap(files[0], mode="w+", dtype=np.float32, shape=(records, features))
    block = np.random.default_rng(0).normal(size=(10_000, features)).astype(np.float32)
    for start in range(0, records, len(block)):
        part = block[: records - start]
        part[:, 0] = start
        x[start : start + len(part)] = part
    x.flush()
    np.save(files[1], (np.arange(records) % 10).astype(np.int64))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=float, default=1e6)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--batch", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    records, row = int(options.records), 4 * options.features + 8
    keep_freed_memory()  # as the engine does on a processor
    with tempfile.TemporaryDirectory() as folder:
        files = written(folder, records, options.features)
        data, q = Stored(*files), options.batch / records
        before = memory()
        order = timed(data.rows(slice(at, at + 100_000)) for at in range(0, records, 100_000))
        rng, stream = np.random.default_rng(1), Stream(derive_key(bytes(32), "benchmark"))
        x, y = (np.load(file, mmap_mode="r") for file in files)
        reading, taking, flat, drawing, whole, single = np.zeros((6, 2))
        for array in (x, y):  # numpy has all of both mapped from here on
            deque((array[at : at + 100_000].sum() for at in range(0, records, 100_000)), maxlen=0)
        rounds = [ROUND] * (options.samples // ROUND)
        for size in rounds:  # in turn, so that all find the same in the system's cache
            ats = [np.sort(rng.choice(records, options.batch)) for _ in range(size)]
            reading += timed((x[at], y[at]) for at in ats)
            taking += timed((np.take(x, at, axis=0), np.take(y, at, axis=0)) for at in ats)
            flat += timed(tuple(np.load(file, mmap_mode="r")[at] for file in files) for at in ats)
            drawing += timed(poisson_indices(records, q, stream) for _ in ats)
            whole += timed(read_ahead(data, (poisson_indices(records, q, stream) for _ in ats), 0, torch.device("cpu")))
            single += timed(gather(data, poisson_indices(records, q, stream)) for _ in ats)
        del x, y  # numpy's own mapping, which has grown to the whole file
        largest = memory()
        for _ in read_ahead(data, (poisson_indices(records, q, stream) for _ in range(sum(rounds))), 0, torch.device("cpu")):
            largest = {name: max(size, largest[name]) for name, size in memory().items()}
        checking = timed(each() for each in [lambda: check_finite(data)])
        binding = timed(each() for each in [lambda: digest_records(data, bytes(32))])
        few = torch.arange(20_000)
        one_by_one = timed(data[int(number)] for number in few)
        after = memory()
    megabytes = sum(rounds) * options.batch * row / 1e6
    result = {
        "records": records,
        "features": options.features,
        "gigabytes": records * row / 1e9,
        "samples": sum(rounds),
        "expected_batch": options.batch,
        "in_order_mb_s": records * row / 1e6 / order[0],
        "random_rows_mb_s": megabytes / reading[0],
        "random_rows_by_take_mb_s": megabytes / taking[0],
        "samples_mb_s": megabytes / whole[0],
        "one_sample_at_a_time_mb_s": megabytes / single[0],
        "random_rows_nothing_left_mapped_mb_s": megabytes / flat[0],
        "samples_of_reading": flat[0] / whole[0],
        "samples_of_reading_with_the_whole_file_mapped": reading[0] / whole[0],
        "samples_of_taking_with_the_whole_file_mapped": taking[0] / whole[0],
        "the_same_in_processor_time": [flat[1] / whole[1], reading[1] / whole[1], taking[1] / whole[1]],
        "one_sample_at_a_time_in_processor_time": [flat[1] / single[1], reading[1] / single[1], taking[1] / single[1]],
        "drawing_s_per_sample": drawing[0] / sum(rounds),
        "check_s": checking[0],
        "digest_s": binding[0],
        "one_by_one_us": one_by_one[0] / len(few) * 1e6,
        "memory_before_mb": before,
        "memory_during_samples_mb": largest,
        "memory_after_mb": after,
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
    }
    print(json.dumps(result, indent=2))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
