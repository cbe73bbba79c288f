"""The calculus of bounds on a real network, and the formulas of docs/theory.md, as figures that need no script in the page.

python docs/make_calculus.py             write docs/calculus.svg (and docs/formulas/*.svg, where matplotlib is installed)

The figure is the recipe mnist-lenet as it is trained: nothing in it is drawn by hand, every number comes from
``lipdp.bounds.analyse``.
"""

from __future__ import annotations

import math
from pathlib import Path

from lipdp import data, models, recipes
from lipdp.bounds import Analysis, analyse

HERE = Path(__file__).resolve().parent
FIGURE, FORMULAS = HERE / "calculus.svg", HERE / "formulas"
RECIPE = "mnist-lenet"
_ROW, _TOP, _NAME, _BAR, _GAP = 30, 62, 250, 170, 26

FORMULA = {
    "gaussian": r"\tilde{g}_d \;=\; \sum_{i \in B} \frac{\partial \ell_i}{\partial W_d} \;+\; \mathcal{N}(0,\, s_d^2 I)",
    "forward": r"X_{k+1} \;=\; \max_{\|x\| \leq X_k,\; W \in \mathcal{W}_k} \| f_k(W, x) \|",
    "backward": r"G_k \;=\; \max_{\|x\| \leq X_k,\; W \in \mathcal{W}_k} \| J_x f_k \|_2 \cdot G_{k+1}",
    "parameter": r"\Delta_k \;=\; \max_{\|x\| \leq X_k,\; W \in \mathcal{W}_k} \| J_W f_k \|_2 \cdot G_{k+1}",
    "dense": r"\| x\, g^{\top} \|_F \;=\; \|x\|\, \|g\| \;\leq\; X_k\, G_{k+1} \;=\; \Delta_k",
    "multiplier": r"\sigma \;=\; \left( \sum_d \Delta_d^2 \,/\, s_d^2 \right)^{-1/2}",
    "promise": r"\Pr[M(D) \in S] \;\leq\; e^{\varepsilon}\, \Pr[M(D^{\prime}) \in S] + \delta",
    "radius": r"r(x) \;=\; \min_{j \neq y} \; \frac{f_y(x) - f_j(x)}{\sqrt{2}\; L}",
}


def analysis() -> Analysis:
    """Of the recipe's network under its loss."""
    recipe, info = recipes.get(RECIPE), data.info("mnist")
    model = models.create(recipe.model, input_shape=info.shape, classes=info.classes, **recipe.options)
    return analyse(model, recipe.make_loss(), input_shape=info.shape)


def _label(where: str) -> str:
    """'layer 'body.0' (SpectralConv2d)' as 'SpectralConv2d'."""
    return where[where.rindex("(") + 1 : -1] if where.endswith(")") else where


def _bar(x: float, y: float, value: float, largest: float, colour: str, *, leftwards: bool = False) -> list[str]:
    """A bar as long as the value, and the value beside it."""
    length = max(1.0, (_BAR - 60) * value / largest) if math.isfinite(value) else _BAR - 60.0
    start = x + _BAR - length if leftwards else x
    place, anchor = (start - 6, "end") if leftwards else (x + length + 6, "start")
    return [
        f'<rect x="{start:.1f}" y="{y + 7}" width="{length:.1f}" height="14" fill="{colour}"/>',
        f'<text x="{place:.1f}" y="{y + 18}" text-anchor="{anchor}" font-size="12">{value:.3g}</text>',
    ]


def figure(result: Analysis) -> str:
    """A row for each operation: X after it, read downwards; G of it, read upwards; Δ where it has a weight."""
    weights = {row.name.rpartition(".")[0]: row for row in result.parameters}
    rows = [row for row in result.layers if math.isfinite(row.norm)]
    largest = {
        "X": max(row.norm for row in rows),
        "G": max(row.cotangent for row in rows),
        "D": max(row.sensitivity for row in result.parameters),
    }
    columns = [_NAME + k * (_BAR + _GAP) for k in range(3)]
    width, height = columns[2] + _BAR + 10, _TOP + len(rows) * _ROW + 40
    heads = ["X: activations, downwards ↓", "G: cotangents, upwards ↑", "Δ: one record's gradient"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="22" font-size="15">{RECIPE}: bounds for every image, every label and all weights in their sets</text>',
        *(f'<text x="{x}" y="{_TOP - 10}" fill="#445">{head}</text>' for x, head in zip(columns, heads, strict=True)),
    ]
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW
        shape = " × ".join(map(str, row.output))
        lines.append(f'<text x="10" y="{y + 18}">{_label(row.where)}<tspan fill="#778" font-size="11"> → {shape}</tspan></text>')
        lines += _bar(columns[0], y, row.norm, largest["X"], "#5b8def")
        lines += _bar(columns[1], y, row.cotangent, largest["G"], "#e07a5f", leftwards=True)
        own = next((bound for name, bound in weights.items() if f"'{name}'" in row.where), None)
        lines += _bar(columns[2], y, own.sensitivity, largest["D"], "#3d9970") if own is not None else []
    start = f"G starts at the bottom, from the loss: L = {result.loss_lipschitz:.4g}"
    lines.append(f'<text x="10" y="{height - 14}" fill="#445" font-size="12">{start}</text></svg>')
    return "\n".join(lines) + "\n"


def draw_formulas(folder: Path) -> None:
    """Each formula as paths in an SVG file: no font, no script, the same everywhere."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "lipdp", "mathtext.fontset": "cm"})
    folder.mkdir(exist_ok=True)
    for name, formula in FORMULA.items():
        page = Figure(figsize=(0.01, 0.01))
        page.text(0, 0, f"${formula}$", fontsize=15)
        page.savefig(folder / f"{name}.svg", bbox_inches="tight", pad_inches=0.06, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    FIGURE.write_text(figure(analysis()), encoding="utf-8")
    try:
        draw_formulas(FORMULAS)
    except ImportError:
        print("matplotlib is not installed: the formulas stay as they are")
