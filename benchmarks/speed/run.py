"""A private step against ordinary ones: time and peak memory, as ratios in one run (`make bench`).

    python benchmarks/speed/run.py                                                       # the small CNN on whatever there is
    python benchmarks/speed/run.py --device cuda --networks cnn-small cnn-large --batches 256 1024 8192 --output speed.json

Every method is measured in the same run, on the same network and data, after a warm-up, as the median over blocks of steps; the
device is waited for at the end of a block, as a training loop would. Memory is the peak of what was allocated, from the model's
construction on. What can't be run is a result, too.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
from pairs import PAIRS
from steps import METHODS, Step

Row = dict[str, float | str | int]


def measure(step: Step, device: torch.device, seconds: float) -> tuple[float, float]:
    """Median milliseconds of a step, and MiB."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) / count

    for _ in range(6 if device.type == "cuda" else 2):  # kernels are compiled, a graph is recorded
        once = block(1)
    size = max(1, min(20, int(0.1 * seconds / once)))
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 40):
        times.append(block(size))
    return 1e3 * statistics.median(times), torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0


def cell(network: str, batch: int, method: str, device: torch.device, seconds: float) -> Row:
    """One row of the table."""
    row: Row = {"network": network, "batch": batch, "method": method}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    torch.compiler.reset()
    try:
        pair = PAIRS[network]
        row["ms"], row["mib"] = measure(METHODS[method](pair, *pair.batch(batch, device)), device, seconds)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    except Exception as error:  # a peer that can't do a network is a result, too
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", default=["cnn-small"], choices=list(PAIRS))
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, for each cell")
    parser.add_argument("--output", default=None, help="a file for the rows, as JSON")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}")
    rows: list[Row] = []
    roofs: list[dict[str, float | str]] = []

    def write() -> None:  # after every row: a run that is cut short leaves what it has
        if arguments.output:
            what = {"device": name, "torch": torch.__version__, "rows": rows, "kernels": roofs}
            Path(arguments.output).write_text(json.dumps(what, indent=1) + "\n")

    print(f"{'network':12} {'batch':>6} {'method':18} {'ms':>9} {'× time':>7} {'MiB':>8} {'× mem':>6}")
    for network in arguments.networks:
        for batch in arguments.batches or ([1024] if device.type == "cuda" else [128]):
            base: Row | None = None
            for method in arguments.methods:
                row = cell(network, batch, method, device, arguments.seconds)
                rows.append(row)
                if "error" in row:
                    print(f"{network:12} {batch:6} {method:18} {row['error']}", flush=True)
                    continue
                base = base or row
                row["times"] = float(row["ms"]) / float(base["ms"])
                memory = ""
                if row["mib"]:
                    row["memory"] = float(row["mib"]) / float(base["mib"])
                    memory = f"{row['mib']:8.0f} {row['memory']:6.2f}"
                print(f"{network:12} {batch:6} {method:18} {row['ms']:9.2f} {row['times']:7.2f} {memory}", flush=True)
                write()
    if device.type == "cuda":
        from kernels import roofline

        roofs += roofline()
        write()


if __name__ == "__main__":
    main()
