"""The estimators as they come, on eight tables that no recipe names and eight that nobody had looked at, beside other scores.

docs/tables.md says what was looked at, and when.

    python benchmarks/tables/estimators.py            runs what is missing (minutes), prints the table
    python benchmarks/tables/estimators.py --table    prints the table of docs/tables.md from the stored results

Scores on a quarter of the rows, held out: accuracy, AUROC for the census (6 % are positive), R² for regression; mean ± std over
splits. "tuned" is not private: the best of a logistic or ridge regression, an RBF machine and boosted trees, each with a small
grid, by cross-validation. "Opacus" is a network of one hidden layer (64, ReLU) on the same encoded rows, with what its tutorials
use: SGD at 0.1, 20 epochs in batches of 64, max_grad_norm 1, PLD ("prv") accounting. Public ranges: from 0 to the next power of
two above the published maximum, or its negative; those that the generators of drawn tables imply.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.svm import SVC, SVR

import lipdp
from lipdp.data.files import data_root
from lipdp.estimators import Categorical, Numeric

RESULTS = Path(__file__).parents[1] / "results" / "estimators" / "tables.jsonl"
DELTA, SPLITS, FRESH_SPLITS = 1e-5, 5, 3


@dataclass(frozen=True)
class Table:
    """One table with what is public of it."""

    name: str
    rows: Any
    targets: Any
    schema: Any
    metric: str = "accuracy"
    target: tuple[float, float] | None = None
    fresh: bool = False


def powers_of_two(columns: np.ndarray) -> list[tuple[float, float]]:
    """From 0 (or its negative) to the next power of two above the largest value."""
    highs = [2.0 ** math.ceil(math.log2(high)) for high in np.abs(columns).max(0)]
    return [(0.0 if low >= 0 else -high, high) for low, high in zip(columns.min(0), highs, strict=True)]


def census(count: int = 20_000) -> Table:
    """7 numbers and 33 categories of each person; income above 50,000."""
    path = data_root(None) / "adbench" / "census_uci_test_mixed40.npz"
    with np.load(path, allow_pickle=False) as file:
        numbers, codes, labels, sizes = file["X_num"], file["X_cat"], file["y"], file["cardinality"]
    chosen = np.random.default_rng(0).permutation(len(labels))[:count]
    rows = np.concatenate([numbers, codes.astype(np.int64)], axis=1)[chosen].astype(float)
    schema = powers_of_two(numbers) + [Categorical([float(v) for v in range(size)], other=True) for size in sizes]
    return Table("census (income)", rows, labels[chosen].astype(int), schema, "auroc")


def tables() -> list[Table]:
    """All of them."""
    found = []
    for name, loaded in (
        ("breast cancer", datasets.load_breast_cancer()),
        ("wine", datasets.load_wine()),
        ("iris", datasets.load_iris()),
    ):
        found.append(Table(name, loaded.data, loaded.target, powers_of_two(loaded.data)))
    moons = datasets.make_moons(2000, noise=0.2, random_state=0)
    found.append(Table("two moons", *moons, [(-2.0, 3.0), (-1.5, 2.0)]))
    rows, labels = datasets.make_hastie_10_2(8000, random_state=0)
    found.append(Table("Hastie's spheres", rows, (labels > 0).astype(int), Numeric(-3, 3)))
    found.append(census())
    rows, values = datasets.load_diabetes(return_X_y=True, scaled=False)
    found.append(Table("diabetes", rows, values, powers_of_two(rows), "R2", (0.0, 400.0)))
    rows, values = datasets.make_friedman1(5000, noise=1.0, random_state=0)
    found.append(Table("Friedman's first", rows, values, Numeric(0, 1), "R2", (0.0, 30.0)))
    return found


def fresh() -> list[Table]:
    """Eight more, drawn by scikit-learn's generators, whose scores nobody had seen when the rules were committed."""
    found = []
    rows, labels = datasets.make_gaussian_quantiles(n_samples=3000, n_features=4, n_classes=3, random_state=0)
    found.append(Table("quantiles of a Gaussian", rows, labels, Numeric(-3, 3), fresh=True))
    rows, along = datasets.make_swiss_roll(2000, noise=0.5, random_state=0)
    labels = (np.floor(along) % 2).astype(int)
    found.append(Table("swiss roll, stripes", rows, labels, [(-16.0, 16.0), (0.0, 22.0), (-16.0, 16.0)], fresh=True))
    rows, labels = datasets.make_classification(5000, 30, n_informative=10, n_redundant=5, n_clusters_per_class=3, random_state=77)
    found.append(Table("clusters on a cube", rows, labels, Numeric(-10, 10), fresh=True))
    rows, labels = datasets.make_blobs(400, 6, centers=3, cluster_std=6.0, random_state=77)
    found.append(Table("three blobs", rows, labels, Numeric(-32, 32), fresh=True))
    spans = [(0.0, 100.0), (40 * math.pi, 560 * math.pi), (0.0, 1.0), (1.0, 11.0)]
    rows, values = datasets.make_friedman2(3000, noise=50.0, random_state=0)
    found.append(Table("Friedman's second", rows, values, spans, "R2", (0.0, 2000.0), fresh=True))
    rows, values = datasets.make_friedman3(3000, noise=0.1, random_state=0)
    found.append(Table("Friedman's third", rows, values, spans, "R2", (0.0, 2.0), fresh=True))
    rows, values = datasets.make_sparse_uncorrelated(800, 10, random_state=0)
    found.append(Table("sparse plane", rows, values, Numeric(-4, 4), "R2", (-16.0, 16.0), fresh=True))
    rows, values = datasets.make_s_curve(1500, noise=0.1, random_state=0)
    found.append(Table("S curve", rows, values, [(-1.5, 1.5), (0.0, 2.0), (-2.5, 2.5)], "R2", (-5.0, 5.0), fresh=True))
    return found


def score(table: Table, answers: np.ndarray, predicted: np.ndarray) -> float:
    """The table's figure; for AUROC ``predicted`` are margins."""
    judge = {"accuracy": accuracy_score, "auroc": roc_auc_score, "R2": r2_score}[table.metric]
    return float(judge(answers, predicted))


def ours(table: Table, epsilon: float, rows: Any, targets: Any, rest: Any, *, declared: bool) -> tuple[np.ndarray, str]:
    """Predictions of the estimator as it comes, and the method that it chose."""
    own: dict[str, Any] = {"delta": DELTA, "schema": table.schema if declared else None}
    if table.metric == "R2":
        model: Any = lipdp.PrivateRegressor(epsilon, target=table.target if declared else None, **own).fit(rows, targets)
        return model.predict(rest), model.choice_.method
    model = lipdp.PrivateClassifier(epsilon, **own).fit(rows, targets)
    return (model.decision_function(rest) if table.metric == "auroc" else model.predict(rest)), model.choice_.method


def encoded(table: Table, rows: np.ndarray) -> np.ndarray:
    """The rows as the estimator's schema makes them: the same for the others."""
    from lipdp.estimators.schema import Schema, columns_of, read_schema

    columns = columns_of(rows)
    known = read_schema(table.schema, list(columns))
    return Schema(tuple(known), tuple(known.values())).encode(columns)


def tuned(table: Table, rows: np.ndarray, targets: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The best of three kinds by cross-validation; not private."""
    if table.metric == "R2":
        kinds: list[tuple[Any, dict[str, Any]]] = [
            (Ridge(), {"alpha": [0.01, 0.1, 1, 10]}),
            (SVR(), {"C": [0.1, 1, 10], "gamma": [0.1, 0.3, 1]}),
            (HistGradientBoostingRegressor(random_state=0), {"learning_rate": [0.05, 0.1], "max_leaf_nodes": [7, 31]}),
        ]
        scale = (lambda v: v / table.target[1]) if table.target else (lambda v: v)
        targets = scale(targets)
    else:
        trees = HistGradientBoostingClassifier(random_state=0)
        kinds = [
            (LogisticRegression(max_iter=2000), {"C": [0.1, 1, 10, 100]}),
            (trees, {"learning_rate": [0.05, 0.1], "max_leaf_nodes": [7, 31]}),
        ]
        if len(rows) < 10_000:
            kinds.append((SVC(), {"C": [1, 10, 100], "gamma": [0.03, 0.1, 0.3, 1]}))
    figure = {"accuracy": "accuracy", "auroc": "roc_auc", "R2": "r2"}[table.metric]
    searches = [GridSearchCV(kind, grid, cv=3, scoring=figure).fit(rows, targets) for kind, grid in kinds]
    best = max(searches, key=lambda search: search.best_score_)
    if table.metric == "auroc":
        return best.predict_proba(rest)[:, 1] if hasattr(best, "predict_proba") else best.decision_function(rest)
    return best.predict(rest) * (table.target[1] if table.metric == "R2" and table.target else 1)


def opacus(table: Table, epsilon: float, rows: np.ndarray, targets: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """A small network trained by Opacus with usual settings."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    regression = table.metric == "R2"
    outputs = 1 if regression else int(targets.max()) + 1
    net = torch.nn.Sequential(torch.nn.Linear(rows.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs))
    labels = (
        torch.tensor(targets / table.target[1], dtype=torch.float32)[:, None]
        if regression and table.target
        else torch.tensor(targets)
    )
    loader = DataLoader(TensorDataset(torch.tensor(rows), labels), batch_size=64, shuffle=True)
    net, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader, target_epsilon=epsilon,
        target_delta=DELTA, epochs=20, max_grad_norm=1.0)  # fmt: skip
    judge = torch.nn.MSELoss() if regression else torch.nn.CrossEntropyLoss()
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            if len(x):
                judge(net(x), y).backward()
                optimizer.step()
    with torch.no_grad():
        answer = net(torch.tensor(rest)).numpy()
    if regression and table.target:
        return answer[:, 0] * table.target[1]
    return answer[:, 1] - answer[:, 0] if table.metric == "auroc" else answer.argmax(1)


def run(table: Table, kind: str, epsilon: float, split: int) -> dict[str, Any]:
    """One figure."""
    by = None if table.metric == "R2" else table.targets
    rows, rest, targets, answers = train_test_split(table.rows, table.targets, test_size=0.25, random_state=split, stratify=by)
    torch.manual_seed(split)
    method = ""
    if kind in ("ours", "ours, ranges paid"):
        predicted, method = ours(table, epsilon, rows, targets, rest, declared=kind == "ours")
    elif kind == "tuned":
        predicted = tuned(table, encoded(table, rows), targets, encoded(table, rest))
    else:
        predicted = opacus(table, epsilon, encoded(table, rows), targets, encoded(table, rest))
    figure = score(table, answers, predicted)
    return {"table": table.name, "kind": kind, "epsilon": epsilon, "split": split, "rows": len(rows), "columns": rows.shape[1],
            "metric": table.metric, "score": figure, "method": method}  # fmt: skip


def stored() -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def print_table(results: list[dict[str, Any]]) -> None:
    """As in the documentation."""
    kinds = [("ours", 1.0), ("ours", 3.0), ("ours, ranges paid", 3.0), ("Opacus", 1.0), ("Opacus", 3.0), ("tuned", 0.0)]
    print(
        "| table (rows × columns) | metric | ours, ε = 1 | ours, ε = 3 | ranges found privately, ε = 3 | Opacus, ε = 1 | "
        "Opacus, ε = 3 | tuned, not private |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(result["table"] for result in results):
        own = [result for result in results if result["table"] == name]
        cells = []
        for kind, epsilon in kinds:
            figures = [r["score"] for r in own if r["kind"] == kind and r["epsilon"] == epsilon]
            deviation = f" ± {100 * statistics.stdev(figures):.1f}" if len(figures) > 1 else ""
            mean = statistics.mean(figures) if figures else math.nan
            cells.append("–" if not figures else "far below 0" if mean < -1 else f"{100 * mean:.1f}{deviation}")
        print(
            f"| {name} ({own[0]['rows']:,} × {own[0]['columns']}) | {own[0]['metric'].replace('R2', 'R²')} | {' | '.join(cells)} |"
        )


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print")
    if not parser.parse_args().table:
        warnings.simplefilter("ignore")
        done = {(r["table"], r["kind"], r["epsilon"], r["split"]) for r in stored()}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        every = [*tables(), *fresh()]
        order = [("ours", 1.0), ("ours", 3.0), ("ours, ranges paid", 3.0), ("Opacus", 1.0), ("Opacus", 3.0), ("tuned", 0.0)]
        for kind, epsilon in order:
            for table in every:
                for split in range(FRESH_SPLITS if table.fresh else SPLITS):
                    if (table.name, kind, epsilon, split) not in done:
                        result = run(table, kind, epsilon, split)
                        with RESULTS.open("a") as file:
                            file.write(json.dumps(result) + "\n")
                        print(result, file=sys.stderr, flush=True)
    print_table(stored())


if __name__ == "__main__":
    main()
