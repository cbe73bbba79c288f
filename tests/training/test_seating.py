"""Seats that are drawn ahead are the seats that would have been drawn."""

import pytest
import torch

import lipdp
from lipdp import losses, nn
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


@pytest.mark.parametrize("sampling", [{}, {"sampling": "fixed_size", "adjacency": "replace_one"}], ids=str)
def test_samples_that_are_drawn_ahead_are_those_that_would_have_been_drawn(sampling):
    def drawn(ahead: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 2))
        sizes = {"dataset_size": 60, "batch_size": 12, "steps": 12, "accountant": "rdp", **sampling}
        plan = lipdp.plan(model, losses.CrossEntropy(), delta=1e-3, noise_multiplier=2.0, **sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = lipdp.PrivacyEngine(model, losses.CrossEntropy(), optimizer, plan, seed=1, reproducible=True)
        found = []
        data = torch.utils.data.TensorDataset(torch.arange(240.0).reshape(60, 4), torch.zeros(60, dtype=torch.long))
        for number, chosen in enumerate(engine.samples(data)):
            found.append(chosen)
            if ahead and number != 4:
                engine._run.draw_ahead(number + 1 + number % 3)  # also of batches that do not come next
        return found

    assert all(map(torch.equal, drawn(True), drawn(False)))
