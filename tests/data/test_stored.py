"""Records on disk: the same as in memory, read in batches, ahead, and checked as they stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.common import planned, small, toy, weights
from torch.utils.data import Dataset, TensorDataset

import lipdp
from lipdp.data import Columns, Stored
from lipdp.errors import DataError, UnexpectedError
from lipdp.training.batches import check_finite, gather, records_of, slices


@pytest.fixture
def files(tmp_path):
    x, y = (tensor.numpy() for tensor in toy().tensors)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    return tmp_path / "x.npy", tmp_path / "y.npy"


class ByHand(Dataset):
    """A Dataset of one's own over a memmap, one record at a time; ``asked`` notes in which process."""

    def __init__(self, x, y):
        self.x, self.y = (np.load(file, mmap_mode="r") for file in (x, y))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return self.x[number], self.y[number]


def test_rows_on_disk_are_the_rows(files):
    data, inside = Stored(*files), toy()
    numbers = torch.tensor([3, 0, 255, 3])
    for found, expected in zip(gather(data, numbers), gather(inside, numbers), strict=True):
        assert torch.equal(found, expected)
    assert [len(y) for _, y in slices(data, 100)] == [100, 100, 56]
    assert torch.equal(torch.cat([x for x, _ in slices(data, 100)]), inside.tensors[0])
    assert torch.equal(data[-1][0], inside[255][0])
    assert gather(data, torch.empty(0, dtype=torch.long))[0].shape == (0, 6)
    data.let_go()
    assert torch.equal(data[5][0], inside[5][0])


def test_what_is_no_array_of_records_is_refused(files):
    with pytest.raises(DataError, match="256 inputs and 3 targets"):
        Stored(files[0], np.arange(3))
    with pytest.raises(DataError, match="must be numbers"):
        Stored(files[0], np.array(["a"] * 256))
    with pytest.raises(DataError, match="not list"):
        Stored(files[0], [1, 2])
    with pytest.raises(IndexError):
        Stored(*files)[256]


@pytest.mark.parametrize("kind", [Stored, ByHand])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_on_files_is_the_run_in_memory(files, kind, workers):
    """The same weights to the bit, whether batches are read ahead by another process or not."""

    def trained(data, count):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = lipdp.losses.CrossEntropy(tau=4.0)
        plan = planned(model, loss, steps=4, batch_size=8)  # some samples may be empty
        lipdp.fit(model, loss, optimizer, plan, data, seed=3, reproducible=True, workers=count)
        return weights(model)

    on_disk, again = trained(kind(*files), workers), trained(ByHand(*files), 0)
    assert all(torch.equal(on_disk[name], again[name]) for name in again)


def test_arrow_is_read_at_once():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": np.arange(40.0).reshape(20, 2).tolist(), "label": list(range(20))}).with_format(
        "numpy"
    )
    assert [int(record["label"]) for record in records_of(table, [3, 1])] == [3, 1]
    inputs, targets = gather(table, torch.tensor([3, 1]))
    assert torch.equal(inputs["x"].double(), torch.tensor([[6.0, 7.0], [2.0, 3.0]], dtype=torch.float64))
    assert targets.tolist() == [3, 1]
    assert gather(Columns(table, ("x",)), torch.tensor([2]))[1].tolist() == [2]


def test_records_that_a_subclass_replaces_are_not_fetched_past_it():
    class Many(Dataset):
        def __getitem__(self, number):
            return torch.tensor([float(number)]), 0

        def __getitems__(self, numbers):
            return [self[number] for number in numbers]

    class Doubled(Many):
        def __getitem__(self, number):
            return torch.tensor([2.0 * number]), 0

        def __getitems__(self, numbers):
            raise AssertionError

    class Late(Many):
        def __getitem__(self, number):
            return torch.tensor([3.0 * number]), 0

        __len__ = lambda self: 9  # noqa: E731

    with pytest.raises(UnexpectedError, match="AssertionError"):
        records_of(Doubled(), [1])
    Many.__getitems__ = lambda self, numbers: [(torch.tensor([-1.0]), 0)]
    assert records_of(Late(), [2])[0][0] == 6.0


def test_checks_stream_and_tell_how_far_they_are(files, tmp_path):
    told = []
    check_finite(Stored(*files), chunk=100, progress=lambda done, total: told.append((done, total)))
    assert told == [(100, 256), (200, 256), (256, 256)]
    x = np.load(files[0])
    x[217, 2] = np.nan
    np.save(tmp_path / "bad.npy", x)
    with pytest.raises(DataError, match="a record contains a NaN"):
        check_finite(Stored(tmp_path / "bad.npy", files[1]), chunk=100)


def test_one_more_array_type_is_stacked_as_before():
    rows = [np.array([1.0, 2.0], dtype=np.float16), np.array([3.0, 4.0], dtype=np.float16)]
    data = [(row, number) for number, row in enumerate(rows)]
    inputs, targets = gather(data, torch.tensor([1, 0]))
    assert inputs.dtype == torch.float16
    assert torch.equal(inputs.float(), torch.tensor([[3.0, 4.0], [1.0, 2.0]]))
    assert isinstance(TensorDataset(inputs, targets)[0][0], torch.Tensor)
