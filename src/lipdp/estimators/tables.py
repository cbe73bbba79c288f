"""Private estimators for tables: :class:`PrivateClassifier`, which hands images over, and :class:`PrivateRegressor`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import _check_feature_names, _check_n_features, check_is_fitted
from torch.utils.data import TensorDataset

from lipdp import losses
from lipdp._checks import is_number, shown
from lipdp._numerics import Undrawn
from lipdp.errors import ConfigurationError, DataError
from lipdp.estimators.base import Choice, Classifier, PrivateEstimator, plan_head, softmax
from lipdp.estimators.images import PrivateImageClassifier, is_images
from lipdp.estimators.methods import METHODS, choose_method, make_model, make_optimizer, private_ranges
from lipdp.estimators.reading import as_numbers, as_table, check_form, check_lengths, note_pairing, note_rows
from lipdp.estimators.schema import (
    Column,
    Numeric,
    Schema,
    check_names,
    columns_of,
    for_each,
    is_boolean,
    is_frame,
    is_numeric,
    read_schema,
)
from lipdp.inputs import outputs_in_parts
from lipdp.privacy import Adjacency, Pure
from lipdp.training import PrivacyPlan

_ADJACENCY: Adjacency = "add_remove"
_TARGET = "the target y"
_LITTLE = 0.05
_TOLD = 60  # columns that are listed one by one
_OF_IMAGES = ("epsilon", "delta", "classes", "random_state", "reproducible", "device", "budget")


@dataclass(frozen=True)
class _Ready:
    """All that is decided before anything is released; ``spent`` is the pure ε that ranges will cost."""

    model: torch.nn.Module
    loss: losses.Loss
    plan: PrivacyPlan
    seed: int
    spent: float


class _PrivateTable(PrivateEstimator):
    """What both have in common: rows by a public schema, ranges that are paid for where there is none, a bounded head."""

    schema: Any
    method: str
    ranges_share: float

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.categorical = True
        return tags

    def _read(self, table: Any, *, first: bool) -> tuple[dict[Hashable, Any], Any]:
        """The columns by name, and the raw rows; scikit-learn's checks of names and numbers of columns are made on the way."""
        if not is_frame(table) and hasattr(table, "to_pandas"):
            table = table.to_pandas()  # pyarrow's, polars' and others' tables
        if not is_frame(table):
            check_form(table, type(self).__name__)
            if is_images(table):
                raise DataError(
                    f"these are images, and {type(self).__name__} {'was fitted on a table' if not first else 'is for tables'}. "
                    "lipdp.PrivateClassifier().fit takes images; pixels are columns after X.reshape(len(X), -1)"
                )
            table = as_table(table, declared=self.schema is not None)
        elif len(table) == 0 or len(table.columns) == 0:
            raise DataError(
                f"the table has shape {tuple(table.shape)}: Found array with 0 sample(s) or 0 feature(s), and at least one row and "
                "one column are needed"
            )
        else:
            check_names(table)
        if not first:
            self._check_form_of_fit(table)
        try:
            _check_feature_names(self, table, reset=first)
            _check_n_features(self, table, reset=first)
        except (TypeError, ValueError) as error:  # its text is made of names and numbers of columns
            again = (
                "" if first or not is_frame(table) else ". Give the columns of the fit in their order: X[model.feature_names_in_]"
            )
            raise DataError(f"{str(error).strip().removesuffix('.')}{again}") from None
        return columns_of(table), table

    def _check_form_of_fit(self, table: Any) -> None:
        """Columns have names or places, as in the fit: which of the two was meant is not guessed."""
        named = any(isinstance(name, str) for name in self.schema_.names)
        if named and not is_frame(table):
            raise DataError(
                "this was fitted on a DataFrame, and X is an array, whose columns have no names: "
                "pandas.DataFrame(X, columns=model.feature_names_in_), if they are in that order"
            )
        if not named and is_frame(table) and any(isinstance(name, str) for name in table.columns):
            raise DataError(
                "this was fitted on an array, and X is a DataFrame, whose columns have names: X.to_numpy(), if they are in the "
                "order of that array"
            )

    def _schema(self, columns: dict[Hashable, Any]) -> tuple[dict[Hashable, Column], list[Hashable]]:
        """What is known of the columns, and those whose range has to be found. All that is wrong with either is said now."""
        known = read_schema(self.schema, list(columns))
        known |= {name: Numeric(0, 1) for name, values in columns.items() if name not in known and is_boolean(values)}
        for_each(known, lambda name: known[name].encode(str(name), columns[name]))
        unknown = [name for name in columns if name not in known]
        texts = [name for name in unknown if not is_numeric(columns[name])]
        if texts:
            raise DataError(
                f"column{'s' if len(texts) > 1 else ''} {', '.join(map(repr, texts[:5]))}{'…' if len(texts) > 5 else ''} "
                f"hold{'' if len(texts) > 1 else 's'} no numbers, and the categories that occur in private rows are private too. "
                f"Declare those that may occur: schema={{{texts[0]!r}: lipdp.estimators.categorical([…]), …}}; "
                "lipdp.estimators.dates(first, last) for dates; of numbers in texts make numbers first"
            )
        for_each(unknown, lambda name: Numeric(0, 1).encode(str(name), columns[name]))  # what is missing, before ε is spent
        return known, unknown

    def _prepare(
        self, rows: Any, columns: dict[Hashable, Any], known: dict[Hashable, Column], outputs: int, *, found: int
    ) -> _Ready:
        """Model, loss and plan from public numbers; what is wrong with them, or too much for the account, is said before anything
        is spent.

        ``found`` is how many ranges will be found privately; a range changes neither the model nor its bounds.
        """
        if not (is_number(self.ranges_share) and 0 < self.ranges_share < 1):
            raise ConfigurationError(f"ranges_share is {shown(self.ranges_share)}: a share of ε between 0 and 1, e.g. 0.2")
        delta = self._check_privacy(len(rows))
        spent = float(self.ranges_share) * float(self.epsilon) if found else 0.0
        left = float(self.epsilon) - spent
        shape = Schema(tuple(columns), tuple(known.get(name, Numeric(0, 1)) for name in columns))
        self.choice_ = choose_method(self.method, records=len(rows), outputs=outputs, epsilon=left, schema=shape)
        seed = self._seed()
        with Undrawn():
            torch.manual_seed(seed)
            model = make_model(self.choice_, shape, outputs)
        loss = self._loss()
        decided = self._plan(model, loss, len(rows), left, delta)
        self._check_account([*([Pure(spent, _ADJACENCY)] if spent else []), decided.run])
        note_rows(rows, float(self.epsilon), delta, self._account_path)
        return _Ready(model, loss, decided, seed, spent)

    def _loss(self) -> losses.Loss:
        """What the outputs are fitted by; the method is known by now."""
        raise NotImplementedError

    def _plan(self, model: torch.nn.Module, loss: losses.Loss, records: int, epsilon: float, delta: float) -> PrivacyPlan:
        clips = self.choice_.method == "clipping"
        return plan_head(
            model,
            loss,
            dataset_size=records,
            batch_size=max(1, round(self.choice_.settings["share"] * records)),
            epsilon=epsilon,
            delta=delta,
            steps=self.choice_.settings["steps"],
            method="bookkeeping" if clips else "clipless",
            max_grad_norm=self.choice_.settings["clip"] if clips else None,
            adjacency=_ADJACENCY,
        )

    def _ranges(self, values: dict[Hashable, Any], ready: _Ready, share: float = 1.0) -> dict[Any, Numeric]:
        """Ranges of columns that have none, for a share of the ε that is set aside for them."""
        columns = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
        return private_ranges(
            columns,
            share * ready.spent,
            adjacency=_ADJACENCY,
            budget=self.budget,
            size=ready.plan.dataset_size,
            seed=ready.seed if self.reproducible else None,
        )

    def _run(self, ready: _Ready, columns: dict[Hashable, Any], targets: npt.NDArray[Any]) -> None:
        """Train the head for ``targets`` (numbers of classes, or scaled values)."""
        optimizer, scheduler = make_optimizer(self.choice_, ready.model, ready.plan)
        data = TensorDataset(torch.from_numpy(self.schema_.encode(columns)), torch.from_numpy(targets))
        self._train(
            ready.model,
            ready.loss,
            optimizer,
            scheduler,
            ready.plan,
            data,
            seed=ready.seed,
            released=ready.spent,
            settle=self.choice_.method in ("linear", "kernel"),
        )

    def _outputs(self, table: Any) -> npt.NDArray[np.float64]:
        """The network's outputs for rows of the same table."""
        check_is_fitted(self)
        columns, _ = self._read(table, first=False)
        rows = torch.from_numpy(self.schema_.encode(columns))
        result: npt.NDArray[np.float64] = outputs_in_parts(self.model_, rows, 8192).numpy()
        return result


class PrivateClassifier(Classifier, _PrivateTable):
    """A private classifier for tables (arrays and DataFrames of numbers and categories) and for images. scikit-learn's shape.

    Ranges and categories are declared (``schema=``), or ranges are found privately and paid for from ``ranges_share`` of ε.
    Nothing else is read off the rows but what the plan pays for. Images (arrays of 3 or 4 dimensions, folders of pictures) need
    no schema; :class:`PrivateImageClassifier` does the work. The method follows from N, ε and the number of classes, all of
    them public: ``choice_`` and ``report()`` say what was chosen and why.

    Args:
        epsilon: ε of the whole fit.
        delta: δ; by default a power of ten, at most 1/(10·N) and 1e-5.
        schema: what is public of the columns: a mapping from column names (numbers, for arrays) to
            :class:`~lipdp.estimators.Numeric`, :class:`~lipdp.estimators.Categorical` or :class:`~lipdp.estimators.Dates` (for
            short: ``(low, high)``, ``[categories]``); a list of them; or one for all, also ``(low, high)``.
        classes: the labels that may occur; by default those in ``y``, which are then taken to be public.
        method: "linear" (a line on the scaled columns), "kernel" (on fixed random features beside them), "network" (a hidden layer
            between boundaries), "clipping" (a line on the columns, every record's gradient clipped), for images "features"
            (fixed public ones, and a private linear head); "auto" chooses.
        ranges_share: share of ε for ranges, where some column has none.
        random_state: of the initial weights. Noise does not follow from it.
        reproducible: draw the noise from ``random_state`` too: repeatable, and *not private*.
        device: where to compute.
        budget: the account of the data, a :class:`lipdp.privacy.Budget` or the path of its file.

    Attributes:
        classes_: the labels.
        schema_: the columns, with ranges found for those that had none; for tables.
        images_: the fitted :class:`PrivateImageClassifier`; for images.
        epsilon_: what was spent, at ``delta_``.
        plan_: of the training.
        history_: of the training.
        model_: the network.
        choice_: the method, and why.
        public_: what was taken to be public.
        private_: False for a reproducible fit.

    Example:
        >>> import lipdp, numpy as np
        >>> x = np.random.default_rng(0).uniform(0, 10, (500, 2)); y = np.where(x[:, 0] > x[:, 1], "yes", "no")
        >>> model = lipdp.PrivateClassifier(epsilon=2.0, schema=lipdp.estimators.Numeric(0, 10)).fit(x[:400], y[:400])
        >>> model.epsilon_ <= 2.0, model.score(x[400:], y[400:]) > 0.8
        (True, True)
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float | None = None,
        schema: Any = None,
        classes: Any = None,
        method: str = "auto",
        ranges_share: float = 0.2,
        random_state: Any = None,
        reproducible: bool = False,
        device: Any = None,
        budget: Any = None,
    ) -> None:
        self.epsilon, self.delta, self.schema, self.classes, self.method = epsilon, delta, schema, classes, method
        self.ranges_share, self.random_state, self.reproducible, self.device = ranges_share, random_state, reproducible, device
        self.budget = budget

    def fit(self, X: Any, y: Any = None) -> PrivateClassifier:
        """Train privately.

        Args:
            X: the rows, an array or a DataFrame; or images, as :class:`PrivateImageClassifier` takes them: (N, height, width),
                (N, channels, height, width), the path of a folder with a folder of pictures for each class.
            y: a label for each; a folder of pictures brings its own.
        """
        check_form(X, type(self).__name__)
        if is_images(X):
            self._fit_images(X, y)
            return self
        if self.method == "features":
            raise ConfigurationError(f'method="features" is for images, and this is a table: "auto", {", ".join(METHODS)}')
        self.__dict__.pop("images_", None)
        columns, rows = self._read(X, first=True)
        note_pairing(X, y)
        labels, codes = self._labels(y, len(rows))
        known, unknown = self._schema(columns)
        ready = self._prepare(rows, columns, known, len(labels), found=len(unknown))
        ranges = self._ranges({name: columns[name] for name in unknown}, ready)
        self.classes_ = labels
        self.schema_ = Schema(tuple(columns), tuple({**known, **ranges}[name] for name in columns))
        self.public_ = (*_public_facts(len(codes), known), self._public_classes(labels))
        self._run(ready, columns, codes)
        return self

    def _fit_images(self, X: Any, y: Any) -> None:
        """Hand over to :class:`PrivateImageClassifier`; what it spent and decided is then this estimator's."""
        if self.method not in ("auto", "features"):
            raise ConfigurationError(
                f'method={shown(self.method)} is for tables, and these are images: take "auto" or "features". To learn from pixels '
                "as columns, give X.reshape(len(X), -1) with schema=numeric(0, 255)"
            )
        if self.schema is not None:
            raise ConfigurationError("schema= declares the columns of a table, and these are images: leave it out")
        shared = {name: value for name, value in self.get_params(deep=False).items() if name in _OF_IMAGES}
        by_images = PrivateImageClassifier(**shared).fit(X, y)
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)
        self.__dict__.update({name: value for name, value in vars(by_images).items() if name.endswith("_")})
        inner = by_images.choice_
        size = " × ".join(map(str, self.shape_))
        why = f"X holds images of {size}: a private linear head on fixed public features of each; {inner.method} ones, {inner.why}"
        self.choice_ = Choice("features", why, inner.settings)
        self.images_ = by_images

    def _outputs(self, X: Any) -> npt.NDArray[np.float64]:
        check_is_fitted(self)
        by_images = getattr(self, "images_", None)
        return super()._outputs(X) if by_images is None else np.asarray(by_images._outputs(X))

    def _loss(self) -> losses.Loss:
        return losses.CrossEntropy() if self.choice_.method == "clipping" else losses.Squares()

    def _shares(self, outputs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Outputs are logits, or are fitted to the indicators of the classes, less their mean."""
        if self.choice_.method in ("features", "clipping"):
            return softmax(outputs)
        shares = outputs - outputs.mean(axis=1, keepdims=True) + 1 / outputs.shape[1]
        # Below 1/20 no longer as they are but ever closer to 0: positive, and in the outputs' order.
        shares = np.maximum(shares, _LITTLE) / (1 + np.maximum(_LITTLE - shares, 0) / _LITTLE)
        return np.asarray(shares / shares.sum(axis=1, keepdims=True), dtype=np.float64)


class PrivateRegressor(RegressorMixin, _PrivateTable):  # type: ignore[misc]
    """A private regressor for tables: arrays and DataFrames of numbers and categories. scikit-learn's shape.

    As :class:`PrivateClassifier`, for one number for each row. Its range is declared, ``target=(low, high)``, or found privately
    and paid for as the columns' are; values beyond it count as its ends, and predictions lie in it.

    Args:
        epsilon: ε of the whole fit.
        delta: δ; by default a power of ten, at most 1/(10·N) and 1e-5.
        schema: what is public of the columns, see :class:`PrivateClassifier`.
        target: (low, high), the public range of ``y``.
        method: see :class:`PrivateClassifier`.
        ranges_share: share of ε for ranges, where some column or ``y`` has none.
        random_state: of the initial weights. Noise does not follow from it.
        reproducible: draw the noise from ``random_state`` too: repeatable, and *not private*.
        device: where to compute.
        budget: the account of the data, a :class:`lipdp.privacy.Budget` or the path of its file.

    Attributes:
        target_: the range of ``y``.
        schema_: the columns, with ranges found for those that had none.
        epsilon_: what was spent, at ``delta_``.
        plan_: of the training.
        history_: of the training.
        model_: the network.
        choice_: the method, and why.
        public_: what was taken to be public.
        private_: False for a reproducible fit.

    Example:
        >>> import lipdp, numpy as np
        >>> x = np.random.default_rng(0).uniform(0, 10, (2000, 2)); y = x[:, 0] - x[:, 1]
        >>> model = lipdp.PrivateRegressor(epsilon=2.0, schema=lipdp.estimators.Numeric(0, 10), target=(-10, 10))
        >>> model.fit(x[:1600], y[:1600]).score(x[1600:], y[1600:]) > 0.8
        True
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float | None = None,
        schema: Any = None,
        target: tuple[float, float] | None = None,
        method: str = "auto",
        ranges_share: float = 0.2,
        random_state: Any = None,
        reproducible: bool = False,
        device: Any = None,
        budget: Any = None,
    ) -> None:
        self.epsilon, self.delta, self.schema, self.target, self.method = epsilon, delta, schema, target, method
        self.ranges_share, self.random_state, self.reproducible, self.device = ranges_share, random_state, reproducible, device
        self.budget = budget

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # on the few rows of its own checks, noise is what is left
        return tags

    def fit(self, X: Any, y: Any = None) -> PrivateRegressor:
        """Train privately.

        Args:
            X: the rows: an array or a DataFrame.
            y: a number for each; it has to be given.
        """
        columns, rows = self._read(X, first=True)
        note_pairing(X, y)
        values = self._values(y, len(rows))
        known, unknown = self._schema(columns)
        given = None if self.target is None else _target(self.target)
        without = {name: columns[name] for name in unknown}
        ready = self._prepare(rows, columns, known, 1, found=len(without) + (given is None))
        # Half for the target, where columns have to be found too: everything that is predicted is scaled by it.
        share = 1.0 if given is not None else 0.5
        ranges = self._ranges(without, ready, share)
        self.target_ = given or self._ranges({_TARGET: values}, ready, share if without else 1.0)[_TARGET]
        self.schema_ = Schema(tuple(columns), tuple({**known, **ranges}[name] for name in columns))
        self.public_ = (
            *_public_facts(len(values), known),
            *([] if given is None else [f"the range of y, {given.said}, as declared"]),
        )
        self._run(ready, columns, self.target_.encode("y", values).astype(np.float32))
        return self

    def _loss(self) -> losses.Loss:
        return losses.Huber(delta=1.0)

    def _values(self, y: Any, rows: int) -> npt.NDArray[np.float64]:
        if y is None:
            raise DataError(f"{type(self).__name__} requires y to be passed, but the target y is None: give a number for each row")
        values = as_numbers(y)
        check_lengths("rows", rows, values)
        return values

    def predict(self, X: Any) -> npt.NDArray[np.float64]:
        """A number for each row, within the range.

        Args:
            X: rows of the same columns.
        """
        outputs = np.clip(self._outputs(X)[:, 0], -1, 1)
        low, high = self.target_.low, self.target_.high
        return np.asarray(low + (outputs + 1) / 2 * (high - low), dtype=np.float64)


def _target(given: Any) -> Numeric:
    """The declared range of the target."""
    advice = f"target is {shown(given)}: the public range of y, (low, high), two different numbers, and no value of y is missing"
    if not (isinstance(given, Numeric) or (isinstance(given, tuple | list) and len(given) == 2)):
        raise ConfigurationError(advice)
    known = given if isinstance(given, Numeric) else Numeric(*given)
    if known.missing or known.low == known.high:
        raise ConfigurationError(advice)
    return known


def _public_facts(records: int, declared: dict[Hashable, Column]) -> list[str]:
    """What whoever signs has to know to be public: which ranges and categories, not only how many."""
    told = [f"{name}, {column.said}" for name, column in list(declared.items())[:_TOLD]]
    more = [f"and {len(declared) - _TOLD} more"] if len(declared) > _TOLD else []
    plural = "s" if len(declared) > 1 else ""
    known = (
        [f"ranges or categories of {len(declared)} column{plural}, as declared: {'; '.join([*told, *more])}"] if declared else []
    )
    return [f"the number of rows, {records}", *known]
