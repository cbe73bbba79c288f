"""Per-example clipping against its peers: time and peak memory of one training step, as ratios to the non-private one.

    python benchmarks/clipping.py --device cuda --networks cnn-small cnn-large --batches 1024 --output results.json

Every method is measured in the same run, on the same network and data, each after a warm-up, as the median of several steps.
Peers: Opacus' hooks and ghost clipping (where opacus is installed).
"""

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import lipdp.clipping
from networks import NETWORKS

warnings.filterwarnings("ignore")
OURS = ("bookkeeping", "ghost", "reweight", "multiloss", "naive")


def _noise(parameters: list[torch.nn.Parameter], scale: float) -> None:
    for p in parameters:
        p.grad += torch.randn_like(p) * scale


def ordinary(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def ours(method: str) -> Callable[..., Callable[[], None]]:
    def make(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        named = dict(model.named_parameters())

        def step() -> None:
            sums = lipdp.clipping.clipped_gradients(model, loss, x, y, 1.0, method=method)
            for name, p in named.items():
                p.grad = (sums[name] + torch.randn_like(p)) / len(x)
            optimizer.step()

        return step

    return make


def _fixed(model: torch.nn.Module) -> torch.nn.Module:
    """Opacus trains its own twins of recurrent and attention layers."""
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(model).to(next(model.parameters()).device)


def opacus_hooks(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(_fixed(model))
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x))
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    return step


def opacus_ghost(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(_fixed(model), max_grad_norm=1.0, use_ghost_clipping=True)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    optimizer = DPOptimizerFastGradientClipping(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x))
    loss = DPLossFastGradientClipping(wrapped, optimizer, torch.nn.CrossEntropyLoss(), loss_reduction="mean")

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    return step


METHODS = {"non-private": ordinary, "opacus hooks": opacus_hooks, "opacus ghost": opacus_ghost}
METHODS |= {name: ours(name) for name in OURS}
QUICK = [name for name in METHODS if name not in ("naive", "multiloss")]


def measure(step: Callable[[], None], device: torch.device, seconds: float) -> tuple[float, float]:
    """Median milliseconds, and peak MiB on the GPU (0 on the CPU)."""
    cuda = device.type == "cuda"
    for _ in range(3 if cuda else 1):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times, end = [], time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < end and len(times) < 50):
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
        if len(times) >= 2 and time.monotonic() > end + 5 * seconds:
            break
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0


def run(network: str, batch: int, method: str, device: torch.device, seconds: float) -> dict[str, float | str | int]:
    make, inputs, classes = NETWORKS[network]
    torch.manual_seed(0)
    model = make().to(device)
    x, y = inputs(batch, device), torch.randint(0, classes, (batch,), device=device)
    row: dict[str, float | str | int] = {"network": network, "batch": batch, "method": method}
    try:
        row["ms"], row["mib"] = measure(METHODS[method](model, x, y), device, seconds)
    except Exception as error:  # a peer that can't do a network is a result, too
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    del model, x, y
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", default=["cnn-small", "mlp", "paper-cnn"], choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--methods", nargs="+", default=QUICK, choices=list(METHODS))
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per cell")
    parser.add_argument("--output", default=None)
    arguments = parser.parse_args()
    device, rows = torch.device(arguments.device), []
    print(f"{'network':12} {'batch':>6} {'method':14} {'ms':>9} {'× time':>7} {'MiB':>8} {'× mem':>6}")
    for network in arguments.networks:
        for batch in arguments.batches:
            base = None
            for method in dict.fromkeys(["non-private", *arguments.methods]):
                row = run(network, batch, method, device, arguments.seconds)
                rows.append(row)
                if "error" in row:
                    print(f"{network:12} {batch:6} {method:14} {row['error']}")
                    continue
                base = base or row
                memory = f"{row['mib']:8.0f} {row['mib'] / base['mib']:6.2f}" if row["mib"] else ""
                print(f"{network:12} {batch:6} {method:14} {row['ms']:9.2f} {row['ms'] / base['ms']:7.2f} {memory}", flush=True)
    if arguments.output:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        what = {"device": name, "torch": torch.__version__, "rows": rows}
        Path(arguments.output).write_text(json.dumps(what, indent=1))


if __name__ == "__main__":
    main()
