"""Real Poisson batches, and datasets of all sorts."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lipdp import losses, nn
from lipdp._sums import MOST_ROWS
from lipdp.errors import ConfigurationError, DataError, LipdpWarning, UnsupportedError
from lipdp.planning.settings import usual_seats
from lipdp.training.batches import check_dataset, check_finite, divided, even_rows, gather, gather_lazily, microbatches, slices

from .common import BATCH, SIZE, empty, engine_of, free, planned, small, toy

FALSE_ALARM = 1e-6


def marked(count=SIZE):
    """Records that carry their own number."""
    x = torch.zeros(count, 6)
    x[:, 0] = torch.arange(count)
    return TensorDataset(x, torch.zeros(count, dtype=torch.long))


def drawn(steps=1500, count=SIZE, seed=0):
    """(steps, count): which records each batch holds."""
    engine = engine_of(free(), planned(free(), steps=steps), seed=seed)
    table = torch.zeros(steps, count)
    for row, (x, _) in zip(table, engine.batches(marked(count)), strict=True):
        row[x[:, 0].long()] = 1
        engine.ledger.charge()  # as a step would, without its cost
    return table.double()


def test_sizes_are_binomial():
    sizes = drawn().sum(1)
    q = BATCH / SIZE
    law = stats.binom(SIZE, q)
    edges = [-1, *(int(law.ppf(p)) for p in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)), SIZE]
    observed = [int(((sizes > a) & (sizes <= b)).sum()) for a, b in itertools.pairwise(edges)]
    expected = [len(sizes) * (law.cdf(b) - law.cdf(a)) for a, b in itertools.pairwise(edges)]
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM
    spread = float(((sizes - BATCH) ** 2).sum()) / (SIZE * q * (1 - q))
    assert stats.chi2(len(sizes)).ppf(FALSE_ALARM) < spread < stats.chi2(len(sizes)).isf(FALSE_ALARM)


def test_each_record_enters_with_probability_q_independently():
    table, q = drawn(), BATCH / SIZE
    steps = len(table)
    counts = table.sum(0)
    assert float(counts.min()) > stats.binom(steps, q).ppf(FALSE_ALARM / SIZE)
    assert float(counts.max()) < stats.binom(steps, q).isf(FALSE_ALARM / SIZE)
    centred = (table - q) / (q * (1 - q)) ** 0.5
    for lag in (1, 2):  # neighbouring records of one batch; one record in neighbouring batches
        for product in (centred[:, lag:] * centred[:, :-lag], centred[lag:] * centred[:-lag]):
            assert abs(float(product.sum())) < stats.norm.isf(FALSE_ALARM / 2) * product.numel() ** 0.5


def test_exactly_as_many_batches_as_the_plan_has_steps():
    engine = engine_of(small(), planned(small(), steps=9))
    count = 0
    for batch in engine.batches(toy()):
        engine.step(*batch)
        count += 1
    assert count == engine.steps == 9


def test_an_empty_batch_is_a_step():
    data = toy(100)
    model = small()
    engine = engine_of(model, planned(model, dataset_size=100, batch_size=1, delta=1e-3, steps=30))
    sizes = []
    for x, y in engine.batches(data):
        sizes.append(len(x))
        engine.step(x, y)
    assert 0 in sizes
    assert engine.steps == 30
    engine = engine_of(small())
    engine.step(*empty(), sample="own")
    assert engine.steps == 1
    assert float(engine.optimizer.seen[0]["1.weight"].norm()) > 0


def test_batches_fetched_ahead_are_different_and_those_of_the_loop():
    """One sample used for several steps would not be what is accounted."""
    plan = planned(small())
    ahead = [x for x, _ in itertools.islice(engine_of(small(), plan).batches(marked()), plan.steps + 1)]
    assert len(ahead) == plan.steps
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(ahead, 2))
    engine = engine_of(small(), plan)
    for expected, (x, y) in zip(ahead, engine.batches(marked()), strict=True):
        assert torch.equal(x, expected)
        engine.step(x, y)


def test_two_iterators_never_give_the_same_batch_twice():
    engine = engine_of(small())
    first, second = engine.batches(marked()), engine.batches(marked())
    seen = [next(it)[0] for _ in range(6) for it in (first, second)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
    assert next(first, None) is None


def test_batches_continue_where_the_steps_are():
    plan = planned(small())
    expected = [x for x, _ in itertools.islice(engine_of(small(), plan).batches(marked()), plan.steps)]
    engine = engine_of(small(), plan)
    for _ in range(4):
        engine.step(*next(engine.batches(marked())))
    state = engine.state_dict()
    next(engine.batches(marked()))  # fetched, never used
    other = engine_of(small(seed=3), plan, seed=None)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for (a, _), b in zip(other.batches(marked()), expected[4:], strict=True))


def test_a_dataset_of_another_size_keeps_q_and_warns():
    engine = engine_of(small())
    with pytest.warns(LipdpWarning, match="512 records"):
        sizes = [len(x) for x, _ in itertools.islice(engine.batches(toy(512)), 12)]
    assert 40 < sum(sizes) / len(sizes) < 90
    next(engine_of(small()).batches(toy(SIZE - 1)))  # a neighbour: no word about it


class Squares(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


class Doubled(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


class Shifted(Subset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 1, y

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Single(Squares):
    def __getitem__(self, index):
        return torch.full((6,), float(index))


class Triple(Squares):
    def __getitem__(self, index):
        return torch.zeros(6), 1, 2


class Records(Squares):
    def __getitem__(self, index):
        return {"x": torch.zeros(6), "y": 1}


CHOSEN = torch.tensor([1, 4, 7])


def test_gather_from_all_sorts_of_datasets():
    plain = marked(20)
    assert gather(plain, CHOSEN)[0][:, 0].tolist() == [1, 4, 7]
    part = Subset(plain, list(range(10, 20)))
    assert gather(part, CHOSEN)[0][:, 0].tolist() == [11, 14, 17]
    assert gather(Subset(part, range(1, 10)), CHOSEN)[0][:, 0].tolist() == [12, 15, 18]
    x, y = gather(Squares(), CHOSEN)
    assert x[:, 0].tolist() == [1, 4, 7]
    assert y.tolist() == [1, 1, 1]
    assert gather(Subset(Squares(), [3, 5, 8, 9, 11, 12, 13, 19]), CHOSEN)[0][:, 0].tolist() == [5, 11, 19]
    assert gather([(torch.zeros(6), 0)] * 9, CHOSEN)[0].shape == (3, 6)


def test_gather_of_nothing_has_shapes():
    none = torch.empty(0, dtype=torch.long)
    for data in (marked(20), Subset(marked(20), [1, 2]), Squares(), Subset(Squares(), [1, 2]), Doubled(*marked(20).tensors)):
        x, y = gather(data, none)
        assert x.shape == (0, 6)
        assert y.shape == (0,)
        assert y.dtype == torch.long


def test_subclasses_with_records_of_their_own_are_asked_for_them():
    assert gather(Doubled(*marked(20).tensors), CHOSEN)[0][:, 0].tolist() == [2, 8, 14]
    assert gather(Shifted(marked(20), range(10, 20)), CHOSEN)[0][:, 0].tolist() == [12, 15, 18]


@pytest.mark.parametrize("data", [Single(), Triple(), Records(), TensorDataset(torch.zeros(20, 6))])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_records_that_are_no_pairs_are_refused(data, count):
    with pytest.raises(DataError, match="pair"):
        gather(data, torch.arange(count))


@pytest.mark.parametrize("data", [DataLoader(toy(10)), Stream(), iter([1, 2]), 3, None])
def test_what_can_not_be_sampled_is_refused(data):
    with pytest.raises(ConfigurationError):
        check_dataset(data)
    with pytest.raises(ConfigurationError):
        next(engine_of(small()).batches(data))


def test_an_empty_dataset_is_refused():
    for data in (TensorDataset(torch.zeros(0, 6), torch.zeros(0)), []):
        with pytest.raises(DataError, match="empty"):
            check_dataset(data)


def test_check_finite_looks_everywhere():
    for data in (toy(10), Squares(), Subset(toy(10), [1, 2]), Subset(Squares(), [3])):
        check_finite(data)
    x, y = (t.clone() for t in toy(10).tensors)
    x[7, 3] = float("nan")
    bad = TensorDataset(x, y)
    for data in (bad, Subset(bad, [1, 7]), [(row, label) for row, label in zip(x, y, strict=True)]):
        with pytest.raises(DataError, match="NaN"):
            check_finite(data, chunk=3)
    check_finite(Subset(bad, [1, 2, 3]))
    with pytest.raises(DataError, match="a record contains a NaN"):
        check_finite(TensorDataset(torch.zeros(9, 6), torch.tensor([0.0] * 4 + [float("inf")] * 5)))


@pytest.mark.parametrize("chosen", [CHOSEN, torch.empty(0, dtype=torch.long), torch.arange(20), torch.arange(20).flip(0)])
def test_rows_that_are_gathered_late_are_those_that_are_gathered_at_once(chosen):
    """At any sampling rate, 0 and 1 included; nothing is copied where all rows are taken in their order."""
    plain = marked(20)
    for data in (plain, Subset(plain, list(range(20))), Squares(), Doubled(*plain.tensors)):
        late, at_once = gather_lazily(data, chosen), gather(data, chosen)
        assert late[0].shape == at_once[0].shape
        assert len(late[0]) == len(chosen)
        assert torch.equal(late[1], at_once[1])
        for part in (slice(0, 2), slice(2, 7), slice(7, 40)):
            assert torch.equal(late[0][part], at_once[0][part])
        device = torch.device("cpu")
        for first, second in zip(microbatches(*late, 6, device), microbatches(*at_once, 6, device), strict=True):
            assert all(map(torch.equal, first, second))
    views = gather_lazily(plain, torch.arange(20))[0][3:5]
    assert views.data_ptr() == plain.tensors[0][3:5].data_ptr()


def test_slices_are_all_records_in_their_order():
    for data in (marked(20), Subset(marked(20), list(range(20))), Squares(), Doubled(*marked(20).tensors)):
        parts = list(slices(data, 7))
        assert [len(x) for x, _ in parts] == [7, 7, 6]
        assert torch.equal(torch.cat([x for x, _ in parts]), gather(data, torch.arange(20))[0])


def test_records_that_are_not_finite_are_masked_and_huge_ones_are_not():
    """A norm overflows where no entry does: such a record counts."""
    x = torch.full((4, 6), 3e38)
    x[1, 2], x[3, 5] = float("nan"), float("-inf")
    ((rows, _, mask),) = microbatches(x, torch.zeros(4), 4, torch.device("cpu"))
    assert mask.tolist() == [True, False, True, False]
    assert bool(torch.isfinite(rows).all())
    assert torch.equal(rows[::2], x[::2])
    check_finite(TensorDataset(x[::2], torch.zeros(2)))


@given(
    kind=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]),
    bad=st.dictionaries(st.integers(0, 8), st.sampled_from([float("nan"), float("inf"), -float("inf")])),
    huge=st.booleans(),
    late=st.booleans(),
)
def test_whatever_is_not_finite_is_found_wherever_it_is(kind, bad, huge, late):
    """Also infinities of both signs, which a sum would let cancel to NaN, and rows whose sums overflow without any."""
    x = torch.ones(9, 5).to(kind)
    if huge:
        x = x * torch.finfo(kind).max
    for row, value in bad.items():
        x[row, row % 5] = value
    y = torch.arange(9)
    batch = gather_lazily(TensorDataset(x, y), torch.arange(9)) if late else (x, y)
    kept = []
    for rows, labels, mask in microbatches(*batch, 4, torch.device("cpu")):
        assert bool(torch.isfinite(torch.view_as_real(rows) if rows.is_complex() else rows).all())
        assert torch.equal(rows[mask], x[labels[mask]])
        kept += labels[mask].tolist()
    assert kept == [row for row in range(9) if row not in bad]


def test_writing_over_the_dataset_is_noticed():
    """At sampling rate 1 rows are views of the dataset; elsewhere they are copies, which a model may change in place."""
    data, device = toy(40), torch.device("cpu")
    before = data.tensors[0].clone()
    for x, _, _ in microbatches(*gather_lazily(data, torch.arange(39)), 8, device):
        x.add_(1.0)
    assert torch.equal(data.tensors[0], before)
    parts = microbatches(*gather_lazily(data, torch.arange(40)), 8, device)
    next(parts)[0].relu_()
    with pytest.raises(UnsupportedError, match="in place"):
        next(parts)


@pytest.mark.parametrize("count", [31, 32, 33, 64, 70])
def test_a_whole_batch_is_one_microbatch_and_none_of_its_records_is_lost(count):
    """The plan's size says how many rows go at once; a neighbouring dataset has one more or less, and all of it counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((6,)), torch.nn.Linear(6, 3, bias=False))
    loss = losses.CrossEntropy(tau=4.0)
    plan = planned(model, dataset_size=32, batch_size=32, noise_multiplier=1e-6, steps=2, delta=1e-5)
    assert plan.sampling_rate == 1
    engine = engine_of(model, plan)
    assert engine.microbatch_size == 34  # a seat for a record more, and one to spare
    data = toy(count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LipdpWarning)
        engine.step(*gather_lazily(data, next(engine.samples(data))), sample="own")
    (expected,) = torch.autograd.grad(loss(model(data.tensors[0]), data.tensors[1]).sum(), [model[1].weight])
    assert torch.allclose(32 * engine.optimizer.seen[0]["1.weight"], expected, atol=1e-4)


@given(
    batch=st.integers(1, 40_000),
    entries=st.one_of(st.none(), st.integers(1, 10**7)),
    products=st.one_of(st.none(), st.integers(1, 10**8)),
    whole=st.booleans(),
)
def test_microbatches_are_even_and_neither_tiny_nor_huge(batch, entries, products, whole):
    rows = even_rows(batch, torch.device("cpu"), entries, products, whole=whole)
    most = usual_seats(batch, whole=whole)
    assert 1 <= rows <= MOST_ROWS
    assert rows >= min(most, 32) / 2
    assert rows * -(-most // rows) < most + rows  # the last one is nearly full
    assert entries is None or rows <= max(32, 2**20 // entries, 0 if products is None else 2**26 // products)


@pytest.mark.parametrize(
    ("seats", "limit", "rows"), [(1088, 1024, 544), (1088, 2048, 1088), (80, 256, 80), (14, 4, 4), (5, 2, 2), (1, 1, 1)]
)
def test_seats_are_divided_evenly(seats, limit, rows):
    assert divided(seats, limit) == rows
    assert divided(seats, rows) == rows  # a state that says so is not divided again


class Windows(Subset):
    """Its numbers are those of windows, of which each record has ten."""

    def __getitem__(self, index):
        return self.dataset[self.indices[index] // 10]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Unsized(Dataset):
    """It does not say how many records it has."""

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index % 3


def test_subsets_may_number_as_they_like_of_datasets_that_need_no_length():
    for data, expected in ((Windows(marked(20), range(10, 200, 10)), [2, 5, 8]), (Subset(Unsized(), range(1, 20)), [2, 5, 8])):
        assert check_dataset(data) == 19
        assert gather(data, torch.tensor([1, 4, 7]))[0][:, 0].tolist() == expected
    with pytest.raises(DataError, match="beyond the 20 of its dataset"):
        check_dataset(Subset(marked(20), [3, 20]))


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([-1, 2], "count records from 0"),
        (np.array([-30]), "count records from 0"),
        ([True, False] * 10, "a list of 20, not whole numbers"),
        (np.zeros(20, bool), "mask.nonzero"),
        ([0.5, 1.0], "not whole numbers"),
        ([float("nan")], "not whole numbers"),
        (["a"], "not whole numbers"),
        ([None], "not whole numbers"),
        ([2**70], "not whole numbers"),
        ({1, 2}, "a set of 2, not whole numbers"),
        (np.array([[1, 2], [3, 4]]), "in one dimension"),
    ],
)
def test_subsets_of_numbers_that_are_none(indices, said):
    for subset in (Subset(marked(20), indices), Subset(Subset(marked(20), indices), [0])):
        with pytest.raises(DataError, match=said):
            check_dataset(subset)
