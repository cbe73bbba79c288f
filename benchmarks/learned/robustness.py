"""Learned mechanisms on real columns, against the best mechanism without assumptions, chosen for each column in hindsight.

    python benchmarks/learned/robustness.py run --data FOLDER [--queries variance] [--sizes 50] [--limit-seconds 900]
    python benchmarks/learned/robustness.py show                                     # as Markdown

Resumable: a setting that is in the file is left out; `--again` measures it anew. Columns: ADBench's (FOLDER/adbench/*.npz, the
census table among them) and scikit-learn's iris, wine, breast cancer and diabetes. Public bounds: the next of 1, 2, 5 · 10^k
above the largest absolute value, and 0 below where no value is negative; then in unit form, which leaves every question as it is.
Datasets are draws of n records from a column (with replacement where it is shorter), three for each, the same for every
mechanism. Losses are expected ones, by quadrature or exact probabilities, no releases are drawn; below 1e-12 (a millionth of the
range) they count as that.

Half of the columns, by a hash of the name, is for tuning, the other half is *held back*: nobody looks at its rows one by one.

Without assumptions (fixed parameters, "even": they treat every number alike):
  all        Laplace noise, staircase noise on the query, limited to the range
  quantiles  also the exponential mechanism on the interval, with a density, and on all multiples of a millionth of the range
"More": also, for the variance, Laplace noise on first and second moment about the middle of the range, half of epsilon each
(which answers 0 where noise is large, and real variances are near 0); for quantiles, permute-and-flip and the exponential
mechanism by rank on 50, 100 and 300 even numbers. A grid that is chosen in hindsight may hold the very atoms of a column, and
then has no loss at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipdp.mechanisms import Mechanism, Problem, Settings, learn
from lipdp.mechanisms.experts import rank_utility
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.mechanism import AdditiveMechanism, SelectionMechanism
from lipdp.mechanisms.noise import draw_noise
from lipdp.mechanisms.postprocess import Plain
from lipdp.mechanisms.statistics import QueryStatistic
from lipdp.mechanisms.worst import truth_losses
from lipdp.privacy.quantile import quantile_probabilities

RESULTS = Path(__file__).parents[1] / "results" / "mechanisms" / "robustness.json"
QUERIES, EPSILONS, SIZES = ("mean", "variance", "median", "p10", "p25", "p90"), (0.3, 1.0), (50, 500, 5000)
MOST = {"1_ALOI": 12, "11_donors": 10, "5_campaign": 10}  # columns of a table, where it has many alike
FLOOR, DRAWS = 1e-12, 3


def columns(folder: Path) -> dict[str, np.ndarray]:
    """Every column by name, those of one value left out."""
    from sklearn import datasets

    tables = {name: getattr(datasets, f"load_{name}")().data for name in ("iris", "wine", "breast_cancer", "diabetes")}
    for path in sorted((folder / "adbench").glob("*.npz")):
        if path.stem not in ("8_celeba", "census_nominal33"):  # of ones and zeros, and of names
            held = np.load(path, allow_pickle=True)
            tables[path.stem] = held["X_num"] if "X_num" in held.files else held["X"]
    found = {}
    for name, table in tables.items():
        for place in range(min(table.shape[1], MOST.get(name, 15))):
            column = table[:, place].astype(np.float64)
            if np.ptp(column) > 0:
                found[f"{name}.{place}"] = column
    return found


def scaled(column: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """The column and its bounds, divided by a power of ten: the question stays the same, and mechanisms can be shared."""
    largest = float(np.abs(column).max())
    power = 10.0 ** math.floor(math.log10(largest))
    high = next(step for step in (1.0, 2.0, 5.0, 10.0) if step * power >= largest)
    if high == 10.0:
        power, high = power * 10, 1.0
    return column / power, (0.0 if column.min() >= 0 else -high, high)


@cache
def learned(query: str, epsilon: float, n: int) -> Mechanism:
    return learn(query, epsilon, n, (0.0, 1.0), settings=Settings(robust=400))


def held_back(name: str) -> bool:
    """Whether a column is of the half that nothing is tuned on."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def without_assumptions(problem: Problem, t: Tensor) -> dict[str, float]:
    """Average losses of each textbook mechanism, on unit datasets."""
    truth, most = problem.query(t), 0.25 if problem.query.kind == "variance" else 1.0
    made: dict[str, float] = {}
    for noise in ("laplace", "staircase"):
        mechanism = AdditiveMechanism(problem, noise, QueryStatistic(problem.query, problem.n), noise, Plain(most))  # type: ignore[arg-type]
        made[noise] = float(truth_losses(mechanism, truth).mean())
    if problem.query.kind == "variance":
        made["moments"] = float(_moments(problem, t.mean(1), truth).mean())
    if problem.query.kind == "quantile":
        made["lattice"] = float(IntervalMechanism.plain(problem).losses(t).mean())
        made["continuous"] = float(np.mean([_continuous(problem, row) for row in t]))
        for size in (50, 100, 300):
            utility = rank_utility(problem, size)
            for method in ("exponential", "permute_and_flip"):
                mechanism = SelectionMechanism(problem, "", utility, method, utility.grid)  # type: ignore[assignment, arg-type]
                made[f"{method} {size}"] = float(mechanism.losses(t).mean())
    return made


def _continuous(problem: Problem, t: Tensor) -> float:
    level = float(problem.query.p)
    edges, chances = quantile_probabilities(t, level, (0.0, 1.0), epsilon=problem.epsilon, adjacency="replace_one")
    q = float(problem.query(t[None]))
    a, b = edges[:-1] - q, edges[1:] - q
    return float((chances * (a * a + a * b + b * b) / 3).sum())


def _moments(problem: Problem, mean: Tensor, variance: Tensor) -> Tensor:
    """The loss of a variance from Σz and Σz², z = x − ½, each with half of ε: sensitivities 1 and ¼, ÷ n."""
    scale, centre = 2 / (problem.n * problem.epsilon), (mean - 0.5)[:, None, None]
    uniform = (torch.arange(151, dtype=torch.float64) + 0.5) / 151
    noise = draw_noise("laplace", uniform, 1.0, 1.0)
    first, second = (centre + scale * noise[:, None]).clamp(-0.5, 0.5), (variance[:, None, None] + centre**2) + scale / 4 * noise
    return (((second.clamp(0, 0.25) - first**2).clamp(0, 0.25) - variance[:, None, None]) ** 2).mean((1, 2))


def drawn_from(name: str, column: np.ndarray, problem: Problem) -> Tensor:
    """The unit datasets of a column, the same for every mechanism."""
    own, (low, high) = scaled(column)
    generator = np.random.default_rng([problem.n, *name.encode()])
    drawn = np.stack([generator.choice(own, problem.n, replace=len(own) < problem.n) for _ in range(DRAWS)])
    return problem.unit(torch.as_tensor((drawn - low) / (high - low)))


def measure(name: str, column: np.ndarray, query: str, epsilon: float, n: int) -> dict[str, Any]:
    """One column, one question."""
    problem = Problem.of(query, epsilon, n, (0.0, 1.0))
    t = drawn_from(name, column, problem)
    mechanism = learned(query, epsilon, n)
    losses = truth_losses(mechanism, problem.query(t)) if isinstance(mechanism, AdditiveMechanism) else mechanism.losses(t)
    plain = without_assumptions(problem, t)
    mine = max(float(losses.mean()), FLOOR)
    even = {who: value for who, value in plain.items() if who != "moments" and not who[-1].isdigit()}
    ratios = {f"to_{kind}": mine / max(min(own.values()), FLOOR) for kind, own in (("even", even), ("any", plain))}
    best = min(plain, key=plain.__getitem__)
    found = {"held_back": held_back(name), "mechanism": mechanism.title, "best": best, "loss": mine}
    return {"column": name, "query": query, "epsilon": epsilon, "n": n, **ratios, **found}


def run(given: argparse.Namespace) -> None:
    """All settings that are not in the file yet, until the time is over."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    start, every = time.monotonic(), columns(given.data)
    print(f"{len(every)} columns, {sum(map(held_back, every))} held back", flush=True)
    for n in given.sizes:
        for epsilon in EPSILONS:
            for query in given.queries:
                there = [row for row in rows if (row["query"], row["epsilon"], row["n"]) == (query, epsilon, n)]
                if (there and not given.again) or time.monotonic() - start > given.limit_seconds:
                    continue
                fresh = [measure(name, column, query, epsilon, n) for name, column in every.items()]
                rows = [row for row in rows if row not in there] + fresh
                RESULTS.parent.mkdir(parents=True, exist_ok=True)
                RESULTS.write_text(json.dumps(rows, indent=0) + "\n")
                print(told(f"{query} {epsilon:g} {n}", fresh), f"{time.monotonic() - start:.0f} s", flush=True)


def told(name: str, rows: list[dict[str, Any]]) -> str:
    made = f"| {name} | {len(rows)} |"
    for kind in ("to_even", "to_any"):
        ratios = np.array([row[kind] for row in rows])
        made += f" {np.median(ratios):.3f} | {np.quantile(ratios, 0.95):.3f} | {ratios.max():.3g} |"
    return made


def show() -> None:
    rows = json.loads(RESULTS.read_text())
    print("| question | rows | ÷ best even: median | 95% | worst | ÷ best of more: median | 95% | worst |")
    print("|---|---|---|---|---|---|---|---|")
    for query in QUERIES:
        for n in SIZES:
            own = [row for row in rows if row["query"] == query and row["n"] == n]
            if own:
                print(told(f"{query}, n = {n}", own))
    groups = {"mean": ("mean",), "variance": ("variance",), "quantiles": QUERIES[2:], "all": QUERIES}
    for name, queries in groups.items():
        own = [row for row in rows if row["query"] in queries]
        for half, held in (("", None), (", tuning half", False), (", held back", True)):
            print(told(name + half, [row for row in own if held is None or row["held_back"] is held]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("--data", type=Path, help="where adbench/ lies")
    parser.add_argument("--queries", nargs="*", default=QUERIES)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--again", action="store_true", help="measure settings anew that are in the file")
    parser.add_argument("--limit-seconds", type=float, default=1e6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "run":
        run(given)
    else:
        show()


if __name__ == "__main__":
    main()
