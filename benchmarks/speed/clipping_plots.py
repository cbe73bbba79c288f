"""The ReweightGP paper's Figures 5-9 from what benchmarks/speed/clipping.py measured.

    python benchmarks/speed/clipping_plots.py RESULTS_FOLDER [ANOTHER …] docs/clipping

Times are per epoch of 60,000 examples, as the paper's; a cell that was not measured, or ran out of memory, has no mark.
A table of everything (milliseconds, and × the time and the memory of the non-private step) goes to RESULTS_FOLDER/clipping.md.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

EXAMPLES = 60_000
STYLES = {
    "non-private": ("black", "o"),
    "bookkeeping": ("tab:blue", "s"),
    "reweight": ("tab:green", "^"),
    "ghost": ("tab:olive", "v"),
    "opacus hooks": ("tab:orange", "D"),
    "opacus ghost": ("tab:red", "P"),
    "multiloss": ("tab:purple", "X"),
    "naive": ("tab:gray", "*"),
}
Row = dict[str, float | str | int]
Cells = dict[tuple[str, int, str], float]


def seconds_per_epoch(rows: list[Row]) -> Cells:
    return {
        (str(row["network"]), int(row["batch"]), str(row["method"])): float(row["ms"]) / 1e3 * EXAMPLES / int(row["batch"])
        for row in rows
        if "ms" in row
    }


def _lines(axes: Axes, cells: Cells, places: list[tuple[str, int]], labels: list[str], title: str) -> None:
    """One line per method over (network, batch) places."""
    for method, (colour, marker) in STYLES.items():
        found = [(k, cells[(*place, method)]) for k, place in enumerate(places) if (*place, method) in cells]
        if found:
            axes.plot(*zip(*found, strict=True), color=colour, marker=marker, label=method)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yscale("log")
    axes.set_title(title)
    axes.grid(visible=True, which="major", alpha=0.3)


def _bars(axes: Axes, cells: Cells, networks: dict[str, str], batch: int) -> None:
    networks = {name: title for name, title in networks.items() if (name, batch, "non-private") in cells}
    width = 0.8 / len(STYLES)
    for number, (method, (colour, _)) in enumerate(STYLES.items()):
        found = [(k, cells[(name, batch, method)]) for k, name in enumerate(networks) if (name, batch, method) in cells]
        if found:
            places, heights = zip(*found, strict=True)
            axes.bar([k + (number - len(STYLES) / 2 + 0.5) * width for k in places], heights, width, color=colour, label=method)
    axes.set_xticks(range(len(networks)), list(networks.values()))
    axes.set_yscale("log")
    axes.set_title(f"batch {batch}")
    axes.grid(visible=True, axis="y", alpha=0.3)


def _save(figure: plt.Figure, axes: list[Axes], out: Path, name: str, device: str) -> None:
    axes[0].set_ylabel(f"seconds per epoch of {EXAMPLES:,}")
    handles = {label: handle for part in axes for handle, label in zip(*part.get_legend_handles_labels(), strict=True)}
    if not handles:
        plt.close(figure)
        return
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    figure.suptitle(device, fontsize=8)
    figure.savefig(out / f"{name}.png", dpi=85)
    plt.close(figure)
    print(out / f"{name}.png")


def merged(runs: list[dict[str, object]]) -> dict[str, object]:
    """One set of rows, the last run's where several have one. Its ratios stay those to the non-private step of its own run."""
    found = {(row["network"], row["batch"], row["method"]): row for run in runs for row in run["rows"]}
    return {**runs[-1], "rows": list(found.values())}


def table(rows: list[Row]) -> str:
    """All cells as a table."""
    lines = ["| network | batch | " + " | ".join(STYLES) + " |", "|---" * (len(STYLES) + 2) + "|"]
    places = sorted({(str(row["network"]), int(row["batch"])) for row in rows})
    found = {(str(row["network"]), int(row["batch"]), str(row["method"])): row for row in rows}
    for name, batch in places:
        cells = [_cell(found.get((name, batch, method))) for method in STYLES]
        lines += ["| " + " | ".join([name, str(batch), *cells]) + " |"]
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "ms" not in row:
        return str(row.get("error", "?"))
    if row["method"] == "non-private":
        return f"{float(row['ms']):.2f} ms, {float(row['mib']):.0f} MiB"
    memory = f", {float(row['memory']):.2f}" if "memory" in row else ""
    return f"{float(row.get('times', 0)):.2f}{memory}"


def draw(results: dict[str, object], out: Path) -> None:
    cells, device = seconds_per_epoch(results["rows"]), f"{results['device']}, torch {results['torch']}"
    out.mkdir(parents=True, exist_ok=True)

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    names = {"mlp": "MLP", "paper-cnn": "CNN", "rnn": "RNN", "lstm": "LSTM", "paper-transformer": "Transformer"}
    _bars(axes, cells, names, 32)
    _save(figure, [axes], out, "figure5_architectures", device)

    figure, several = plt.subplots(1, len(names), figsize=(15, 4), layout="constrained", sharey=True)
    batches = [batch for batch in (16, 32, 64, 128, 256, 1024) if any((name, batch, "non-private") in cells for name in names)]
    for axes, (name, title) in zip(several, names.items(), strict=True):
        _lines(axes, cells, [(name, batch) for batch in batches], [str(batch) for batch in batches], title)
        axes.set_xlabel("batch")
    _save(figure, list(several), out, "figure6_batch", device)

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    depths = [2, 4, 6, 8]
    _lines(axes, cells, [(f"mlp-{depth}", 128) for depth in depths], [str(depth) for depth in depths], "MLP, batch 128")
    axes.set_xlabel("hidden layers")
    _save(figure, [axes], out, "figure7_depth", device)

    sides = [32, 64, 128, 256]
    for number, name, batch, title in ((8, "vgg11", 20, "VGG-11"), (9, "resnet18", 32, "ResNet-18")):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        _lines(axes, cells, [(f"{name}-{side}", batch) for side in sides], [str(side) for side in sides], f"{title}, batch {batch}")
        axes.set_xlabel("image side")
        _save(figure, [axes], out, f"figure{number}_{name}", device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="folders with clipping.json")
    parser.add_argument("out", help="folder for the figures")
    arguments = parser.parse_args()
    results = merged([json.loads((Path(folder) / "clipping.json").read_text()) for folder in arguments.results])
    draw(results, Path(arguments.out))
    (Path(arguments.results[0]) / "clipping.md").write_text(table(results["rows"]))


if __name__ == "__main__":
    main()
