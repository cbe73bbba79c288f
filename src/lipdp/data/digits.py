"""The 8×8 digits that come with scikit-learn: the dataset for a first try, without network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lipdp.data.info import Availability, DatasetInfo, Loaded, images_dataset, stratified
from lipdp.errors import DataError

__all__ = ["DIGITS", "SPLIT_SEED", "Digits"]

# The publisher gives no split with this copy. Ours is public and fixed: a fifth of each class, by this seed.
SPLIT_SEED = 0
_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Digits:
    """The embedded copy: the UCI test part, 1797 images of grey levels 0…16."""

    info: DatasetInfo

    def availability(self, root: Path) -> Availability:
        """Always there: it is a part of scikit-learn."""
        return Availability(self.info.name, on_disk=True, path=None)

    def load(self, root: Path, *, download: bool) -> Loaded:
        """The images divided by 16, split by `SPLIT_SEED`, stratified."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError(
                "digits: the images come with scikit-learn, which is not installed. pip install scikit-learn."
            ) from error
        bunch = load_digits()
        images = bunch.images.astype(np.uint8).reshape(-1, *self.info.shape)
        labels = bunch.target.astype(np.uint8)
        train, test = stratified(torch.from_numpy(labels), _TEST_FRACTION, SPLIT_SEED)
        parts = [
            images_dataset(images[chosen.numpy()], labels[chosen.numpy()], largest=16, size=size, info=self.info)
            for chosen, size in ((train, self.info.train_size), (test, self.info.test_size))
        ]
        return parts[0], parts[1], self.info


DIGITS = Digits(
    DatasetInfo(
        name="digits",
        classes=10,
        shape=(1, 8, 8),
        train_size=1438,
        test_size=359,
        class_names=tuple("0123456789"),
        licence="CC BY 4.0 (UCI Machine Learning Repository)",
        citation="E. Alpaydin and C. Kaynak. Optical Recognition of Handwritten Digits. UCI Machine Learning "
        "Repository, 1998. doi:10.24432/C50P49",
        source="sklearn.datasets.load_digits",
    )
)
