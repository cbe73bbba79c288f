"""Per-example clipping against its peers: time and peak memory of one training step, as ratios to the non-private one.

    python benchmarks/clipping.py --device cuda --networks cnn-small cnn-large --batches 1024 --out results
    python benchmarks/clipping.py --device cuda --grid --largest cnn-small resnet18-64 --limit-seconds 300 --out results
    python benchmarks/clipping.py --device cuda --profile cnn-small --batches 1024
    python benchmarks/clipping_plots.py results docs/clipping            # the paper's Figures 5-9 from them

Every method is measured in the same run, on the same network and data, after a warm-up, as the median over blocks of steps; the
device is waited for at the end of a block, as a training loop would. Memory is the peak of what was allocated, from the model's
construction on: warm-up, self-check and the recording of CUDA graphs included. Peers: Opacus' hooks and ghost clipping (where
opacus is installed). Out of memory is a result.
"""

import argparse
import csv
import gc
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import lipdp.clipping
from clipping_steps import METHODS, QUICK, Step
from lipdp.errors import LipdpNotice
from networks import NETWORKS

warnings.filterwarnings("ignore")
warnings.simplefilter("once", LipdpNotice)  # what is not replayed, or not done by a kernel, and why
Row = dict[str, float | str | int]
FIELDS = ("network", "batch", "method", "ms", "times", "mib", "memory", "held_mib", "error")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(step: Step, device: torch.device, seconds: float) -> Row:
    """Median milliseconds of a step over blocks of steps; on the GPU also the peak of what was allocated, and what is held."""
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    begin = time.perf_counter()
    for _ in range(4 if cuda else 1):  # a graph is recorded in the second
        step()
        if time.perf_counter() - begin > 3 * seconds:
            break
    wait()
    started = time.perf_counter()
    step()
    wait()
    once = time.perf_counter() - started
    block = max(1, min(20, int(0.1 * seconds / max(once, 1e-6))))
    times, end = [once * 1e3] if block == 1 else [], time.perf_counter() + seconds
    while len(times) < 2 or (time.perf_counter() < end and len(times) < 30):
        if once > seconds and times:
            break
        started = time.perf_counter()
        for _ in range(block):
            step()
        wait()
        times.append((time.perf_counter() - started) * 1e3 / block)
    row: Row = {"ms": statistics.median(times), "mib": 0.0, "held_mib": 0.0}
    if cuda:
        row |= {"mib": torch.cuda.max_memory_allocated() / 2**20, "held_mib": torch.cuda.memory_reserved() / 2**20}
    return row


def run(network: str, batch: int, method: str, device: torch.device, seconds: float) -> Row:
    make, inputs, classes = NETWORKS[network]
    torch.manual_seed(0)
    _free(device)
    row: Row = {"network": network, "batch": batch, "method": method}
    try:
        model = make().to(device)
        x, y = inputs(batch, device), torch.randint(0, classes, (batch,), device=device)
        row |= measure(METHODS[method](model, x, y), device, seconds)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    except Exception as error:  # a peer that can't do a network is a result, too
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
    return row


def fits(network: str, batch: int, method: str, device: torch.device) -> bool:
    """Whether a few steps of so many rows run without running out of memory."""
    make, inputs, classes = NETWORKS[network]
    _free(device)
    try:
        model = make().to(device)
        x, y = inputs(batch, device), torch.randint(0, classes, (batch,), device=device)
        step = METHODS[method](model, x, y)
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    return True


def largest_batch(network: str, method: str, device: torch.device, gib: float) -> int:
    """By bisection to 2%, within ``gib`` of memory, so that it takes seconds."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)
    try:
        low, high = 0, 16
        while fits(network, high, method, device):
            low, high = high, 2 * high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(network, middle, method, device) else (low, middle)
        return low
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def self_check(device: torch.device) -> None:
    """Replayed sums are those of an eager call, for fresh inputs and another C, and of the naive loop."""
    for network in ("cnn-small", "rnn", "paper-transformer"):
        make, inputs, classes = NETWORKS[network]
        torch.manual_seed(1)
        model = make().to(device)
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        captured = lipdp.clipping.CapturedClipping(model, loss)
        for call in range(5):
            x, y = inputs(8, device), torch.randint(0, classes, (8,), device=device)
            mask = torch.arange(8, device=device) < 8 - call
            found = captured(x, y, 0.1 * (call + 1), mask=mask)
            for other in ("bookkeeping", "naive"):
                expected = lipdp.clipping.clip_batch(model, loss, x, y, 0.1 * (call + 1), other, mask=mask)
                error = max(float((found.sums[k] - v).norm() / (v.norm() + 1e-3)) for k, v in expected.sums.items())
                assert error < 5e-3, f"{network}: call {call} is off by {error:.2g} from {other}"
        mode = "replayed" if device.type == "cuda" else "not on CUDA"
        print(f"self-check {network}: 5 calls equal eager and naive; {captured.refused or mode}", flush=True)


def dropout_check(device: torch.device) -> None:
    """From the same seed, a replay draws the same masks as an eager call; from another, others."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 3)).to(device)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(16, 20, device=device), torch.randint(0, 3, (16,), device=device)
    captured, results = lipdp.clipping.CapturedClipping(model, loss), []
    for call in range(6):
        torch.manual_seed(call // 2)
        found = captured(x, y, 1.0).sums["0.weight"]
        torch.manual_seed(call // 2)
        expected = lipdp.clipping.clip_batch(model, loss, x, y, 1.0).sums["0.weight"]
        assert float((found - expected).norm()) < 1e-3 * float(expected.norm()), f"dropout: call {call} drew other masks"
        results.append(found)
    assert torch.allclose(results[4], results[5])
    assert not torch.allclose(results[3], results[4])
    mode = "replayed" if device.type == "cuda" else "not on CUDA"
    print(f"self-check dropout: masks follow the seed; {captured.refused or mode}", flush=True)


def profile(network: str, batch: int, method: str, device: torch.device) -> None:
    """Where the time of a step goes: kernels by total time, and the device's and the host's time per step."""
    make, inputs, classes = NETWORKS[network]
    torch.manual_seed(0)
    model = make().to(device)
    x, y = inputs(batch, device), torch.randint(0, classes, (batch,), device=device)
    step = METHODS[method](model, x, y)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        started = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - started) * 200
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    totals: dict[str, list[float]] = {}
    for event in kernels:
        entry = totals.setdefault(event.name, [0.0, 0.0])
        entry[0] += event.device_time_total / 5e3
        entry[1] += 1 / 5
    whole, launches = (sum(entry[k] for entry in totals.values()) for k in (0, 1))
    print(f"\n{network} batch {batch} {method}: {wall:.2f} ms a step (profiled), {whole:.2f} ms of kernels, {launches:.0f} kernels")
    for name, (ms, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:14]:
        print(f"  {ms:7.3f} ms  {count:5.0f} ×  {name[:110]}", flush=True)


# Figures 5-9 of the paper as (networks, batches, methods), and our own targets first.
TARGETS = ["non-private", "opacus hooks", "opacus ghost", "bookkeeping", "non-private graph"]
EVERY = ["non-private", "opacus hooks", "opacus ghost", "bookkeeping", "ghost", "reweight", "multiloss", "naive"]
GRID = (
    (["cnn-small", "cnn-large"], [1024, 256, 64, 16], TARGETS),
    (["transformer"], [32, 16, 64], TARGETS),
    (["mlp", "paper-cnn", "rnn", "lstm", "paper-transformer"], [32, 128], EVERY),
    (["mlp", "paper-cnn", "rnn", "lstm", "paper-transformer"], [16, 64, 256, 1024], ["non-private", *EVERY[1:6]]),
    (["mlp", "paper-cnn", "rnn"], [16, 64], ["non-private", "multiloss", "naive"]),
    (["mlp-2", "mlp-4", "mlp-6", "mlp-8"], [128], ["non-private", "opacus hooks", "bookkeeping", "reweight", "naive"]),
    (["resnet18-32", "resnet18-64", "resnet18-128", "resnet18-256"], [32], EVERY),
    (["vgg11-32", "vgg11-64", "vgg11-128", "vgg11-256"], [20], ["non-private", "opacus hooks", "bookkeeping", "reweight", "naive"]),
)


def cells(arguments: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    grid = GRID if arguments.grid else ((arguments.networks, arguments.batches, arguments.methods),)
    seen = set()
    for networks, batches, methods in grid:
        for network in networks:
            for batch in batches:
                for method in dict.fromkeys(["non-private", *methods]):
                    if (network, batch, method) not in seen:
                        seen.add((network, batch, method))
                        yield network, batch, method


class Results:
    """Rows as they come: printed, and written at once, so that a run that is cut short leaves what it has."""

    def __init__(self, out: str | None, device: torch.device) -> None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        self.what = {"device": name, "torch": torch.__version__, "rows": [], "largest": []}
        self.out = None if out is None else Path(out)
        self.base: dict[tuple[str, int], Row] = {}
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        print(f"{name}, torch {torch.__version__}")
        print(f"{'network':17} {'batch':>6} {'method':22} {'ms':>9} {'× time':>7} {'MiB':>8} {'× mem':>6} {'held':>8}")

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
        (self.out / "clipping.json").write_text(json.dumps(self.what, indent=1))
        with (self.out / "clipping.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, FIELDS)
            table.writeheader()
            table.writerows(self.what["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="*", default=["cnn-small", "mlp", "paper-cnn"], choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--methods", nargs="+", default=QUICK, choices=list(METHODS))
    parser.add_argument("--grid", action="store_true", help="the whole table: our targets, and the paper's Figures 5-9")
    parser.add_argument("--largest", nargs="*", default=[], choices=list(NETWORKS), help="largest batch in --gib of memory (CUDA)")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--profile", nargs="*", default=[], choices=list(NETWORKS), help="kernels of a step (CUDA)")
    parser.add_argument("--self-check", action="store_true", help="replayed results against eager ones and the naive loop")
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time per cell")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="cells after that are left out")
    parser.add_argument("--out", default=None, help="folder for clipping.json and clipping.csv, written row by row")
    arguments = parser.parse_args()
    device, end = torch.device(arguments.device), time.monotonic() + arguments.limit_seconds
    results = Results(arguments.out, device)
    if arguments.self_check:
        self_check(device)
        dropout_check(device)
    for network in arguments.profile:
        for method in ("non-private", *arguments.methods):
            profile(network, arguments.batches[0], method, device)
    for network in arguments.largest:
        whole = 0
        for method in ("non-private", "bookkeeping", "reweight", "opacus hooks", "opacus ghost"):
            found = largest_batch(network, method, device, arguments.gib)
            whole = whole or found
            print(
                f"{network:17} largest batch in {arguments.gib:g} GiB, {method}: {found} ({found / max(whole, 1):.0%})", flush=True
            )
            results.what["largest"].append({"network": network, "method": method, "gib": arguments.gib, "batch": found})
            results.write()
    if arguments.profile and not arguments.grid:
        return
    for network, batch, method in cells(arguments):
        if time.monotonic() > end:
            results.what["cut"] = "some cells were left out: --limit-seconds"
            results.write()
            print("time is up; the other cells are left out")
            break
        results.add(run(network, batch, method, device, arguments.seconds))


if __name__ == "__main__":
    main()
