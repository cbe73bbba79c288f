"""Membership inference: how well a trained model's outputs tell its training records from others of the same kind.

These attacks are what an outsider with the model, and records of both kinds, would try. They give no bound on ε: an attack that
fails proves nothing, one that succeeds shows a leak. For bounds on ε see :mod:`lipdp.audit.epsilon`.

- *loss*, *confidence*, *entropy*, *modified entropy*: a threshold for each class (Yeom et al. 2018; Song and Mittal 2021).
- *regression*: logistic regression on the outputs, and on how they fit the target.
- *LiRA*: the target's confidence against that of shadow models that have not seen the record (Carlini et al. 2022, offline).
- *RMIA*: the share of other records beside which the model likes this one more than shadow models do (Zarifzadeh et al. 2024).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lipdp._checks import is_number, named_one
from lipdp._texts import text_table
from lipdp.audit.results import Report
from lipdp.audit.statistics import check_confidence, clopper_pearson
from lipdp.errors import ConfigurationError, DataError
from lipdp.inputs import outputs_in_parts
from lipdp.program.dtypes import Types
from lipdp.training.batches import check_dataset, gather_tensors

Numbers = npt.NDArray[np.float64]
Interval = tuple[float, float]

_SMALL = 1e-12
_POPULATION_SHARE = 0.3  # a of offline RMIA: how much a record's own presence lifts its probability
_FEWEST = 20
_COLUMNS = 128  # that inputs are looked at in without the model


@dataclass(frozen=True)
class AttackRow:
    """One attack, judged on records that its thresholds were not chosen on. Intervals hold with the report's confidence.

    Attributes:
        name: of the attack.
        accuracy: balanced: half of it on members, half on others.
        accuracy_interval: of it.
        auroc: probability that a member scores above another record.
        auroc_interval: of it.
        advantage: true positives less false positives, at the chosen thresholds.
        tpr: false positive rate → true positive rate there, on all records of this half.
        tpr_intervals: of them.
    """

    name: str
    accuracy: float
    accuracy_interval: Interval
    auroc: float
    auroc_interval: Interval
    advantage: float
    tpr: dict[float, float]
    tpr_intervals: dict[float, Interval]

    @property
    def is_chance(self) -> bool:
        """Whether guessing would do as well, as far as one can tell."""
        return self.accuracy_interval[0] <= 0.5

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        content = dataclasses.asdict(self)
        for name in ("tpr", "tpr_intervals"):
            content[name] = {f"{rate:g}": value for rate, value in content[name].items()}
        return {**content, "is_chance": self.is_chance}


@dataclass(frozen=True)
class MembershipReport(Report):
    """All attacks on one model.

    Attributes:
        rows: by attack.
        members: training records that were tried.
        others: records that were tried and are not in the training set.
        confidence: of each interval.
        seconds: that it took.
        blind: the inputs and targets alone, without the model (logistic regression; its intervals are of 99.9%). Where they tell
            members from others, these are not of one kind, and what the attacks tell may be that.
        shared: others that are members too, number for number.
    """

    rows: tuple[AttackRow, ...]
    members: int
    others: int
    confidence: float
    seconds: float
    blind: AttackRow
    shared: int

    def __getitem__(self, name: str) -> AttackRow:
        return named_one("attack", name, self.rows)

    @property
    def best(self) -> AttackRow:
        """The most accurate."""
        return max(self.rows, key=lambda row: row.accuracy)

    @property
    def is_chance(self) -> bool:
        """Whether no attack does better than guessing."""
        return all(row.is_chance for row in self.rows)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What speaks against the comparison itself, in words; empty where nothing does."""
        found = []
        if self.blind.auroc_interval[0] > 0.5:
            found.append(
                f"members and others are told apart without the model too (AUROC {self.blind.auroc:.2f}): they are not of one "
                "kind, and what an attack reaches may be that. Draw both from one pool at random."
            )
        if self.shared:
            found.append(f"{self.shared} of the others are members too: no attack can be right about them. Leave them out.")
        return tuple(found)

    def __str__(self) -> str:
        rows = [
            (
                row.name,
                _with_interval(row.accuracy, row.accuracy_interval),
                _with_interval(row.auroc, row.auroc_interval),
                f"{row.advantage:+.3f}",
                *(_with_interval(row.tpr[rate], row.tpr_intervals[rate]) for rate in row.tpr),
            )
            for row in self.rows
        ]
        rates = [f"TPR at {rate:.1%} FPR" for rate in self.rows[0].tpr]
        headers = ("attack", "accuracy", "AUROC", "advantage", *rates)
        body = text_table(headers, rows, right=headers[1:])
        head = f"membership inference, half of {self.members:,} members and {self.others:,} others judged; {self.seconds:.1f} s"
        verdict = "no attack is better than chance" if self.is_chance else f"{self.best.name} is better than chance"
        return "\n".join((head, body, f"intervals of {self.confidence:.1%}; {verdict}", *self.doubts))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        rows = [row.to_dict() for row in self.rows]
        return {
            **dataclasses.asdict(self),
            "rows": rows,
            "blind": self.blind.to_dict(),
            "is_chance": self.is_chance,
            "best": self.best.name,
            "doubts": list(self.doubts),
        }


def _with_interval(value: float, interval: Interval) -> str:
    return f"{value:.3f} ({interval[0]:.3f}–{interval[1]:.3f})"


def membership(
    model: torch.nn.Module,
    members: Any,
    others: Any,
    *,
    shadows: Sequence[torch.nn.Module] = (),
    rates: Sequence[float] = (0.001, 0.01),
    confidence: float = 0.95,
    seed: int = 0,
) -> MembershipReport:
    """Try to tell a classifier's training records from others.

    The result is about the records: with private ones it is private itself. Keep it, or use public data.

    Args:
        model: trained; outputs of shape (batch, classes), or one output.
        members: records that it was trained on.
        others: as many as possible of the same kind that it was not: both drawn from one pool at random. Whether they look it is
            checked without the model (``report.blind``, ``report.doubts``).
        shadows: models trained like it on records that are neither (:func:`lipdp.audit.train_shadows`): for LiRA and RMIA.
        rates: false positive rates to report true positives at.
        confidence: of each interval.
        seed: of the split into records to choose thresholds on and records to judge by.
    """
    started = time.monotonic()
    check_confidence(confidence)
    for rate in rates:
        if not (is_number(rate) and 0 <= rate < 1):
            raise ConfigurationError(f"rates has {rate!r}: false positive rates are from 0 to below 1, e.g. (0.001, 0.01)")
    for what, data in (("members", members), ("others", others)):
        if check_dataset(data) < _FEWEST:
            raise DataError(f"{len(data)} {what} are too few to tell anything: give at least {_FEWEST}")
    x, y, inside = _joined(members, others)
    own = _probabilities(model, x)
    if int(y.max()) >= own.shape[1] or int(y.min()) < 0:
        raise DataError(f"targets must be class numbers from 0 to {own.shape[1] - 1}")
    halves = _split(inside, np.random.default_rng(seed))
    scores = _plain_scores(own, y)
    scores["regression"] = _regression(own, y, inside, halves[0])
    if shadows:
        beside = np.stack([_probabilities(shadow, x)[np.arange(len(y)), y] for shadow in shadows])
        target = own[np.arange(len(y)), y]
        scores["LiRA"] = _lira(target, beside)
        scores["RMIA"] = _rmia(target, beside, halves[0] & ~inside)
    rows = tuple(_judged(name, values, y, inside, halves, tuple(rates), confidence) for name, values in scores.items())
    records = _described(x, y)
    blind = _judged("inputs alone", _told(records, inside, halves[0]), y, inside, halves, tuple(rates), 0.999)
    shared = len({row.tobytes() for row in records[inside]} & {row.tobytes() for row in records[~inside]})
    return MembershipReport(rows, int(inside.sum()), int((~inside).sum()), confidence, time.monotonic() - started, blind, shared)


def _joined(members: Any, others: Any) -> tuple[Tensor, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    parts = [gather_tensors(data, torch.arange(len(data))) for data in (members, others)]
    inside = np.repeat([True, False], [len(parts[0][1]), len(parts[1][1])])
    targets = torch.cat([y.reshape(len(y)).cpu() for _, y in parts])
    if targets.is_floating_point() and not bool((targets == targets.round()).all()):
        raise DataError("membership inference is for classifiers: targets must be class numbers")
    return torch.cat([x for x, _ in parts]), (targets if targets.min() >= 0 else (targets > 0)).long().numpy(), inside


def _probabilities(model: torch.nn.Module, x: Tensor) -> Numbers:
    """Of each class, for each record; a single output is that of the second of two classes."""
    outputs = outputs_in_parts(model, x, 1024, Types(model).inputs)
    if outputs.ndim > 2 or not bool(torch.isfinite(outputs).all()):
        raise DataError(
            f"membership inference needs finite outputs of shape (batch, classes), not {tuple(outputs.shape)}"
            f"{'' if outputs.ndim > 2 else ' with infinite ones or NaN among them'}"
        )
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        outputs = torch.stack([torch.zeros(len(outputs)), outputs.reshape(len(outputs))], 1).double()
    return np.asarray(torch.softmax(outputs, 1).clamp(_SMALL, 1 - _SMALL).numpy())


def _split(inside: npt.NDArray[np.bool_], draw: np.random.Generator) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Half of the members and half of the others; and the other halves."""
    first = np.zeros(len(inside), dtype=bool)
    for kind in (True, False):
        numbers = draw.permutation(np.flatnonzero(inside == kind))
        first[numbers[: len(numbers) // 2]] = True
    return first, ~first


# --- scores: higher means member --------------------------------------------------------------------------------------------------


def _plain_scores(p: Numbers, y: npt.NDArray[np.int64]) -> dict[str, Numbers]:
    """From the probabilities alone. Modified entropy, −(1−p_y)·log p_y − Σ_{k≠y} p_k·log(1−p_k), is small if *right* and sure."""
    right = p[np.arange(len(y)), y]
    wrong = p * np.log(1 - p)
    wrong[np.arange(len(y)), y] = 0.0
    return {
        "loss": np.log(right),
        "confidence": p.max(1),
        "entropy": (p * np.log(p)).sum(1),
        "modified entropy": (1 - right) * np.log(right) + wrong.sum(1),
    }


def _regression(p: Numbers, y: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], fitted: npt.NDArray[np.bool_]) -> Numbers:
    """Logistic regression on the sorted log-probabilities, that of the target, and whether it is the largest."""
    right = p[np.arange(len(y)), y]
    largest = np.sort(np.log(p), 1)[:, ::-1][:, :10]
    return _told(np.column_stack([largest, np.log(right), _logit(right), p.argmax(1) == y]), inside, fitted)


def _described(x: Tensor, y: npt.NDArray[np.int64]) -> Numbers:
    """Records as numbers: inputs (those of more than 128 entries turned into 128 by a fixed random matrix), and classes 0 or 1."""
    flat = np.ascontiguousarray(x.reshape(len(x), -1).double().cpu().numpy())
    if flat.shape[1] > _COLUMNS:
        flat = flat @ (np.random.default_rng(0).normal(size=(flat.shape[1], _COLUMNS)) / math.sqrt(flat.shape[1]))
    classes, codes = np.unique(y, return_inverse=True)
    return np.column_stack([flat, np.eye(min(len(classes), _COLUMNS))[np.minimum(codes, _COLUMNS - 1)]])


def _told(features: Numbers, inside: npt.NDArray[np.bool_], fitted: npt.NDArray[np.bool_]) -> Numbers:
    """Logistic regression on features of records; both kinds weigh the same."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    features = StandardScaler().fit(features[fitted]).transform(features)
    weights = {True: 0.5 / inside[fitted].mean(), False: 0.5 / (~inside[fitted]).mean()}
    known = LogisticRegression(max_iter=1000, class_weight=weights).fit(features[fitted], inside[fitted])
    return np.asarray(known.decision_function(features))


def _logit(p: Numbers) -> Numbers:
    return np.asarray(np.log(p) - np.log1p(-p))


def _lira(target: Numbers, beside: Numbers) -> Numbers:
    """(φ − mean)/deviation, φ = log(p/(1−p)) of the target class, over shadow models that have not seen the record.

    From few models a record's own deviation is hardly known: it is that of all records, pooled, below eight of them.
    """
    known = _logit(beside)
    spread = known.std(0, ddof=1) if len(known) >= 8 else np.full(len(target), math.sqrt(float(known.var(0).mean())))
    return np.asarray((_logit(target) - known.mean(0)) / np.maximum(spread, 1e-6))


def _rmia(target: Numbers, beside: Numbers, population: npt.NDArray[np.bool_]) -> Numbers:
    """Share of records z of the population for which p(x)/P(x) ≥ p(z)/P(z).

    P(x) is the mean over models with and without x; from those without, it is ((1+a)·P_out(x) + 1 − a)/2.
    """
    a = _POPULATION_SHARE
    usual = ((1 + a) * beside.mean(0) + 1 - a) / 2
    ratios = target / usual
    ordered = np.sort(ratios[population])
    # Ties among the surest are broken by the ratio itself.
    return np.asarray(np.searchsorted(ordered, ratios, side="right") / len(ordered) + 1e-9 * ratios)


# --- judging ----------------------------------------------------------------------------------------------------------------------


def _judged(
    name: str,
    scores: Numbers,
    y: npt.NDArray[np.int64],
    inside: npt.NDArray[np.bool_],
    halves: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]],
    rates: tuple[float, ...],
    confidence: float,
) -> AttackRow:
    chosen, judged = halves
    guessed = scores >= _thresholds(scores, y, inside, chosen)
    kinds = [guessed[judged & (inside == kind)] == kind for kind in (True, False)]
    hits = [(int(kind.sum()), len(kind)) for kind in kinds]
    right = [k / n for k, n in hits]
    each = 1 - (1 - confidence) / 4  # two limits of two shares, all four together
    limits = [clopper_pearson(k, n, each) for k, n in hits]
    positive, negative = scores[judged & inside], scores[judged & ~inside]
    area, area_limits = _auroc(positive, negative, confidence)
    tpr = {rate: _tpr(positive, negative, rate) for rate in rates}
    return AttackRow(
        name=name,
        accuracy=sum(right) / 2,
        accuracy_interval=((limits[0][0] + limits[1][0]) / 2, (limits[0][1] + limits[1][1]) / 2),
        auroc=area,
        auroc_interval=area_limits,
        advantage=sum(right) - 1,
        tpr={rate: hits_at / len(positive) for rate, hits_at in tpr.items()},
        tpr_intervals={rate: clopper_pearson(k, len(positive), 1 - (1 - confidence) / 2) for rate, k in tpr.items()},
    )


def _thresholds(scores: Numbers, y: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], chosen: npt.NDArray[np.bool_]) -> Numbers:
    """For each record the threshold of its class that was best on the first half; that of all classes where one is rare."""
    found = np.full(len(y), _threshold(scores[chosen], inside[chosen]))
    for label in np.unique(y):
        own = chosen & (y == label)
        if min(int((own & inside).sum()), int((own & ~inside).sum())) >= _FEWEST:
            found[y == label] = _threshold(scores[own], inside[own])
    return found


def _threshold(scores: Numbers, inside: npt.NDArray[np.bool_]) -> float:
    order = np.argsort(-scores, kind="stable")
    gain = np.cumsum(inside[order]) / inside.sum() - np.cumsum(~inside[order]) / (~inside).sum()
    last = np.append(scores[order][1:] != scores[order][:-1], True)  # equal scores are on one side
    best = int(np.argmax(np.where(last, gain, -np.inf)))
    return float(scores[order][best]) if gain[best] > 0 else math.inf


def _auroc(positive: Numbers, negative: Numbers, confidence: float) -> tuple[float, Interval]:
    """P(positive > negative) + ½P(equal), and its interval by the variances of both samples' placements (DeLong)."""
    low, high = np.sort(negative), np.sort(positive)
    above = (np.searchsorted(low, positive, "left") + np.searchsorted(low, positive, "right")) / (2 * len(low))
    below = 1 - (np.searchsorted(high, negative, "left") + np.searchsorted(high, negative, "right")) / (2 * len(high))
    area = float(above.mean())
    deviation = math.sqrt(float(above.var(ddof=1)) / len(above) + float(below.var(ddof=1)) / len(below))
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * deviation
    return area, (max(0.0, area - reach), min(1.0, area + reach))


def _tpr(positive: Numbers, negative: Numbers, rate: float) -> int:
    """Members above the score that at most this share of the others exceeds."""
    allowed = math.floor(rate * len(negative))
    limit = np.sort(negative)[::-1][allowed]
    return int((positive > limit).sum())
