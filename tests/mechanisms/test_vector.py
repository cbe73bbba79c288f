"""Several queries in one budget, and several columns."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from lipdp.errors import BudgetError, CheckpointError, ConfigurationError, DataError
from lipdp.mechanisms import BudgetLedger, Mixture, learn_columns, learn_vector, load_columns, load_vector
from tests.mechanisms.common import BOUNDS, TINY, N, datasets, private


@pytest.fixture(scope="module")
def both() -> object:
    return learn_vector(["mean", "median", "p90"], 2.0, N, BOUNDS, robustness=None, settings=TINY)


def test_all_answers_for_one_price(both: object, tmp_path: Path) -> None:
    from lipdp.mechanisms import VectorMechanism

    assert isinstance(both, VectorMechanism)
    ledger = BudgetLedger(tmp_path / "a", budget=3.0, dataset="d")
    answers = both.release(private(), ledger=ledger)
    assert list(answers) == ["mean", "median", "p90"]
    assert all(0 <= value <= 10 for value in answers.values())
    assert ledger.remaining == 1.0
    with pytest.raises(BudgetError):
        both.release(private(), ledger=ledger)
    with pytest.raises(DataError):
        both.release(private() * 5, ledger=ledger)
    assert ledger.remaining == 1.0
    # A split spends its shares, a joint release all of it at once: never more than epsilon.
    assert 1.999999 < sum(Fraction(part.epsilon) for part in both.parts) <= 2


def test_the_better_way_is_returned_and_saved(both: object, tmp_path: Path) -> None:
    from lipdp.mechanisms import VectorMechanism

    assert isinstance(both, VectorMechanism)
    normalised = both.report["normalised"]
    assert normalised[both.report["way"]] == min(normalised.values())
    assert set(normalised) >= {"split", "joint, m = 2"}
    both.save(tmp_path / "m")
    again = load_vector(tmp_path / "m")
    t = datasets(30, 1)
    assert torch.equal(again.losses(t, 2), both.losses(t, 2))
    assert again.expected_loss() == both.expected_loss()
    (tmp_path / "bad").write_text("x")
    with pytest.raises(CheckpointError):
        load_vector(tmp_path / "bad")


def test_queries_have_to_differ() -> None:
    for bad in (["mean"], ["median", "p50"]):
        with pytest.raises(ConfigurationError, match="different"):
            learn_vector(bad, 1.0, N, BOUNDS, settings=TINY)


def test_columns_share_the_budget(tmp_path: Path) -> None:
    mechanism = learn_columns("mean", 2.0, N, [(0.0, 10.0), (-1.0, 1.0)], settings=TINY)
    assert mechanism.epsilon == 2.0
    assert 1.999999 < sum(Fraction(part.epsilon) for part in mechanism.parts) <= 2
    ledger = BudgetLedger(tmp_path / "a", budget=2.0, dataset="d")
    x = torch.stack([private(1), private(2) / 5 - 1], 1)
    with pytest.raises(DataError, match="outside"):  # the second column is bad: the first is not released either
        mechanism.release(x * 2, ledger=ledger)
    with pytest.raises(DataError, match="shape"):
        mechanism.release(x[:, :1], ledger=ledger)
    assert ledger.remaining == 2.0
    first, second = mechanism.release(x, ledger=ledger)
    assert 0 <= first <= 10
    assert -1 <= second <= 1
    assert ledger.remaining == 0.0
    assert len(mechanism.sensitivity) == len(mechanism.expected_loss()) == 2
    assert mechanism.describe()["columns"] == 2
    mechanism.save(tmp_path / "m")
    again = load_columns(tmp_path / "m")
    assert again.describe() == mechanism.describe()
    assert len(again.release(x)) == 2
    with pytest.raises(CheckpointError, match="column mechanism"):
        load_vector(tmp_path / "m")
    with pytest.raises(CheckpointError, match="there is no mechanism"):
        load_columns(tmp_path / "none")


def test_each_column_can_have_its_own_belief_and_bounds() -> None:
    """A belief in the columns' own units: one for all can't lie inside bounds that have nothing in common."""
    wide, narrow = Mixture(2, 0.0, 100.0), Mixture(2, -1.0, 1.0)
    made = learn_columns("mean", 2.0, N, [(0, 100), (-1, 1), (0, 100)], [wide, narrow, wide], settings=TINY)
    assert [part.problem.high for part in made.parts] == [100.0, 1.0, 100.0]
    assert made.parts[0] is made.parts[2]
    with pytest.raises(DataError, match="not in the bounds"):
        learn_columns("mean", 2.0, N, [(0, 100), (-1, 1)], wide, settings=TINY)
    with pytest.raises(ConfigurationError, match="1 beliefs for 2 columns"):
        learn_columns("mean", 2.0, N, [(0, 100), (-1, 1)], [wide], settings=TINY)
    with pytest.raises(ConfigurationError, match="for each column"):
        learn_columns("mean", 2.0, N, (0, 100), settings=TINY)  # type: ignore[arg-type]
