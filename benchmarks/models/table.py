"""Which models can be trained by clipping as they are? Tiny ones of every kind, from configurations (``zoo.py``), in float64.

    python benchmarks/models/table.py [NAMES…] [--write]

For each: the clipped sum by book-keeping against a loop over single examples; then one step of the engine, in training mode.
Where that is refused, the one line that helps is tried. ``--write`` puts the table into docs/your_model.md and
benchmarks/results/models.json.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from zoo import ZOO, Case, Made, build

import lipdp
from lipdp import clipping
from lipdp.errors import UnsupportedError
from lipdp.inputs import call, loss_of, select

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "your_model.md", ROOT / "benchmarks" / "results" / "models.json"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def reference(made: Made, norm: float | None = None) -> tuple[dict[str, torch.Tensor], float]:
    """Σ_i min(1, C/‖g_i‖)·g_i, one example after another; C is the median norm."""
    parameters = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(made.y)):
        part = slice(i, i + 1)
        value = loss_of(made.loss, call(made.model, select(made.x, part)), made.y[part]).sum()
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), found, strict=True)])
    norms = [float(torch.stack([g.square().sum() for g in row]).sum().sqrt()) for row in rows]
    c = sorted(norms)[len(norms) // 2]
    sums = {
        name: sum(min(1.0, c / size) * row[k] for row, size in zip(rows, norms, strict=True)) for k, name in enumerate(parameters)
    }
    return sums, c


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    whole = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    return max(float((found[name] - g).norm() / whole) for name, g in expected.items())


def one_step(made: Made) -> None:
    """A private step of the engine, in training mode."""
    model = made.model.train()
    data = [({name: part[i] for name, part in made.x.items()}, made.y[i]) for i in range(len(made.y))] * 2
    plan = lipdp.plan(
        model, made.loss, dataset_size=len(data), batch_size=4, delta=1e-3, noise_multiplier=1.0, steps=1,
        method="bookkeeping", max_grad_norm=1.0, accountant="rdp",
    )  # fmt: skip
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with lipdp.PrivacyEngine(model, made.loss, optimizer, plan, microbatch_size=4) as engine:
        for batch in engine.batches(data):
            engine.step(*batch)


def renormed(made: Made) -> Made:
    return Made(lipdp.convert.per_example_norms(made.model).model, made.x, made.y, made.loss)


def without_dropout(made: Made) -> Made:
    for module in made.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return made


LINES = {
    "lipdp.convert.per_example_norms(model)": renormed,
    "dropout 0 in its configuration": without_dropout,
}


class InFloat64:
    """Some models compute in float32 inside (``x.float()``), whatever their weights are; not here."""

    def __enter__(self) -> None:
        self.kept = torch.Tensor.float
        torch.Tensor.float = torch.Tensor.double

    def __exit__(self, *_: Any) -> None:
        torch.Tensor.float = self.kept


def look(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "family": case.family, "parameters": 0}
    made = build(case)
    row["parameters"] = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    started = time.perf_counter()
    try:
        with InFloat64():
            expected, c = reference(made)
            row["error"] = difference(clipping.clipped_gradients(made.model, made.loss, made.x, made.y, c), expected)
            seen = clipping.support(made.model, made.x, made.y, made.loss)
        row["slow"] = [layer.layer for layer in seen.layers if layer.speed == "slow"]
        row["layers"] = len(seen.layers)
    except UnsupportedError as error:
        return {**row, "status": "refused", "why": str(error)}
    try:
        one_step(build(case))
        row["status"] = "as it is"
    except UnsupportedError as error:
        row |= {"status": "refused", "why": str(error)}
        for line, change in LINES.items():
            try:
                one_step(change(build(case)))
            except UnsupportedError:
                continue
            row |= {"status": "with one line", "line": line}
            break
    return {**row, "seconds": round(time.perf_counter() - started, 2)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | kind | | ‖difference‖ | layers: fast + slow | |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["family"], row["name"])):
        error = f"{row['error']:.0e}" if "error" in row else ""
        slow = len(row.get("slow", ()))
        counts = f"{row['layers'] - slow} + {slow}" if "layers" in row else ""
        note = row.get("line", "") or row.get("why", "").split(". ")[0][:160]
        lines.append(f"| {row['name']} | {row['family']} | {row['status']} | {error} | {counts} | {note} |")
    kinds = {status: sum(row["status"] == status for row in rows) for status in ("as it is", "with one line", "refused")}
    share = kinds["as it is"] / len(rows)
    counted = f"{kinds['as it is']} as they are ({share:.0%}), {kinds['with one line']} with one line, {kinds['refused']} refused"
    head = f"{len(rows)} models: {counted}."
    worst = max((row["error"] for row in rows if "error" in row), default=0.0)
    return f"{head} The largest difference from the loop is {worst:.0e} of the whole sum.\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--write", action="store_true", help="into the documentation")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for case in ZOO:
        if not options.names or any(part in case.name for part in options.names):
            rows.append(look(case))
            print(json.dumps(rows[-1]), flush=True)
    if options.write:  # rows of models that were not tried (they can't be built here, or were not named) stay as they were
        tried = {row["name"] for row in rows}
        rows += [row for row in json.loads(RESULTS.read_text()) if row["name"] not in tried]
    text = table(rows)
    print(text)
    if options.write:
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
