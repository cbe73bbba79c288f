"""One record's contribution to a sum in floating point, against the claim: thousands of records, millions of inputs."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.privacy.randomness import Stream
from lipdp.training.gradients import gradient_sum
from lipdp.training.query import Sample
from lipdp.training.seats import choose_seats
from tests.many import examples

METHODS = ("clipless", "naive", "multiloss", "reweight", "ghost", "bookkeeping", "mixed")
# The loops take every record by itself: their sums are as long, and their time is another (LIPDP_LOOPED_RECORDS=60000: 10 minutes).
SINGLE = ("naive", "multiloss")
RECORDS = int(os.environ.get("LIPDP_RECORDS", "60000"))
LOOPED = int(os.environ.get("LIPDP_LOOPED_RECORDS", "300"))
INPUTS = int(os.environ.get("LIPDP_INPUTS", "150000"))
WIDTH = 4


def model_of(width: int, method: str) -> torch.nn.Module:
    """Two outputs whose difference is huge for every input, so a wrong target has the cotangent (1, −1): Δ is reached."""
    model = torch.nn.Sequential(nn.BoundedInput((width,)), torch.nn.Linear(width, 2, bias=method == "mixed"))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].weight[0, 0] = 1e12
    return model


def engine_of(model: torch.nn.Module, method: str, records: int, **changes: object) -> lipdp.PrivacyEngine:
    clip = {} if method == "clipless" else {"max_grad_norm": math.sqrt(2)}
    clip |= {"clipping": lipdp.Clipping(clipped=["1.weight"])} if method == "mixed" else {}
    loss = losses.CrossEntropy()
    settings = {
        "dataset_size": records,
        "batch_size": records,
        "delta": 1e-7,
        "noise_multiplier": 1.0,
        "steps": 2,
        **clip,
        **changes,
    }
    plan = lipdp.plan(model, loss, method=method, accountant="rdp", **settings)  # type: ignore[arg-type]
    return lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), plan, seed=1)


@functools.cache
def engine_among(method: str, records: int) -> lipdp.PrivacyEngine:
    """One for all that is asked of so many records: nothing is asked of it but sums, which change nothing in it."""
    return engine_of(model_of(WIDTH, method), method, records)


def asked(engine: lipdp.PrivacyEngine, x: torch.Tensor, y: torch.Tensor, seats: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The query's answer, not noised."""
    parameters = dict(engine.model.named_parameters())
    sample = Sample(x, y, engine.microbatch_size, torch.device("cpu"), seats=seats)
    return engine._run.query.ask(parameters, sample, {}).sums


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return math.hypot(*(float((one[name].double() - other[name].double()).norm()) for name in one))


def claim(engine: lipdp.PrivacyEngine) -> float:
    return engine.plan.sensitivity * engine.plan.slack


PATTERNS = ("aligned", "alternating", "swallowed", "odd")


def records(pattern: str, count: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of norm Δ and below, along one direction: what makes float32 sums large, or what they swallow."""
    x = torch.zeros(count, width)
    x[:, 0] = 1.0
    y = torch.ones(count, dtype=torch.long)
    if pattern == "alternating":
        y[1::2] = 0  # a right target has no gradient; a negative input turns it round
        x[2::4, 0] = -1.0
    if pattern == "swallowed":
        # Half of every block brings its sum to a power of two, the rest is below half of a unit in its last place.
        block = torch.arange(count) % 128
        x[block >= 64, 0] = 0.49 * 2.0**-23 * 64
        x[block >= 96, 0] *= -1
    if pattern == "odd":
        x[:, 1:] = 0.3 + torch.linspace(0, 1e-3, count)[:, None]
    return x, y


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("method", METHODS)
def test_a_record_among_thousands(method, pattern):
    """With a record and without it, the others where they were: in the order that suits the attack, and in a random one."""
    count = LOOPED if method in SINGLE else RECORDS
    engine = engine_among(method, count)
    assert engine.microbatch_size <= engine._run.query.most_rows
    x, y = records(pattern, count)
    x[count // 2] = torch.full((WIDTH,), 0.6 + 1e-7)  # the record: its bits don't fit the others' sum
    y[count // 2] = 1
    whole = torch.arange(count)
    for seats in (whole, choose_seats(count, count + 2, Stream(bytes(32)))):
        if method in SINGLE:
            found = distance_by_parts(engine, x, y, seats, count // 2)
        else:
            without = torch.where(seats == count // 2, -1, seats)
            found = distance(asked(engine, x, y, seats), asked(engine, x, y, without))
        assert found <= claim(engine) * (1 + 1e-12), pattern
        assert found > 0.99 * engine.plan.sensitivity


def distance_by_parts(
    engine: lipdp.PrivacyEngine, x: torch.Tensor, y: torch.Tensor, seats: torch.Tensor, record: int, rows: int = 128
) -> float:
    """As :func:`distance` with a record and without it, in small microbatches. Those where it does not sit are computed once: they
    are the same to the bit (:func:`test_others_are_the_same_to_the_bit`).
    """
    here: dict[str, torch.Tensor] = {}
    gone: dict[str, torch.Tensor] = {}
    for part in seats.split(rows):
        one = asked(engine, x, y, part)
        other = asked(engine, x, y, torch.where(part == record, -1, part)) if bool((part == record).any()) else one
        for name in one:
            here[name] = here.get(name, 0.0) + one[name].double()
            gone[name] = gone.get(name, 0.0) + other[name].double()
    return distance(here, gone)


@pytest.mark.parametrize("method", ["clipless", "bookkeeping", "ghost"])
def test_neighbours_as_a_step_seats_them(method):
    """A record removed from the list, all behind it moved up, seats drawn anew: still no further apart than the claim."""
    engine = engine_among(method, RECORDS)
    x, y = records("aligned", RECORDS)
    x[0] = torch.full((WIDTH,), 0.5)
    first = asked(engine, x, y, engine._run.seats(x, 0))
    again = asked(engine, x[1:], y[1:], engine._run.seats(x[1:], 1))
    assert 0.99 * engine.plan.sensitivity < distance(first, again) <= claim(engine)


def test_plain_float32_would_exceed_the_claim():
    """What the attack does to a sum as it was: microbatches added up in float32. The tests above can fail."""
    total = torch.zeros(2)
    for part in torch.full((RECORDS, 2), math.sqrt(0.5)).split(1000):
        total += part.sum(0)
    angles = torch.linspace(0, 1.5, 200)
    last = torch.stack([angles.cos(), angles.sin()], 1)
    assert float(((total + last) - total).double().norm(dim=1).max()) > 1.002


@pytest.mark.parametrize("method", METHODS)
def test_a_million_and_a_half_inputs(method):
    """The norm of a long vector, and the gradient of a layer that reads it (LIPDP_INPUTS=1500000 for the full length)."""
    engine = engine_of(model_of(INPUTS, method), method, 4)
    flat, peaked = torch.full((1, INPUTS), 0.1), torch.full((1, INPUTS), 2.0**-12)
    peaked[0, ::4096] = 1.0
    waves = torch.sin(torch.arange(INPUTS) * 0.7)[None] * 3 + 0.1
    for x in (flat, peaked, waves):
        found = asked(engine, x, torch.ones(1, dtype=torch.long), None)
        length = math.hypot(*(float(total.double().norm()) for total in found.values()))
        assert 0.99 * engine.plan.sensitivity < length <= claim(engine)


def test_norms_of_long_inputs_are_right():
    x = torch.full((1, 1_500_000), 0.1)
    true = float(x.double().norm())
    assert abs(float(torch.linalg.vector_norm(x)) / true - 1) > 1e-4  # as torch has it
    projected = nn.BoundedInput((1_500_000,))(x).double()
    assert abs(float(projected.norm()) - 1) < 2e-5


@pytest.mark.parametrize("method", METHODS)
def test_others_are_the_same_to_the_bit(method):
    """Whoever is in the batch: the microbatches in which a record does not sit stay the same."""
    count = 40
    torch.manual_seed(0)
    model = torch.nn.Sequential(nn.BoundedInput((5,)), nn.SpectralLinear(5, 8), nn.GroupSort(2), nn.SpectralLinear(8, 2))
    x, y = torch.randn(count, 5), torch.randint(2, (count,))
    clip = {} if method == "clipless" else {"max_grad_norm": 0.1}
    clip |= {"clipping": lipdp.Clipping(clipped=["3"])} if method == "mixed" else {}
    loss = losses.CrossEntropy()
    plan = lipdp.plan(
        model, loss, dataset_size=count, batch_size=count, delta=1e-3, noise_multiplier=1.0, steps=1, method=method, **clip
    )
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), plan, microbatch_size=8, seed=0)
    seats = choose_seats(count, count + 2, Stream(bytes(32)))
    parts = [asked(engine, x, y, part) for part in seats.split(8)]
    place = int(torch.nonzero(seats == 7))
    without = torch.where(seats == 7, -1, seats)
    again = [asked(engine, x, y, part) for part in without.split(8)]
    for number, (one, other) in enumerate(zip(parts, again, strict=True)):
        same = all(torch.equal(one[name], other[name]) for name in one)
        assert same == (number != place // 8)
    moved = x.clone()
    moved[7] = 100.0  # another record in its place
    for number, part in enumerate(seats.split(8)):
        if number != place // 8:
            found = asked(engine, moved, y, part)
            assert all(torch.equal(found[name], parts[number][name]) for name in found)


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([4, 16, 64]), st.booleans())
def test_gradients_of_norm_preserving_networks(seed, depth, width, scaled):
    """Orthogonal weights, inputs on the sphere, a cotangent of full length: the computed gradient against Δ and the slack."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = [nn.BoundedInput((width,), mode="sphere")]
    for _ in range(depth):
        layers += [nn.SpectralLinear(width, width, bias=False), nn.GroupSort(2)]
    model = torch.nn.Sequential(*layers, nn.SpectralLinear(width, 2, bias=False))
    loss = losses.CrossEntropy(tau=1e6 if scaled else 1.0)
    analysis = lipdp.bounds.analyse(model, loss)
    x, y = torch.randn(3, width) * 10.0 ** seed.__mod__(5), torch.randint(2, (3,))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for row in range(3):
        one = slice(row, row + 1)
        sums = gradient_sum(model, loss, parameters, x[one], y[one], microbatch_size=1, device=torch.device("cpu"))
        for name, bound in analysis.sensitivities.items():
            assert float(sums[name].norm()) <= bound * analysis.slack()


def test_a_record_whose_gradient_is_not_finite_moves_nobody():
    """It is left out; the others are computed at their places, in a microbatch of the same shape."""

    class Fragile(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x) * torch.where(x[:, :1] > 50, float("inf"), 1.0)

    torch.manual_seed(0)
    model, loss, x, y = Fragile(), losses.CrossEntropy(), torch.randn(8, 3), torch.randint(2, (8,))
    x[3] = 100.0
    parameters = dict(model.named_parameters())
    arguments = {"microbatch_size": 8, "device": torch.device("cpu")}
    found = gradient_sum(model, loss, parameters, x, y, **arguments)
    blank = torch.where(torch.arange(8) == 3, -1, torch.arange(8))
    expected = gradient_sum(model, loss, parameters, x.index_fill(0, torch.tensor([3]), 0.0), y, seats=blank, **arguments)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_step_at_rate_one_is_the_same_whatever_the_order_of_the_data():
    """In distribution, that is; here, up to rounding: no record is lost or counted twice by its seat."""
    x, y = torch.randn(50, WIDTH), torch.randint(2, (50,))
    model = torch.nn.Sequential(nn.BoundedInput((WIDTH,)), torch.nn.Linear(WIDTH, 2, bias=False))
    engine = engine_of(model, "clipless", 50)
    data, turned = TensorDataset(x, y), TensorDataset(x.flip(0), y.flip(0))
    from lipdp.training.batches import gather_lazily

    found = [
        asked(engine, *gather_lazily(d, torch.arange(50)), engine._run.seats(x, number)) for number, d in enumerate((data, turned))
    ]
    assert distance(found[0], found[1]) < 1e-5
