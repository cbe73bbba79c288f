"""What a step costs in Python: how many functions of the library it enters, and how often. Of small networks that is most of it."""

import functools
import gc
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn

HERE = str(Path(lipdp.__file__).parent)
COMMON = {"dataset_size": 256, "batch_size": 64, "delta": 1e-3, "noise_multiplier": 1.0, "steps": 50, "accountant": "rdp"}


def lipschitz():
    return nn.Sequential(
        nn.BoundedInput((1, 8, 8)),
        nn.Flatten(),
        nn.SpectralLinear(64, 64, bias=False),
        nn.GroupSort(2),
        nn.SpectralLinear(64, 10, bias=False),
    )


def ordinary():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))


def engine_of(method):
    if method == "clipless":
        model, loss, more = lipschitz(), losses.CrossEntropy(), {}
    else:
        model, loss = ordinary(), torch.nn.CrossEntropyLoss(reduction="none")
        more = {"method": method, "max_grad_norm": 1.0, "input_shape": (1, 8, 8)}
    plan = lipdp.plan(model, loss, **COMMON, **more)
    return lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan, microbatch_size=256)


def entered(work):
    """Every call of a function of the library that it makes: file and line.

    What other tests have left is not swept away meanwhile: an engine that goes gives its account back, a generator is closed.
    """
    calls = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            calls.append((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def counts(method):
    """Functions of the library that a step enters, and calls of them, in one microbatch.

    tests/test_new_process.py asks: what other tests leave in a process (constants of living models, threads) is counted too.
    Noise drawn again takes a few calls more: the fewest count.
    """
    engine = engine_of(method)
    batches = iter(engine.batches(TensorDataset(torch.rand(256, 1, 8, 8), torch.arange(256) % 10)))
    for _ in range(2):
        engine.step(*next(batches))
    steps = [entered(functools.partial(engine.step, *next(batches))) for _ in range(5)]
    return min(len(set(step)) for step in steps), min(map(len, steps))


def test_watch_query_and_clipper_number_settings_together():
    """One look at the model's settings serves all three; what a step changes there is seen by the next."""
    engine = engine_of("bookkeeping")
    batches = iter(engine.batches(TensorDataset(torch.rand(256, 1, 8, 8), torch.arange(256) % 10)))
    engine.step(*next(batches))
    watched = engine._run.watch.watched
    clipper = engine._run.query._clipping(1)
    assert engine._run.query.watched is watched
    assert clipper.watched is watched
    assert clipper.seen == engine._run.watch.settings
    engine.model[1].note = "another setting"
    engine.step(*next(batches))
    again = engine._run.query._clipping(1)
    assert again is not clipper, "what was proved of the model before is forgotten"
    assert again.seen == engine._run.watch.settings == watched()
