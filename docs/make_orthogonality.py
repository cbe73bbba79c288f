"""Write the table of singular values into docs/parametrisations.md: ``python docs/make_orthogonality.py`` (a few minutes on a CPU).

Each layer is trained by itself for 200 noisy private steps through lipdp.PrivacyEngine, on random data. Its singular values are
those of its impulse response: the dense matrix of the layer with the weights it then has, in float64.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lipdp
from lipdp import losses, nn
from lipdp.parametrize import constraint as C

PAGE = Path(__file__).resolve().parent / "parametrisations.md"
START, END = "<!-- orthogonality: written by docs/make_orthogonality.py -->", "<!-- end of orthogonality -->"
SETTINGS = {"steps": 200, "noise_multiplier": 1.0, "batch_size": 64, "dataset_size": 512, "learning_rate": 0.01}
CIRCULAR: dict[str, Any] = {"padding": "same", "padding_mode": "circular", "bias": False}
IMAGE = (4, 8, 8)
torch.manual_seed(0)

# (layer, shape of one example, whether all singular values should be 1 to within 5%)
LAYERS: list[tuple[torch.nn.Module, tuple[int, ...], bool]] = [
    *(
        (nn.SpectralLinear(16, 16, bias=False, constraint=chosen), (16,), exact)
        for chosen, exact in (
            (C.Bjorck(), True),
            (C.Cayley(), True),
            (C.MatrixExp(), True),
            (C.Householder(), True),
            (C.Polar(), False),
            (C.DifferentiableBjorck(), False),
            (C.Spectral(), False),
            (C.Frobenius(), False),
        )
    ),
    (nn.SpectralConv2d(4, 4, 3, **CIRCULAR), IMAGE, False),
    (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=C.Cayley()), IMAGE, False),
    (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=C.AOC()), IMAGE, True),
    (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=C.BCOP()), IMAGE, True),
    (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=C.SOC()), IMAGE, True),
    (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=C.CircularFFT(8)), IMAGE, True),
    (nn.SpectralConv2d(4, 16, 4, 2, 1, padding_mode="circular", bias=False), IMAGE, False),
    (nn.SpectralConv2d(4, 16, 4, 2, 1, padding_mode="circular", bias=False, constraint=C.AOC()), IMAGE, True),
    (nn.SpectralConvTranspose2d(16, 4, 2, 2, bias=False, constraint=C.AOC()), (16, 4, 4), True),
    (nn.SpectralConv2d(4, 4, 3, padding=1, bias=False), IMAGE, False),
    (nn.SpectralConv2d(4, 4, 3, padding=1, bias=False, constraint=C.AOC()), IMAGE, False),
]


@dataclass(frozen=True)
class Measured:
    """Singular values, and the least and largest ‖Jᵀδ‖/‖δ‖ over random cotangents δ."""

    smallest: float
    largest: float
    kept: tuple[float, float]
    moved: float  # how far training has moved the parameter, relative to its norm


def train(layer: torch.nn.Module, shape: tuple[int, ...], steps: int) -> float:
    """``steps`` private steps of the layer under a cross-entropy of its flattened outputs; how far its parameter moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput(shape), layer, nn.Flatten())
    outputs = model(torch.zeros(1, *shape)).shape[1]
    size = int(SETTINGS["dataset_size"])
    data = TensorDataset(torch.randn(size, *shape), torch.randint(outputs, (size,)))
    loss = losses.CrossEntropy(tau=4.0)
    plan = lipdp.plan(
        model,
        loss,
        dataset_size=size,
        batch_size=int(SETTINGS["batch_size"]),
        delta=1e-4,
        noise_multiplier=SETTINGS["noise_multiplier"],
        steps=steps,
        accountant="rdp",
    )
    before = next(layer.parameters()).detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=SETTINGS["learning_rate"])
    engine = lipdp.PrivacyEngine(model, loss, optimizer, plan, seed=0)
    for batch in engine.batches(data):
        engine.step(*batch)
    assert engine.steps == steps
    return float((next(layer.parameters()).detach() - before).norm() / before.norm())


def measure(layer: torch.nn.Module, shape: tuple[int, ...], moved: float = 0.0) -> Measured:
    """The layer as it is: its exported weights, applied in float64."""
    from tests.soundness.harness import impulse_jacobian

    jacobian = impulse_jacobian(lipdp.export(layer, input_shape=shape), shape)
    values = torch.linalg.svdvals(jacobian)
    delta = torch.randn(64, jacobian.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = (delta @ jacobian).norm(dim=1) / delta.norm(dim=1)
    return Measured(float(values.min()), float(values.max()), (float(kept.min()), float(kept.max())), moved)


def row(layer: torch.nn.Module, shape: tuple[int, ...], exact: bool, found: Measured) -> str:
    """One line of the table."""
    arguments = (
        layer.extra_repr()
        .split(", constraint=")[0]
        .replace("in_features=", "")
        .replace("out_features=", "")
        .replace(", bias=False", "")
    )
    chosen = str(layer.constraint).split("(matrix=")[0] if "matrix=" in str(layer.constraint) else type(layer.constraint).__name__
    if isinstance(layer, torch.nn.modules.conv._ConvNd) and isinstance(layer.constraint, C.Bjorck | C.Cayley):
        chosen += " of the reshaped kernel (RKO)"
    kept = f"{found.kept[0]:.3f} – {found.kept[1]:.3f}"
    name = f"`{type(layer).__name__}({arguments})`"
    # Rounded down and up: a table that says 1.0000 must not hide 1.00004.
    smallest, largest = math.floor(found.smallest * 1e5) / 1e5, math.ceil(found.largest * 1e5 - 1e-6) / 1e5
    return f"| {name} | {chosen} | {'yes' if exact else 'no'} | {smallest:.5f} | {largest:.5f} | {kept} | {found.moved:.2f} |"


def table(steps: int) -> str:
    """The whole table, with how it was made."""
    lines = [
        START,
        "",
        f"After {steps} private steps of each layer by itself (Adam, learning rate {SETTINGS['learning_rate']}, noise multiplier",
        f"{SETTINGS['noise_multiplier']:g}, expected batch {SETTINGS['batch_size']}, random data, float32). Singular values: SVD",
        "of the impulse response, rounded down and up. *Gradient kept*: least and largest ‖Jᵀδ‖/‖δ‖ over 64 random cotangents.",
        "*Moved*: how far the stored parameter went, relative to its norm at the start. *Exact*: all singular values are 1 by",
        "construction, for SOC up to its series.",
        "",
        "| layer | constraint | exact | smallest | largest | gradient kept | moved |",
        "|---|---|---|---|---|---|---|",
    ]
    for layer, shape, exact in LAYERS:
        lines.append(row(layer, shape, exact, measure(layer, shape, train(layer, shape, steps))))
        print(lines[-1])
    return "\n".join([*lines, "", END])


def main() -> None:
    """Measure, and put the table between the markers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=int(SETTINGS["steps"]))
    steps = parser.parse_args().steps
    text = PAGE.read_text()
    before, rest = text.split(START)
    PAGE.write_text(before + table(steps) + rest.split(END)[1])


if __name__ == "__main__":
    main()
