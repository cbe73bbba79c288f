"""A run as its folder tells it, and what its model does on records that are not protected.

Every file is read field by field; what can be derived is derived again.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from lipdp._texts import brief, downwards, upwards
from lipdp.certify import certified_accuracy, certify
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.fields import Range, Size, check_fields, parse_json, read
from lipdp.inputs import call, logits_of, mapped
from lipdp.losses import predict
from lipdp.privacy.ledger import Ledger
from lipdp.training import History, PrivacyPlan
from lipdp.training.batches import gather

__all__ = [
    "ABOUT",
    "FILES",
    "HISTORY",
    "MODEL",
    "PLAN",
    "RESULT",
    "SCHEMA",
    "WEIGHTS",
    "About",
    "Evaluation",
    "RunRecord",
    "evaluate_run",
    "read_run",
    "this_environment",
    "write_about",
]

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
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [mapped(lambda leaf, at=at: leaf[at : at + _ROWS].to(place), x) for at in range(0, len(y), _ROWS)]
            predicted = torch.cat([predict(logits_of(call(model, part))).cpu() for part in parts]).long()
        confusion: tuple[tuple[int, ...], ...] = ()
        if len(classes) <= _MOST_CLASSES:
            counts = torch.zeros(len(classes), len(classes), dtype=torch.long)
            counts.index_put_((y.cpu().long(), predicted), torch.ones_like(predicted), accumulate=True)
            confusion = tuple(map(tuple, counts.tolist()))
        certified: tuple[tuple[float, float], ...] = ()
        try:
            if isinstance(x, torch.Tensor):
                radii = certify(model, x[:_CERTIFIED].to(place), y[:_CERTIFIED].to(place))
                certified = tuple(certified_accuracy(radii, _RADII).items())
        except LipdpError:  # a network without a Lipschitz constant certifies nothing
            pass
    finally:
        model.train(was)
    return Evaluation(part, tuple(map(str, classes)), confusion, certified, min(len(y), _CERTIFIED) if certified else 0)


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
    ledger = Ledger(plan.run, plan.delta, math.inf, plan.accountant, plan.adjacency, steps, releases)
    # Of what was released, not of the plan's own figure: ∞ stands for a plan that is not asked.
    epsilon = dataclasses.replace(ledger, planned_epsilon=math.inf).epsilon if steps < plan.steps else _cost(plan)
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


def _cost(plan: PrivacyPlan) -> float:
    from lipdp.privacy import run_epsilon

    return run_epsilon(plan.run, plan.delta, plan.accountant, plan.adjacency)


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
