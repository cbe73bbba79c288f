"""Several processes train what one would: the same samples, exact sums, one draw of noise, one account, one checkpoint."""

from __future__ import annotations

import math
import pickle
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lipdp
from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.privacy import Budget
from lipdp.privacy.noise import grid
from lipdp.training.checkpoint import load_checkpoint
from lipdp.training.query import carried, check_range, exact, floating, unit_of
from lipdp.training.shards import shards_of_file, take_back
from tests.training.common import engine_of, planned, small, toy, weights
from tests.training.rank_tasks import (
    CASES,
    LOSS,
    SLOW,
    disagreements,
    divided_cases,
    fitted_in,
    kept_in_a_book,
    noise_of_empty_batches,
    odd_kinds,
    paid,
    some_cases,
    some_cases_and_crops,
    stumbles,
    written_to,
)
from tests.training.ranks import results, run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


# --- the same result ---------------------------------------------------------------------------------------------------


def _difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_train_what_one_process_does(count):
    """With microbatches of their own size, so that sums are rounded otherwise; no group, and groups of 2 and 4."""
    cases = list(CASES) if SLOW else ["clipless", "bookkeeping", "mixed"] if count == 2 else ["clipless"]
    alone, found = some_cases(cases, None, False), results(count, some_cases, cases, None, False)
    for case in cases:
        assert all(_difference(found[0][case], other[case]) == 0 for other in found)
        assert _difference(alone[case], found[0][case]) < 1e-5, case
        assert _difference(alone[case], weights(CASES[case][0]())) > 0.05, "nothing was trained"


def test_a_private_run_is_the_same_to_the_bit_on_any_number_of_ranks():
    cases = list(CASES) if SLOW else ["clipless with dropout", "bookkeeping, adaptive"]
    one, three = results(1, some_cases_and_crops, cases), results(3, some_cases_and_crops, cases)
    for found in three:
        assert found.keys() == {*cases, "crops"}
        assert all(_difference(found[case], one[0][case]) == 0 for case in found)


@pytest.mark.parametrize("count", [2, 4])
def test_divided_models_train_what_one_process_does(count):
    """fully_shard: each rank keeps a part of the weights and of the optimiser's state, and the result is that of one process."""
    cases = ["clipless", "bookkeeping", "mixed"]
    alone, found = some_cases(cases, None, False), results(count, divided_cases, cases, None, False)
    for case in cases:
        assert all(_difference(found[0][case], other[case]) == 0 for other in found)
        assert _difference(alone[case], found[0][case]) < 1e-5, case
        assert _difference(alone[case], weights(CASES[case][0]())) > 0.05, "nothing was trained"
        assert sum(each[f"{case}: share"] for each in found) == pytest.approx(1)


def test_a_divided_private_run_is_the_whole_one_to_the_bit():
    cases = ["clipless with dropout", "bookkeeping, adaptive"]
    one, divided = results(1, some_cases, cases, 8, True), results(3, divided_cases, cases, 8, True)
    for case in cases:
        assert all(_difference(found[case], one[0][case]) == 0 for found in divided)


def test_divided_models_with_shared_frozen_and_standardised_layers():
    for found in results(2, odd_kinds):
        assert found == {"tied": 0.0, "settled": 0.0, "statistics": 0.0}


def test_a_divided_model_is_watched():
    for found in results(2, written_to):
        assert found["outside"] > 10
        assert found["inside"] <= 1 + 1e-6, "it was projected before the next step computed anything"
        assert found["same function"]
        assert found["past"][0] == "ConfigurationError"
        assert "has no noise" in found["past"][1]
        assert found["back"] == 3
        assert found["changed"][0] == "CheckpointError"
        assert found["moved"] > 0
        assert found["rate"] == pytest.approx(found["rate of whole"], rel=1e-12)


# --- noise -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divided", [False, True])
def test_noise_is_added_once_in_total(divided):
    """Not once a rank: its variance is the plan's, not 3 times that, nor a third; and all ranks have drawn the same."""
    found = results(3, noise_of_empty_batches, divided)
    (drawn, std), others = found[0], found[1:]
    assert all(torch.equal(drawn, other) for other, _ in others)
    share = float(drawn.double().var()) / std**2
    assert abs(share - 1) < 5 * math.sqrt(2 / drawn.numel()), share
    correlation = float((drawn[0] * drawn[1]).mean()) / std**2
    assert abs(correlation) < 5 / math.sqrt(drawn[0].numel()), "two steps share noise"


# --- what is refused ---------------------------------------------------------------------------------------------------


def test_ranks_that_were_given_different_things_are_refused(tmp_path):
    for found in results(2, disagreements, str(tmp_path)):
        messages = {name: text for name, value in found.items() if isinstance(value, tuple) for _, text in [value]}
        assert "the initial weights of rank 1 differs" in messages["weights"]
        assert "the plan of rank 1 differs" in messages["plan"]
        assert "the optimiser of rank 1 differs" in messages["optimiser"]
        assert "an argument of the engine of rank 1 differs" in messages["argument"]
        assert "the training data of rank 1 differs" in messages["data"]
        assert "what step 0 depends on of rank 1 differs" in messages["batch"]
        assert "what step 0 depends on of rank 1 differs" in messages["moved"]
        assert found["steps"] == found["alone steps"] == 0
        assert found["alone"][0] == "UnsupportedError"  # on both, though only the second has refused
        assert "something of this rank's own" in messages["alone"]
        assert "an unexpected OSError" in messages["unread"]  # its words may hold a record's
        assert found["wrapped"][0] == found["partly"][0] == found["policy"][0] == "UnsupportedError"
        assert "fully_shard the model itself, too" in messages["partly"]
        assert "MixedPrecisionPolicy" in messages["policy"]
        assert "microbatch_size must be" in messages["own argument"]
        assert "has hooks" in messages["own hook"]
        assert "a record contains a NaN" in messages["own data"]
        assert "shape" in messages["own batch"]
        assert found["budget"][0] == "BudgetError"  # on both, though only the first has asked
        assert found["released"] == 0


def test_what_fails_on_one_rank_ends_the_run_on_all(tmp_path):
    """After the sums, too. The others hear which rank failed of what and where, not its words, which may tell of its records;
    and they can go on to another run, none waits for another.
    """
    found = results(2, stumbles, str(tmp_path))
    for name, failing in {"optimiser": 1, "callback": 0, "evaluation": 0, "release": 1, "file": 0}.items():
        kind, own = found[failing][name]
        assert (kind, own) == ("OSError" if name == "file" else "RuntimeError", "this rank's own")
        heard, told = found[1 - failing][name]
        assert heard == "UnexpectedError", name
        assert told.startswith(f"rank {failing}: an unexpected {kind} at training/"), name
        assert own not in told, name
    for each in found:
        assert "an argument of the engine of rank 1 differs" in each["seed"][1]
        assert "an argument of fit of rank 1 differs" in each["evaluations"][1]
        assert "the mode (training or evaluation) of a layer of rank 1 differs" in each["mode"][1]


def test_processes_that_are_not_joined_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = small()
    with pytest.raises(ConfigurationError, match=r"one of 2 processes .*init_process_group"):
        engine_of(model, planned(model, LOSS), loss=LOSS)
    with pytest.raises(ConfigurationError, match="one of 2 processes"):
        lipdp.fit(model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), planned(model, LOSS), toy())


# --- the whole run, its account and its file ---------------------------------------------------------------------------


@pytest.mark.parametrize("private", [True, False] if SLOW else [True])
def test_a_rank_is_killed_and_the_run_goes_on_with_another_number(tmp_path, private):
    """Same ε, same weights, same history as the run that nothing has happened to; in a private run to the last bit."""
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole = results(1, fitted_in, {"folder": str(folders[0]), "private": private})[0]
    outcomes = run_ranks(2, fitted_in, {"folder": str(folders[1]), "private": private, "dies_at": 5})
    assert outcomes[1] == ("gone", None)
    assert outcomes[0][0] == "error"
    for found in results(3, fitted_in, {"folder": str(folders[1]), "private": private, "resume": True}):
        assert _difference(found[0], whole[0]) == 0
        assert found[1:] == whole[1:]


def test_a_divided_run_goes_on_with_another_number(tmp_path):
    """The checkpoint is of torch.distributed.checkpoint; who reads it may be divided otherwise, or not at all."""
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole = results(1, fitted_in, {"folder": str(folders[0]), "private": True})[0]
    outcomes = run_ranks(2, fitted_in, {"folder": str(folders[1]), "private": True, "dies_at": 5, "divided": True})
    assert outcomes[1] == ("gone", None)
    assert outcomes[0][0] == "error"
    assert len(list(folders[1].glob("run.shards-*/*.distcp"))) == 4, "two ranks, two checkpoints"
    for count, divided in ((3, True), (2, False), (1, True)):
        folder = shutil.copytree(folders[1], tmp_path / f"{count} {divided}")
        for found in results(count, fitted_in, {"folder": str(folder), "private": True, "resume": True, "divided": divided}):
            assert _difference(found[0], whole[0]) == 0
            assert found[1:] == whole[1:]
        assert len(list(folder.glob("run.shards-*"))) == (2 if divided else 0)


def test_files_of_shards_run_no_code(tmp_path):
    """Metadata of torch.distributed.checkpoint are a pickle: of it nothing is read but what describes tensors."""
    run_ranks(2, fitted_in, {"folder": str(tmp_path), "private": True, "dies_at": 5, "divided": True})
    state = load_checkpoint(tmp_path / "run", torch.device("cpu"))
    folder = tmp_path / state["shards"]

    def read():
        return take_back(state["engine"], folder, None, together=False)

    assert read()["model"]["1.weight"].shape == (16, 6)

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps([metadata, Evil()]))
    with pytest.raises(CheckpointError, match="describes no tensor"):
        read()
    assert not (tmp_path / "executed").exists()
    index = next(iter(metadata.storage_data))
    object.__setattr__(metadata.storage_data[index], "relative_path", "../run")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="files elsewhere"):
        read()
    with pytest.raises(CheckpointError, match="no folder of its own"):
        shards_of_file({"shards": "../x.shards-1"}, tmp_path / "run")


def test_a_rank_is_killed_in_the_first_step(tmp_path):
    """The size of microbatches follows from the number of ranks, unless somebody has kept it: it was, before the first step."""
    outcomes = run_ranks(2, fitted_in, {"folder": str(tmp_path), "private": True, "dies_at": 0, "rows": None})
    assert outcomes[1] == ("gone", None)
    state = load_checkpoint(tmp_path / "run", torch.device("cpu"))["engine"]
    assert state["steps"] == 0
    assert isinstance(state["rows"], int)


def test_the_budget_is_charged_once_and_the_file_belongs_to_the_first(tmp_path):
    found = results(2, paid, str(tmp_path))
    assert found[0] == found[1]
    (epsilon, again), _ = found
    once = lipdp.privacy.epsilon(noise_multiplier=1.0, sampling_rate=1 / 8, steps=4, delta=1e-4)
    assert Budget(tmp_path / "budget").spent == pytest.approx(once, rel=1e-3)
    assert epsilon > once  # another accountant
    assert again[0] == CheckpointError.__name__
    assert "exists" in again[1]


# --- exact sums --------------------------------------------------------------------------------------------------------


def test_exact_sums_are_the_sums():
    """Against fractions: sums of 1,000 numbers of all sizes, in any order, to half of 2^-23 of the grid."""
    std = 0.37
    unit, draw = unit_of(std), torch.Generator().manual_seed(0)
    values = torch.randn(1000, 4, dtype=torch.float64, generator=draw) * torch.tensor([1e-12, 1.0, 1e6, 3e8])
    for order in (torch.arange(1000), torch.randperm(1000, generator=draw)):
        pair = torch.zeros(2, 4, dtype=torch.int64)
        for value in values[order]:
            pair += exact(value, unit)
        found = carried(pair.clone())
        assert int(found[1].abs().max()) <= 2**47
        for column in range(4):
            true = sum((Fraction(float(v)) for v in values[:, column]), Fraction(0))
            whole = (Fraction(int(found[0, column])) + Fraction(int(found[1, column]), 2**48)) * Fraction(unit)
            assert abs(whole - true) <= 1000 * Fraction(grid(std)) / 2**25
            assert float(floating(pair, unit)[column]) == pytest.approx(float(true), rel=1e-15, abs=float(grid(std)) / 2**20)
        if order[0] == 0 and bool((order.diff() == 1).all()):
            in_order = floating(pair, unit)
    assert torch.equal(in_order, floating(pair, unit))


def test_sums_that_might_not_fit_are_refused():
    check_range(10**9, 100, 1000, 0.5)
    with pytest.raises(ConfigurationError, match="too small for several processes"):
        check_range(10**9, 100, 2, 1e-5)
    with pytest.raises(ConfigurationError, match="larger microbatch_size"):
        check_range(10**9, 10**6, 2, 1.0)


def test_a_release_is_in_the_book_before_any_rank_has_it(tmp_path):
    one, other = results(2, kept_in_a_book, str(tmp_path))
    for found in (one, other):
        assert found["refused"][0] == "CheckpointError"
        assert "No space left" in found["refused"][1]
        assert not found["moved"]
        assert "an argument of the engine" in found["alone"][1]
    assert one["lines"] == 2
