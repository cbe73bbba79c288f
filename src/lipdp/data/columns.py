"""Records with named columns (Hugging Face's datasets, tokenized texts) as inputs of one shape and a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from lipdp._checks import whole
from lipdp.errors import ConfigurationError, DataError

__all__ = ["Columns"]

_IGNORED = -100  # what torch's losses leave out among token labels


class Columns(Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """A dataset whose records are dicts, or pairs of a dict and a target, as (dict of tensors, target).

    With ``length``, sequences are cut or padded to that many positions, and a mask says which of them are real. The length is a
    public constant and not that of the longest record of a batch: else a long record would change what the model computes for the
    others, and with it the sensitivity.

    Args:
        dataset: records with names: a Hugging Face ``Dataset``, a list of dicts.
        inputs: the columns that the model gets, by name; by default all but the target.
        target: the column with the targets; unused where records are pairs.
        length: positions that every sequence (a column of one dimension) gets; ``None``: they have one length already.
        pad: what fills the rest, one number or one for each column. Token labels are filled with −100, which losses leave out.
        mask: name of a column to make, 1 for real positions and 0 for the rest, unless there is one; ``None`` for none.

    Example:
        >>> texts = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}]
        >>> Columns(texts, length=2)[1]
        ({'input_ids': tensor([8, 0]), 'attention_mask': tensor([1, 0])}, tensor(0))
    """

    def __init__(
        self,
        dataset: Any,
        inputs: Sequence[str] | None = None,
        target: str = "label",
        *,
        length: int | None = None,
        pad: float | Mapping[str, float] = 0,
        mask: str | None = "attention_mask",
    ) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(dataset, Mapping):
            raise ConfigurationError(f"{type(dataset).__name__} has no records by number: pass a dataset, e.g. dataset['train']")
        if inputs is not None and (isinstance(inputs, str) or not inputs):
            raise ConfigurationError(f"inputs are names of columns, e.g. ('input_ids', 'attention_mask'), not {inputs!r}")
        self.dataset, self.target, self.mask = dataset, target, mask
        self.inputs = None if inputs is None else tuple(inputs)
        self.length = None if length is None else whole("length", length, least=1)
        self.pad = pad

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        columns, target = self._divided(self.dataset[number])
        names = [name for name in columns if name != self.target] if self.inputs is None else self.inputs
        missing = [name for name in names if name not in columns]
        if missing and missing != [self.mask]:
            raise DataError(f"a record has no column {missing[0]!r}; it has {', '.join(map(str, columns))}")
        values = {name: _tensor(name, columns[name]) for name in names if name in columns}
        if self.length is None:
            return values, _tensor(self.target, target)
        return self._fitted(values), self._filled(_tensor(self.target, target), _IGNORED)

    def _divided(self, record: Any) -> tuple[Mapping[str, Any], Any]:
        if isinstance(record, tuple | list) and len(record) == 2 and isinstance(record[0], Mapping):
            return record[0], record[1]
        if not isinstance(record, Mapping):
            raise DataError(f"a record of Columns is a dict, or a pair of a dict and a target, not a {type(record).__name__}")
        if self.target not in record:
            raise DataError(f"a record has no column {self.target!r} for its target; it has {', '.join(map(str, record))}")
        return record, record[self.target]

    def _fitted(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sequences of one length, with a mask."""
        assert self.length is not None
        sizes = {len(value) for value in values.values() if value.ndim == 1}
        fitted = {name: self._filled(value, self._pad_of(name)) for name, value in values.items()}
        wanted = self.mask is not None and (self.inputs is None or self.mask in self.inputs)
        if wanted and self.mask not in fitted and sizes:
            if len(sizes) > 1:
                raise DataError(f"the sequences of a record have lengths {sorted(sizes)}, so no mask can be made: give one")
            fitted[str(self.mask)] = (torch.arange(self.length) < sizes.pop()).long()
        return fitted

    def _pad_of(self, name: str) -> float:
        return self.pad.get(name, 0) if isinstance(self.pad, Mapping) else 0 if name == self.mask else self.pad

    def _filled(self, value: torch.Tensor, pad: float) -> torch.Tensor:
        if value.ndim != 1:
            return value
        assert self.length is not None
        kept = value[: self.length]
        return torch.cat([kept, kept.new_full((self.length - len(kept),), pad)])


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"column {name!r} holds a {type(value).__name__}, which is no array of numbers. Choose other columns (inputs=…), or "
            "make numbers of it first (a tokenizer)."
        ) from error
