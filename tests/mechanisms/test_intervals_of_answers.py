"""Intervals of answers lie in what is possible: short datasets, tied columns, counts with a public n."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lipdp.errors import LipdpError
from lipdp.mechanisms import Settings, answer

QUICK = Settings.quick()


@pytest.mark.parametrize("column", [[3.0, 3.0], [3.0] * 40, [0.0] * 30 + [10.0] * 10])
@pytest.mark.parametrize("given", [{"epsilon": 0.5}, {"rho": 0.01}], ids=["epsilon", "rho"])
def test_intervals_stay_in_what_is_possible(column: list[float], given: dict[str, Any]) -> None:
    """A variance of numbers of 0 to 10 is at most 25, and had intervals up to 92; a count had more than all records."""
    most = {"variance": 25.0, "std": 5.0, "count:2,4": float(len(column)), "mean": 10.0}
    for one in answer(torch.tensor(column), list(most), bounds=(0, 10), settings=QUICK, **given):
        assert one.interval is not None
        low, high = one.interval
        assert 0 <= low <= one.value <= high <= most[one.question] + 1e-9, one


def test_histograms_of_a_public_n_hold_no_more_than_all_records() -> None:
    for _ in range(20):
        (one,) = answer(torch.tensor([1.0, 1.0]), "histogram:0,5,10", bounds=(0, 10), epsilon=0.05)
        assert isinstance(one.value, list)
        assert 0 <= min(one.value) <= max(one.value) <= 2


def test_one_record_is_refused_by_name() -> None:
    with pytest.raises(LipdpError, match="n is 1"):
        answer(torch.tensor([3.0]), "mean", bounds=(0, 10), epsilon=1.0)
