"""Mechanisms in files: plain values and tensors, with a digest, written whole or not at all. Nothing in them is executed.

A file holds each thing once: what follows from the rest (sensitivities, sizes of networks, ranks) is derived when it is read, and
what is read is checked field by field. So a file that was edited is refused, or describes a mechanism that keeps its promise.

``BudgetLedger`` is the older name of the account that mechanisms charge: :class:`lipdp.privacy.Budget` has taken its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from lipdp._files import PUBLIC, written_whole
from lipdp.digest import content_digest
from lipdp.errors import CheckpointError, ConfigurationError, LipdpError
from lipdp.privacy.budget import AnyBudget, Budget, open_budget

T = TypeVar("T")
PathLike = str | os.PathLike[str]


def save_file(content: dict[str, Any], path: PathLike, form: str) -> None:
    """Write ``content`` as a file of this form."""
    own = {"format": form, **content}
    target = _path(path)
    if not target.parent.is_dir():
        raise CheckpointError(f"the folder {target.parent} does not exist: make it before saving {target.name} there.")
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder: give the name of a file in it.")
    with written_whole(target, PUBLIC) as file:  # nothing in it is private
        torch.save({**own, "digest": content_digest(own).hex()}, file)


def _path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise ConfigurationError(f"path is a {type(path).__name__}: give the name of a file.") from None


def load_file(path: PathLike, form: str, build: Callable[[dict[str, Any]], T]) -> T:
    """What ``build`` makes of the content of a file of this form; every failure is an error that says what is wrong with it."""
    file = _path(path)
    if not file.is_file():
        raise CheckpointError(f"there is no mechanism at {file}: learn one and save it, or check the path.")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many kinds
        raise CheckpointError(f"{file} can't be read as a mechanism ({type(error).__name__}): is it one, and whole?") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), str):
        raise CheckpointError(f"{file} can't be read as a mechanism (it does not say its format): is it one, and whole?")
    own = dict(content)
    digest = own.pop("digest", None)
    if own["format"] != form:
        raise CheckpointError(
            f"{file} is of format {own['format']!r}, not {form!r}: use the loader for what was saved, or learn it again."
        )
    try:
        made = build({name: value for name, value in own.items() if name != "format"})
        fresh = content_digest(own).hex()
    except LipdpError as error:
        raise CheckpointError(f"{file} holds no mechanism that can be trusted: {error}") from error
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{file} can't be read as a mechanism: {error}") from error
    if digest != fresh:
        raise CheckpointError(f"{file} was changed since it was saved: its content does not match its digest. Learn it again.")
    return made


class BudgetLedger(Budget):
    """A :class:`lipdp.privacy.Budget` for pure releases (δ = 0, replace-one neighbours), by the arguments of an older lipdp.

    It is the same file and the same account: one begun here is opened by ``Budget(path)``, and the other way round.

    Args:
        path: the file.
        budget: total ε, for a new one.
        dataset: a name for the data, for a new one.
    """

    def __init__(self, path: str | os.PathLike[str], budget: float | None = None, dataset: str | None = None) -> None:
        if Path(path).exists():
            super().__init__(path, epsilon=budget, dataset=dataset)
            return
        if budget is None or dataset is None:
            raise ConfigurationError(
                f"there is no ledger at {path}: give budget (the total epsilon for this dataset, for all time) and dataset, its "
                "name, to begin one."
            )
        super().__init__(path, epsilon=budget, delta=0.0, dataset=dataset, adjacency="replace_one")

    @property
    def budget(self) -> float:
        """The total ε."""
        return self.epsilon


def payer(budget: AnyBudget, ledger: Budget | None) -> Budget | None:
    """Who pays for a release: ``budget``, or ``ledger``, which is the older name of the argument."""
    if budget is not None and ledger is not None:
        raise ConfigurationError("budget and ledger are two names of one argument: give budget alone.")
    return open_budget(ledger if budget is None else budget)
