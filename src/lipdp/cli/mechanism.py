"""``lipdp mechanism answer|learn|release|describe|compare``: private statistics of CSV columns."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._texts import brief, downwards
from lipdp.cli import options
from lipdp.cli.csv_files import read_column
from lipdp.cli.output import check_new_file, console, print_fields, print_json
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.mechanisms import Answer, Comparison
    from lipdp.privacy import Budget

app = typer.Typer(
    name="mechanism",
    no_args_is_help=True,
    help="Private statistics of a column: means, medians, quantiles, histograms, with intervals.",
)

_EVERY = 5.0  # seconds between two signs of life
LEARN_EXAMPLE = "Example: lipdp mechanism learn median --epsilon 1 --size 100 --low 0 --high 10 --output median.mechanism"
RELEASE_EXAMPLE = "Example: lipdp mechanism release median.mechanism survey.csv --column age --budget survey.budget"

Query = Annotated[str, typer.Argument(help="mean, variance, median, p10 (any percentile) or quantile:0.25.", show_default=False)]
Epsilon = Annotated[float, typer.Option(help="ε of one release.", show_default=False)]
Size = Annotated[int, typer.Option("--size", help="n, the public number of records.", show_default=False)]
Low = Annotated[float, typer.Option(help="Lower bound that holds for every possible record.", show_default=False)]
High = Annotated[float, typer.Option(help="Upper bound.", show_default=False)]
Loss = Annotated[str, typer.Option(help="squared, or quantile (points between truth and answer).")]
Quick = Annotated[bool, typer.Option(help="A few seconds of training: a worse mechanism, the same guarantee.")]
Robustness = Annotated[
    float,
    typer.Option(help="τ: no dataset loses over 1 + τ times what it would without a belief; 0: only the belief counts."),
]
Encoding = Annotated[str | None, typer.Option(help="Of the CSV file, where it is not UTF-8: latin-1, cp1252, utf-16, …")]
Seed = Annotated[int, typer.Option(help="Of training; release noise never comes from a seed.")]


@app.command(epilog=LEARN_EXAMPLE)
def learn(
    query: Query,
    epsilon: Epsilon,
    size: Size,
    low: Low,
    high: High,
    output: Annotated[Path, typer.Option(help="Where the mechanism is written.", show_default=False)],
    loss: Loss = "squared",
    robustness: Robustness = 0.25,
    quick: Quick = False,
    seed: Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Learn a mechanism from the default prior and save it. No data are read."""
    check_new_file(output, "--output")
    with _working(f"learning {query} of {size} records", quiet=as_json):
        chosen = _compare(query, epsilon, size, (low, high), loss, robustness, quick, seed).chosen
    chosen.save(output)
    described = chosen.describe()
    if as_json:
        print_json({**described, "path": str(output)})
        return
    print_fields(console(), [(name, _text(value)) for name, value in described.items()] + [("written to", str(output))])


@app.command(epilog=RELEASE_EXAMPLE)
def release(
    mechanism: Annotated[Path, typer.Argument(help="A file that `lipdp mechanism learn` wrote.", show_default=False)],
    data: Annotated[Path, typer.Argument(help="A CSV file with a header line.", show_default=False)],
    column: Annotated[str, typer.Option(help="Which column.", show_default=False)],
    budget: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The dataset's budget (`lipdp budget create`), charged before the answer is drawn."),
    ] = None,
    no_budget: Annotated[
        bool, typer.Option("--no-budget", "--no-ledger", help="Keep no account: you add up the ε yourself.")
    ] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Older name of --budget; begun where it is missing, with --budget EPSILON and --dataset."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="The dataset's name, with --ledger.")] = None,
    clamp: Annotated[bool, typer.Option(help="Move values outside of the bounds to the nearest bound.")] = False,
    encoding: Encoding = None,
    as_json: options.Json = False,
) -> None:
    """One private answer about a CSV column. Each call spends the mechanism's ε."""
    from lipdp.mechanisms import load

    if (ledger is None and budget is None) != no_budget:
        raise ConfigurationError("give --budget FILE, so that the budget is kept, or --no-budget to keep no account (not both)")
    if ledger is None and dataset is not None:
        raise ConfigurationError("--dataset goes with --ledger; `lipdp budget create` begins a budget")
    loaded = load(mechanism)
    values = read_column(data, column, encoding)
    loaded.problem.dataset(values, clamp)  # refuse bad data before a ledger is begun
    book = _account(budget, ledger, dataset)
    answer = loaded.release(values, budget=book, clamp=clamp)
    left = None if book is None else book.remaining
    query = loaded.problem.query.name
    if as_json:
        print_json({"query": query, "answer": answer, "epsilon": loaded.epsilon, "remaining": left, "mechanism": loaded.title})
        return
    fields = [(query, f"{answer:.6g}"), ("epsilon", f"{brief(loaded.epsilon)}, for replacing one record")]
    print_fields(console(), fields if left is None else [*fields, ("budget left", downwards(left))])


ANSWER_EXAMPLE = "Example: lipdp mechanism answer data.csv --column age --query median --low 0 --high 120 --epsilon 1"


@app.command(epilog=ANSWER_EXAMPLE)
def answer(
    data: Annotated[Path, typer.Argument(help="A CSV file with a header line.", show_default=False)],
    column: Annotated[list[str], typer.Option(help="Which column; several: once for each.", show_default=False)],
    query: Annotated[
        list[str],
        typer.Option(
            help="mean, sum, variance, std, median, p25, iqr, min, max, histogram:0,18,65, count:18,65; several: once for each.",
            show_default=False,
        ),
    ],
    low: Annotated[list[float], typer.Option(help="Lower bound for every possible record; once, or for each column.")],
    high: Annotated[list[float], typer.Option(help="Upper bound.")],
    epsilon: Annotated[float | None, typer.Option(help="ε of all answers together.", show_default=False)] = None,
    delta: Annotated[
        float, typer.Option(help="δ of all answers together: above 0, Gaussian noise is used where it is less.", show_default=False)
    ] = 0.0,
    rho: Annotated[
        float | None, typer.Option(help="ρ of zero-concentrated DP instead of --epsilon: Gaussian noise.", show_default=False)
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The dataset's budget (`lipdp budget create`), charged before noise is drawn."),
    ] = None,
    belief: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Public data with the same columns: what is believed of the private ones.")
    ] = None,
    adjacency: Annotated[
        str,
        typer.Option(help="replace_one: the number of rows is public; add_remove: it is private (and count asks for it)."),
    ] = "replace_one",
    step: Annotated[
        float | None,
        typer.Option(help="Public: every record is low, low + step, …; 1 for whole numbers. Quantiles are among these."),
    ] = None,
    robustness: Robustness = 0.25,
    quick: Quick = False,
    clamp: Annotated[bool, typer.Option(help="Move values outside of the bounds to the nearest bound.")] = False,
    encoding: Encoding = None,
    as_json: options.Json = False,
) -> None:
    """Plan, charge and release private answers about columns of a CSV file."""
    from lipdp import mechanisms
    from lipdp.mechanisms.problem import Problem, share_of
    from lipdp.mechanisms.questions import release_all
    from lipdp.privacy.budget import open_budget

    adjacency = adjacency.replace("-", "_")
    if adjacency not in ("replace_one", "add_remove"):
        raise ConfigurationError(f"--adjacency {adjacency}: choose replace_one or add_remove")
    if adjacency == "add_remove" and belief is not None:
        raise ConfigurationError("--belief is for a public number of rows: leave it out, or use --adjacency replace_one")
    if (epsilon is None) == (rho is None):
        raise ConfigurationError("give --epsilon (and a --delta, if Gaussian noise may be used), or --rho: one of the two")
    lows, highs = (_for_each(name, given, len(column)) for name, given in (("--low", low), ("--high", high)))
    account = open_budget(budget)
    values = [read_column(data, name, encoding) for name in column]
    public = [None if belief is None else read_column(belief, name, encoding) for name in column]
    share, concentrated = (None if whole is None else share_of(whole, len(column)) for whole in (epsilon, rho))
    part = share_of(delta, len(column)) if delta else 0.0
    settings = mechanisms.Settings.quick() if quick else None
    plans: list[mechanisms.Plan | mechanisms.GaussianPlan | mechanisms.OpenPlan] = []
    if adjacency == "replace_one":  # what is wrong with a column is said before the work; release_all looks again
        for own, bounds in zip(values, zip(lows, highs, strict=True), strict=True):
            Problem.of("mean", 1.0, len(own), bounds).dataset(own, clamp)
    for name, own, known, bounds in zip(column, values, public, zip(lows, highs, strict=True), strict=True):
        if adjacency == "add_remove":
            plans.append(mechanisms.OpenPlan(share, *bounds, tuple(query), step, part, concentrated))
            continue
        cost: dict[str, Any] = {"robustness": None if robustness == 0 else robustness, "delta": part, "rho": concentrated}
        with _working(f"planning {name}: {', '.join(query)}", quiet=as_json):
            plans.append(mechanisms.plan(query, share, len(own), bounds, known, settings=settings, step=step, **cost))
    answers = release_all(plans, values, budget=account, clamp=clamp)
    left = None if account is None else account.remaining
    if as_json:
        rows = [{"column": name, **dataclasses.asdict(one)} for name, own in zip(column, answers, strict=True) for one in own]
        costs = {"epsilon": epsilon, "delta": delta, "rho": rho}
        print_json({"answers": rows, **costs, "adjacency": adjacency, "remaining": left})
        return
    fields = [(f"{name}: {one.question}", _shown(one)) for name, own in zip(column, answers, strict=True) for one in own]
    neighbours = "replacing one record" if adjacency == "replace_one" else "adding or removing one record"
    spent = f"rho {brief(rho)}" if epsilon is None else brief(epsilon) + (f", delta {brief(delta)}" if delta else "")
    fields.append(("privacy" if epsilon is None else "epsilon", f"{spent}, for {neighbours}"))
    fields.append(("budget", "none was given: add up the ε yourself" if left is None else f"{downwards(left)} left"))
    print_fields(console(), fields)


@contextmanager
def _working(what: str, *, quiet: bool) -> Iterator[None]:
    """Say on stderr what is being done, and every few seconds for how long."""
    if quiet:
        yield
        return
    own, done, start = console(stderr=True), threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_EVERY):
            own.print(f"still at it after {time.monotonic() - start:.0f} s")

    own.print(f"{what} (no data are used for it)")
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _for_each(name: str, given: list[float], columns: int) -> list[float]:
    """A bound for each column, from one for all or as many."""
    if len(given) not in (1, columns):
        raise ConfigurationError(f"{name} was given {len(given)} times for {columns} columns: once, or once for each --column")
    return given * columns if len(given) == 1 else given


def _shown(one: Answer) -> str:
    """A released answer with its interval, in words."""
    if isinstance(one.value, list):
        error = one.interval[1] if one.interval else 0.0
        return f"{', '.join(f'{value:g}' for value in one.value)}  (each ± {error:.3g}: 95% of the noise)"
    if one.interval is None:
        return f"{one.value:.6g}"
    low, high = one.interval
    basis = "95% of the noise" if one.basis == "noise" else "holds for 95% of the columns that are thought likely"
    return f"{one.value:.6g}  (between {low:.6g} and {high:.6g}: {basis})"


@app.command(epilog="Example: lipdp mechanism describe median.mechanism")
def describe(
    mechanism: Annotated[Path, typer.Argument(help="A file that `lipdp mechanism learn` wrote.", show_default=False)],
    as_json: options.Json = False,
) -> None:
    """What a saved mechanism is and guarantees. The file is checked whole: its digest, every field, and its sensitivity."""
    from lipdp.mechanisms import load

    described = load(mechanism).describe()
    if as_json:
        print_json(described)
        return
    print_fields(console(), [(name, _text(value)) for name, value in described.items()])


@app.command(epilog="Example: lipdp mechanism compare p10 --epsilon 0.5 --size 100 --low 0 --high 10")
def compare(
    query: Query,
    epsilon: Epsilon,
    size: Size,
    low: Low,
    high: High,
    loss: Loss = "squared",
    robustness: Robustness = 0.25,
    quick: Quick = False,
    seed: Seed = 0,
    as_json: options.Json = False,
) -> None:
    """The learned mechanism beside the best expert, on held-out datasets of the default prior. No data are read."""
    with _working(f"learning {query} of {size} records, and the experts for it", quiet=as_json):
        comparison = _compare(query, epsilon, size, (low, high), loss, robustness, quick, seed)
    report = comparison.chosen.report
    if as_json:
        print_json({"query": comparison.chosen.problem.query.name, "epsilon": epsilon, **report})
        return
    rows = (
        ("expert", f"{report['expert_loss']:.5g}  {report['expert']}"),
        ("learned", f"{report['learned_loss']:.5g}  {report['learned']}"),
        ("learned ÷ expert", _ratio(report["learned_to_expert"])),
        ("learn() returns", str(report["returned"])),
        ("time", f"{report['seconds']:.1f} s"),
    )
    print_fields(console(), rows)


def _account(budget: str | None, ledger: Path | None, dataset: str | None) -> Budget | None:
    """The budget in a file; with --ledger, --budget is a number, as it was in an older lipdp."""
    from lipdp.mechanisms import BudgetLedger
    from lipdp.privacy.budget import open_budget

    if ledger is None:
        return open_budget(budget)
    try:
        total = None if budget is None else float(budget)
    except ValueError:
        raise ConfigurationError(f"with --ledger, --budget is a total epsilon, not {budget!r}: give --budget FILE alone") from None
    return BudgetLedger(ledger, total, dataset)


def _compare(
    query: str, epsilon: float, size: int, bounds: tuple[float, float], loss: str, robustness: float, quick: bool, seed: int
) -> Comparison:
    from lipdp import mechanisms

    settings = mechanisms.Settings.quick() if quick else None
    held = None if robustness == 0 else robustness
    return mechanisms.compare(query, epsilon, size, bounds, loss=loss, robustness=held, settings=settings, seed=seed)


def _ratio(value: float | None) -> str:
    return "none: the expert's loss is 0" if value is None else f"{value:.3f}"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
