"""Joint quantiles and linear regression against OpenDP's mechanisms and those of the literature, at the same ε: real releases.

    python benchmarks/learned/releases.py run --data FOLDER    # FOLDER/adbench/*.npz; a few minutes on one core
    python benchmarks/learned/releases.py show                 # as Markdown

Quantiles (replace-one, n = 1000 draws of a real column, the bounds of robustness.py): one joint choice; the exponential mechanism
on all numbers for each with ε/m; OpenDP's private quantile on 1,000 even candidates for each with ε/m; and the recursion of Kaplan,
Schnapp and Stemmer (2022), the middle quantile first, each level with ε/⌈log₂(m+1)⌉, written out here. Loss: squared error ÷
range², averaged over the quantiles. Regression: the share of the target's variance that the private fit loses to least squares.
AdaSSP (Wang 2018) is for neighbours that differ by one record more or less; ours and OpenDP's Theil-Sen (one feature), for a
replaced one, which is harder.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from robustness import columns, scaled

from lipdp.mechanisms import JointQuantiles, Problem, Query, release_line, release_moments
from lipdp.mechanisms.intervals import IntervalMechanism

RESULTS = Path(__file__).parents[1] / "results" / "mechanisms" / "releases.json"
N, RELEASES, EPSILONS, DELTA = 1000, 12, (0.3, 1.0, 3.0), 1e-6
SETS = {"quartiles": [Fraction(k, 4) for k in (1, 2, 3)], "deciles": [Fraction(k, 10) for k in range(1, 10)]}
Answers = Callable[[np.ndarray], list[float]]


# --- quantiles --------------------------------------------------------------------------------------------------------------


def joint(levels: list[Fraction], epsilon: float, low: float, high: float) -> Answers:
    made = JointQuantiles(tuple(levels), epsilon, N, low, high)
    return lambda x: made.respond(torch.as_tensor(x))


def split(levels: list[Fraction], epsilon: float, low: float, high: float) -> Answers:
    share = epsilon / len(levels)
    parts = [IntervalMechanism.plain(Problem.of(Query("quantile", level), share, N, (low, high))) for level in levels]
    return lambda x: sorted(part.release(x) for part in parts)


def opendp(levels: list[Fraction], epsilon: float, low: float, high: float) -> Answers:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    candidates = np.linspace(low, high, N).tolist()
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=N), dp.symmetric_distance()

    def make(level: Fraction) -> Any:
        def of(scale: float) -> Any:
            return dp.m.make_private_quantile(*space, dp.max_divergence(), candidates=candidates, alpha=float(level), scale=scale)

        return of(dp.binary_search_param(of, d_in=2, d_out=epsilon / len(levels), bounds=(1e-3, 1e6)))

    parts = [make(level) for level in levels]
    return lambda x: sorted(float(part(x.tolist())) for part in parts)


def recursion(levels: list[Fraction], epsilon: float, low: float, high: float) -> Answers:
    """Each level splits the records: a replaced one leaves one part and joins another, so each choice is for ε ÷ 2·depth."""
    slope = epsilon / (2 * math.ceil(math.log2(len(levels) + 1)))
    generator = np.random.default_rng()

    def one(x: np.ndarray, share: float, a: float, b: float) -> float:
        ends = np.concatenate([[a], np.sort(x), [b]])
        with np.errstate(divide="ignore"):
            weights = np.log(np.diff(ends)) - slope * np.abs(np.arange(len(x) + 1) - share * len(x))
        place = int(np.argmax(weights + generator.gumbel(size=len(weights)))) if b > a else 0
        return float(generator.uniform(ends[place], ends[place + 1]))

    def inside(x: np.ndarray, asked: list[Fraction], first: Fraction, last: Fraction, a: float, b: float) -> list[float]:
        if not asked:
            return []
        middle = len(asked) // 2
        level = asked[middle]
        value = one(x, float((level - first) / (last - first)), a, b)
        below = inside(x[x < value], asked[:middle], first, level, a, value)
        return [*below, value, *inside(x[x >= value], asked[middle + 1 :], level, last, value, b)]

    return lambda x: inside(x, levels, Fraction(0), Fraction(1), low, high)


WAYS = {"joint": joint, "split": split, "opendp": opendp, "recursion": recursion}


def quantiles(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name, column in list(columns(folder).items())[::8]:
        own, (low, high) = scaled(column)
        x = np.random.default_rng([N, *name.encode()]).choice(own, N, replace=len(own) < N)
        for (kind, levels), epsilon in ((item, epsilon) for item in SETS.items() for epsilon in EPSILONS):
            truth = np.quantile(x, [float(level) for level in levels], method="averaged_inverted_cdf")
            losses = {}
            for way, make in WAYS.items():
                answers = make(levels, epsilon, low, high)
                errors = [(np.array(answers(x)) - truth) / (high - low) for _ in range(RELEASES)]
                losses[way] = float(np.mean(np.square(errors)))
            rows.append({"column": name, "levels": kind, "epsilon": epsilon, **losses})
        print(rows[-1], flush=True)
    return rows


# --- regression -------------------------------------------------------------------------------------------------------------


def adassp(x: np.ndarray, y: np.ndarray, epsilon: float, generator: np.random.Generator) -> np.ndarray:
    """Coefficients and intercept for x ∈ [−1, 1]ᵈ, y ∈ [−1, 1]: rows are scaled to norm 1 at most; three Gaussian mechanisms."""
    d = x.shape[1] + 1
    rows = np.concatenate([x, np.ones((len(x), 1))], 1) / math.sqrt(d)
    part, log = epsilon / 3, math.log(6 / DELTA)
    least = np.linalg.eigvalsh(rows.T @ rows)[0]
    known = max(least + math.sqrt(log) / part * generator.normal() - log / part, 0.0)
    ridge = max(math.sqrt(d * log * math.log(2 * d * d / 0.05)) / part - known, 0.0)
    noise = np.triu(generator.normal(size=(d, d)))
    second = rows.T @ rows + math.sqrt(log) / part * (noise + np.triu(noise, 1).T)
    cross = rows.T @ y + math.sqrt(log) / part * generator.normal(size=d)
    made: np.ndarray = np.linalg.solve(second + ridge * np.eye(d), cross) / math.sqrt(d)
    return made


def moments(x: np.ndarray, y: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    table = np.concatenate([x, y[:, None]], 1)
    slopes, intercept = release_moments(table, [(-1.0, 1.0)] * table.shape[1], epsilon, delta).regression(x.shape[1])
    return np.append(slopes, intercept)


def line(x: np.ndarray, y: np.ndarray, epsilon: float) -> np.ndarray:
    found = release_line(np.column_stack([x, y]), [(-1.0, 1.0)] * 2, epsilon)
    return np.array([found.slope, found.intercept])


def theil_sen(x: np.ndarray, y: np.ndarray, epsilon: float) -> np.ndarray:
    import opendp.prelude as dp

    dp.enable_features("contrib", "idealized-numerics", "honest-but-curious", "private-selection-v2")

    def of(scale: float) -> Any:
        return dp.sklearn.linear_model.LinearRegression(dp.max_divergence(), [(-1.0, 1.0)], (-1.0, 1.0), scale)

    scale = dp.binary_search(lambda s: of(s).measurement.map(2) <= epsilon, bounds=(1e-3, 1e6))
    fit = of(scale).fit(x, y)
    return np.append(fit.coef_, fit.intercept_)


def tables() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Features and targets, scaled to [−1, 1] by their least and largest values (public here, for all mechanisms alike)."""
    from sklearn import datasets

    diabetes, cancer = datasets.load_diabetes(), datasets.load_breast_cancer()
    some = np.random.default_rng(0)
    line = some.uniform(-1, 1, (5000, 1))
    wide = some.uniform(-1, 1, (5000, 5))
    found = {
        "line, n = 5000": (line, 0.6 * line[:, 0] + 0.1 + some.normal(0, 0.1, 5000)),
        "five features, n = 5000": (wide, wide @ [0.4, -0.2, 0.1, 0.0, 0.3] + some.normal(0, 0.1, 5000)),
        "diabetes: bmi, n = 442": (diabetes.data[:, [2]], diabetes.target),
        "cancer: area from radius, n = 569": (cancer.data[:, [0]], cancer.data[:, 3]),
        "cancer: area from 4, n = 569": (cancer.data[:, [0, 1, 4, 5]], cancer.data[:, 3]),
    }

    def to_unit(values: np.ndarray) -> np.ndarray:
        low, high = values.min(0), values.max(0)
        made: np.ndarray = 2 * (values - low) / (high - low) - 1
        return made

    return {name: (to_unit(x), to_unit(y)) for name, (x, y) in found.items()}


def regressions() -> list[dict[str, Any]]:
    rows = []
    generator = np.random.default_rng(1)
    for name, (x, y) in tables().items():
        design = np.concatenate([x, np.ones((len(x), 1))], 1)
        best = float(np.square(design @ np.linalg.lstsq(design, y, rcond=None)[0] - y).mean())
        for epsilon in EPSILONS:
            ways: dict[str, Callable[[], np.ndarray]] = {
                "pure": lambda x=x, y=y, e=epsilon: moments(x, y, e, 0.0),  # type: ignore[misc]
                "gaussian": lambda x=x, y=y, e=epsilon: moments(x, y, e, DELTA),  # type: ignore[misc]
                "adassp": lambda x=x, y=y, e=epsilon: adassp(x, y, e, generator),  # type: ignore[misc]
            }
            if x.shape[1] == 1:
                ways["line"] = lambda x=x, y=y, e=epsilon: line(x, y, e)  # type: ignore[misc]
                ways["theil-sen"] = lambda x=x, y=y, e=epsilon: theil_sen(x, y, e)  # type: ignore[misc]
            lost = {}
            for way, fit in ways.items():
                errors = [float(np.square(design @ fit() - y).mean()) for _ in range(RELEASES)]
                lost[way] = float(np.median(errors) - best) / float(y.var())
            rows.append({"table": name, "epsilon": epsilon, **lost})
            print(rows[-1], flush=True)
    return rows


def show() -> None:
    held = json.loads(RESULTS.read_text())
    print("| quantiles | ε | columns | joint ÷ split: median (95%) | ÷ OpenDP | ÷ recursion |\n|---|---|---|---|---|---|")
    for kind in SETS:
        for epsilon in EPSILONS:
            own = [row for row in held["quantiles"] if row["levels"] == kind and row["epsilon"] == epsilon]
            if not own:
                continue
            cells = []
            for other in ("split", "opendp", "recursion"):
                ratios = np.array([max(row["joint"], 1e-12) / max(row[other], 1e-12) for row in own])
                cells.append(f"{np.median(ratios):.2f} ({np.quantile(ratios, 0.95):.2f})")
            print(f"| {kind} | {epsilon:g} | {len(own)} | {' | '.join(cells)} |")
    print(
        "\n| table | ε | moments, δ = 0 | moments, δ = 10⁻⁶ | `release_line`, δ = 0 | AdaSSP, δ = 10⁻⁶ | OpenDP Theil-Sen, δ = 0 |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in held["regression"]:
        values = [f"{row[way]:.3g}" if way in row else "–" for way in ("pure", "gaussian", "line", "adassp", "theil-sen")]
        print(f"| {row['table']} | {row['epsilon']:g} | {' | '.join(values)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("--data", type=Path, help="where adbench/ lies")
    parser.add_argument("--only", choices=("regression", "quantiles"), help="leave the other part of the file as it is")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "run":
        held = json.loads(RESULTS.read_text()) if given.only else {}
        if given.only != "quantiles":
            held["regression"] = regressions()
        if given.only != "regression":
            held["quantiles"] = quantiles(given.data)
        RESULTS.write_text(json.dumps(held, indent=0) + "\n")
    show()


if __name__ == "__main__":
    main()
