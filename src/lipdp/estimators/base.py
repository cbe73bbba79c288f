"""What the estimators have in common: the budget, how a run is made from it, the record of what was decided and why, and labels.

An estimator is scikit-learn's shape around :func:`lipdp.plan` and :func:`lipdp.fit`. What it decides by itself (method, rates,
steps) depends on
public numbers only: how many records there are, how many columns and classes, ε and δ.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from torch.utils.data import TensorDataset

from lipdp._checks import discreet, is_discreet, known_device, positive, probability, shown
from lipdp._texts import NEIGHBOURS, REPRODUCIBLE, brief, downwards, upwards
from lipdp.data.images import read_labels
from lipdp.errors import BudgetError, ConfigurationError, DataError, LipdpNotice
from lipdp.estimators.reading import check_labels, check_lengths, codes_of, declared_classes, is_place, one_column
from lipdp.privacy.budget import open_budget
from lipdp.training import History, PrivacyPlan, fit, plan
from lipdp.training.account import several_runs


@dataclass(frozen=True)
class Choice:
    """What an estimator decided by itself, from public numbers.

    Attributes:
        method: the one that was taken.
        why: in words.
        settings: of the model and the run, by name.
    """

    method: str
    why: str
    settings: dict[str, Any]


_TAKE_RECORDS = ("fit", "predict", "predict_proba", "decision_function", "score")


def _undone(fit: Callable[..., Any]) -> Callable[..., Any]:
    """``fit`` that leaves the estimator as it was where it fails: not half of an old fit and half of a new one."""

    @functools.wraps(fit)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self))
        try:
            return fit(self, *args, **kwargs)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    return whole


def default_delta(records: int) -> float:
    """A power of ten, at most a tenth of 1/N and at most 1e-5."""
    return min(1e-5, 10.0 ** -math.ceil(math.log10(10 * max(1, records))))


def plan_head(model: torch.nn.Module, loss: Any, **settings: Any) -> PrivacyPlan:
    """:func:`lipdp.plan` for a head on rows of norm 1, with a notice of its own where nothing can be learned.

    An output sees the noise along one direction, its row's, not the whole length √p·s that a plan's own notice compares with:
    over T steps of N records that all pull the same way, N·√T/σ against 1.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LipdpNotice)
        decided = plan(model, loss, **settings)
    signal = decided.batch_size * math.sqrt(decided.steps) / decided.noise_multiplier
    if signal < 1:
        warnings.warn(
            f"this fit can't learn: even if all {decided.dataset_size} records said the same, that would be {signal:.2g} of the "
            "noise of a prediction. More records or a larger epsilon are needed.",
            LipdpNotice,
            stacklevel=4,
        )
    return decided


class PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """The base of all private estimators. Subclasses define ``__init__`` (scikit-learn reads its signature) and ``fit``.

    A subclass has the parameters ``epsilon``, ``delta``, ``random_state``, ``reproducible``, ``device`` and ``budget`` at least,
    calls :meth:`_check_privacy`, :meth:`_check_account` and :func:`~lipdp.estimators.reading.note_rows` before anything is
    released, and :meth:`_train` to spend the plan. It sets ``choice_`` and ``public_``.

    Attributes:
        epsilon_: ε that was spent, all releases together.
        delta_: δ of it.
        plan_: the :class:`lipdp.PrivacyPlan` of the training.
        history_: the :class:`lipdp.History` of the training.
        model_: the trained network.
        choice_: what was decided, and why.
        public_: what was taken to be public, in words.
        private_: False for a reproducible fit.
    """

    epsilon: float
    delta: float | None
    random_state: Any
    reproducible: bool
    device: Any
    budget: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """What takes records is discreet, whoever defines it (scikit-learn's mixins, too); a fit that fails changes nothing."""
        super().__init_subclass__(**options)
        for name in _TAKE_RECORDS:
            method = getattr(cls, name, None)
            if method is not None and not is_discreet(method):
                setattr(cls, name, discreet(_undone(method) if name == "fit" else method))

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """The arguments that are not the usual ones; of one that may hold records, only its type and shape."""
        usual = inspect.signature(type(self).__init__).parameters
        given = self.get_params(deep=False).items()
        told = ", ".join(f"{name}={shown(value)}" for name, value in given if shown(value) != shown(usual[name].default))
        return f"{type(self).__name__}({told})"[:N_CHAR_MAX]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # the noise is secret
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def _check_privacy(self, records: int) -> float:
        """Check ε, δ and the seed before anything is released. Returns δ."""
        positive("epsilon", self.epsilon)
        if self.device is not None:
            known_device(self.device)
        if not isinstance(self.reproducible, bool | np.bool_):
            raise ConfigurationError(f"reproducible is {shown(self.reproducible)}: True (repeatable, and not private) or False")
        if isinstance(self.random_state, bool) or not isinstance(
            self.random_state, numbers.Integral | np.random.RandomState | np.random.Generator | None
        ):
            raise ConfigurationError(f"random_state is {shown(self.random_state)}: a whole number, a numpy generator, or None")
        if self.reproducible and not isinstance(self.random_state, numbers.Integral):
            raise ConfigurationError("reproducible=True draws everything from random_state: give it, as a whole number")
        return default_delta(records) if self.delta is None else probability(self.delta)

    def _check_account(self, costs: list[Any]) -> None:
        """Refuse a fit whose whole cost the account can't pay, before a part of it is spent."""
        account = open_budget(self.budget)
        if account is not None and account.epsilon_with(costs) > account.epsilon:
            raise BudgetError(
                f"the budget {account.path} has {downwards(account.remaining)} of its ε = {brief(account.epsilon)} left, and this "
                f"fit needs {brief(float(self.epsilon))}: nothing was released. Ask for less, or for other data."
            )

    @property
    def _account_path(self) -> str | None:
        account = open_budget(self.budget)
        return None if account is None else str(account.path)

    def _seed(self) -> int:
        """Of the initial weights, and of all else in a reproducible fit. Noise and samples do not follow from it."""
        if self.random_state is None:
            return int(torch.seed() % 2**63)
        if isinstance(self.random_state, numbers.Integral):
            return int(self.random_state) % 2**63
        draw = self.random_state.randint if isinstance(self.random_state, np.random.RandomState) else self.random_state.integers
        return int(draw(2**31 - 1))

    def _train(
        self,
        model: torch.nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        plan: PrivacyPlan,
        data: TensorDataset,
        *,
        seed: int,
        released: float = 0.0,
        **options: Any,
    ) -> History:
        """Spend the plan's ε on the model, and note all that was; ``released`` is the pure ε of what was released before.

        Args:
            model: trained in place.
            loss: that the plan is for.
            optimizer: of the model.
            scheduler: of the optimiser.
            plan: for what is left of ε.
            data: (inputs, targets).
            seed: from :meth:`_seed`.
            released: ε of ranges and the like; pure releases add up with the rest.
            options: other arguments of :func:`lipdp.fit`.
        """
        with several_runs():  # repeats are told by note_rows, which knows folds
            history = fit(
                model,
                loss,
                optimizer,
                plan,
                data,
                scheduler=scheduler,
                seed=seed,
                reproducible=self.reproducible,
                device=self.device,
                budget=self.budget,
                evaluations=1,
                **options,
            )
        model.eval()
        self.model_, self.plan_, self.history_ = model, plan, history
        self.epsilon_, self.delta_, self.private_ = history.epsilon + released, plan.delta, history.private
        self.released_ = released
        return history

    def _outputs(self, X: Any) -> npt.NDArray[np.float64]:
        """The network's outputs for records as those of ``fit``, (records, outputs)."""
        raise NotImplementedError

    def report(self) -> str:
        """What was promised, spent, chosen and taken to be public, as Markdown."""
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        plan, choice = self.plan_, self.choice_
        ranges = f" ({upwards(self.released_)} of it for ranges of columns)" if self.released_ else ""
        sources = sorted({group.source for group in plan.groups})
        lines = [
            f"# {type(self).__name__}",
            "",
            *([] if self.private_ else [f"**{REPRODUCIBLE}**", ""]),
            f"- **Guarantee**: ε = {upwards(self.epsilon_)}{ranges} at δ = {brief(self.delta_)}, for {NEIGHBOURS[plan.adjacency]}; "
            f"{plan.accountant.upper()} accounting of {plan.steps} steps at sampling rate {plan.sampling_rate:.3g}, noise "
            f"multiplier {plan.noise_multiplier:.4g}.",
            f"- **Method**: {choice.method}: {choice.why}. Sensitivities are {' and '.join(sources)}.",
            *(f"- **Taken to be public**: {fact}." for fact in self.public_),
            "- **Not covered**: the test rows, what was done to the table before it came here, other fits on the same rows.",
        ]
        return "\n".join(lines) + "\n"


class Classifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """The base of private classifiers: a subclass says what its outputs are (``_outputs``) and which shares they stand for.

    Attributes:
        classes_: the labels.
    """

    classes: Any
    _records = "rows"  # what messages call them

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # on the few records of its own checks, noise is what is left
        return tags

    def _labels(self, y: Any, records: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """The classes, sorted, and the number of each record's."""
        each = self._records.removesuffix("s")
        if y is None:
            raise DataError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: give a label for each {each}"
            )
        given = one_column(y)
        check_labels(given, each)
        check_lengths(self._records, records, given)
        labels = np.unique(given) if self.classes is None else declared_classes(self.classes)
        if len(labels) < 2:
            raise DataError(
                "y has one class only: there is nothing to tell apart. Declare the classes that may occur, "
                "classes=[…], if there are others"
            )
        return labels, codes_of(given, labels, self.classes is not None)

    def _public_classes(self, labels: npt.NDArray[Any]) -> str:
        """What the report says of the classes."""
        declared = "as declared" if self.classes is not None else "as they occur in y: nobody declared them"
        return f"the {len(labels)} classes, {declared}"

    def _shares(self, outputs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Non-negative numbers of sum 1 for each record, from the network's outputs."""
        raise NotImplementedError

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:
        """How much each record looks like each class, (records, classes); for two, how much more like the second, (records,).

        Args:
            X: records as those of ``fit``.
        """
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """(records, classes): the outputs made non-negative, with sum 1.

        Args:
            X: records as those of ``fit``.
        """
        return self._shares(self._outputs(X))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each record.

        Args:
            X: records as those of ``fit``.
        """
        outputs = self._outputs(X)
        return np.asarray(self.classes_[outputs.argmax(axis=1)])

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The accuracy on labelled records.

        Args:
            X: records as those of ``fit``.
            y: their labels; a folder of pictures brings its own.
            sample_weight: of each record.
        """
        predicted = self.predict(X)
        if y is None and not is_place(X):
            raise DataError(f"score takes {self._records} and their labels, score(X, y), and the labels y are None")
        answers = one_column(read_labels(X) if y is None else y)
        check_labels(answers, self._records.removesuffix("s"))
        check_lengths(self._records, len(predicted), answers)
        if not {*answers.tolist()} & {*self.classes_.tolist()}:
            raise DataError(f"none of the labels y is one of the {len(self.classes_)} classes that were learned, classes_")
        return float(accuracy_score(answers, predicted, sample_weight=sample_weight))


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Shares from logits, row by row."""
    return np.asarray(torch.from_numpy(logits).softmax(1).numpy(), dtype=np.float64)
