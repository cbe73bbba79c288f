"""A run as its folder tells it. Every file is read field by field; what can be derived is derived again."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lipdp.errors import ConfigurationError, LipdpError
from lipdp.fields import parse_json, read
from lipdp.privacy.ledger import Ledger
from lipdp.report.evaluation import Evaluation
from lipdp.training import History, PrivacyPlan

__all__ = ["ABOUT", "About", "RunRecord", "read_run", "this_environment", "write_about"]

ABOUT = "about.json"
_PLAN, _HISTORY, _RESULT, _MODEL = "plan.json", "history.json", "result.json", "model.lipdp"


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
            or what the result says, where that is more.
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
    missing = [name for name in (_PLAN, _HISTORY, _RESULT) if not (place / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"'{place}' is no folder of a run: it has no {', '.join(missing)}. Give one that `lipdp train … --output FOLDER` "
            "has filled."
        )
    try:
        plan = PrivacyPlan.from_json(_text(place / _PLAN))
        history = History.from_state(parse_json(_text(place / _HISTORY), "the history", constants=True))
        result = read(dict[str, Any], parse_json(_text(place / _RESULT), "the result", constants=True), "the result")
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
    if isinstance(released, int | float) and released > 0:  # pure ε beside the steps, whatever the result makes of both
        epsilon += float(released)
    if isinstance(said, int | float) and said > epsilon * (1 + 1e-6):  # more than the steps cost is believed, less is not
        epsilon = float(said)
    return RunRecord(place.resolve().name, plan, history, result, about, epsilon, contradictions, _model_in(place))


def _steps(plan: PrivacyPlan, history: History, result: dict[str, Any]) -> int:
    """How many were taken, if the files agree; else all that the plan pays for: no file is believed that says less than another."""
    said = result.get("steps")
    taken = int(history.last.get("step", 0))
    return min(taken, plan.steps) if said == taken else plan.steps


def _model_in(place: Path) -> str:
    file = place / _MODEL
    return f"{_MODEL}, SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}" if file.is_file() else ""


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
    said = {"result.json": result.get("epsilon"), "history.json": history.epsilon}
    rows = [
        f"{file} says ε = {value:.4g}, but the steps that were taken cost {epsilon:.4g}"
        for file, value in said.items()
        if isinstance(value, int | float) and value < epsilon * (1 - 1e-6)
    ]
    if result.get("delta") not in (None, plan.delta):
        rows.append(f"result.json says δ = {result['delta']}, the plan {plan.delta:g}")
    if history.last.get("step", 0) > plan.steps:
        rows.append(f"history.json has {history.last['step']:g} steps, and the plan pays for {plan.steps}")
    return rows
