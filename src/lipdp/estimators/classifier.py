"""What classifiers have in common, whatever their records are: labels, decisions, shares and scores."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from lipdp.data.images import read_labels
from lipdp.errors import ConfigurationError, DataError
from lipdp.estimators.base import PrivateEstimator

__all__ = ["Classifier", "check_lengths", "is_place", "softmax"]


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
        given = column_or_1d(y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else y, warn=True)
        check_classification_targets(given)
        check_lengths(self._records, records, given)
        labels = np.unique(given if self.classes is None else np.asarray(self.classes))
        if self.classes is not None and len(labels) < max(2, len(np.asarray(self.classes))):
            raise ConfigurationError(f"classes is {self.classes!r}: at least two different labels")
        if len(labels) < 2:
            raise DataError(
                f"y has one class only, {labels[0]!r}: there is nothing to tell apart. Declare the classes that may occur, "
                "classes=[…], if there are others"
            )
        codes = np.searchsorted(labels, given)
        if (labels[np.minimum(codes, len(labels) - 1)] != given).any():
            raise DataError(f"y has labels that are not among the {len(labels)} declared classes. Declare all that may occur")
        return labels, codes.astype(np.int64)

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
        return float(accuracy_score(read_labels(X) if y is None and is_place(X) else y, predicted, sample_weight=sample_weight))


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Shares from logits, row by row."""
    return np.asarray(torch.from_numpy(logits).softmax(1).numpy(), dtype=np.float64)


def is_place(given: Any) -> bool:
    """Whether records are given by where they are: a folder or a file."""
    return isinstance(given, str | os.PathLike)


def check_lengths(kind: str, records: int, targets: npt.NDArray[Any]) -> None:
    """One target for each record, in the words that scikit-learn's users look for."""
    if len(targets) != records:
        raise DataError(
            f"X has {records} {kind} and y has {len(targets)} labels or numbers: Found input variables with inconsistent numbers "
            "of samples"
        )
