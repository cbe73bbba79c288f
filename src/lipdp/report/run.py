"""A run as its folder tells it, and what its model does on records that are not protected.

Every file is read field by field; what can be derived is derived again.

And the sentences about it: what is promised, what was taken to be public, what is not covered.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from lipdp._texts import NEIGHBOURS, REPRODUCIBLE, brief, downwards, guarantee, upwards
from lipdp.certify import certified_accuracy, certify
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.fields import Range, Size, check_fields, parse_json, read
from lipdp.inputs import call, evaluating, logits_of, mapped
from lipdp.losses import predict
from lipdp.privacy.accounting import run_epsilon
from lipdp.privacy.ledger import Ledger
from lipdp.training import History, PrivacyPlan
from lipdp.training.batches import gather

ABOUT, SCHEMA = "about.json", "schema.json"
_RADII = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
_CERTIFIED = 1000  # examples at most: certificates of whole test sets take their time
_MOST_CLASSES = 30
_ROWS = 1024  # evaluated at a time
Share = Annotated[float, Range(least=0, most=1)]
PLAN, HISTORY, RESULT, MODEL, WEIGHTS = FILES = ("plan.json", "history.json", "result.json", "model.lipdp", "model.pt")


@dataclass(frozen=True)
class Evaluation:
    """Figures on records outside the guarantee.

    Attributes:
        records: on which part: "test" or "validation".
        classes: names of the classes.
        confusion: counts by true class (rows) and predicted class; empty where there are too many classes to show.
        certified: (L2 radius in the units of the inputs, share of examples that stay right within it); empty where nothing is
            certified.
        examples: how many the certificates are of.
    """

    records: str
    classes: tuple[str, ...]
    confusion: tuple[tuple[Size, ...], ...]
    certified: tuple[tuple[Annotated[float, Range(least=0)], Share], ...] = ()
    examples: Size = 0

    def __post_init__(self) -> None:
        check_fields(self, "an evaluation")


@dataclass(frozen=True)
class About:
    """What a report says of a run beside its figures.

    Attributes:
        command: how to do such a run again; without seeds, which are nobody's business.
        environment: versions and machine.
        public: what was declared public, in words.
        evaluation: on records outside the guarantee.
    """

    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    public: tuple[str, ...] = ()
    evaluation: Evaluation | None = None


def evaluate_run(model: torch.nn.Module, records: Any, classes: Sequence[str], *, part: str = "test") -> Evaluation:
    """A confusion matrix and, where the model has a Lipschitz constant, certified accuracies.

    Args:
        model: the trained one.
        records: a dataset of (input, class number) pairs, not protected by the guarantee.
        classes: names of the classes.
        part: what the records are: "test" or "validation".
    """
    x, y = gather(records, torch.arange(len(records)))
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    certified: tuple[tuple[float, float], ...] = ()
    with evaluating(model):
        with torch.no_grad():
            parts = [mapped(lambda leaf, at=at: leaf[at : at + _ROWS].to(place), x) for at in range(0, len(y), _ROWS)]
            predicted = torch.cat([predict(logits_of(call(model, part))).cpu() for part in parts])
        try:
            if isinstance(x, torch.Tensor):
                radii = certify(model, x[:_CERTIFIED].to(place), y[:_CERTIFIED].to(place))
                certified = tuple(certified_accuracy(radii, _RADII).items())
        except LipdpError:  # a network without a Lipschitz constant certifies nothing
            pass
    confusion = confusion_of(zip(y.long().tolist(), predicted.long().tolist(), strict=True), len(classes))
    return Evaluation(part, tuple(map(str, classes)), confusion, certified, min(len(y), _CERTIFIED) if certified else 0)


def confusion_of(pairs: Iterable[tuple[int, int]], classes: int) -> tuple[tuple[int, ...], ...]:
    """Counts by true class (rows) and predicted class, by pairs of their numbers; empty for too many to show."""
    if classes > _MOST_CLASSES:
        return ()
    counts = Counter(pairs)
    return tuple(tuple(counts[true, said] for said in range(classes)) for true in range(classes))


def this_environment(device: str = "cpu") -> dict[str, str]:
    """The day, versions and machine, as far as results may depend on them.

    Args:
        device: where the run computed.
    """
    from lipdp import __version__

    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "lipdp": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": where,
    }


def write_about(about: About, folder: Path) -> str:
    """Put it into a run's folder; returns the file's name.

    Args:
        about: what to write.
        folder: of the run.
    """
    (folder / ABOUT).write_text(json.dumps(dataclasses.asdict(about), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return ABOUT


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its folder.

    Attributes:
        name: of the folder.
        plan: what was decided.
        history: what happened.
        result: the figures that ``train`` wrote, as plain data.
        about: command, environment, evaluation.
        epsilon: of the steps that were taken, by the accountant from the plan, and of ranges of columns that were released before;
            or what the result or the history says, where that is more.
        contradictions: where files say other things than follow from the plan.
        model: the file of the model and its digest, so that it is known what a report is of; empty where there is none.
    """

    name: str
    plan: PrivacyPlan
    history: History
    result: dict[str, Any]
    about: About
    epsilon: float
    contradictions: tuple[str, ...]
    model: str = ""

    @property
    def private(self) -> bool:
        """Whether nobody knows the noise."""
        return self.history.private and self.result.get("private") is not False

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return _steps(self.plan, self.history, self.result)

    def figure(self, name: str) -> float | None:
        """A number of the result; ``None`` where there is none."""
        value = self.result.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def read_run(folder: str | Path) -> RunRecord:
    """The run in a folder of ``lipdp train --output``.

    Args:
        folder: its path.
    """
    place = Path(folder)
    missing = [name for name in (PLAN, HISTORY, RESULT) if not (place / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"'{place}' is no folder of a run: it has no {', '.join(missing)}. Give one that `lipdp train … --output FOLDER` "
            "has filled."
        )
    try:
        plan = PrivacyPlan.from_json(_text(place / PLAN))
        history = History.from_state(parse_json(_text(place / HISTORY), "the history", constants=True))
        result = read(dict[str, Any], parse_json(_text(place / RESULT), "the result", constants=True), "the result")
        own = place / ABOUT
        about = read(About, parse_json(_text(own), "about the run"), "about the run") if own.is_file() else About()
    except LipdpError as error:
        raise ConfigurationError(f"'{place}' can't be read as a run: {error}") from error
    steps = _steps(plan, history, result)
    releases = [release.name for release in plan.releases]  # paid for before the first step
    spent = Ledger(plan.run, plan.delta, plan.epsilon, steps=steps, one_off=releases).spent
    epsilon = run_epsilon(spent, plan.delta, plan.accountant, plan.adjacency)  # not the plan's own figure
    contradictions = tuple(_contradictions(plan, history, result, epsilon))
    said, released = result.get("epsilon"), result.get("released")
    # More than the steps cost is believed (of a run that was rewound or resumed), less is not.
    if history.epsilon > epsilon * (1 + 1e-6):
        epsilon = history.epsilon
    if isinstance(released, int | float) and released > 0:  # pure ε beside the steps, whatever the result makes of both
        epsilon += float(released)
    if isinstance(said, int | float) and said > epsilon * (1 + 1e-6):
        epsilon = float(said)
    return RunRecord(place.resolve().name, plan, history, result, about, epsilon, contradictions, _model_in(place))


def _steps(plan: PrivacyPlan, history: History, result: dict[str, Any]) -> int:
    """How many were taken, if the files agree; else all that the plan pays for: no file is believed that says less than another."""
    said = result.get("steps")
    taken = int(history.last.get("step", 0))
    return min(taken, plan.steps) if said == taken else plan.steps


def _model_in(place: Path) -> str:
    file = place / MODEL
    return f"{MODEL}, SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}" if file.is_file() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"'{path}' is no text in UTF-8") from error


def _contradictions(plan: PrivacyPlan, history: History, result: dict[str, Any], epsilon: float) -> list[str]:
    """What the files say less of than the accountant does."""
    said = {RESULT: result.get("epsilon"), HISTORY: history.epsilon}
    rows = [
        f"{file} says ε = {downwards(value)}, but the steps that were taken cost {upwards(epsilon)}"
        for file, value in said.items()
        if isinstance(value, int | float) and value < epsilon * (1 - 1e-6)
    ]
    if result.get("delta") not in (None, plan.delta):
        rows.append(f"result.json says δ = {result['delta']}, the plan {brief(plan.delta)}")
    if history.last.get("step", 0) > plan.steps:
        rows.append(f"history.json has {history.last['step']:g} steps, and the plan pays for {plan.steps}")
    return rows


_SAMPLING = {
    "poisson": "Poisson: each record independently",
    "truncated_poisson": "Poisson, cut to a largest batch",
    "fixed_size": "batches of a fixed size, without replacement",
}


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
