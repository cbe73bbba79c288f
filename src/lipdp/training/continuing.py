"""How a run goes on from a saved state: what the state holds, and when it is taken over."""

from __future__ import annotations

import copy
from typing import Any

from lipdp.errors import CheckpointError
from lipdp.parametrize import project_outside_
from lipdp.training.run import Run
from lipdp.training.shards import Places
from lipdp.training.state import STATE_FORMAT, EngineState, check_seal, read_state, sealed, try_optimizer


def state_of(run: Run) -> dict[str, Any]:
    """All that an exact continuation needs, as a copy.

    A copy, for a step counter that went back over weights that did not would allow steps nobody paid for.
    """
    run.project.check()
    book = run.book.sync(run.streams.run)
    run.account.note_book()
    return sealed(
        copy.deepcopy(
            {
                "format": STATE_FORMAT,
                "plan": run.plan.to_json(),
                "steps": run.ledger.steps,
                "batches": max(run.used, run.ledger.steps),  # a step that was interrupted is charged, and made with no batch
                "one_off": list(run.ledger.one_off),
                "charged": run.ledger.charged,
                "charged_one_off": run.ledger.charged_one_off,
                "rows": run.microbatch_size if run.ledger.steps or run.rows is not None else None,
                "run": run.account.nonce,
                "budget": run.account.name,
                "book": book,
                **run.streams.state_dict(),
                "clips": dict(run.mechanism.clips),
                "model": run.shards.state_dict(),
                "optimizer": run.optimizer.state_dict(),
                "average": None if run.average is None else run.average.state_dict(),
            }
        )
    )


def places_of(run: Run) -> Places:
    """How the tensors of the state are divided among the ranks."""
    return Places(run.shards, run.optimizer)


def load_state(run: Run, state: dict[str, Any]) -> None:
    """Continue from it. A state that does not fit is an error, and then nothing has changed."""
    with run.ranks.together():
        state = places_of(run).divided(state)
        given = read_state(state, run.plan, run.shards.state_dict(), run.optimizer, run.average)
    check_seal(state)
    with run.ranks.together():
        _check_resumed(run, given)
        proved = not run.watch.changed
    before = EngineState(**state_of(run))
    try:
        with run.ranks.together():
            _take_over(run, given)
            try_optimizer(run.optimizer)
        run.shards.gather()
        with run.ranks.together():
            project_outside_(run.model)
            run.shards.scatter()
            run.check_plan()
            run.watch.remember()
    except BaseException as error:
        _put_back(run, before, proved)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"this state does not fit the engine: {error}. Nothing was changed.") from error
    try:
        run.open_book()  # it may know of steps behind the state: those are spent
    except BaseException:
        _put_back(run, before, proved)
        raise


def _put_back(run: Run, before: EngineState, proved: bool) -> None:
    _take_over(run, before)
    run.shards.gather()
    run.watch.remember() if proved else run.watch.forget()


def _check_resumed(run: Run, state: EngineState) -> None:
    """Refuse what would make steps behind the state again as other releases, or releases that nobody pays for."""
    if run.ranks.is_first:
        run.account.check_resumed(state.budget)
    if state.book is not None and run.book.path is None:
        raise CheckpointError(
            "this run keeps a book, which tells what it has released since this state was saved: pass its file as book= to "
            "PrivacyEngine (lipdp.fit keeps it beside the checkpoint)."
        )
    rows = None if run.asked_rows is None else min(run.asked_rows, run.query.most_rows)
    # A book that is begun now knows nothing of what was made since.
    exact = None in (run.book.path, state.book) and state.private and state.steps < run.plan.steps
    if exact and rows is not None and rows != state.rows:
        before, instead = f"microbatches of {state.rows} rows", f"Leave microbatch_size out, or pass {state.rows}"
        if state.rows is None:
            before, instead = "microbatches of the size that lipdp chooses", "Leave microbatch_size out"
        raise CheckpointError(
            f"this state was saved with {before}, and here microbatch_size makes them {rows}: steps that were made after it "
            f"was saved would be made again with other sums, as releases that nobody pays for. {instead}; or keep a book "
            "(book=FILE, from the start of a run on): it knows them."
        )


def _take_over(run: Run, state: EngineState) -> None:
    run.shards.load_state_dict(state.model)
    run.optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    if run.average is not None and state.average is not None:
        run.average.load_state_dict(state.average)
    run.ledger.steps = state.steps
    run.drawn = run.used = state.batches
    run.ledger.one_off = list(state.one_off)
    run.rows = run.asked_rows or state.rows  # the same microbatches give the same bits, on any number of ranks
    run.choose_microbatch_size()
    run.mechanism.clips = {name: state.clips[name] for name, _ in run.plan.clips}
    run.apply_clips()
    run.account.adopt(state.run)
    run.streams.load_state_dict(vars(state))
    run.ledger.furthest = run.streams.furthest
    run.ledger.furthest.note(state.charged, state.charged_one_off)
    run.resumed, run.book.since = True, state.book
