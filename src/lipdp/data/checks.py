"""Checks of a dataset before anything is trained on it."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from lipdp.errors import ConfigurationError, DataError

__all__ = ["require_finite"]

# Examples looked at together: the masks of a whole CIFAR-10 would need twice its memory.
_CHUNK = 4096


def require_finite(dataset: TensorDataset) -> None:
    """Raise a `DataError` if a floating tensor of the dataset holds a NaN or an infinity.

    No bound on a gradient holds for such an example, so it has to be refused rather than trained on.
    """
    if not isinstance(dataset, TensorDataset):
        raise ConfigurationError(
            f"require_finite takes a torch.utils.data.TensorDataset, not a {type(dataset).__name__}: put the examples in tensors."
        )
    bad = torch.zeros(len(dataset), dtype=torch.bool)
    for tensor in dataset.tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            for start in range(0, len(tensor), _CHUNK):
                part = tensor[start : start + _CHUNK]
                finite = torch.isfinite(part).reshape(len(part), -1).all(dim=1)
                bad[start : start + _CHUNK] |= ~finite.cpu()
    if count := int(bad.sum()):
        raise DataError(
            f"{count} of {len(dataset)} examples contain a NaN or an infinity, the first at index "
            f"{int(bad.nonzero()[0])}: no sensitivity bound holds for them. Remove or repair them first."
        )
