"""The book of a run on disk: nothing is made twice and paid for once, whoever goes on, wherever."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import signal
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import CheckpointError, ConfigurationError, LipdpWarning, RepeatedStepError
from lipdp.training import Callback, positions
from lipdp.training.book import BookFile
from lipdp.training.checkpoint import book_path
from lipdp.training.positions import close_book
from tests.privacy.stand_in import draw_as_on_a_device

from .ranks import fresh_processes

RUN = bytes(range(32))
TAG, OTHER = b"t" * 16, b"o" * 16
NOTHING = f"0 {hashlib.sha256().hexdigest()}"
STEPS = 10


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(200, 24, generator=generator), torch.randint(0, 4, (200,), generator=generator))


def parts(method: str = "bookkeeping"):
    torch.manual_seed(0)
    if method == "clipless":
        model = nn.Sequential(nn.BoundedInput((24,)), nn.SpectralLinear(24, 16, bias=False), nn.SpectralLinear(16, 4, bias=False))
        loss = losses.CrossEntropy()
        more = {}
    else:
        model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        loss, more = torch.nn.CrossEntropyLoss(reduction="none"), {"max_grad_norm": 1.0, "input_shape": (24,)}
    plan = lipdp.plan(
        model,
        loss,
        dataset_size=200,
        batch_size=60,
        delta=1e-3,
        noise_multiplier=1.0,
        steps=STEPS,
        accountant="rdp",
        method=method,
        **more,
    )
    return model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan


def made(path) -> list[list]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def weights(model) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# ------------------------------------------------------------------------------------------------------------ the file


def test_what_was_written_is_read(tmp_path):
    file = BookFile(tmp_path / "book", RUN)
    file.write({(0, 0): TAG})
    file.write({(1, 0): b"", ("statistics", 2): OTHER})
    file.write({(1, 0): OTHER})
    mark = file.mark
    file.close()
    assert (tmp_path / "book").stat().st_mode & 0o777 == 0o600
    again = BookFile(tmp_path / "book", RUN, mark)
    assert again.draws == {(0, 0): TAG, (1, 0): OTHER, ("statistics", 2): OTHER}
    again.close()


def test_cut_anywhere_it_says_all_that_was_whole(tmp_path):
    path = tmp_path / "book"
    file = BookFile(path, RUN)
    mark = file.mark
    for step in range(4):
        file.write({(step, 0): TAG})
    file.close()
    content = path.read_bytes()
    head = content.index(b"\n") + 1
    for length in range(head, len(content) + 1):
        path.write_bytes(content[:length])
        cut = BookFile(path, RUN, mark)
        assert len(cut.draws) == content[head:length].count(b"\n")
        cut.write({(9, 0): OTHER})  # behind whole lines
        cut.close()
        assert BookFile(path, RUN, mark).draws[9, 0] == OTHER


LINES = [
    "",
    "[]",
    "null",
    "[1, 0]",
    "[-1, 0, '']",
    '[1.5, 0, ""]',
    '[true, 0, ""]',
    '[1, -1, ""]',
    '[1, 0, "xyz"]',
    "[1, 0, null]",
    "[" * 9999,
]
LINES += ['[1, 0, "00"]', '[99999999999999999999, 0, ""]', '{"1": 0}', '[[1], 0, ""]', '[NaN, 0, ""]', "\x00\xff"]


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "book"
    BookFile(path, RUN).close()
    with path.open("ab") as file:
        file.write(line.encode() + b"\n")
    with pytest.raises(CheckpointError, match="damaged at the line"):
        BookFile(path, RUN)


def test_the_book_of_another_run_a_lost_one_and_one_that_is_held(tmp_path):
    path = tmp_path / "book"
    with pytest.raises(CheckpointError, match="is not there"):
        BookFile(path, RUN, NOTHING)
    file = BookFile(path, RUN)
    with pytest.raises(CheckpointError, match="is held by another process"):
        BookFile(path, RUN, file.mark)
    file.close()
    with pytest.raises(CheckpointError, match="not the book of this run"):
        BookFile(path, RUN[::-1])
    with pytest.raises(CheckpointError, match="can't be opened"):
        BookFile(tmp_path, RUN)


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path, monkeypatch):
    file = BookFile(tmp_path / "book", RUN)
    file.write({(0, 0): TAG})
    whole, real = (tmp_path / "book").read_bytes(), os.write

    def full(descriptor, content):
        if len(content) > 5:
            return real(descriptor, content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="can't be written"):
        file.write({(1, 0): TAG})
    monkeypatch.undo()
    assert (tmp_path / "book").read_bytes() == whole
    file.write({(1, 0): OTHER})
    file.close()
    assert BookFile(tmp_path / "book", RUN).draws == {(0, 0): TAG, (1, 0): OTHER}


def test_a_write_that_is_interrupted_leaves_nothing_that_was_not_told(tmp_path, monkeypatch):
    """Ctrl-C behind the operating system's write, and then a full disk: what was promised before stays whole."""
    path, real = tmp_path / "book", os.write
    file = BookFile(path, RUN)

    def ended(descriptor, content):
        real(descriptor, content)
        raise KeyboardInterrupt

    def full(descriptor, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", ended)
    with pytest.raises(KeyboardInterrupt):
        file.write({(0, 0): TAG})
    monkeypatch.setattr(os, "write", real)
    file.write({(1, 0): OTHER})
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="can't be written"):
        file.write({(2, 0): TAG})
    monkeypatch.undo()
    mark = file.mark
    file.close()
    assert BookFile(path, RUN, mark).draws == {(1, 0): OTHER}


def test_an_older_book_an_emptied_one_and_another_branch_are_refused(tmp_path):
    """What was put back from a copy lacks what was said since: nothing may go on by it."""
    path = tmp_path / "book"
    file = BookFile(path, RUN)
    begun = path.read_bytes()
    file.write({(0, 0): TAG})
    mark = file.mark
    file.write({(1, 0): TAG})
    file.close()
    whole = path.read_bytes()
    other = whole.replace(TAG.hex().encode(), OTHER.hex().encode())
    for content in (b"", begun, other, begun + whole.splitlines(keepends=True)[2]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="an older copy of it"):
            BookFile(path, RUN, mark)
        assert path.read_bytes() == content
    path.write_bytes(whole)
    assert len(BookFile(path, RUN, mark).draws) == 2


def test_what_is_no_file_is_refused_by_name(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null", "/dev/full"):
        with pytest.raises(CheckpointError, match="no ordinary file"):
            BookFile(path, RUN)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "book", tmp_path / ("x" * 300), "a\0b"):
        with pytest.raises(CheckpointError, match="can't be opened"):
            BookFile(path, RUN)
    monkeypatch.setattr(os, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"can't be opened.*No space"):
        BookFile(tmp_path / "book", RUN)
    with pytest.raises(ConfigurationError, match="book is 5: the path of a file"):
        engine_of(book=5)


@pytest.mark.parametrize("content", [b"a file of somebody else, in one line", b"lipdp book 2", b"\x00" * 9])
def test_a_file_of_somebody_else_is_left_as_it_is(tmp_path, content):
    """Also where it has no end of line."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="not the book of this run"):
        BookFile(tmp_path / "file", RUN)
    assert (tmp_path / "file").read_bytes() == content
    for begun in (b"", b"lipdp book 1 0001"):  # ours, and cut off
        (tmp_path / "file").write_bytes(begun)
        BookFile(tmp_path / "file", RUN).close()


def harmed(path, how):
    """The file at ``path`` while a run writes it; what brings it back."""
    aside = path.with_name("aside")
    whole = path.read_bytes()
    if how in ("cut", "written to"):
        path.write_bytes(whole[: whole.index(b"\n") + 1] if how == "cut" else whole + b"[7]\n")
        return lambda: path.write_bytes(whole)
    path.rename(aside)
    if how == "replaced by a copy":
        path.write_bytes(whole)
    if how == "replaced by a link":
        path.with_name("copy").write_bytes(whole)
        path.symlink_to(path.with_name("copy"))
    return lambda: aside.replace(path)


@pytest.mark.parametrize("how", ["moved", "replaced by a copy", "replaced by a link", "cut", "written to"])
def test_a_book_that_others_would_not_read_is_not_written(tmp_path, how):
    """A run that is killed is gone on with by what lies at the path: it has to know all that was released."""
    engine, path = engine_of(book=tmp_path / "book"), tmp_path / "book"
    batches = engine.batches(records())
    engine.step(*next(batches))
    before, batch = weights(engine.model), next(batches)
    put_back = harmed(path, how)
    for work in (lambda: engine.step(*batch), engine.state_dict):
        with pytest.raises(CheckpointError, match="was moved, replaced, removed or written to"):
            work()
    assert engine.steps == 1
    assert torch.equal(weights(engine.model), before)
    put_back()
    engine.step(*batch)
    engine.state_dict()
    engine.close()
    assert [line[0] for line in made(path)] == [0, 1]


def test_a_book_is_where_it_was_when_the_process_goes_to_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = engine_of(book="book")
    engine.step(*next(engine.batches(records())))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    engine.close()
    engine.step(*next(engine.batches(records())))
    engine.close()
    assert len(made(tmp_path / "book")) == 2


@pytest.mark.parametrize("ended", ["closed", "gone"])
def test_a_run_that_keeps_a_book_does_not_go_on_without(tmp_path, ended):
    """Another engine of the same run has none: what it makes would be in no book."""
    without = engine_of()
    keeping = engine_of(book=tmp_path / "book")
    keeping.load_state_dict(without.state_dict())
    without.bind(records())
    batches = without.batches(records())
    keeping.step(*next(keeping.batches(records())))
    without.step(*next(batches))  # the same release
    without.step(*next(batches))  # noted, for the book is open
    if ended == "closed":
        keeping.close()
    else:
        del keeping
        gc.collect()
    batch = next(batches)
    with pytest.raises(CheckpointError, match=r"this run keeps a book.*was closed"):
        without.step(*batch)
    assert without.steps == 2
    again = engine_of(book=tmp_path / "book")
    again.load_state_dict(without.state_dict())
    again.bind(records())
    without.step(*batch)
    again.close()
    assert [line[0] for line in made(tmp_path / "book")] == [0, 1, 2]


def test_a_lock_does_not_outlive_its_holder(tmp_path):
    """Neither with an engine that nobody closed, nor with processes that were forked while it was held."""
    path = tmp_path / "book"
    file = BookFile(path, RUN)
    del file
    engine, there = engine_of(book=tmp_path / "own"), len(list(Path("/proc/self/fd").iterdir()))
    engine.bind(records())
    del engine
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == there
    read, write = os.pipe()
    kept = BookFile(path, RUN)
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    kept.close()
    BookFile(path, RUN).close()
    os.write(write, b"x")
    os.waitpid(child, 0)


# -------------------------------------------------------------------------------------------------------------- a run


class Kill(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.engine.steps == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def until_killed(file: str, method: str, step: int) -> None:
    setting = {"checkpoint_every": 1e6, "microbatch_size": 16, "evaluations": 1}  # nothing is saved but the beginning
    lipdp.fit(*parts(method), records(), checkpoint=file, callbacks=[Kill(step)], **setting)


another = fresh_processes()  # whose processes know nothing of what this one has done


def in_another(work, *arguments):
    with another.Pool(1) as pool:
        return pool.apply(work, arguments)


_killed: dict[tuple[str, int], dict[str, bytes]] = {}


def killed(tmp_path, method: str, step: int = 6):
    """A run that was killed in its step, with nothing saved since its start; one for each method and step."""
    file = tmp_path / "run"
    if (method, step) in _killed:
        for name, content in _killed[method, step].items():
            (tmp_path / name).write_bytes(content)
        return file
    process = another.Process(target=until_killed, args=(str(file), method, step))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(made(book_path(file))) == step
    _killed[method, step] = {name: (tmp_path / name).read_bytes() for name in ("run", "run.book")}
    return file


@pytest.mark.parametrize("method", ["bookkeeping", "clipless"])
def test_a_killed_run_goes_on_as_the_same_or_gives_up_what_was_made(tmp_path, method):
    file = killed(tmp_path, method)
    kept = {name: (tmp_path / name).read_bytes() for name in ("run", "run.book")}
    same_model, *same = parts(method)
    history = lipdp.fit(same_model, *same, records(), checkpoint=file, resume=True, microbatch_size=16, evaluations=1)
    assert history.last["step"] == STEPS
    assert len(made(book_path(file))) == STEPS  # six of them were the same releases, and were not noted again

    close_book_of(file)
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    # In a process of its own: this one knows all ten by now.
    told, steps, epsilon, there = in_another(elsewhere, str(file), method)
    if told:  # other microbatches round otherwise, nearly always
        assert "steps 0 to 5 were made before" in told[0]
        assert "given up" in told[0]
    assert steps == STEPS
    assert epsilon == history.epsilon  # as planned, and never less than what was released
    draws = [tuple(line[:2]) for line in made(book_path(file))]
    assert sorted(draws) == [(step, 0) for step in range(STEPS)]  # each step once, whoever made it
    assert there != weights(same_model).tolist() or not told


def killed_here(engine) -> None:
    """Its process is gone, and what follows is in another one."""
    positions._runs.clear()
    engine._run.book._file = None


def close_book_of(file) -> None:
    """As the end of the process does."""
    run = bytes.fromhex(book_path(file).read_text().splitlines()[0].split()[-1])
    close_book(run)


def elsewhere(file: str, method: str):
    model, *rest = parts(method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = lipdp.fit(model, *rest, records(), checkpoint=file, resume=True, microbatch_size=3, evaluations=1)
    told = [str(w.message) for w in caught if issubclass(w.category, LipdpWarning)]
    return told, int(history.last["step"]), history.epsilon, weights(model).tolist()


def test_a_run_whose_every_step_was_made_ends_with_what_is_left(tmp_path):
    """Killed after its last step, and before it was saved: all is paid for, and nothing may be made again."""
    file = killed(tmp_path, "bookkeeping", step=STEPS)
    told, steps, _, _ = in_another(elsewhere, str(file), "bookkeeping")
    assert steps == STEPS
    assert len(told) == 1
    assert len(made(book_path(file))) == STEPS


def test_a_checkpoint_without_its_book_is_refused(tmp_path):
    file = killed(tmp_path, "bookkeeping")
    book_path(file).unlink()
    with pytest.raises(CheckpointError, match=r"the book of this run.*is not there"):
        lipdp.fit(*parts(), records(), checkpoint=file, resume=True, microbatch_size=16)


def test_the_evaluation_behind_steps_that_were_given_up_is_told_to_callbacks(tmp_path):
    file = killed(tmp_path, "bookkeeping", step=STEPS)
    told = []

    class Note(Callback):
        def on_evaluation(self, run, row):
            told.append(row["step"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = lipdp.fit(*parts(), records(), checkpoint=file, resume=True, microbatch_size=3, evaluations=1, callbacks=[Note()])
    assert any("given up" in str(w.message) for w in caught)
    assert told == history.metrics["step"] == [STEPS]


def test_a_folder_in_the_place_of_the_book_is_named(tmp_path):
    book_path(tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="Remove it, or choose another checkpoint file"):
        lipdp.fit(*parts(), records(), checkpoint=tmp_path / "run")


def test_a_new_run_begins_a_new_book(tmp_path):
    """A checkpoint that somebody removed leaves a book that is nobody's."""
    file = tmp_path / "run"
    lipdp.fit(*parts(), records(), checkpoint=file)
    before = made(book_path(file))
    file.unlink()
    lipdp.fit(*parts(), records(), checkpoint=file)
    after = made(book_path(file))
    assert len(before) == len(after) == STEPS
    assert not {line[2] for line in before} & {line[2] for line in after}


def test_a_reproducible_run_keeps_none(tmp_path):
    lipdp.fit(*parts(), records(), checkpoint=tmp_path / "run", reproducible=True, seed=0)
    assert not book_path(tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ a loop of your own


@pytest.fixture(params=["processor", "as on a device", "cuda"])
def where(request, monkeypatch):
    """The device; that of tags: drawn on a processor, as a device does it, and on one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if request.param == "as on a device":
        draw_as_on_a_device(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


def engine_of(method: str = "bookkeeping", **more) -> lipdp.PrivacyEngine:
    return lipdp.PrivacyEngine(*parts(method), **({"input_shape": (24,)} if method == "bookkeeping" else {}), **more)


def test_other_microbatches_are_refused_where_no_book_tells_what_was_made():
    engine, train = engine_of(microbatch_size=16), records()
    batches = engine.batches(train)
    engine.step(*next(batches))
    state = engine.state_dict()
    other = engine_of(microbatch_size=8)
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=r"microbatches of 16 rows.*makes them 8.*Leave\s+microbatch_size out, or pass 16"):
        other.load_state_dict(state)
    after = other.state_dict()
    assert (after["key"], after["steps"]) == (before["key"], 0)
    for free in (engine_of(), engine_of(microbatch_size=16)):
        free.load_state_dict(state)
        assert free.microbatch_size == 16


@pytest.mark.parametrize(("before", "made"), [({"microbatch_size": 16}, 1), ({"microbatch_size": 16}, 0), ({}, 1), ({}, 0)])
def test_neither_a_book_that_is_begun_late_nor_a_state_of_no_step_lets_steps_be_made_twice(tmp_path, before, made):
    """Of what was made behind such a state nothing knows: only the same microbatches make it again as it was."""
    engine, train = engine_of(**before), records()
    for _, batch in zip(range(made), engine.batches(train), strict=False):
        engine.step(*batch)
    state = engine.state_dict()
    for batch in engine.batches(train):
        engine.step(*batch)
    expected = weights(engine.model)
    positions._runs.clear()  # as in another process
    for book in ({}, {"book": tmp_path / "late"}):
        with pytest.raises(CheckpointError, match="Leave microbatch_size out"):
            engine_of(microbatch_size=8, **book).load_state_dict(state)
        with engine_of(**book) as again:
            again.load_state_dict(state)
            for batch in again.batches(train):
                again.step(*batch)
            assert torch.equal(weights(again.model), expected)


def test_a_state_that_keeps_a_book_wants_it(tmp_path):
    engine = engine_of(book=tmp_path / "book")
    engine.step(*next(engine.batches(records())))
    state = engine.state_dict()
    engine.close()
    with pytest.raises(CheckpointError, match="pass its file as book="):
        engine_of().load_state_dict(state)
    (tmp_path / "book").unlink()
    lost = engine_of(book=tmp_path / "book")
    weights = copy.deepcopy(lost.model.state_dict())
    with pytest.raises(CheckpointError, match="is not there"):
        lost.load_state_dict(state)
    assert lost.steps == 0
    assert all(torch.equal(value, weights[name]) for name, value in lost.model.state_dict().items())
    lost.step(*next(lost.batches(records())))
    assert lost.epsilon < engine.epsilon * 1.0001


def test_a_state_of_an_engine_that_has_not_begun_its_book_wants_it_as_well(tmp_path):
    engine = engine_of(book=tmp_path / "book")
    state = engine.state_dict()
    for batch in engine.batches(records()):
        engine.step(*batch)
    engine.close()
    with pytest.raises(CheckpointError, match="pass its file as book="):
        engine_of().load_state_dict(state)
    (tmp_path / "book").unlink()
    positions._runs.clear()
    lost = engine_of(book=tmp_path / "book")
    with pytest.raises(CheckpointError, match="is not there"):
        lost.load_state_dict(state)


def test_an_engine_that_was_closed_lets_its_book_go(tmp_path):
    """Also when its state is asked for afterwards."""
    engine = engine_of(book=tmp_path / "book")
    engine.step(*next(engine.batches(records())))
    failing = mock.patch.object(type(engine._run.account), "close", side_effect=RuntimeError("the budget's disk is full"))
    with failing, pytest.raises(RuntimeError, match="disk is full"):
        engine.close()
    mark = engine.state_dict()["book"]
    again = BookFile(tmp_path / "book", engine._run.streams.run, mark)
    assert again.mark == mark
    assert len(again.draws) == 1


def test_a_private_state_is_not_freed_of_its_microbatches_by_a_reproducible_engine():
    engine = engine_of(microbatch_size=16)
    engine.step(*next(engine.batches(records())))
    state = engine.state_dict()
    with pytest.raises(CheckpointError, match="microbatches of 16 rows"):
        engine_of(microbatch_size=8, seed=0, reproducible=True).load_state_dict(state)


def test_what_was_drawn_before_the_book_was_begun_is_in_it(tmp_path, where):
    """One engine keeps none; another one of the same run does, from its beginning."""
    engine = engine_of(device=where)
    state = engine.state_dict()
    for _, batch in zip(range(3), engine.batches(records()), strict=False):
        engine.step(*batch)
    keeping = engine_of(device=where, book=tmp_path / "book")
    keeping.load_state_dict(state)
    keeping.bind(records())
    keeping.close()
    assert [line[:2] for line in made(tmp_path / "book")][:3] == [[0, 0], [1, 0], [2, 0]]
    assert len({line[2] for line in made(tmp_path / "book")} - {""}) == 3


@pytest.mark.parametrize("method", ["bookkeeping", "clipless"])
def test_gone_on_behind_the_steps_that_were_made(tmp_path, method, where):
    train = records()
    engine = engine_of(method, book=tmp_path / "book", microbatch_size=16, device=where)
    state = None
    for batch in engine.batches(train):
        if engine.steps == 2:
            state = engine.state_dict()
        engine.step(*batch)
        if engine.steps == 6:
            break
    engine.close()
    positions._runs.clear()  # as if what follows ran in another process
    rewound = engine_of(method, book=tmp_path / "book", microbatch_size=8, device=where)
    rewound.load_state_dict(state)
    batches = iter(list(rewound.batches(train)))  # all fetched ahead
    before = weights(rewound.model)
    with pytest.raises(RepeatedStepError, match=r"step 2 of this run was made before.*engine\.give_up\(\)"):
        rewound.step(*next(batches))
    assert torch.equal(weights(rewound.model), before)
    assert rewound.give_up() == rewound.steps == 6
    for batch in batches:  # those of other steps: two releases of one sample are not what is accounted
        with pytest.raises(ConfigurationError, match="used in a step before"):
            rewound.step(*batch)
    for batch in rewound.batches(train):
        rewound.step(*batch)
    assert rewound.steps == STEPS
    assert rewound.epsilon == pytest.approx(rewound.plan.epsilon)
    rewound.close()
    told = {line[0]: line[2] for line in made(tmp_path / "book")}
    assert list(told) == list(range(STEPS))
    assert len(set(told.values()) - {""}) == STEPS
    assert rewound.give_up() == STEPS


@pytest.mark.parametrize("method", ["bookkeeping", "clipless"])
def test_the_same_steps_in_another_process_are_the_same_releases(tmp_path, method, where):
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = engine_of(method, book=tmp_path / "book", device=where)
    state = engine.state_dict()
    for batch in engine.batches(records()):
        engine.step(*batch)
    engine.close()
    torch.use_deterministic_algorithms(False)
    before = made(tmp_path / "book")
    positions._runs.clear()
    again = engine_of(method, book=tmp_path / "book", device=where)
    again.load_state_dict(state)
    for batch in again.batches(records()):
        again.step(*batch)
    again.close()
    assert torch.equal(weights(again.model), weights(engine.model))
    assert made(tmp_path / "book") == before


def test_of_a_killed_run_on_a_device_the_last_tags_are_missing(tmp_path, monkeypatch):
    """Its positions are not: they are given up."""
    draw_as_on_a_device(monkeypatch)
    engine = engine_of(book=tmp_path / "book")
    state = engine.state_dict()
    batches = engine.batches(records())
    for _ in range(3):
        engine.step(*next(batches))
    assert [line[2] for line in made(tmp_path / "book")] == ["", "", ""]
    killed_here(engine)
    again = engine_of(book=tmp_path / "book")
    again.load_state_dict(state)
    with pytest.raises(RepeatedStepError, match="step 0"):
        again.step(*next(again.batches(records())))
    assert again.give_up() == 3
    again.step(*next(again.batches(records())))
    assert again.steps == 4


def test_tags_on_a_device_are_written_by_and_by(tmp_path, monkeypatch):
    draw_as_on_a_device(monkeypatch)
    monkeypatch.setattr(positions, "_WAITING", 2)
    engine = engine_of(book=tmp_path / "book")
    for batch in engine.batches(records()):
        engine.step(*batch)
    told = {line[0]: line[2] for line in made(tmp_path / "book")}
    assert len(told) == STEPS
    assert sum(not tag for tag in told.values()) <= 3
    engine.state_dict()
    assert all({line[0]: line[2] for line in made(tmp_path / "book")}.values())


def test_a_new_engine_has_nothing_to_give_up():
    engine = engine_of()
    assert engine.give_up() == 0
    engine.step(*next(engine.batches(records())))
    assert engine.give_up() == 1
