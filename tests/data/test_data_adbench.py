"""The ADBench tables: reading, the fixed split, damaged files, and the real ones where they are."""

from __future__ import annotations

import dataclasses
import hashlib
import os

import numpy as np
import pytest
import torch

from lipdp import data
from lipdp.data.datasets import ADBENCH
from lipdp.errors import DataError

REAL = os.environ.get("LIPDP_DATA")


def small(tmp_path, table=None, labels=None, **changes):
    """The first table with a file of our own."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 4)) if table is None else table
    labels = (np.arange(50) % 5 == 0).astype(int) if labels is None else labels
    (tmp_path / "adbench").mkdir()
    file = tmp_path / "adbench" / "small.npz"
    np.savez(file, X=table, y=labels, **changes.pop("arrays", {}))
    source = ADBENCH[0]
    info = dataclasses.replace(source.info, shape=(4,), train_size=40, test_size=10)
    remote = dataclasses.replace(source.file, name="small.npz", sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    return dataclasses.replace(source, info=info, file=remote, **changes)


def test_a_table_is_split_by_class_and_kept_in_its_own_units(tmp_path) -> None:
    table = np.random.default_rng(1).normal(size=(50, 4)) * 1000
    train, test, info = small(tmp_path, table).load(tmp_path, download=False)
    assert (len(train), len(test), info.classes) == (40, 10, 2)
    assert int(train.tensors[1].sum()) == 8
    assert int(test.tensors[1].sum()) == 2
    rows = torch.cat([train.tensors[0], test.tensors[0]])
    assert torch.allclose(rows.sort(0).values, torch.from_numpy(table).float().sort(0).values)


def test_codes_become_indicators_and_a_missing_one_zeros(tmp_path) -> None:
    codes = np.tile(np.array([[0, 1], [1, 255]], dtype=np.uint8), (25, 1))
    source = small(tmp_path, codes, arrays={"cardinality": np.array([2, 2])}, one_hot=True)
    train, _, _ = source.load(tmp_path, download=False)
    found = {tuple(row.tolist()) for row in train.tensors[0]}
    assert found == {(1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 0.0)}


def test_another_shape_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="should be there"):
        small(tmp_path, np.zeros((50, 5))).load(tmp_path, download=False)


def test_a_damaged_file_is_refused(tmp_path) -> None:
    source = small(tmp_path)
    file = tmp_path / "adbench" / "small.npz"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match="corrupt"):
        source.load(tmp_path, download=False)


def test_a_file_that_holds_objects_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="can't be read"):
        small(tmp_path, np.array([[{}] * 4] * 50, dtype=object)).load(tmp_path, download=False)


def test_the_census_substitute_says_that_it_is_one(tmp_path) -> None:
    assert "substitute" in data.info("adbench/census").citation
    with pytest.raises(DataError, match="not published in this form"):
        data.load("adbench/census", root=tmp_path)


def test_names_are_case_blind() -> None:
    assert data.info("adbench/ALOI").shape == (27,)


@pytest.mark.parametrize("source", ADBENCH, ids=lambda source: source.info.name)
def test_real_tables(source) -> None:
    if not REAL or not source.availability(data.datasets.data_root(REAL)).on_disk:
        pytest.skip(f"LIPDP_DATA does not name a folder that holds {source.info.name}")
    train, test, info = data.load(info_name := source.info.name, root=REAL, download=False)
    assert info.name == info_name
    assert (len(train), len(test)) == (info.train_size, info.test_size)
    assert set(train.tensors[1].unique().tolist()) == {0, 1}
    assert torch.isfinite(train.tensors[0]).all()
