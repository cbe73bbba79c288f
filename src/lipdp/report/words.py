"""The sentences of a report: what is promised, what was taken to be public, what is not covered."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lipdp._texts import NEIGHBOURS, REPRODUCIBLE, brief, downwards, guarantee, upwards
from lipdp.report.run import RunRecord
from lipdp.training import PrivacyPlan

__all__ = ["declared_public", "in_plain_words", "in_short", "not_covered", "promises", "statement", "together"]

_SAMPLING = {
    "poisson": "Poisson: each record independently",
    "truncated_poisson": "Poisson, cut to a largest batch",
    "fixed_size": "batches of a fixed size, without replacement",
}


_IN_PLAIN_WORDS = {
    "guarantee": "ε: how much the model may tell of one record; smaller is safer. δ: how rarely that may fail",
    "model": "the file that this report is about",
    "neighbouring datasets": "nobody can tell well from which of two such datasets the model comes",
    "accountant": "how ε follows from steps and noise: it is never below the true one",
    "sampling": "which records a step reads; drawn in secret",
    "steps": "each reads a batch and adds noise once",
    "noise": "how large it is beside the most that one record can change a step by",
    "method": "why one record can change a step by no more than that",
    "released beside the steps": "computed from the records as well, and noised",
    "account of the dataset": "the file that adds up all that is released about these records",
    "audit": "attacks on the training itself: they bound ε from below, as the accountant does from above",
}


def in_plain_words(name: str) -> str:
    """What a row of :func:`promises` means, for who does not know the field."""
    return _IN_PLAIN_WORDS[name.split(":")[0]]


def promises(run: RunRecord) -> Iterator[tuple[str, str]]:
    """What is promised, and under which description of the run."""
    plan = run.plan
    yield "guarantee", guarantee(run.epsilon, run.plan.delta) if run.private else f"none: {REPRODUCIBLE}"
    if run.model:
        yield "model", run.model
    yield "neighbouring datasets", NEIGHBOURS[plan.adjacency]
    yield "accountant", f"{plan.accountant.upper()} of dp-accounting, an upper bound"
    yield (
        "sampling",
        f"{_SAMPLING[plan.sampling]}, rate {plan.sampling_rate:.4g} ({plan.batch_size:,} of {plan.dataset_size:,} expected)",
    )
    yield "steps", f"{run.steps:,} of {plan.steps:,} planned"
    yield "noise", f"multiplier {plan.noise_multiplier:.4g}, {plan.allocation} allocation; exact Gaussian noise on a public grid"
    yield "method", f"{plan.method}: sensitivities {_sources(plan)}"
    for release in plan.releases:
        yield f"released beside the steps: {release.name}", f"{release.kind}, {release.amount:.4g}; in the same ε"
    if (released := run.figure("released") or 0.0) > 0:
        yield "released beside the steps: ranges of columns", f"pure ε = {upwards(released)}; in the same ε"
    budget = run.result.get("budget")
    if isinstance(budget, dict):
        spent, left = budget.get("spent"), budget.get("remaining")
        if isinstance(spent, int | float) and isinstance(left, int | float):
            yield "account of the dataset", f"ε = {upwards(float(spent))} spent when this run ended, {downwards(left)} left"
    else:
        yield "account of the dataset", "none: nobody has added this run to others on the same records"
    yield "audit", _audited(run)


def _sources(plan: PrivacyPlan) -> str:
    proved = sum(group.source == "proved" for group in plan.groups)
    if proved == len(plan.groups):
        return "proved from the architecture"
    return "enforced by clipping" if not proved else f"proved for {proved} of {len(plan.groups)} groups, clipped for the others"


def _audited(run: RunRecord) -> str:
    """The audit's lower bound beside the accountant's upper one."""
    audit = run.result.get("audit")
    try:
        bound = audit["epsilon"]  # type: ignore[index]
        lower, claimed = float(bound["epsilon"]), float(bound["claimed"])
        if audit["refuted"] or not lower <= claimed:  # type: ignore[index]
            return "REFUTED: an attack found more than is promised"
        return f"nothing refutes the plan: attacks show ε ≥ {downwards(lower)} of {upwards(claimed)} for what they audited"
    except (TypeError, KeyError, ValueError):
        return "none was made (lipdp train … --audit makes one)"


def declared_public(run: RunRecord) -> Iterator[str]:
    """What the guarantee takes to be known to everybody."""
    plan = run.plan
    yield f"the number of records, {plan.dataset_size:,}, of steps, {plan.steps:,}, and in a batch, {plan.batch_size:,} expected"
    yield f"the network's architecture, fixed features and initial weights; the bounds on its inputs; the loss ({plan.loss})"
    yield "clipping norms, temperatures, learning rates and every other setting of the run"
    own = [fact for fact in run.about.public if not fact.startswith("the number of rows")]  # N is told above
    judged = run.figure("accuracy") is not None or run.figure("classes") is not None or run.about.evaluation is not None
    if judged and not any(" classes, " in fact for fact in own):
        yield "the set of classes"
    yield from own


def not_covered(run: RunRecord) -> Iterator[str]:
    """What nobody may read into the guarantee."""
    records = run.about.evaluation.records if run.about.evaluation is not None else run.result.get("evaluated_on", "test")
    if records is None:
        yield "records other than those that were trained on"
    else:
        yield f"the {records} records, on which the figures of this report were computed as they are"
    yield "settings that were chosen by looking at the training records, or at figures computed from them"
    yield "other runs and releases about the same records: their ε adds to this one"
    yield "what a group of k records has in common: for it the guarantee is about k times weaker in ε"
    yield "facts about the population, which can be learned from others' records and hold for everybody"
    yield "the checkpoint, which holds the run's secret key: it must not leave its owner"
    yield "what is collected or stored before training, and who may use the model for what"


def in_short(run: RunRecord) -> str:
    """The promise in one sentence, for who reads no further."""
    if not run.private:
        return "Nothing is promised: the randomness of this run can be repeated."
    what = "what one given record held" if run.plan.adjacency == "replace_one" else "whether one given record was used"
    return (
        f"In short: whatever else somebody knows, seeing this model changes their odds on {what} by a factor of at most "
        f"{_odds('e^ε', run.epsilon)} (but for a probability of about {brief(run.plan.delta)})."
    )


def statement(run: RunRecord) -> list[str]:
    """Paragraphs for whoever answers for the data; what is not covered follows them (:func:`not_covered`)."""
    plan, dataset = run.plan, str(run.result.get("dataset", "the dataset"))
    if not run.private:
        return [
            "This run is not private. Its randomness follows from a chosen seed, so whoever knows or guesses it can take the noise "
            f"away. Nothing about the {plan.dataset_size:,} records of {dataset} is protected, and neither the model nor its "
            "figures may be published on the strength of this report."
        ]
    date = f" on {run.about.environment['date']}" if "date" in run.about.environment else ""
    return [
        f"A model was trained{date} on {plan.dataset_size:,} records of {dataset} with ({guarantee(run.epsilon, plan.delta)}) "
        f"differential privacy for {NEIGHBOURS[plan.adjacency]}.",
        "What that means: whatever else somebody knows, seeing the model and all that is in this report changes the odds of any "
        f"conclusion {_meaning(run)}.",
        f"Why it holds: sensitivities were {_sources(plan)}, and the noise was drawn from a cryptographic generator under a key "
        "that only the run had. It holds on one condition, which whoever signs has to know of: what was declared public above was "
        "not read off these records.",
    ]


def _meaning(run: RunRecord) -> str:
    """What (ε, δ) says of odds. From one content of a record to another are two steps by adding and removing, and one by replacing:

    P(with a) ≤ e^ε·P(without) + δ ≤ e^ε·(e^ε·P(with b) + δ) + δ.
    """
    epsilon, delta = run.epsilon, run.plan.delta
    if run.plan.adjacency == "replace_one":
        return f"about what one given record held, by a factor of at most {_odds('e^ε', epsilon)}, but for a probability of about δ"
    both = delta * (1 + math.exp(min(epsilon, 700.0)))
    return (
        f"about whether one given record was used, by a factor of at most {_odds('e^ε', epsilon)}, but for a probability of about "
        f"δ = {brief(delta)}; and of any conclusion about what that record held, by a factor of at most "
        f"{_odds('e^2ε', 2 * epsilon)}, but for a probability of about (1 + "
        f"e^ε)·δ{f' = {brief(both, 2)}' if both < 1 else ', which may be all cases'}"
    )


_LARGE = 20.0  # ε from which on a factor says nothing any more


def _odds(name: str, epsilon: float) -> str:
    return (
        f"{name} = {upwards(math.exp(epsilon), 3)}" if epsilon <= _LARGE else f"{name}, far above a million: next to no protection"
    )


def together(runs: list[RunRecord]) -> Iterator[str]:
    """What several runs on one dataset cost together, at most: ε and δ add up."""
    for dataset in dict.fromkeys(str(run.result.get("dataset")) for run in runs):
        every = [run for run in runs if str(run.result.get("dataset")) == dataset]
        same = [run for run in every if run.private]
        if len(same) > 1:
            epsilon, delta = sum(run.epsilon for run in same), sum(run.plan.delta for run in same)
            yield (
                f"{len(same)} private runs on {dataset}: whoever publishes all of them spends up to ε = {upwards(epsilon)} at δ = "
                f"{brief(delta, 2)} (basic composition; an account, --budget FILE, composes them more tightly)."
            )
        if same and len(same) < len(every):
            yield (
                f"{len(every) - len(same)} of the {len(every)} runs on {dataset} are not private: whoever publishes one of those "
                "too takes back what the others promise."
            )
