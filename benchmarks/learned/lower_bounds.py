"""How small can a quantile's ratio be? A lower bound for every mechanism, on each real column of ``robustness.py``.

    python benchmarks/learned/lower_bounds.py run --data FOLDER [--sizes 50]   # 4 minutes on a busy core
    python benchmarks/learned/lower_bounds.py show                             # goal, reached and lower bound, as Markdown
    python benchmarks/learned/lower_bounds.py small                            # all datasets of a small domain

**Of what it is a bound.** Let x_0 be n records of a column, and x_k (x_-k) the same with its k smallest (largest) records replaced
by records at the high (low) end of the range, |k| ≤ K = ⌈8/ε⌉, at most n/5. Neighbours in this chain differ in one record. With b_k
the loss of the best mechanism without assumptions on x_k (noise on the query, exponential mechanism), F the losses' floor, and ℓ_k
the loss of *any* ε-DP mechanism, even one that was made for just these 2K + 1 datasets:

    average over k of max(ℓ_k, F) ÷ max(b_k, F) ≥ the bound.

So no mechanism is below the bound for a column and those next to it, taken together. (On x_0 alone nothing can be said: a mechanism
that knows the answer has no loss there.) A mechanism that does not know the column needs more.

**Proof.** For every answer r, v_k = P(M(x_k) ∈ dr) is in the cone e^-ε ≤ v_{k+1}/v_k ≤ e^ε. If for multipliers λ_k

    min over the cone of Σ_k v_k (c_k(r) − λ_k) ≥ 0 for every r,   c_k(r) = (r − q_k)² ÷ max(b_k, F) ÷ (2K + 1),

then Σ_k E c_k(M(x_k)) ≥ Σ_k λ_k, since each x_k's chances sum to one. The minimum is a recursion, as the best next factor is e^ε
where what follows is negative and e^-ε where it is not: V_k = s_k + min(e^ε·V_{k+1}, e^-ε·V_{k+1}). Answers are limited to
[min q, max q], which loses nothing; this range is cut into cells, and c_k is the least in a cell, so the bound holds for continuous
answers, too. Whatever λ is tried, the bound it gives is true. λ is what a mechanism loses that draws an order statistic by a
two-sided geometric rank, less at the ends of the chain, times the largest number that the recursion allows. A mechanism without
assumptions that is missing in b only makes the bound smaller.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from robustness import EPSILONS, FLOOR, QUERIES, RESULTS, SIZES, columns, drawn_from, held_back
from scipy import sparse
from scipy.optimize import linprog
from torch import Tensor

from lipdp.mechanisms import Problem
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.worst import noisy_query, truth_losses

BOUNDS = RESULTS.with_name("lower_bounds.json")
CELLS = 16  # between two neighbouring truths
TAPERS = (0.0, 0.3, 0.5, 0.7)  # how much smaller multipliers are tried at the chain's ends
QUANTILES = QUERIES[2:]
Floats = npt.NDArray[np.float64]


def least_over_the_cone(slack: Floats, epsilon: float) -> Floats:
    """min Σ_k v_k·s_k over e^-ε ≤ v_{k+1}/v_k ≤ e^ε, v_0 = 1, for each row of ``slack`` (cells, chain)."""
    value = slack[:, -1].copy()
    up, down = math.exp(epsilon), math.exp(-epsilon)
    for place in range(slack.shape[1] - 2, -1, -1):
        value = slack[:, place] + np.where(value < 0, up, down) * value
    return value


def cell_costs(truths: Floats, scale: Floats) -> Floats:
    """The least of (r − q_k)² ÷ scale_k in each cell of [min q, max q], (cells, chain)."""
    ends = np.unique(truths)
    if len(ends) == 1:
        return np.zeros((1, len(truths)))
    parts = [np.linspace(a, b, CELLS, endpoint=False) for a, b in itertools.pairwise(ends)]
    edges = np.concatenate([*parts, ends[-1:]])
    low, high = edges[:-1, None], edges[1:, None]
    away = np.maximum(np.maximum(low - truths, truths - high), 0.0)
    costs: Floats = away**2 / scale
    return costs


def ranks_at_random(truths: Floats, scale: Floats, epsilon: float) -> Floats:
    """What is lost by the mechanism that knows the chain, and answers the truth of place k + Z, Z two-sided geometric: ε-DP."""
    count = len(truths)
    place = np.arange(count)
    chance = np.exp(-epsilon * np.abs(place[:, None] - place[None, :]))
    chance /= (1 + math.exp(-epsilon)) / (1 - math.exp(-epsilon))
    # What lies beyond an end is answered by that end.
    tail = np.exp(-epsilon * place) * math.exp(-epsilon) / (1 + math.exp(-epsilon))
    chance[:, 0] += tail
    chance[:, -1] += tail[::-1]
    losses: Floats = (chance * (truths[None, :] - truths[:, None]) ** 2).sum(1) / scale
    return losses


def chain_bound(truths: Floats, plain: Floats, epsilon: float) -> float:
    """The bound of this module for one chain: truths q_k, and losses b_k of the best mechanism without assumptions."""
    scale = np.maximum(plain, FLOOR)
    nothing = FLOOR / scale  # what is below the floor counts as the floor
    counted = nothing < 0.5
    weight = counted / len(truths)
    sure = float((nothing * ~counted).sum()) / len(truths)
    costs, guess = cell_costs(truths, scale) * weight, ranks_at_random(truths, scale, epsilon) * weight
    to_end = np.minimum(np.arange(len(truths)), np.arange(len(truths))[::-1])
    found = [float(nothing.mean())]
    for less in TAPERS:
        multipliers = guess * (1 - less * np.exp(-epsilon * to_end / 3))
        found.append(sure + _largest(costs, multipliers, epsilon) * float(multipliers.sum()))
    return max(found)


def _largest(costs: Floats, multipliers: Floats, epsilon: float) -> float:
    """The largest number that the multipliers may be taken times."""
    low, high = 0.0, 4.0
    for _ in range(20):
        middle = (low + high) / 2
        # Rounding of the recursion, which is relative to its largest terms, is far below what is given away here.
        slack = costs - middle * multipliers - 1e-12 * multipliers.max()
        low, high = (middle, high) if float(least_over_the_cone(slack, epsilon).min()) >= 0 else (low, middle)
    return low


def chain(t: Tensor, most: int) -> Tensor:
    """The datasets x_-K … x_K of a sorted unit dataset (n,)."""
    padded = torch.cat([t.new_zeros(most), t, t.new_ones(most)])
    return padded.unfold(0, len(t), 1)


def measure(name: str, column: npt.NDArray[np.float64], query: str, epsilon: float, n: int) -> dict[str, Any]:
    """The bound for the first draw of a column."""
    problem = Problem.of(query, epsilon, n, (0.0, 1.0))
    near = chain(drawn_from(name, column, problem)[0], min(math.ceil(8 / epsilon), n // 5))
    truths = problem.query(near)
    every = [IntervalMechanism.plain(problem).losses(near)]
    every += [truth_losses(noisy_query(problem, noise), truths) for noise in ("laplace", "staircase")]
    bound = chain_bound(truths.numpy(), torch.stack(every).amin(0).numpy(), epsilon)
    return {"column": name, "query": query, "epsilon": epsilon, "n": n, "held_back": held_back(name), "bound": bound}


def run(given: argparse.Namespace) -> None:
    """All settings that are not in the file yet."""
    rows = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else []
    start, every = time.monotonic(), columns(given.data)
    for n, epsilon, query in itertools.product(given.sizes, EPSILONS, given.queries):
        if any((row["query"], row["epsilon"], row["n"]) == (query, epsilon, n) for row in rows):
            continue
        rows += [measure(name, column, query, epsilon, n) for name, column in every.items()]
        BOUNDS.write_text(json.dumps(rows, indent=0) + "\n")
        print(query, epsilon, n, f"{time.monotonic() - start:.0f} s", flush=True)


def show() -> None:
    """Goal, reached, bound: median, 95% and worst over the columns, for each setting."""
    bounds, reached = json.loads(BOUNDS.read_text()), json.loads(RESULTS.read_text())
    print("| question | ε | median ≤ 0.8: reached | at least | 95% ≤ 1.25: reached | at least | worst ≤ 1.5: reached | at least |")
    print("|---|---|---|---|---|---|---|---|")
    for query, n, epsilon in itertools.product(QUANTILES, SIZES, EPSILONS):
        told = [f"{query}, n = {n}", f"{epsilon:g}"]
        two = (
            np.array([row[what] for row in rows if (row["query"], row["epsilon"], row["n"]) == (query, epsilon, n)])
            for rows, what in ((reached, "to_even"), (bounds, "bound"))
        )
        ours, least = two
        for share in (0.5, 0.95, 1.0):
            told += [f"{np.quantile(ours, share):.3f}", f"{np.quantile(least, share):.3f}"]
        print("| " + " | ".join(told) + " |")


def small_domain(n: int, values: int, epsilon: float) -> tuple[float, float]:
    """Over *all* datasets of n records with so many even values, and all mechanisms that answer one of these, for the median.

    The smallest worst ratio to the better one of exponential mechanism and Laplace noise; the smallest average ratio with none
    above 1.25. Each by a linear programme: one unknown for each dataset and answer, and one for the worst ratio.
    """
    data = [counts for counts in itertools.product(range(n + 1), repeat=values) if sum(counts) == n]
    places, index = np.linspace(0, 1, values), {counts: number for number, counts in enumerate(data)}
    t = torch.tensor(np.stack([np.repeat(places, counts) for counts in data]))
    problem = Problem.of("median", epsilon, n, (0.0, 1.0))
    upto = np.cumsum(np.array(data), 1)
    distance = np.maximum(np.maximum(upto - np.array(data) - n / 2, n / 2 - upto), 0.0)
    cost = (places - problem.query(t).numpy()[:, None]) ** 2
    chance = np.exp(-epsilon / 2 * distance)
    plain = (chance * cost).sum(1) / chance.sum(1)
    scaled = cost / np.minimum(plain, truth_losses(noisy_query(problem, "laplace"), problem.query(t)).numpy())[:, None]
    moved = {
        (number, index[tuple(c - (v == a) + (v == b) for v, c in enumerate(counts))])
        for number, counts in enumerate(data)
        for a, b in itertools.permutations(range(values), 2)
        if counts[a]
    }
    size, count = cost.size, len(data)

    def matrix(entries: Any, rows: Any, unknowns: Any, height: int) -> sparse.csr_matrix:
        return sparse.csr_matrix((entries, (rows, unknowns)), shape=(height, size + 1))

    unknowns = (np.array(sorted(moved))[:, None, :] * values + np.arange(values)[:, None]).reshape(-1)
    height = len(unknowns) // 2
    private = matrix(np.tile([1.0, -math.exp(epsilon)], height), np.arange(height).repeat(2), unknowns, height)
    each = np.arange(count).repeat(values)
    whole, ratios = (matrix(entries, each, np.arange(size), count) for entries in (np.ones(size), scaled.ravel()))
    least = matrix(np.ones(count), np.arange(count), np.full(count, size), count)

    def solved(aim: Floats, limit: sparse.csr_matrix, most: float) -> float:
        limits = sparse.vstack([private, limit]), np.concatenate([np.zeros(height), np.full(count, most)])
        return float(linprog(aim, *limits, whole, np.ones(count), method="highs").fun)

    worst = solved(np.concatenate([np.zeros(size), [1.0]]), ratios - least, 0.0)
    return worst, solved(np.concatenate([scaled.ravel() / count, [0.0]]), ratios, 1.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show", "small"))
    parser.add_argument("--data", type=Path, help="where adbench/ lies")
    parser.add_argument("--queries", nargs="*", default=QUANTILES)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "run":
        run(given)
    elif given.command == "show":
        show()
    else:
        for n, values, epsilon in itertools.product((3, 5), (4, 5), (0.3, 1.0, 3.0)):
            print(n, values, epsilon, "worst {:.3f}, average {:.3f}".format(*small_domain(n, values, epsilon)), flush=True)


if __name__ == "__main__":
    main()
