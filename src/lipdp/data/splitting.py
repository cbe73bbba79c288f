"""Set a part of the training data aside, to choose hyper-parameters without looking at the test set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lipdp.errors import ConfigurationError

__all__ = ["split", "stratified"]


def split(dataset: TensorDataset, fraction: float, seed: int = 0, stratify: bool = True) -> tuple[TensorDataset, TensorDataset]:
    """Split into `train, validation`; `fraction` is the share of the validation part.

    The choice depends on `seed` alone (and on the labels if `stratify`, which keeps the classes' shares; the labels
    are the last tensor). The seed is public: it is no source of privacy. Examples keep their order.

    A privacy guarantee speaks of the examples trained on: neighbouring datasets are two *training parts* that differ
    in one example. What is chosen by looking at the validation part has no guarantee towards its examples.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> train, validation = split(TensorDataset(torch.rand(100, 3), torch.arange(100) % 2), 0.2)
    >>> len(train), len(validation)
    (80, 20)
    """
    if not isinstance(dataset, TensorDataset):
        raise ConfigurationError(
            f"split takes a torch.utils.data.TensorDataset, not a {type(dataset).__name__}: put the examples in tensors."
        )
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigurationError(
            f"fraction={fraction!r} is not the share of a validation part: give a number between 0 and 1, e.g. 0.1."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigurationError(f"seed={seed!r} is not a seed: give an integer, 0 or more.")
    size = len(dataset)
    if not 0 < round(fraction * size) < size:
        raise ConfigurationError(
            f"fraction={fraction!r} of {size} examples leaves {round(fraction * size)} for validation: both parts need "
            "at least one example. Choose another fraction or bring more data."
        )
    labels = dataset.tensors[-1]
    if not stratify:
        labels = torch.zeros(size, dtype=torch.int64)
    elif labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise ConfigurationError(
            f"the last tensor of the dataset, {labels.dtype} of shape {tuple(labels.shape)}, does not hold one class "
            "per example, so the split cannot be stratified by it. Pass stratify=False."
        )
    train, validation = stratified(labels, float(fraction), seed)
    return (
        TensorDataset(*(tensor[train] for tensor in dataset.tensors)),
        TensorDataset(*(tensor[validation] for tensor in dataset.tensors)),
    )


def stratified(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the two parts, each ascending; the second has round(fraction × size) of them.

    Each class gives the floor of its share, and those with the largest remainders one more (ties: the smaller class
    index), so that the shares of the classes are as even as whole examples allow.
    """
    values = labels.detach().cpu().numpy()
    _, classes = np.unique(values, return_inverse=True)
    shares = np.bincount(classes) * fraction
    # A share of 1.9999999998 is a 2 spoilt by rounding.
    taken = np.floor(shares + 1e-9).astype(np.int64)
    left = round(fraction * len(values)) - int(taken.sum())
    taken[np.argsort(-(shares - taken), kind="stable")[:left]] += 1
    # Numpy keeps the raw stream of a bit generator forever, but not that of shuffle or permutation: a published
    # split must not move when numpy is updated.
    order = np.argsort(np.random.PCG64(seed).random_raw(len(values)), kind="stable")
    chosen = np.zeros(len(values), dtype=np.bool_)
    for index, count in enumerate(taken):
        chosen[order[classes[order] == index][:count]] = True
    return torch.from_numpy(np.flatnonzero(~chosen)), torch.from_numpy(np.flatnonzero(chosen))
