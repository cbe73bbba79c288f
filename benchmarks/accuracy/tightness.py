"""How near true per-example gradients come to their proved bounds, on real images, before and after private training.

    python benchmarks/accuracy/tightness.py                    # all parts; minutes on two cores
    python benchmarks/accuracy/tightness.py mixer --epochs 10  # one part

``dense``: gradient-norm-preserving perceptrons on MNIST. ``mixer``: the clipless paper's MLP-Mixer on CIFAR-10 (its figures 11 and
12), and what makes it tighter. ``colour``: norms of CIFAR-10's images in each colour space (its figure 8). These datasets are
public, which is why their true gradients may be shown. Settings were not tuned: the table is about tightness.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lipdp
from lipdp import data, losses, nn
from lipdp.diagnose import Diagnosis, DiagnosisCallback
from lipdp.models import mlp

PATCH, DIM, TOKENS = 4, 64, 64


@dataclass(frozen=True)
class Case:
    """A network and its loss; what is named in the table."""

    name: str
    make: Callable[[], nn.Sequential]
    loss: losses.Loss
    lr: float


def dense() -> list[Case]:
    """The first hidden layer of the rectangular network is 784 → 256: it can't keep norms. The square one can."""

    def network(width: int, mode: str = "sphere", norm: float = 1.0, normalised: bool = False) -> Callable[[], nn.Sequential]:
        def make() -> nn.Sequential:
            model = mlp((1, 28, 28), 10, hidden=(width, width), input_norm=norm, input_mode=mode)  # type: ignore[arg-type]
            return model.append(nn.ClipGradient(1.0, normalise=True)) if normalised else model

        return make

    entropy, kr = losses.CrossEntropy(tau=8.0), losses.MulticlassKR()
    return [
        Case("256-256, ball of radius 15, cross-entropy", network(256, "ball", 15.0), entropy, 0.002),
        Case("256-256, sphere, cross-entropy", network(256), entropy, 0.5),
        Case("784-784, sphere, cross-entropy", network(784), entropy, 0.5),
        Case("784-784, sphere, KR", network(784), kr, 0.5),
        Case("784-784, sphere, normalised cotangents", network(784, normalised=True), entropy, 0.5),
    ]


class Mix(torch.nn.Module):
    """Token mixing, then channel mixing; with ``residual`` as ``(x + mix(x))/2``. ``identity``: weights that start there."""

    def __init__(self, residual: bool, identity: bool) -> None:
        super().__init__()
        wrap: Any = nn.Residual if residual else torch.nn.Sequential
        self.along_tokens, self.along_channels = wrap(self._mix(TOKENS, identity)), wrap(self._mix(DIM, identity))

    @staticmethod
    def _mix(size: int, identity: bool) -> nn.Sequential:
        layers = [nn.SpectralLinear(size, size, bias=False) for _ in range(2)]
        if identity:
            with torch.no_grad():
                for layer in layers:
                    layer.weight.copy_(torch.eye(size))
        return nn.Sequential(layers[0], nn.GroupSort(2, dim=-1), layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.along_tokens(x.transpose(1, 2)).transpose(1, 2)
        mixed: torch.Tensor = self.along_channels(x)
        return mixed


class Tokens(torch.nn.Module):
    """(batch, dim, rows, columns) to (batch, tokens, dim)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


def mixer() -> list[Case]:
    """One block, as the paper's best; then without skip connections, with normalised cotangents, with a mean over tokens."""

    def network(
        *, residual: bool = False, mean: bool = False, identity: bool = False, centre: bool = True, normalised: bool = False
    ) -> Callable[[], nn.Sequential]:
        def make() -> nn.Sequential:
            front: list[torch.nn.Module] = [nn.LayerCentering()] if centre else []
            head = [nn.TokenMean(TOKENS), nn.SpectralLinear(DIM, 10, bias=False)]
            if not mean:
                head = [nn.Flatten(), nn.SpectralLinear(TOKENS * DIM, 10, bias=False)]
            return nn.Sequential(
                *front,
                nn.BoundedInput((3, 32, 32), mode="sphere"),
                nn.SpectralConv2d(3, DIM, PATCH, stride=PATCH, bias=False),
                Tokens(),
                Mix(residual, identity),
                *head,
                *([nn.ClipGradient(1.0, normalise=True)] if normalised else []),
            )

        return make

    loss = losses.CrossEntropy(tau=8.0)
    return [
        Case("as in the paper: skip connections", network(residual=True), loss, 0.5),
        Case("no skip connections", network(), loss, 0.5),
        Case("… normalised cotangents", network(normalised=True), loss, 0.5),
        Case("… mean over tokens, no centring", network(mean=True, centre=False, normalised=True), loss, 0.5),
        Case("… mixing starts at the identity", network(mean=True, centre=False, identity=True, normalised=True), loss, 0.5),
    ]


def measured(case: Case, dataset: str, options: argparse.Namespace) -> dict[str, Any]:
    """Diagnoses at the start and at the end of a private run."""
    train, test, info = data.load(dataset)
    torch.manual_seed(options.seed)
    model = case.make()
    watch = DiagnosisCallback(test, public=True, examples=options.examples)
    plan = lipdp.plan(
        model,
        case.loss,
        dataset_size=info.train_size,
        batch_size=options.batch,
        delta=1e-5,
        epsilon=options.epsilon,
        epochs=options.epochs,
        accountant="rdp",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9)
    history = lipdp.fit(
        model, case.loss, optimizer, plan, train, test, [watch], seed=options.seed, device=options.device, evaluations=1
    )
    (_, first), (_, last) = watch.records[0], watch.records[-1]
    if first.violations or last.violations:
        raise SystemExit(f"{case.name}: a bound was exceeded by {first.violations or last.violations}")
    return {
        "case": case.name,
        "dataset": dataset,
        "epsilon": history.epsilon,
        "accuracy": history.last["validation_accuracy"],
        "start": figures(first),
        "end": figures(last),
    }


def figures(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "tightness": {row.name: row.tightness for row in diagnosis.rows},
        "input_share": {row.name: row.input_share for row in diagnosis.rows},
        "cotangent_share": {row.name: row.cotangent_share for row in diagnosis.rows},
        "snr": {row.name: row.snr for row in diagnosis.rows},
        "whole": diagnosis.whole.tightness,
        "whole_snr": diagnosis.whole.snr,
    }


def printed(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"\n{result['case']} ({result['dataset']}; ε = {result['epsilon']:.3g}, accuracy {100 * result['accuracy']:.1f}%)")
        print("| parameter | start: mean/Δ | ‖x‖/X | ‖δ‖/G | SNR | end: mean/Δ | ‖x‖/X | ‖δ‖/G | SNR |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name in result["start"]["tightness"]:
            cells = []
            for when in ("start", "end"):
                cells += [f"{100 * result[when][key][name]:.1f}%" for key in ("tightness", "input_share", "cotangent_share")]
                cells.append(f"{result[when]['snr'][name]:.2f}")
            print(f"| {name} | {' | '.join(cells)} |")
        whole = [f"{100 * result[when]['whole']:.1f}% | | | {result[when]['whole_snr']:.2f}" for when in ("start", "end")]
        print(f"| whole | {' | '.join(whole)} |", flush=True)


def colour() -> list[dict[str, Any]]:
    """Norms of the images in each colour space; the share of a bound at the 90% quantile that an average image uses."""
    train, _, _ = data.load("cifar10")
    results = []
    print("\n| colour space | ℓ | mean norm | std/mean | centred: std/mean | 90% quantile | mean share of a bound there |")
    print("|---|---|---|---|---|---|---|")
    for name in data.COLOUR_SPACES:
        layer = data.colour_space(name)
        images = data.map_inputs(train, layer, batch_size=4096)
        found = data.norm_histogram(images, public=True, bins=400)
        centred = data.norm_histogram(data.map_inputs(images, nn.LayerCentering(), batch_size=4096), public=True)
        top = found.quantiles[0.9]
        row = {"space": name, "mean": found.mean, "spread": found.spread, "centred": centred.spread, "q90": top}
        row["share"] = found.tightness(top)
        results.append(row)
        cells = f"{found.mean:.2f} | {found.spread:.3f} | {centred.spread:.3f} | {top:.2f} | {100 * row['share']:.1f}%"
        print(f"| {name} | {layer.lipschitz:.4g} | {cells} |")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["all", "dense", "mixer", "colour"], default="all")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the figures")
    options = parser.parse_args()
    found: dict[str, Any] = {"settings": {k: v for k, v in vars(options).items() if k not in ("out", "device")}}
    cases = {"dense": (dense, "mnist"), "mixer": (mixer, "cifar10")}
    for part in ("dense", "mixer", "colour") if options.part == "all" else (options.part,):
        if part == "colour":
            found[part] = colour()
            continue
        make, dataset = cases[part]
        found[part] = []
        for case in make():
            found[part].append(measured(case, dataset, options))
            printed(found[part][-1:])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
