"""Seats that are drawn ahead are the seats that would have been drawn."""

import pytest
import torch

from lipdp.privacy.randomness import Stream
from lipdp.training.seats import Seating, choose_seats, seats_in_order

SEATS = 24


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("count", [0, 1, 17, SEATS, SEATS + 1, 3 * SEATS + 5])
def test_drawn_ahead_or_not_they_are_the_same(count, shuffled):
    key = bytes(range(32))
    expected = (seats_in_order if shuffled else choose_seats)(count, SEATS, Stream(key))
    seating = Seating(SEATS)
    seating.draw_ahead(Stream(key))
    assert torch.equal(seating(count, Stream(key), shuffled=shuffled), expected)
    assert torch.equal(seating(count, Stream(key), shuffled=shuffled), expected)


def test_an_order_of_another_step_is_not_used():
    seating = Seating(SEATS)
    seating.draw_ahead(Stream(bytes(32)))
    key = bytes(range(32))
    assert torch.equal(seating(10, Stream(key), shuffled=False), choose_seats(10, SEATS, Stream(key)))
