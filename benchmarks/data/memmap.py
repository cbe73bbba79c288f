"""How fast samples of a large file are drawn and read, beside reading as such, and how much memory it takes.

    python benchmarks/data/memmap.py --records 1e7 --features 100 --output benchmarks/results/data/memmap.json

Writes a file of float32 rows (removed afterwards), then measures: reading all of it in order; reading sorted random rows, as many
as a sample has, by numpy alone; samples as a run has them (Poisson, drawn and read); the checks before a run and binding it to the
data; one record at a time. Memory is what the process holds by itself (anonymous) and in all, from /proc.
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

from lipdp.data import Stored
from lipdp.privacy import Stream, poisson_indices
from lipdp.privacy.randomness import derive_key
from lipdp.training.batches import check_finite, gather
from lipdp.training.positions import digest_records


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
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    records, row = int(options.records), 4 * options.features + 8
    with tempfile.TemporaryDirectory() as folder:
        files = written(folder, records, options.features)
        data, q = Stored(*files), options.batch / records
        before = memory()
        order = timed(data.rows(slice(at, at + 100_000)) for at in range(0, records, 100_000))
        rng, stream = np.random.default_rng(1), Stream(derive_key(bytes(32), "benchmark"))
        x, y = (np.load(file, mmap_mode="r") for file in files)
        reading, flat, drawing, whole = np.zeros((4, 2))
        for _ in range(options.samples):  # in turn, so that both find the same in the system's cache
            at = np.sort(rng.choice(records, options.batch))
            reading += timed((x[at], y[at]) for _ in range(1))
            flat += timed(tuple(np.load(file, mmap_mode="r")[at] for file in files) for _ in range(1))
            drawing += timed(poisson_indices(records, q, stream) for _ in range(1))
            whole += timed(gather(data, poisson_indices(records, q, stream)) for _ in range(1))
        del x, y  # numpy's own mapping, which has grown to the whole file
        largest = memory()
        for _ in range(options.samples):
            gather(data, poisson_indices(records, q, stream))
            largest = {name: max(size, largest[name]) for name, size in memory().items()}
        checking = timed(each() for each in [lambda: check_finite(data)])
        binding = timed(each() for each in [lambda: digest_records(data, bytes(32))])
        few = torch.arange(20_000)
        one_by_one = timed(data[int(number)] for number in few)
        after = memory()
    megabytes = options.samples * options.batch * row / 1e6
    result = {
        "records": records,
        "features": options.features,
        "gigabytes": records * row / 1e9,
        "samples": options.samples,
        "expected_batch": options.batch,
        "in_order_mb_s": records * row / 1e6 / order[0],
        "random_rows_mb_s": megabytes / reading[0],
        "samples_mb_s": megabytes / whole[0],
        "random_rows_nothing_left_mapped_mb_s": megabytes / flat[0],
        "samples_of_reading": flat[0] / whole[0],
        "samples_of_reading_with_the_whole_file_mapped": reading[0] / whole[0],
        "the_same_in_processor_time": [flat[1] / whole[1], reading[1] / whole[1]],
        "drawing_s_per_sample": drawing[0] / options.samples,
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
