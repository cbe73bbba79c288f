"""The account of a dataset: charges, refusals, reserved runs and what is given back."""

from __future__ import annotations

import copy
import pickle
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lipdp
from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy import Approximate, Budget, PrivateRun, Pure, Release, epsilon
from lipdp.privacy.budget import open_budget

RUN = PrivateRun(0.05, ((3.0, 40), (2.5, 20)), (Release("statistics", "gaussian", 30.0), Release("clip", "pure", 0.05)))


def begun(path: Path, epsilon: float = 2.0, delta: float = 1e-5, **options: Any) -> Budget:
    return Budget(path, epsilon=epsilon, delta=delta, dataset="survey", **options)


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    assert (budget.epsilon, budget.delta, budget.dataset, budget.adjacency) == (2.0, 1e-5, "survey", "add_remove")
    assert (budget.spent, budget.remaining, budget.entries(), budget.events(), budget.runs()) == (0.0, 2.0, [], [], {})
    assert "survey" in repr(budget)
    again = lipdp.privacy.Budget(str(tmp_path / "a"))
    assert (again.epsilon, again.dataset, again.path) == (2.0, "survey", (tmp_path / "a").resolve())
    assert begun(tmp_path / "b", adjacency="replace_one").adjacency == "replace_one"


def test_decimals_add_up_in_a_pure_budget(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a", epsilon=1.0, delta=0.0)
    for _ in range(10):
        budget.charge(0.1, "mean")
    assert (budget.spent, budget.remaining) == (1.0, 0.0)
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(BudgetError, match="has 0 of its epsilon 1 left"):
        budget.charge(1e-6)
    assert (tmp_path / "a").read_bytes() == before
    with pytest.raises(BudgetError, match="delta 0"):
        budget.charge(dp_event.GaussianDpEvent(100.0))


def test_a_run_that_was_planned_for_the_whole_budget_fits_and_nothing_else_does(tmp_path: Path) -> None:
    run = PrivateRun(0.05, ((3.0, 60),))
    cost = epsilon(noise_multiplier=3.0, sampling_rate=0.05, steps=60, delta=1e-5)
    budget = begun(tmp_path / "a", epsilon=cost)
    budget.reserve("run", run, "training")
    assert budget.spent <= cost
    assert budget.spent == pytest.approx(cost, rel=1e-6)
    with pytest.raises(BudgetError, match="training would bring"):
        budget.reserve("other", run, "training")
    with pytest.raises(BudgetError):
        budget.charge(0.01)
    small = begun(tmp_path / "b", epsilon=cost * 0.999)
    with pytest.raises(BudgetError):
        small.reserve("run", run)
    assert small.entries() == []


def test_epsilon_with_charges_nothing(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    expected = budget.epsilon_with(RUN)
    assert budget.entries() == []
    budget.charge(RUN, "by hand")
    assert budget.spent == expected
    assert budget.epsilon_with(50.0) > 50


def test_every_kind_of_cost(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a", epsilon=20.0)
    for cost in (
        0.1,
        Pure(0.1, "replace_one"),
        Approximate(0.1, 1e-8),
        dp_event.GaussianDpEvent(10.0),
        dp_event.LaplaceDpEvent(10.0),
        dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(5.0)), 7),
        RUN,
        Release("statistics", "gaussian", 10.0),
        [0.1, Pure(0.2)],
    ):
        before = budget.spent
        budget.charge(cost)
        assert before < budget.spent < 20
    with pytest.raises(ConfigurationError, match="nothing to charge"):
        budget.charge(dp_event.NoOpDpEvent())
    with pytest.raises(ConfigurationError, match="at least 1"):
        budget.charge(dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(10.0), -3))
    assert Budget(tmp_path / "a").spent == pytest.approx(budget.spent, abs=1e-9)


# ------------------------------------------------------------------------------------------------------- reserved runs


def counts(budget: Budget) -> dict[str, int]:
    return {repr(event): count for event, count in budget.events()}


def released(steps: int, *one_off: str) -> PrivateRun:
    first = min(steps, 40)
    return PrivateRun(0.05, ((3.0, first), (2.5, steps - first)), tuple(r for r in RUN.releases if r.name in one_off))


def costs(tmp_path: Path, run: PrivateRun) -> dict[str, int]:
    other = begun(tmp_path / f"reference {uuid.uuid4()}", epsilon=100.0)
    if run.steps or run.releases:
        other.charge(run)
    return counts(other)


def test_an_early_end_gives_back_what_was_never_released(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    held = budget.reserve("run", RUN)
    assert counts(budget) == costs(tmp_path, RUN)
    held.close(47, ["statistics"])
    assert counts(budget) == costs(tmp_path, released(47, "statistics"))
    assert counts(Budget(budget.path)) == counts(budget)
    assert budget.runs()["run"] == {"steps": 60, "released": 47, "reserved": False}
    with pytest.raises(ConfigurationError, match="not held"):
        held.close(10)


def test_a_run_is_paid_for_once_however_often_it_is_resumed(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    budget.reserve("run", RUN)  # and killed
    before = budget.spent
    held = Budget(budget.path).reserve("run", RUN)
    assert budget.spent == before
    held.close(60, ["statistics", "clip"])
    assert budget.spent == before
    assert budget.runs()["run"]["reserved"]  # the killed one may have released anything


def test_a_killed_holder_leaves_all_of_it_reserved_for_good(tmp_path: Path) -> None:
    """It may have released more than its last checkpoint knows."""
    budget = begun(tmp_path / "a")
    budget.reserve("run", RUN)
    held = budget.reserve("run", RUN)
    held.close(5)
    assert counts(budget) == costs(tmp_path, RUN)


def test_positions_never_go_back(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    budget.reserve("run", RUN).close(50, ["clip"])
    held = budget.reserve("run", RUN)  # resumed from an older checkpoint
    assert counts(budget) == costs(tmp_path, RUN)
    held.close(10, ["statistics"])
    assert counts(budget) == costs(tmp_path, released(50, "statistics", "clip"))


def test_a_paused_run_keeps_what_it_needs(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a", epsilon=0.9)
    budget.reserve("run", RUN).close(10, keep=True)
    assert counts(budget) == costs(tmp_path, RUN)
    budget.reserve("run", RUN).close(20)
    assert counts(budget) == costs(tmp_path, released(20))


def test_what_was_given_back_may_be_gone_when_the_run_is_resumed(tmp_path: Path) -> None:
    total = begun(tmp_path / "reference", epsilon=9.0).epsilon_with(RUN) + 0.01
    budget = begun(tmp_path / "a", epsilon=total)
    budget.reserve("run", RUN).close(10)
    budget.charge(total - budget.spent - 0.05, "somebody else")
    before = budget.path.read_bytes()
    with pytest.raises(BudgetError, match="would bring"):
        budget.reserve("run", RUN)
    assert budget.path.read_bytes() == before


def test_runs_of_one_name_have_one_plan(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    held = budget.reserve("run", RUN)
    for other in (PrivateRun(0.05, ((3.0, 40), (2.5, 21)), RUN.releases), PrivateRun(0.05, RUN.segments)):
        with pytest.raises(ConfigurationError, match="not the same run"):
            budget.reserve("run", other)
    for steps, one_off in ((61, []), (-1, []), (3, ["other"])):
        with pytest.raises(ConfigurationError, match="can't have released"):
            held.close(steps, one_off)
    assert len(budget.entries()) == 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["open", "close", "pause", "charge"]), st.integers(0, 60)), max_size=12))
def test_any_history_counts_at_least_what_was_released(tmp_path_factory: Any, history: list[tuple[str, int]]) -> None:
    budget = begun(tmp_path_factory.mktemp("x") / "a", epsilon=50.0)
    open_, furthest, crashed_to, pure = [], 0, 0, 0
    for action, steps in history:
        if action == "open":
            open_.append(budget.reserve("run", RUN))
        elif action in ("close", "pause") and open_:
            open_.pop(steps % len(open_)).close(steps, keep=action == "pause")
            furthest = max(furthest, steps)
        elif action == "charge":
            budget.charge(0.01)
            pure += 1
    crashed_to = 60 if open_ else 0
    for reader in (budget, Budget(budget.path)):
        noise = sum(count for event, count in reader.events() if isinstance(event, dp_event.PoissonSampledDpEvent))
        stated = sum(count for event, count in reader.events() if event == Pure(0.01))
        assert stated == pure
        assert noise >= max(furthest, crashed_to)
        assert noise <= 61


# ------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("inf")}, "epsilon"),
        ({"epsilon": "3"}, "epsilon"),
        ({"epsilon": True}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"delta": -1e-9}, "delta"),
        ({"delta": float("nan")}, "delta"),
        ({"dataset": ""}, "dataset"),
        ({"dataset": 3}, "dataset"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"epsilon": None}, "give epsilon"),
        ({"delta": None}, "give delta"),
        ({"dataset": None}, "give dataset"),
    ],
)
def test_bad_arguments_begin_nothing(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Budget(tmp_path / "a", **{"epsilon": 1.0, "delta": 1e-5, "dataset": "d", **changes})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_budget_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    begun(path)
    begun(path, adjacency="add_remove")
    for changes, message in (
        ({"epsilon": 3.0}, "epsilon 2, not 3"),
        ({"delta": 1e-4}, "delta 1e-05, not 0.0001"),
        ({"dataset": "other"}, "belongs to dataset 'survey'"),
        ({"adjacency": "replace_one"}, "adjacency 'add_remove', not 'replace_one'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Budget(path, **changes)


def test_paths_in_the_place_of_budgets(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    assert open_budget(None) is None
    assert open_budget(budget) is budget
    assert open_budget(str(tmp_path / "a")).path == budget.path
    with pytest.raises(ConfigurationError, match="lipdp budget create"):
        open_budget(tmp_path / "b")
    with pytest.raises(ConfigurationError, match="budget is 3"):
        open_budget(3)  # type: ignore[arg-type]


def test_copies_are_the_same_account(tmp_path: Path) -> None:
    budget = begun(tmp_path / "a")
    assert copy.deepcopy(budget) is budget
    other = pickle.loads(pickle.dumps(budget))
    other.charge(1.5)
    assert budget.spent == pytest.approx(1.5, abs=1e-4)


def test_threads_share_an_object(tmp_path: Path) -> None:
    budget, paid = begun(tmp_path / "a", epsilon=0.5, delta=0.0), []

    def work() -> None:
        for _ in range(20):
            try:
                budget.charge(0.01)
                paid.append(1)
            except BudgetError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paid) == 50 == len(budget.entries())


def test_the_cost_of_a_charge_does_not_grow(tmp_path: Path, monkeypatch: Any) -> None:
    """Counted in work, not in time: bytes read and lines understood for one charge are those of one entry."""
    import lipdp.privacy._journal as journal

    budget = begun(tmp_path / "a", epsilon=100.0)
    read: list[int] = []
    real = journal._read
    monkeypatch.setattr(journal, "_read", lambda file, start, stop: read.append(stop - start) or real(file, start, stop))
    work = []
    for number in range(300):
        read.clear()
        budget.charge(0.001 if number % 2 else dp_event.GaussianDpEvent(200.0))
        work.append(sum(read))
    assert max(work) == min(work)
    Budget(tmp_path / "a").charge(0.1)
    read.clear()
    budget.charge(0.1)  # catches up with one entry of another
    assert 0 < sum(read) - work[0] < 500


def test_statistics_are_charged_before_they_are_drawn(tmp_path: Path, monkeypatch: Any) -> None:
    import torch

    from lipdp.privacy import Stream, above_threshold, clip_search, moments, private_moments, private_quantile, quantile

    budget = begun(tmp_path / "a", epsilon=3.0)
    rows = torch.linspace(0, 1, 50)
    source = Stream()
    common: dict[str, Any] = {"radius": 1.0, "dataset_size": 50, "generator": source, "budget": budget}
    private_moments([rows[:, None]], multiplier=20.0, **common)
    private_quantile(rows, 0.5, (0, 1), epsilon=0.1, budget=str(tmp_path / "a"), adjacency="replace_one")
    above_threshold([0.0, 5.0], 1.0, epsilon=0.2, budget=budget)
    clip_search(rows, [0.5, 1.0], dataset_size=50, epsilon=0.3, budget=budget)
    gaussian = dp_event.PoissonSampledDpEvent(1.0, dp_event.GaussianDpEvent(20.0))
    assert budget.events() == [(gaussian, 1), (Pure(0.1, "replace_one"), 1), (Pure(0.2), 1), (Pure(0.3), 1)]
    assert [entry["what"] for entry in budget.entries()][:2] == ["statistics of channels", "a quantile (0.5)"]

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("noise was drawn for a release that was refused")

    monkeypatch.setattr(moments, "add_noise", never)
    monkeypatch.setattr(quantile, "_stream", never)
    with pytest.raises(BudgetError):
        private_moments([rows[:, None]], multiplier=0.3, **common)
    with pytest.raises(BudgetError):
        private_quantile(rows, 0.5, (0, 1), epsilon=5.0, budget=budget)
    with pytest.raises(BudgetError):
        clip_search(rows, [0.5, 1.0], dataset_size=50, epsilon=5.0, budget=budget)
    assert len(budget.entries()) == 4
