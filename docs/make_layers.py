"""Write docs/layers.md and docs/models.md from the code: ``python docs/make_layers.py`` (``--check``: only compare).

Constants are read off the calculus: the bounds at two input norms tell how they depend on X, and at one cotangent norm how they
depend on G (they are proportional to it). Tightness is measured by the soundness harness, so it takes a minute.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lipdp import models, nn
from lipdp.bounds import analyse, calculus
from lipdp.errors import ConfigurationError
from lipdp.parametrize import Constrained, ConvParametrisation, Parametrisation, Reparametrised
from lipdp.parametrize import constraint as C

T = torch.nn
HERE = Path(__file__).resolve().parent


def _of_one_input(layer: torch.nn.Module) -> torch.nn.Module:
    """A layer that reads two tensors, as a model of one."""
    from tests.soundness.functions import Forward

    if isinstance(layer, nn.ConvexMix):
        return Forward(lambda m, x: m.layer(x, x.abs()), layer=layer)
    if isinstance(layer, nn.MaskedTokenMean):
        return Forward(lambda m, ids: m.layer(m.table(ids), ids), layer=layer, table=nn.BoundedEmbedding(5, 4))
    return layer


def _standardize() -> nn.Standardize:
    layer = nn.Standardize(1, radius=1.0)
    layer.set_statistics(torch.tensor([0.5]), torch.tensor([0.0625]))
    return layer


_CIRCULAR = {"padding": 1, "padding_mode": "circular", "bias": False}


# Each layer at a small size. Containers and composed layers are traced into, so their row sums up several rules.
LAYERS: list[tuple[torch.nn.Module, tuple[int, ...]]] = [
    (nn.SpectralLinear(6, 4, bias_norm=0.1), (6,)),
    (nn.FrobeniusLinear(6, 4), (6,)),
    (nn.L1Linear(4, 3), (4,)),
    (nn.L1Linear(4, 3, rows=True), (4,)),
    (nn.SpectralConv1d(2, 3, 3, padding=1), (2, 9)),
    (nn.SpectralConv2d(2, 3, 3, padding=1), (2, 6, 6)),
    (nn.SpectralConv2d(2, 4, 2, stride=2), (2, 4, 4)),
    (nn.SpectralConv3d(1, 2, 2, stride=2), (1, 2, 4, 4)),
    (nn.SpectralConvTranspose2d(2, 1, 2, stride=2), (2, 3, 3)),
    (nn.SpectralLinear(6, 6, bias=False, constraint=C.Cayley()), (6,)),
    (nn.SpectralLinear(6, 6, bias=False, constraint=C.MatrixExp()), (6,)),
    (nn.SpectralLinear(6, 6, bias=False, constraint=C.Householder()), (6,)),
    (nn.SpectralLinear(6, 6, bias=False, constraint=C.Polar()), (6,)),
    (nn.SpectralLinear(6, 6, bias=False, constraint=C.DifferentiableBjorck()), (6,)),
    (nn.SpectralConv2d(2, 2, 3, **_CIRCULAR, constraint=C.Cayley()), (2, 4, 4)),
    (nn.SpectralConv2d(2, 2, 3, **_CIRCULAR, constraint=C.AOC()), (2, 4, 4)),
    (nn.SpectralConv2d(2, 8, 2, 2, bias=False, constraint=C.AOC()), (2, 4, 4)),
    (nn.SpectralConv2d(2, 2, 3, **_CIRCULAR, constraint=C.BCOP()), (2, 4, 4)),
    (nn.SpectralConv2d(2, 2, 3, padding=1, bias=False, constraint=C.SOC()), (2, 4, 4)),
    (nn.SpectralConv2d(2, 2, 3, **_CIRCULAR, constraint=C.CircularFFT(4)), (2, 4, 4)),
    (nn.SpectralConvTranspose2d(4, 1, 2, stride=2, bias=False, constraint=C.AOC()), (4, 3, 3)),
    (nn.FourierConv2d(2, 3, 3, padding=1), (2, 6, 6)),
    (nn.GroupSort(2), (6,)),
    (nn.MaxMin(), (6,)),
    (nn.FullSort(), (6,)),
    (nn.Householder(6), (6,)),
    (nn.Abs(), (6,)),
    (nn.BoundedPReLU(), (6,)),
    (nn.LayerScale(4, bound=0.5), (3, 4)),
    (nn.L2NormPool1d(2), (2, 6)),
    (nn.L2NormPool2d(2), (2, 4, 4)),
    (nn.L2NormPool2d(3, stride=1), (1, 5, 5)),
    (nn.GlobalL2NormPool(), (2, 3, 3)),
    (nn.ScaledAvgPool1d(2), (2, 6)),
    (nn.ScaledAvgPool2d(2), (2, 4, 4)),
    (nn.ScaledAdaptiveAvgPool2d(1), (2, 4, 4)),
    (nn.InvertibleDownsampling(2), (1, 4, 4)),
    (nn.InvertibleUpsampling(2), (4, 2, 2)),
    (nn.LayerCentering(), (6,)),
    (nn.LayerNorm(4), (3, 4)),
    (nn.RMSNorm(4), (3, 4)),
    (nn.GroupNorm(2, 4), (4, 2, 2)),
    (nn.Normalize(0.5, 0.25), (1, 3, 3)),
    (_standardize(), (1, 3, 3)),
    (nn.Residual(nn.SpectralLinear(4, 4, bias=False)), (4,)),
    (nn.ConvexResidual(nn.SpectralLinear(4, 4, bias=False), 0.3), (4,)),
    (nn.ConvexResidual(nn.SpectralLinear(4, 4, bias=False), 0.5, learned=True), (4,)),
    (nn.ConcatResidual(nn.SpectralLinear(4, 4, bias=False)), (4,)),
    (nn.ConvexMix(0.5), (4,)),
    (nn.BoundedEmbedding(5, 4, length=3), (3,)),
    (nn.LearnedPositions(3, 4, norm=0.5), (3, 4)),
    (nn.SinusoidalPositions(3, 4), (3, 4)),
    (nn.TokenBall(0.5), (3, 4)),
    (nn.TokenMean(), (4, 3)),
    (nn.MaskedTokenMean(), (3,)),
    (nn.LipschitzAttention(4, 2, tokens=3), (3, 4)),
    (nn.TransformerBlock(4, 2, tokens=3), (3, 4)),
    (nn.BoundedInput((4,), norm=1.0), (4,)),
    (nn.BoundedInput((4,), norm=1.0, mode="sphere"), (4,)),
    (nn.BoundedInput((4,), norm=1.0, mode="floor", floor=0.5), (4,)),
    (nn.Boundary(norm=1.0, cotangent=0.5), (4,)),
    (nn.ClipGradient(0.5), (4,)),
    (nn.Flatten(), (2, 3)),
    (nn.Sequential(nn.SpectralLinear(4, 4, bias=False), nn.GroupSort()), (4,)),
]


@dataclass(frozen=True)
class Row:
    """One line of the table; ``tightness`` apart, it follows from the code alone."""

    layer: str
    output: str
    lipschitz: str
    deltas: str
    kind: str
    constraint: str
    tightness: str = ""

    def line(self) -> str:
        """As Markdown."""
        cells = (self.layer, self.output, self.lipschitz, self.deltas, self.kind, self.constraint, self.tightness)
        return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _in_x(at_one: float, at_two: float, at_four: float) -> str:
    """How a bound depends on X, from its values at X = 1, 2, 4."""
    slope = at_two - at_one
    if math.isinf(at_one):
        return "∞"
    if not math.isclose(at_four - at_two, 2 * slope, rel_tol=1e-6, abs_tol=1e-9):
        return f"{_number(at_one)} at X = 1, {_number(at_four)} at X = 4"
    start = at_one - slope
    factor = "" if math.isclose(slope, 1.0, rel_tol=1e-6) else f"{_number(slope)}·"
    if abs(slope) < 1e-9:
        return _number(at_one)
    return f"{factor}X" + (f" + {_number(start)}" if start > 1e-6 else "")


def _delta(name: str, values: tuple[float, float, float]) -> str:
    text = _in_x(*values)
    if text.endswith("X"):
        return f"{name}: {text.replace('X', 'G·X')}"
    return f"{name}: {'' if text == '1' else text + '·'}G" if "X" not in text else f"{name}: ({text})·G"


def _name(layer: torch.nn.Module) -> str:
    children = "(…)" if next(layer.children(), None) is not None else ""
    arguments = layer.extra_repr().split(", constraint=")[0].replace("|", "\\|")
    if isinstance(getattr(layer, "constraint", None), Parametrisation | ConvParametrisation):
        arguments += f", constraint={_short(layer.constraint)}"
    return f"`{type(layer).__name__}{children or f'({arguments})'}`"


def _short(chosen: object) -> str:
    """A constraint without its inner settings."""
    return str(chosen).split("(matrix=")[0] + "()" if "(matrix=" in str(chosen) else str(chosen)


def _constraint(layer: torch.nn.Module) -> str:
    found = []
    for module in layer.modules():
        if isinstance(module, Reparametrised) and module.maps():
            found.append(f"W = π(θ), {_short(module.constraint)}; none needed")
            continue
        if isinstance(module, Constrained) and next(module.parameters(recurse=False), None) is not None:
            text = (type(module).project_.__doc__ or "").strip().split("\n")[0].rstrip(".").removeprefix("Back to ")
            by = f" ({type(module.constraint).__name__})" if hasattr(module, "constraint") else ""
            text = text.removesuffix("; a reparametrised weight needs no projection")
            found.append(text.replace("|", "\\|") + by)
    return "; ".join(dict.fromkeys(found)) or "–"


def row(layer: torch.nn.Module, shape: tuple[int, ...]) -> Row:
    """The line of one layer, without the measured part."""
    model = _of_one_input(layer)
    one, two, four = (analyse(model, 1.0, input_shape=shape, input_norm=x) for x in (1.0, 2.0, 4.0))
    deltas = [
        _delta(name.replace("module.", ""), (bound, two.sensitivities[name], four.sensitivities[name]))
        for name, bound in one.sensitivities.items()
    ]
    clip = [m.max_norm for m in layer.modules() if isinstance(m, nn.ClipGradient)]
    clip += [m.cotangent for m in layer.modules() if isinstance(m, nn.Boundary) and m.cotangent]
    lipschitz = f"{_number(one.lipschitz)}" + (f", G clipped at {clip[0]:g}" if clip else "")
    exact = one.layers[0].exact if len(one.layers) == 1 else None
    kind = "composed" if exact is None else "exact" if exact else "loose"
    output = _in_x(one.output.norm, two.output.norm, four.output.norm)
    return Row(f"{_name(layer)} on {shape}", output, lipschitz, ", ".join(deltas) or "–", kind, _constraint(layer))


def tightness(layer: torch.nn.Module, shape: tuple[int, ...]) -> str:
    """Median over the layer's Δ, X and ℓ of the largest value that the harness finds ÷ its bound."""
    from tests.soundness.harness import attack

    model = _of_one_input(layer)
    report = attack(model, 1.0, input_shape=shape, input_norm=1.5, steps=20, draws=3)
    clipped = any(isinstance(m, nn.ClipGradient | nn.Boundary) for m in layer.modules())  # ℓ leaves clipping out, cotangents do not
    kinds = ("parameter", "activation", "cotangent" if clipped else "input")
    found = [r.tightness for r in report.rows if r.kind in kinds and r.bound > 0]
    return f"{statistics.median(found):.3f}" if found else "–"


HEADER = """# Layers

Generated by `python docs/make_layers.py` from the code: do not edit. Each row is a layer at a small size; the calculus is in
[bounds](bounds.md).

X bounds the norm of the input of one example, G that of the cotangent of the output. *Exact* rules are reached by some input and
weights (tests hold them to 99%); *composed* layers are traced into, and each of their parts has its own rule. *Tightness* is the
median, over the layer's bounds, of the largest value found by attack ÷ the bound; above 1 a bound would be false.

| layer | X out | ℓ (gain of G) | Δ | rule | kept by projection | tightness |
|---|---|---|---|---|---|---|
"""


def _registered() -> str:
    modules = sorted({cls.__name__ for cls in calculus._module_rules if cls.__module__.startswith("torch.nn")})
    functions, methods = set(), set()
    for target in calculus._function_rules:
        if isinstance(target, str):
            methods.add(f".{target}()")
        else:
            functions.add(_function_name(target))
    parts = (
        ("torch.nn layers with rules (trained weights that nothing constrains have ℓ = ∞ and a finite Δ)", modules),
        ("Functions with rules", sorted(functions)),
        ("Tensor methods with rules", sorted(methods)),
    )
    return "\n".join(f"\n## {title}\n\n{', '.join(f'`{name}`' for name in names)}" for title, names in parts) + "\n"


def _function_name(target: object) -> str:
    for module in (torch.nn.functional, torch):
        for name, value in vars(module).items():
            if value is target and not name.startswith("_"):
                return f"{'F' if module is torch.nn.functional else 'torch'}.{name}"
    return str(getattr(target, "__name__", target))


SIZES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def models_page() -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        "Generated by `python docs/make_layers.py`: do not edit. `lipdp.models.create(name, input_shape=…, classes=…)` builds",
        "them. Names that start with `plain-` are conventional networks of torch's layers, for per-example clipping; those that",
        "start with `boundary-` are the same networks between boundaries.",
        "",
        "| name | what | parameters, 28×28×1 | parameters, 32×32×3 | layers with weights |",
        "|---|---|---|---|---|",
    ]
    for name in models.names():
        counts, layers = [], 0
        for shape in SIZES.values():
            try:
                model = models.create(name, input_shape=shape, classes=10)
            except ConfigurationError:  # it has arguments that must be given
                counts.append("by its arguments")
                continue
            counts.append(f"{sum(p.numel() for p in model.parameters()):,}")
            layers = sum(any(p.ndim > 1 for p in m.parameters(recurse=False)) for m in model.modules())
        text = (registry_doc(name) or "").strip().split("\n")[0]
        lines.append(f"| `{name}` | {text} | {counts[0]} | {counts[1]} | {layers or '–'} |")
    return "\n".join(lines) + "\n"


def registry_doc(name: str) -> str | None:
    """The docstring of a model's constructor."""
    from lipdp.models import by_name as found

    text = found._builders[name].__doc__
    return None if text is None else text.replace(":func:", "")


def page(measure: bool, known: dict[str, str]) -> str:
    """docs/layers.md; without measuring, tightness is taken from ``known`` (layer → cell)."""
    lines = []
    for layer, shape in LAYERS:
        found = row(layer, shape)
        cell = tightness(layer, shape) if measure else known.get(found.layer, "?")
        lines.append(Row(*(getattr(found, field) for field in Row.__dataclass_fields__ if field != "tightness"), cell).line())
    return HEADER + "\n".join(lines) + "\n" + _registered()


def known_tightness(text: str) -> dict[str, str]:
    """The measured cells of a page that exists."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0]: row[-1] for row in cells}


def main() -> int:
    """Write the pages, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare, without measuring")
    check = parser.parse_args().check
    torch.manual_seed(0)
    pages = {"layers.md": HERE / "layers.md", "models.md": HERE / "models.md"}
    old = pages["layers.md"].read_text() if pages["layers.md"].exists() else ""
    texts = {"layers.md": page(not check, known_tightness(old)), "models.md": models_page()}
    stale = [name for name, path in pages.items() if not path.exists() or path.read_text() != texts[name]]
    if not check:
        for name, path in pages.items():
            path.write_text(texts[name])
        return 0
    for name in stale:
        print(f"docs/{name} is out of date: run python docs/make_layers.py")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
