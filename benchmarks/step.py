"""One private training step against its peers: clipless, book-keeping, Opacus, and no privacy at all. Ratios in one run.

python benchmarks/step.py                        # `make bench`: a CIFAR-shaped CNN on whatever device there is
python benchmarks/step.py --device cuda --batches 1024 16384 --networks cnn-small cnn-large
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lipdp
from clipping import METHODS, run
from lipdp import losses, nn

SIZES = {"cnn-small": ((32, 64, 64), 64), "cnn-large": ((64, 128, 256), 256)}


def lipschitz_twin(channels: tuple[int, int, int], hidden: int) -> torch.nn.Module:
    """The same network with Lipschitz layers in the place of convolution, ReLU and max pooling."""
    layers: list[torch.nn.Module] = [nn.BoundedInput((3, 32, 32))]
    depth = 3
    for size in channels:
        layers += [nn.SpectralConv2d(depth, size, 3, padding=1, bias=False), nn.GroupSort(2), nn.L2NormPool2d(2)]
        depth = size
    layers += [nn.Flatten(), nn.SpectralLinear(depth * 16, hidden, bias=False), nn.GroupSort(2)]
    return nn.Sequential(*layers, nn.SpectralLinear(hidden, 10, bias=False))


def clipless(model: torch.nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The engine's whole step: gradient sum, noise, optimiser, certified projection. The model given only says the size."""
    name = "cnn-small" if sum(p.numel() for p in model.parameters()) < 500_000 else "cnn-large"
    twin = lipschitz_twin(*SIZES[name]).to(x.device)
    loss = losses.CrossEntropy(tau=10.0)
    # The accounting is not part of a step; any long plan will do.
    plan = lipdp.plan(
        twin, loss, dataset_size=100 * len(x), batch_size=len(x), delta=1e-6, noise_multiplier=1.0, steps=100_000, accountant="rdp"
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    engine = lipdp.PrivacyEngine(twin, loss, optimizer, plan, microbatch_size=len(x))
    return lambda: engine.step(x, y)


METHODS["clipless"] = clipless


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", default=["cnn-small"], choices=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--output", default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batches = arguments.batches or ([1024] if device.type == "cuda" else [128])
    rows = []
    print(f"{'network':10} {'batch':>6} {'method':14} {'ms':>9} {'× time':>7} {'MiB':>8} {'× mem':>6}")
    for network in arguments.networks:
        for batch in batches:
            base = None
            for method in ("non-private", "clipless", "bookkeeping", "opacus hooks", "opacus ghost"):
                row = run(network, batch, method, device, arguments.seconds)
                rows.append(row)
                if "error" in row:
                    print(f"{network:10} {batch:6} {method:14} {row['error']}")
                    continue
                base = base or row
                memory = f"{row['mib']:8.0f} {row['mib'] / base['mib']:6.2f}" if row["mib"] else ""
                print(f"{network:10} {batch:6} {method:14} {row['ms']:9.2f} {row['ms'] / base['ms']:7.2f} {memory}", flush=True)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
