"""The budget's file under attack: killed processes, full disks, cut and edited files, many processes at once.

Whatever happens, a state that is accepted says at least what was granted.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from lipdp.errors import BudgetError, ConfigurationError, DataError, LipdpError
from lipdp.privacy import Budget, PrivateRun, Release
from lipdp.privacy._journal import Journal
from tests.failpoints import Failpoint, die, in_child, no_space, points

EVERYTHING = os.environ.get("LIPDP_KILLS", "") == "all"
"""All points, not a share of them."""
PROCESSES = int(os.environ.get("LIPDP_PROCESSES", "6"))
CHARGES = int(os.environ.get("LIPDP_CHARGES", "20"))

RUN = PrivateRun(1.0, ((50.0, 4),), (Release("statistics", "gaussian", 90.0),))


def begun(path: Path, epsilon: float = 2.0, delta: float = 1e-5) -> Budget:
    return Budget(path, epsilon=epsilon, delta=delta, dataset="d")


def some(cases: list[Any], share: int) -> list[Any]:
    return cases if EVERYTHING else cases[::share]


def state(path: Path) -> tuple[int, float]:
    budget = Budget(path)
    return len(budget.entries()), sum(count * float(event.epsilon) for event, count in budget.events() if hasattr(event, "epsilon"))


# ---------------------------------------------------------------------------------------------------------- kill -9


def spend(path: Path, say: Any) -> None:
    """A budget's life: begun, charged, a run reserved, given back in part, charged again."""
    budget = begun(path)
    say("begun")
    for number in range(4):
        budget.charge(0.1 + number / 100, f"release {number}")
        say(f"charged {0.1 + number / 100}")
    held = budget.reserve("run", RUN, "training")
    say("reserved")
    held.close(2, ["statistics"])
    say("closed")
    budget.charge(0.01, "last")
    say("charged 0.01")


def test_killed_anywhere_and_never_less_than_was_granted(tmp_path: Path) -> None:
    cases = points(lambda: spend(tmp_path / "count", lambda _: None))
    assert len(cases) >= 80
    ends = set()
    for at, when in some(cases, 3):
        path = tmp_path / f"{at}-{when}"
        said, code = in_child(lambda say, path=path: spend(path, say), Failpoint(at, when, die))
        assert code == -9
        budget = begun(path)  # there, or begun now; never unreadable
        budget.check()
        granted = sum(float(line.split()[1]) for line in said if line.startswith("charged"))
        _, counted = state(path)
        assert granted <= counted + 1e-12 <= granted + 0.15  # at most the one that was under way
        if "reserved" in said:
            run = budget.runs()["run"]
            assert run["reserved"] or run["released"] == 2
            assert sum(count for event, count in budget.events() if not hasattr(event, "epsilon")) >= 3
        if said:
            assert "begun" in said[0]
        before = counted
        budget.charge(0.05, "after")
        assert state(path)[1] == pytest.approx(before + 0.05)
        ends.add(len(said))
    assert len(ends) >= 5


def test_killed_while_it_is_begun_and_begun_again_by_others(tmp_path: Path) -> None:
    for at, when in points(lambda: begun(tmp_path / "count") and None):
        path = tmp_path / f"{at}-{when}"
        in_child(lambda _, path=path: begun(path) and None, Failpoint(at, when, die))
        budget = begun(path)
        budget.charge(1.0)
        assert sorted(p.name for p in tmp_path.glob(f"{path.name}*")) == [path.name, f"{path.name}.head"]


# -------------------------------------------------------------------------------------------------------- full disks


def test_a_full_disk_at_every_point_of_a_charge(tmp_path: Path) -> None:
    path = tmp_path / "a"
    budget = begun(path, epsilon=50.0)
    budget.charge(0.25)
    cases = points(lambda: budget.charge(0.25))
    granted = 0.5
    for at, when in cases:
        with Failpoint(at, when, no_space).installed(), pytest.raises(BudgetError, match="Nothing was released"):
            budget.charge(0.5, "no room")
        for reader in (budget, Budget(path)):
            reader.check()
        counted = state(path)[1]
        assert counted in (granted, granted + 0.5)  # written whole and not promised: it counts, conservatively
        budget.charge(0.25, "room again")
        granted = counted + 0.25
        assert state(path)[1] == granted
    assert granted < 0.5 + len(cases) * 0.75  # in some of them the file was put back as it was


def test_a_disk_that_is_full_where_the_line_is_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    budget = begun(path)
    budget.charge(0.25)
    before = path.read_bytes(), (tmp_path / "a.head").read_bytes()
    for when in ("before", "half", "after"):
        with Failpoint(0, when, no_space).installed(), pytest.raises(BudgetError, match="No space left"):
            budget.charge(0.5)
        assert (path.read_bytes(), (tmp_path / "a.head").read_bytes()) == before
    budget.charge(0.5)


def test_a_full_disk_while_it_is_begun(tmp_path: Path) -> None:
    for at, when in points(lambda: begun(tmp_path / "count") and None):
        path = tmp_path / f"{at}-{when}"
        with Failpoint(at, when, no_space).installed(), pytest.raises(BudgetError):
            begun(path)
        begun(path).charge(0.5)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
def test_a_file_that_can_not_be_written_refuses_and_is_still_read(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    path = tmp_path / "a"
    budget = begun(path)
    budget.charge(0.25)
    real = os.open

    def read_only(name: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(number, os.strerror(number))
        return real(name, flags, *rest, **options)

    before = path.read_bytes()
    monkeypatch.setattr(os, "open", read_only)
    for reader in (budget, Budget(path)):
        with pytest.raises(BudgetError, match="can't be written"):
            reader.charge(0.25)
        assert len(reader.entries()) == 1
        assert reader.spent <= 0.25
    with pytest.raises(BudgetError, match="can't be begun"):
        begun(tmp_path / "b")
    monkeypatch.undo()
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------------------------------ cut and edited


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "full"
    budget = begun(path)
    for number in range(5):
        budget.charge(0.125, f"release {number}")
    return path


def refused(path: Path) -> None:
    with pytest.raises(DataError, match="damaged"):
        Budget(path)


def test_cut_at_every_byte_of_the_last_three_lines(full: Path, tmp_path: Path) -> None:
    content = full.read_bytes()
    shutil.copy(f"{full}.head", tmp_path / "cut.head")
    start = sum(map(len, content.splitlines(keepends=True)[:-3]))
    for length in range(start, len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        refused(tmp_path / "cut")
    (tmp_path / "cut").write_bytes(content)
    assert state(tmp_path / "cut")[0] == 5


def test_every_line_boundary_from_the_first_on(full: Path) -> None:
    lines = full.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        full.write_bytes(b"".join(lines[:kept]))
        refused(full)


def test_an_edited_byte_anywhere(full: Path) -> None:
    content = full.read_bytes()
    step = 1 if EVERYTHING else 5
    for place in range(0, len(content), step):
        for change in (1, 32):
            edited = bytes([content[place] ^ change])
            full.write_bytes(content[:place] + edited + content[place + 1 :])
            refused(full)


def test_naive_edits(full: Path) -> None:
    content = full.read_bytes()
    lines = content.splitlines(keepends=True)
    raised = lines[0].replace(b'"epsilon": "2"', b'"epsilon": "9"')
    cheaper = lines[-1].replace(b"1/8", b"1/9")
    assert raised != lines[0]
    assert cheaper != lines[-1]
    for edited in (
        [raised, *lines[1:]],
        [*lines[:-1], cheaper],
        [*lines[:-1], cheaper.replace(b"1/9", b"1/80")],
        lines[:2] + lines[3:],
        [lines[0], *reversed(lines[1:])],
        [*lines, lines[-1]],
        [*lines, b"hello\n"],
        [lines[0].replace(b'"delta": "1/100000"', b'"delta": "1/10"'), *lines[1:]],
        [content[:-1] + b" \n"],
        [content.replace(b"\n", b"\r\n")],
    ):
        full.write_bytes(b"".join(edited))
        refused(full)


def test_a_raised_header_before_the_first_charge(tmp_path: Path) -> None:
    path = tmp_path / "a"
    begun(path)
    path.write_bytes(path.read_bytes().replace(b'"epsilon": "2"', b'"epsilon": "9"'))
    refused(path)


def test_a_damaged_head_is_refused_or_says_all(full: Path) -> None:
    """Also together with a file that was cut at a line's end: that is what a head is for."""
    head_path = Path(f"{full}.head")
    content, head = full.read_bytes(), head_path.read_bytes()
    lines = content.splitlines(keepends=True)
    for length in range(0, len(head), 1 if EVERYTHING else 7):
        for kept in (6, 5, 4):
            full.write_bytes(b"".join(lines[:kept]))
            for damaged in (head[:length], head[:length] + b"x" + head[length + 1 :], head[:length].ljust(len(head), b"\0")):
                if damaged == head:
                    continue
                head_path.write_bytes(damaged)
                try:
                    count = state(full)[0]
                except DataError:
                    continue
                assert count == 5
    head_path.unlink()
    refused(full)


def test_a_file_that_is_gone_is_not_begun_anew(full: Path) -> None:
    full.unlink()
    with pytest.raises(DataError, match="had 5 entries"):
        begun(full)
    with pytest.raises(ConfigurationError, match="there is no budget"):
        Budget(full)


def test_a_process_that_has_seen_more_notices_old_copies_of_both_files(full: Path, tmp_path: Path) -> None:
    for name in ("full", "full.head"):
        shutil.copy(tmp_path / name, tmp_path / f"{name}.backup")
    watching = Budget(full)
    Budget(full).charge(0.125)
    assert len(watching.entries()) == 6
    assert watching.spent > 0
    for name in ("full", "full.head"):
        shutil.copy(tmp_path / f"{name}.backup", tmp_path / name)
    for _ in range(2):  # not only the first time
        with pytest.raises(DataError, match="when this process last read it"):
            watching.charge(0.125)
    Budget(full).charge(0.25, "another history")
    with pytest.raises(DataError, match="when this process last read it"):
        watching.charge(0.125)


def test_an_older_head_with_the_whole_file_counts_all(full: Path, tmp_path: Path) -> None:
    shutil.copy(f"{full}.head", tmp_path / "old")
    budget = Budget(full)
    for _ in range(3):
        budget.charge(0.125)
    shutil.copy(tmp_path / "old", f"{full}.head")
    assert state(full) == (8, 1.0)
    Budget(full).charge(0.5)
    assert state(full) == (9, 1.5)


def test_an_unfinished_line_is_no_charge_and_is_removed(full: Path) -> None:
    content = full.read_bytes()
    for tail in (b"{", b'{"kind": "charge", "events"', b"\0" * 100):
        full.write_bytes(content + tail)
        assert state(full)[0] == 5
        assert full.read_bytes() == content + tail  # readers change nothing
    Budget(full).charge(0.125)
    assert full.read_bytes().startswith(content + b'{"by"')
    assert state(full)[0] == 6


def test_lines_that_follow_but_make_no_sense(tmp_path: Path) -> None:
    """Somebody with the right digests: what can't be understood is not skipped."""
    for number, entry in enumerate(
        (
            {"kind": "refund", "events": []},
            {"kind": "charge", "events": [[{"type": "pure", "epsilon": "-1", "adjacency": None}, 1]]},
            {"kind": "charge", "events": [[{"type": "pure", "epsilon": "1/4", "adjacency": None}, -1]]},
            {"kind": "charge", "events": [[{"type": "os", "of": {}}, 1]]},
            {"kind": "charge"},
            {"kind": "end", "run": "x", "holder": "y", "steps": 0, "one_off": [], "keep": False},
        )
    ):
        budget = begun(tmp_path / str(number))
        budget.charge(0.5)
        with Journal(budget.path, "budget").writing() as session:
            session.new_lines()
            session.append(entry)
        with pytest.raises(DataError, match="makes no sense"):
            Budget(tmp_path / str(number))
        with pytest.raises(DataError, match="makes no sense"):
            budget.charge(0.1)


def test_other_files(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("text", b"hello\n"), ("json", b'{"a": 1}\n'), ("binary", bytes(range(256)))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LipdpError, match=r"damaged|older"):
            begun(tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    (tmp_path / "ledger").write_text('{"budget": "2", "dataset": "d", "ledger": 1, "previous": ""}\n')
    with pytest.raises(ConfigurationError, match="older lipdp"):
        Budget(tmp_path / "ledger")
    with pytest.raises(LipdpError):
        Budget(tmp_path)


def test_links_lead_to_one_account(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    budget = begun(tmp_path / "there" / "a")
    (tmp_path / "here" / "b").symlink_to(tmp_path / "there" / "a")
    Budget(tmp_path / "here" / "b").charge(1.5)
    with pytest.raises(BudgetError):
        budget.charge(1.0)
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["b"]
    assert stat.S_ISREG((tmp_path / "there" / "a").stat().st_mode)


# ------------------------------------------------------------------------------------------------------ many processes


def _race(path: str, start: Any, results: Any, count: int) -> None:
    budget, paid = Budget(path), 0
    start.wait()
    for _ in range(count):
        try:
            budget.charge(0.001, "race")
            paid += 1
        except BudgetError:
            pass
    results.put(paid)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_many_processes_never_spend_more_and_lose_nothing(tmp_path: Path, delta: float) -> None:
    """Together they want a third more than there is."""
    path, context = tmp_path / "a", multiprocessing.get_context("fork")
    allowed = 3 * PROCESSES * CHARGES // 4
    # With a delta, charges compose: more of them fit than their sum says, and their number has to be that of dp-accounting.
    budget = begun(path, epsilon=allowed / 1000 if delta == 0 else 0.02, delta=delta)
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_race, args=(str(path), start, results, CHARGES), daemon=True) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    start.set()
    paid = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(paid) == len(budget.entries()) == sum(count for _, count in budget.events())
    budget.check()
    assert budget.spent <= budget.epsilon
    if delta == 0:
        assert sum(paid) == allowed
        assert budget.remaining == 0.0
    elif sum(paid) < PROCESSES * CHARGES:
        assert budget.epsilon_with(0.001) > budget.epsilon


def test_processes_that_begin_one_file_at_once(tmp_path: Path) -> None:
    path, context = str(tmp_path / "a"), multiprocessing.get_context("fork")
    results = context.Queue()

    def start() -> None:
        budget = Budget(path, epsilon=1.0, delta=0.0, dataset="d")
        budget.charge(0.125)
        results.put(True)

    workers = [context.Process(target=start) for _ in range(6)]
    for worker in workers:
        worker.start()
    assert all(results.get(timeout=600) for _ in workers)
    for worker in workers:
        worker.join()
    assert Budget(path).remaining == 0.25
