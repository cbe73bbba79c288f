"""Which tiles the norm kernels of lipdp.clipping.kernels should use: times on the layers of our reference networks (CUDA).

python benchmarks/speed/clipping_kernels.py
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch

from lipdp.clipping import kernels
from lipdp.clipping.kernels import Tiles
from lipdp.clipping.outer import OuterSum
from lipdp.clipping.rules_conv import ConvSum

CONVOLUTIONS = {  # name: batch, channels in, out, side
    "small 1": (1024, 3, 32, 32),
    "small 2": (1024, 32, 64, 16),
    "small 3": (1024, 64, 64, 8),
    "large 1": (1024, 3, 64, 32),
    "large 2": (1024, 64, 128, 16),
    "large 3": (1024, 128, 256, 8),
}
# Outputs (or positions), taps (or positions), summed over at a time, warps, stages.
CONVOLUTION_TILES = (
    (128, 64, 32, 8, 3), (128, 64, 32, 4, 3), (64, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 128, 32, 8, 3), (64, 64, 64, 4, 2),
)  # fmt: skip
GRAM_TILES = ((64, 64, 32, 4, 3), (64, 64, 64, 4, 3), (128, 128, 32, 8, 3), (128, 128, 32, 4, 3), (64, 64, 32, 8, 4))
DENSE = {"in": (32, 256, 1536, 512), "out": (32, 256, 512, 512), "up": (32, 256, 2048, 512), "down": (32, 256, 512, 2048)}


def milliseconds(function: Callable[[], object]) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def best(label: str, truth: torch.Tensor, run: Callable[[Tiles], torch.Tensor], candidates: list[Tiles]) -> None:
    found = []
    for tiles in candidates:
        try:
            error = float(((run(tiles) - truth) / truth).abs().max())
            found.append((milliseconds(lambda tiles=tiles: run(tiles)), tiles, error))
        except Exception as problem:  # too large for the GPU's shared memory
            print(f"  {label} {tuple(tiles)}: {type(problem).__name__} {str(problem)[:60]}")
    for ms, tiles, error in sorted(found)[:3]:
        print(f"  {label} {ms:7.3f} ms  {tuple(tiles)}  off by {error:.1e}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    convolutions = [Tiles(*sizes) for sizes in CONVOLUTION_TILES]
    for name, (batch, inside, outside, side) in CONVOLUTIONS.items():
        x, delta = (torch.randn(batch, channels, side, side, device="cuda") for channels in (inside, outside))
        part = ConvSum(delta, x, (outside, inside, 3, 3), (1, 1), (1, 1), 1, 1.0, (1, 1))
        truth = torch.cat([p.double().flatten(1).square().sum(1) for p in part.materialise().split(64)])
        print(f"conv {name}: torch {milliseconds(partial(part.by_torch, 'auto')):.3f} ms (TF32 where cuDNN may)", flush=True)
        for precision in ("tf32", "tf32x3") if name == "large 2" else ("tf32",):
            best(
                precision,
                truth,
                lambda tiles, x=x, delta=delta, precision=precision: kernels.convolution_norms(
                    x, delta, (3, 3), (1, 1), (1, 1), (1, 1), 1, 1, precision, tiles
                ).sum(1),
                convolutions,
            )
    grams = [Tiles(*sizes) for sizes in GRAM_TILES]
    for name, (batch, positions, p, d) in DENSE.items():
        delta, x = (torch.randn(batch, positions, size, device="cuda") for size in (p, d))
        part = OuterSum(delta, x, (p, d))
        truth = part.materialise().double().flatten(1).square().sum(1)
        print(f"dense {name}: torch {milliseconds(partial(part.measured, 'gram')):.3f} ms", flush=True)
        for precision in ("tf32", "tf32x3"):
            best(
                precision,
                truth,
                lambda tiles, x=x, delta=delta, precision=precision: kernels.gram_sums(delta, x, precision, tiles).products,
                grams,
            )


if __name__ == "__main__":
    main()
