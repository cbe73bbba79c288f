"""What the ranks of tests/training/test_distributed.py run: functions of a module that is imported once, before they are forked."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp._numerics import whole_tensor
from lipdp.data import RandomCrop
from lipdp.errors import UnsupportedError
from lipdp.privacy import AdaptiveClip, Budget
from lipdp.training.shards import local
from tests.training.common import Spy, engine_of, free, planned, small, toy, weights

SLOW = bool(os.environ.get("LIPDP_SLOW"))
STEPS = 20 if SLOW else 4
LOSS = losses.CrossEntropy(tau=4.0)


def _mixed(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        nn.BoundedInput((6,)), nn.SpectralLinear(6, 8), torch.nn.Linear(8, 8), nn.GroupSort(2), nn.SpectralLinear(8, 3)
    )


CASES = {
    "clipless": (small, {}),
    "clipless with dropout": (lambda: small(dropout=0.3), {}),
    "bookkeeping": (free, {"method": "bookkeeping", "max_grad_norm": 0.5}),
    "bookkeeping, adaptive": (
        lambda: free(seed=1),
        {"method": "bookkeeping", "max_grad_norm": 0.5, "clipping": lipdp.Clipping(adaptive=AdaptiveClip(quantile=0.5))},
    ),
    "mixed": (_mixed, {"method": "mixed", "max_grad_norm": 0.5}),
}


def divide(model):
    """Every layer, and the rest of the model: what is left to each rank is a part of the rows of each weight."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in dict.fromkeys(model):
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def undivided(model):
    return {name: whole_tensor(p).clone() for name, p in model.named_parameters()}


def _trained(case, rows, private, divided=False):
    build, settings = CASES[case]
    model = build()
    plan = planned(model, LOSS, steps=STEPS, **settings)
    if divided:
        divide(model)
    if private:
        _know_the_secret()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    rows = 8 if "dropout" in case else rows  # a microbatch's draws are its own
    engine = engine_of(model, plan, optimizer, LOSS, seed=None if private else 3, microbatch_size=rows)
    for batch in engine.batches(toy()):
        engine.step(*batch)
    return engine


def _know_the_secret():
    """A private run whose key the test knows: noise depends on every bit of the sums, and all randomness is the same."""
    import lipdp.training.run as module

    module.secret_of = lambda seed, reproducible: bytes(32)


def some_cases(cases, rows, private):
    return {case: weights(_trained(case, rows, private=private).model) for case in cases}


def divided_cases(cases, rows, private):
    """Trained with the weights divided; what the user's model holds afterwards, gathered, and how much of it is this rank's."""
    found = {}
    for case in cases:
        engine = _trained(case, rows, private, divided=True)
        given = engine._run.shards.given
        found[case] = undivided(given)
        assert all(torch.equal(p, found[case][name]) for name, p in engine.model.named_parameters())
        own = sum(local(p).numel() for p in given.parameters())
        found[f"{case}: share"] = own / sum(p.numel() for p in given.parameters())
        kept = [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]
        assert kept
        assert all(local(t).numel() < t.numel() or t.numel() < dist.get_world_size() for t in kept if dist.get_world_size() > 1)
    return found


def crops():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(32, 3))
    plan = planned(model, LOSS, steps=3, method="bookkeeping", max_grad_norm=0.5)
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(256, 1, 6, 6, generator=draw), torch.arange(256) % 3)
    augmentation = RandomCrop(1, copies=2)
    engine = engine_of(model, plan, torch.optim.SGD(model.parameters(), lr=0.5), LOSS, microbatch_size=8, augmentation=augmentation)
    for batch in engine.batches(data):
        engine.step(*batch)
    return weights(model)


def some_cases_and_crops(cases):
    return {**some_cases(cases, 8, True), "crops": crops()}


def noise_of_empty_batches(divided):
    """Gradients of steps without records: noise alone, on every rank; of a private run. Of a divided model, gathered."""
    model = free(width=64)
    plan = planned(model, LOSS, steps=6, method="bookkeeping", max_grad_norm=0.5, noise_multiplier=2.0)
    if divided:
        divide(model)
    engine = engine_of(model, plan, Spy(model), LOSS, seed=None)
    for _ in range(plan.steps):
        engine.step(torch.empty(0, 6), torch.empty(0, dtype=torch.long), sample="own")
    seen = [torch.cat([whole_tensor(g).reshape(-1) for g in step.values()]) for step in engine.optimizer.seen]
    return torch.stack(seen), next(iter(plan.noise_stds.values())) / plan.batch_size


def _refusal(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _refuse(*_):
    raise UnsupportedError("something of this rank's own")


class _Unreadable(torch.utils.data.Dataset):
    """Its records can't be read on rank 1."""

    def __init__(self, rank):
        self.rank, self.records = rank, toy()

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        if self.rank == 1:
            raise OSError("a disk is gone")
        return self.records[index]


def disagreements(folder):
    """What each of two ranks is told when it was given something else than the other."""
    rank, found = dist.get_rank(), {}
    model = small()
    plan = planned(model, LOSS, steps=3)
    found["weights"] = _refusal(lambda: engine_of(small(seed=rank), plan, loss=LOSS))
    found["plan"] = _refusal(lambda: engine_of(model, planned(model, LOSS, steps=3 + rank), loss=LOSS))
    other = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    found["optimiser"] = _refusal(lambda: engine_of(model, plan, other, loss=LOSS))
    found["argument"] = _refusal(lambda: engine_of(model, plan, loss=LOSS, microbatch_size=8 + rank))
    engine = engine_of(model, plan, loss=LOSS)
    found["data"] = _refusal(lambda: next(engine.batches(toy(seed=rank))))
    batch = next(engine.batches(toy()))
    found["batch"] = _refusal(lambda: engine.step(batch[0] + rank, batch[1], sample=batch))
    found["steps"] = engine.steps
    with torch.no_grad():
        model[1].weight.mul_(1 - 0.5 * rank)
    found["moved"] = _refusal(lambda: engine.step(*next(engine.batches(toy()))))
    alone = engine_of(small(), plan, loss=LOSS)
    found["unread"] = _refusal(lambda: next(alone.batches(_Unreadable(rank))))
    batch = next(alone.batches(toy()))
    if rank == 1:
        alone._run.query.ask = _refuse
    found["alone"] = _refusal(lambda: alone.step(*batch))
    found["alone steps"] = alone.steps
    wrapped = torch.nn.parallel.DistributedDataParallel(small())
    found["wrapped"] = _refusal(lambda: engine_of(wrapped, plan, loss=LOSS))
    mesh = init_device_mesh("cpu", (2,))
    partly = small()
    fully_shard(partly[1], mesh=mesh)
    found["partly"] = _refusal(lambda: engine_of(partly, plan, loss=LOSS))
    mixed = fully_shard(small(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found["policy"] = _refusal(lambda: engine_of(mixed, plan, loss=LOSS))
    odd = {"microbatch_size": -1} if rank == 1 else {}
    found["own argument"] = _refusal(lambda: engine_of(small(), plan, loss=LOSS, **odd))
    hooked = small()
    if rank == 1:
        hooked[1].register_forward_hook(lambda *_: None)
    found["own hook"] = _refusal(lambda: engine_of(hooked, plan, loss=LOSS))
    records = toy()
    if rank == 1:
        records.tensors[0][7] = float("nan")
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.1)
    found["own data"] = _refusal(lambda: lipdp.fit(hooked, LOSS, optimizer, plan, records))
    found["own batch"] = _refusal(lambda: alone.step(torch.randn(3, 6 + rank), torch.zeros(3, dtype=torch.long), sample="own"))
    file = f"{folder}/budget"
    Budget(file, epsilon=0.1, delta=1e-4, dataset="toy") if rank == 0 else None
    poor = engine_of(small(), plan, loss=LOSS, budget=file)
    found["budget"] = _refusal(lambda: poor.step(*next(poor.batches(toy()))))
    found["released"] = poor.steps
    return found


def _stumble(name, folder):
    """What one of two ranks does wrong between two exchanges with the other, in a run."""
    rank, model = dist.get_rank(), free()
    plan = planned(model, LOSS, steps=4, method="bookkeeping", max_grad_norm=0.5)

    class Failing(torch.optim.SGD):
        def step(self, *arguments):
            if name == "optimiser" and rank == 1:
                raise RuntimeError("this rank's own")
            return super().step(*arguments)

    class Callback(lipdp.training.Callback):
        def on_step(self, run):
            if name == "callback" and run.engine.steps == 2:
                raise RuntimeError("this rank's own")

        def on_evaluation(self, run, row):
            if name == "evaluation":
                raise RuntimeError("this rank's own")

    released, saved = lipdp.PrivacyEngine._release, torch.save

    def release(engine, asked):
        if name == "release" and rank == 1 and engine.steps == 1:
            raise RuntimeError("this rank's own")
        released(engine, asked)

    def save(*arguments, **options):
        if name == "file" and rank == 0:
            raise OSError("this rank's own")
        saved(*arguments, **options)

    lipdp.PrivacyEngine._release, torch.save = release, save
    try:
        others = {"seed": {"seed": 3 + rank}, "evaluations": {"evaluations": 1 + rank}, "mode": {}}.get(name, {})
        model.train(name != "mode" or rank == 0)
        settings = {"seed": 3, "reproducible": True, "callbacks": [Callback()], "checkpoint": f"{folder}/{name}", **others}
        return _refusal(lambda: lipdp.fit(model, LOSS, Failing(model.parameters(), lr=0.1), plan, toy(), **settings))
    finally:
        lipdp.PrivacyEngine._release, torch.save = released, saved


def stumbles(folder):
    """In one group, one after the other: none may leave the ranks out of step."""
    names = ("optimiser", "callback", "evaluation", "release", "file", "seed", "evaluations", "mode")
    return {name: _stumble(name, folder) for name in names}


class _Leave(lipdp.training.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.engine.steps == self.step:
            run.stop = True


def fitted(folder, *, private, dies_at=None, budget=None, resume=False, stop=None, rows=8, divided=False):
    model = free()
    plan = planned(model, LOSS, steps=8, method="bookkeeping", max_grad_norm=0.5)
    if divided:
        divide(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if private:
        _know_the_secret()
    if dies_at is not None and dist.get_rank() == dist.get_world_size() - 1:
        _die_at(dies_at)
    history = lipdp.fit(
        model,
        LOSS,
        optimizer,
        plan,
        toy(),
        toy(64, seed=1),
        seed=5,
        reproducible=not private,
        scheduler=scheduler,
        checkpoint=f"{folder}/run",
        resume=resume,
        checkpoint_every=1e-9,
        microbatch_size=rows,
        evaluations=4,
        ema_decay=0.9,
        budget=budget,
        callbacks=[] if stop is None else [_Leave(stop)],
    )
    return undivided(model), history.epsilon, history.metrics


def written_to():
    """A divided model that somebody writes to between two steps, runs, and tries to step past the engine."""
    model = small()
    plan = planned(model, LOSS, steps=4)
    divide(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model, plan, optimizer, LOSS)
    batches = engine.batches(toy())
    engine.step(*next(batches))
    with torch.no_grad():
        local(model[1].weight).mul_(50.0)  # far out of its set
    found = {"outside": float(torch.linalg.matrix_norm(whole_tensor(model[1].weight), 2))}
    engine.step(*next(batches))
    found["inside"] = float(torch.linalg.matrix_norm(whole_tensor(model[1].weight), 2))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found["same function"] = torch.equal(model(x), engine.model(x))  # which leaves its outer unit gathered
    engine.step(*next(batches))
    found["past"] = _refusal(optimizer.step)
    state = engine.state_dict()
    engine.step(*next(batches))
    ahead = undivided(model)
    engine.load_state_dict(state)
    found["back"] = engine.steps
    state["steps"] = 0
    found["changed"] = _refusal(lambda: engine.load_state_dict(state))
    found["moved"] = _apart(ahead, undivided(model))
    found["rate"] = lipdp.suggest_optimizer(model, plan)[0].param_groups[0]["lr"]
    found["rate of whole"] = lipdp.suggest_optimizer(engine.model, plan)[0].param_groups[0]["lr"]
    return found


def _apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def _die_at(step):
    """This process is gone in the middle of a step, without a word to the others."""
    import lipdp.training.engine as module

    whole = module.PrivacyEngine._release

    def released(engine, *arguments):
        if engine.steps == step:
            os._exit(9)
        return whole(engine, *arguments)

    module.PrivacyEngine._release = released


def fitted_in(arguments):
    return fitted(**arguments)


def paid(folder):
    if dist.get_rank() == 0:
        Budget(f"{folder}/budget", epsilon=20.0, delta=1e-4, dataset="toy")
    found = fitted(folder, private=True, budget=f"{folder}/budget", stop=4)
    again = _refusal(lambda: fitted(folder, private=True))
    return found[1], again


def under_an_accelerator():
    """The processes are Accelerate's to name; the loop is ours, on the model as it is. What ``prepare`` wraps is refused."""
    import accelerate

    rank, count = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    accelerator = accelerate.Accelerator(cpu=True)
    model = small()
    plan = planned(model, LOSS, steps=3)
    wrapped = _refusal(lambda: engine_of(accelerator.prepare(small()), plan, loss=LOSS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    history = lipdp.fit(model, LOSS, optimizer, plan, toy(), seed=3, reproducible=True, microbatch_size=8)
    return accelerator.num_processes, accelerator.is_main_process, wrapped, weights(model), history.epsilon


def _tied():
    torch.manual_seed(0)
    twice = torch.nn.Linear(6, 6)
    return torch.nn.Sequential(twice, torch.nn.Tanh(), twice, torch.nn.Linear(6, 3))


def _settling():
    model = small()
    model[1].requires_grad_(False)
    return model


def _standardised():
    torch.manual_seed(0)
    return nn.Sequential(nn.BoundedInput((6,)), nn.Standardize(6, 1.0), nn.Boundary(norm=1.0), nn.SpectralLinear(6, 3))


def odd_kinds():
    """Shared, frozen and applied-once layers, released statistics: how far a divided model ends from a whole one."""
    kinds = {
        "tied": (_tied, {"method": "bookkeeping", "max_grad_norm": 0.5}, {}),
        "settled": (_settling, {}, {"settle": True}),
        "statistics": (_standardised, {"epsilon": 8.0, "statistics_budget": 0.1}, {}),
    }
    found = {}
    for name, (build, settings, options) in kinds.items():
        ends = []
        for divided in (False, True):
            model = build()
            plan = planned(model, LOSS, steps=3, **settings)
            if divided:
                divide(model)
            optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
            lipdp.fit(model, LOSS, optimizer, plan, toy(), seed=3, reproducible=True, microbatch_size=8, **options)
            values = (*model.named_parameters(), *model.named_buffers())
            ends.append({of: whole_tensor(value).double().clone() for of, value in values})
        found[name] = _apart(*ends)
    return found


def kept_in_a_book(folder):
    """A disk that is full for the first rank alone; a twin that goes on behind a closed engine; a book that one rank has only."""
    first, path = dist.get_rank() == 0, Path(folder) / "book"
    model, data, real = small(), toy(), os.write
    engine = engine_of(model, None, torch.optim.SGD(model.parameters(), lr=0.1), seed=None, book=path)
    batches = engine.batches(data)
    engine.step(*next(batches))
    before = weights(model)

    def full(descriptor, content):
        if content.startswith(b"["):
            raise OSError(28, "No space left on device")
        return real(descriptor, content)

    os.write = full if first else real
    refused = _refusal(lambda: engine.step(*next(batches)))
    os.write = real
    moved = not all(torch.equal(before[name], now) for name, now in weights(model).items())
    twin = copy.deepcopy(engine)
    engine.close()
    twin.step(*next(twin.batches(data)))
    twin.close()
    lines = [] if not first else path.read_text().splitlines()[1:]
    alone = _refusal(lambda: engine_of(small(), seed=None, book=path if first else None))
    return {"refused": refused, "moved": moved, "lines": len(lines), "alone": alone}
