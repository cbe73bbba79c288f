"""Per-example clipping against its peers: time and peak memory of one training step, as ratios to the non-private one.

    python benchmarks/speed/clipping.py --device cuda --networks cnn-small cnn-large --batches 1024 --out results
    python benchmarks/speed/clipping.py --device cuda --self-check --grid --seconds 0.15 --limit-seconds 320 --resume --out results
    python benchmarks/speed/clipping.py --device cuda --profile cnn-small --batches 1024
    python benchmarks/speed/clipping_plots.py results docs/clipping            # the paper's Figures 5-9 from them

Every method is measured in the same run, on the same network and data, after a warm-up, as the median over blocks of steps; the
device is waited for at the end of a block, as a training loop would. A loop over the examples that takes more than two seconds is
measured once. Memory is the peak of what was allocated, from the model's construction on: warm-up, self-check and the recording of
CUDA graphs included. Peers: Opacus' hooks and ghost clipping (where opacus is installed). Out of memory is a result, as any other
error.
"""

import argparse
import csv
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from clipping_checks import dropout_check, profile, self_check
from clipping_steps import LOOPS, METHODS, QUICK, Step
from networks import NETWORKS

from lipdp.errors import LipdpNotice

warnings.filterwarnings("ignore")
warnings.simplefilter("once", LipdpNotice)  # what is not replayed, or not done by a kernel, and why
Row = dict[str, float | str | int]
# Seconds: a loop over the examples that takes longer is measured once.
_LONG = 2.0
FIELDS = ("network", "batch", "method", "ms", "times", "mib", "memory", "held_mib", "error")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(step: Step, device: torch.device, seconds: float, *, loop: bool) -> Row:
    """Median milliseconds of a step over blocks of steps; on the GPU also the peak of what was allocated, and what is held."""
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None

    def block_of(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - started) / count

    times = [block_of(1)]
    if not loop or times[0] < _LONG:
        for _ in range(3 if cuda and not loop else 0):  # kernels are compiled in the first step, a graph is recorded in the second
            if block_of(1) > 3 * _LONG:
                break
        once = block_of(1)
        size = max(1, min(20, int(0.1 * seconds / max(once, 1e-6))))
        times, end = [once] if size == 1 else [], time.perf_counter() + seconds
        while len(times) < 2 or (time.perf_counter() < end and len(times) < 30):
            if once > seconds and times:
                break
            times.append(block_of(size))
    row: Row = {"ms": statistics.median(times) * 1e3, "mib": 0.0, "held_mib": 0.0}
    if cuda:
        row |= {"mib": torch.cuda.max_memory_allocated() / 2**20, "held_mib": torch.cuda.memory_reserved() / 2**20}
    return row


def run(network: str, batch: int, method: str, device: torch.device, seconds: float) -> Row:
    make, inputs, classes = NETWORKS[network]
    torch.manual_seed(0)
    row: Row = {"network": network, "batch": batch, "method": method}
    try:
        _free(device)
        model = make().to(device)
        x, y = inputs(batch, device), torch.randint(0, classes, (batch,), device=device)
        row |= measure(METHODS[method](model, x, y), device, seconds, loop=method in LOOPS)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    except Exception as error:  # a peer that can't do a network is a result, too
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
    return row


FAST = ["non-private", "opacus hooks", "opacus ghost", "bookkeeping", "ghost", "reweight"]
TARGETS = [*FAST, "non-private graph"]
EVERY = [*FAST, "multiloss", "naive"]
PAPER = ["mlp", "paper-cnn", "rnn", "lstm", "paper-transformer"]
SIDES = (32, 64, 128, 256)
# Blocks of (networks, batches, methods): our targets first, then the paper's Figures 5-9, then the rest.
GRID = {
    "targets": [(["cnn-small", "cnn-large"], [1024], TARGETS), (["transformer"], [32], TARGETS)],
    "architectures": [(PAPER, [128, 32], EVERY)],
    "images": [([f"resnet18-{n}" for n in SIDES], [32], EVERY), ([f"vgg11-{n}" for n in SIDES], [20], EVERY)],
    "memory": [
        ([f"resnet18-{n}" for n in SIDES], [32], ["bookkeeping", "reweight"]),
        ([f"vgg11-{n}" for n in SIDES], [20], ["bookkeeping", "reweight"]),
    ],
    "depth": [([f"mlp-{n}" for n in (2, 4, 6, 8)], [128], EVERY)],
    "batches": [
        (PAPER, [1024, 16, 256, 64], FAST),
        (["cnn-small", "cnn-large"], [16, 256, 64], TARGETS),
        (["transformer"], [16, 64, 128], TARGETS),
    ],
    "loops": [(PAPER, [16, 64], ["multiloss", "naive"])],
    "more": [
        (["resnet18-32", "vgg11-32"], [128, 1024, 16], FAST),
        (["resnet18-32"], [128], ["naive"]),
        (PAPER, [256], ["multiloss", "naive"]),
        (PAPER, [1024], ["naive"]),
        (["mlp", "paper-cnn", "rnn"], [1024], ["multiloss"]),  # on the others it takes minutes
    ],
}


def cells(arguments: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    blocks = [(arguments.networks, arguments.batches, arguments.methods)]
    if arguments.grid is not None:
        blocks = [block for name in arguments.grid or GRID for block in GRID[name]]
    seen = set()
    for networks, batches, methods in blocks:
        for network in networks:
            for batch in batches:
                for method in dict.fromkeys(["non-private", *methods]):
                    if (network, batch, method) not in seen:
                        seen.add((network, batch, method))
                        yield network, batch, method


class Results:
    """Rows as they come: printed, and written at once, so that a run that is cut short leaves what it has."""

    def __init__(self, out: str | None, device: torch.device, *, resume: bool = False) -> None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        self.what = {"device": name, "torch": torch.__version__, "rows": []}
        self.out = None if out is None else Path(out)
        self.base: dict[tuple[str, int], Row] = {}
        if resume and self.out is not None and (self.out / "clipping.json").exists():
            self.what = json.loads((self.out / "clipping.json").read_text())
            self.base = {(r["network"], r["batch"]): r for r in self.what["rows"] if r["method"] == "non-private" and "ms" in r}
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        print(f"{name}, torch {torch.__version__}")
        print(f"{'network':17} {'batch':>6} {'method':22} {'ms':>9} {'× time':>7} {'MiB':>8} {'× mem':>6} {'held':>8}")

    def known(self) -> set[tuple[str, int, str]]:
        return {(row["network"], row["batch"], row["method"]) for row in self.what["rows"]}

    def add(self, row: Row) -> None:
        key = str(row["network"]), int(row["batch"])
        label = f"{row['network']:17} {row['batch']:6} {row['method']:22}"
        if row["method"] == "non-private" and "error" not in row:
            self.base[key] = row
        base = self.base.get(key)
        if base is not None and "ms" in row:
            row["times"] = row["ms"] / base["ms"]
            if row.get("mib"):
                row["memory"] = row["mib"] / base["mib"]
        row |= {name: float(f"{value:.5g}") for name, value in row.items() if isinstance(value, float)}
        if "error" in row:
            print(f"{label} {row['error']}", flush=True)
        else:
            memory = f"{row['mib']:8.0f} {row.get('memory', 0):6.2f} {row['held_mib']:8.0f}" if row.get("mib") else ""
            print(f"{label} {row['ms']:9.3f} {row.get('times', 0):7.2f} {memory}", flush=True)
        self.what["rows"].append(row)
        self.write()

    def write(self) -> None:
        if self.out is None:
            return
        rows = ",\n".join(json.dumps(row) for row in self.what["rows"])
        rest = json.dumps({name: value for name, value in self.what.items() if name != "rows"})
        (self.out / "clipping.json").write_text(f'{rest[:-1]}, "rows": [\n{rows}\n]}}\n')
        with (self.out / "clipping.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, FIELDS)
            table.writeheader()
            table.writerows(self.what["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="*", default=["cnn-small", "mlp", "paper-cnn"], choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--methods", nargs="+", default=QUICK, choices=list(METHODS))
    parser.add_argument("--grid", nargs="*", default=None, choices=list(GRID), help="blocks of the whole table; all without a name")
    parser.add_argument("--profile", nargs="*", default=[], choices=list(NETWORKS), help="kernels of a step (CUDA)")
    parser.add_argument("--self-check", action="store_true", help="replayed results against eager ones and the naive loop")
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time per cell")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="cells after that are left out")
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds; after a CUDA error (exit status 3)")
    parser.add_argument("--out", default=None, help="folder for clipping.json and clipping.csv, written row by row")
    arguments = parser.parse_args()
    device, end = torch.device(arguments.device), time.monotonic() + arguments.limit_seconds
    results = Results(arguments.out, device, resume=arguments.resume)
    if arguments.self_check and not results.known():
        for check in (self_check, dropout_check):
            try:
                check(device)
            except Exception as error:  # seen in the results; the measurements go on
                print(f"{check.__name__} FAILED: {type(error).__name__}: {error}", flush=True)
                results.what[check.__name__] = f"failed: {type(error).__name__}: {error}"
    for network in arguments.profile:
        for method in ("non-private", *arguments.methods):
            profile(network, arguments.batches[0], method, device)
    if arguments.profile and arguments.grid is None:
        return 0
    known = results.known()
    for network, batch, method in cells(arguments):
        if (network, batch, method) in known:
            continue
        if time.monotonic() > end:
            results.what["cut"] = "some cells were left out: --limit-seconds"
            results.write()
            print("time is up; the other cells are left out")
            break
        row = run(network, batch, method, device, arguments.seconds)
        results.add(row)
        if "CUDA error" in str(row.get("error", "")):  # of the kind that nothing survives in this process
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
