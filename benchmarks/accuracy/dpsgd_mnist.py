"""Settings of clipped DP-SGD on MNIST (a small convolutional network, ε = 3, δ = 1e-5): searched for, then tested once.

    python benchmarks/accuracy/dpsgd_mnist.py noise                                     multipliers by PLD, for the search
    python benchmarks/accuracy/dpsgd_mnist.py search --seconds 100 --workers 3          random changes of the best so far
    python benchmarks/accuracy/dpsgd_mnist.py confirm --seconds 40 --workers 3          the best few again, with new seeds
    python benchmarks/accuracy/dpsgd_mnist.py test --seeds 0 1 2                        the best one, by the engine, on the test set

The search holds out a sixth of the *training* set and never reads the test set. Its trials clip by the library's book-keeping with
Poisson samples and calibrated noise, without the engine's checks and with noise from torch's generator; what is reported comes from
``test``, which is :func:`lipdp.recipes.train`. Every trial is appended to OUT/trials.jsonl; a call goes on with what is there.
"""

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lipdp.clipping
from lipdp import data, models
from lipdp._texts import upwards
from lipdp.data import RandomCrop
from lipdp.losses import CrossEntropy
from lipdp.recipes import Recipe, train
from lipdp.training.averaging import Average, make_average

Config = dict[str, Any]
EPSILON, DELTA, HELD_OUT = 3.0, 1e-5, 1 / 6
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081  # as published with the dataset, everywhere
BATCHES, STEPS = (1024, 2048, 4096, 8192), (300, 500, 800, 1200)
# Of the weights; all of them are kept in every run, so that which one is best costs no further run.
AVERAGES = ("ema 0.9", "ema 0.95", "ema 0.98", "ema 0.99", "tail 0.2", "tail 0.4")

BASE: Config = {
    "width": 16, "hidden": 32, "activation": "tanh", "groups": 0, "standardised": True, "tau": 1.0,
    "batch": 4096, "steps": 500, "lr": 0.6, "momentum": 0.9, "schedule": "cosine", "clip": 0.1, "copies": 1, "shift": 0,
}  # fmt: skip
STARTS: tuple[Config, ...] = (
    {},
    {"copies": 4, "shift": 1},
    {"lr": 1.5},
    {"width": 32, "hidden": 64},
    {"standardised": False, "lr": 1.2},
    {"activation": "relu", "groups": 4, "width": 16},
    {"steps": 1200, "lr": 0.4},
    {"copies": 4, "shift": 2, "width": 32, "steps": 800},
    {"clip": 0.5},
    {"copies": 8, "shift": 1, "lr": 1.0, "steps": 800},
    {"groups": 4, "lr": 1.0},
    {"hidden": 0, "width": 32},
    {"activation": "relu", "lr": 1.0},
    {"schedule": "constant", "copies": 4, "shift": 1},
    {"momentum": 0.0, "lr": 5.0},
)
FACTORS = {"lr": 1.6, "clip": 2.0, "tau": 1.5}
CHOICES: dict[str, tuple[Any, ...]] = {
    "width": (16, 24, 32, 48), "hidden": (0, 32, 64, 128), "activation": ("tanh", "relu"), "groups": (0, 4, 8),
    "standardised": (True, False), "batch": BATCHES, "steps": STEPS, "momentum": (0.0, 0.8, 0.9, 0.95),
    "schedule": ("cosine", "constant"), "copies": (1, 2, 4, 8), "shift": (0, 1, 2),
}  # fmt: skip


def options(config: Config) -> dict[str, Any]:
    """Those of the model ``tanh-cnn``."""
    found = {name: config[name] for name in ("width", "hidden", "activation", "groups")}
    return found | ({"centre": MNIST_MEAN, "spread": MNIST_STD} if config["standardised"] else {})


def augmentation(config: Config) -> RandomCrop | None:
    return RandomCrop(config["shift"], config["copies"], mode="zeros", flip=False) if config["shift"] else None


def averaging(name: str) -> dict[str, float | None]:
    """As settings of a recipe."""
    kind, value = name.split()
    return {"ema_decay": float(value) if kind == "ema" else None, "tail_average": float(value) if kind == "tail" else None}


def averaged(name: str, parameters: dict[str, torch.nn.Parameter], steps: int) -> Average:
    found = make_average(parameters, steps, **averaging(name))
    assert found is not None
    return found


def as_recipe(config: Config, average: str) -> Recipe:
    """The same run for :func:`lipdp.recipes.train`, with as many steps on the whole training set."""
    return Recipe(
        "mnist-dpsgd", "mnist", "tanh-cnn", options(config), temperature=config["tau"], batch_size=config["batch"],
        epochs=config["steps"] * config["batch"] / data.info("mnist").train_size, learning_rate=config["lr"],
        momentum=config["momentum"], schedule=config["schedule"], delta=DELTA, method="bookkeeping", max_grad_norm=config["clip"],
        augmentation=augmentation(config), **averaging(average),
    )  # fmt: skip


class Trials:
    """The data on the device, the noise table and the file of trials."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        training, _, self.info = data.load("mnist", download=False)
        learn, held = data.split(training, HELD_OUT)
        self.x, self.y = (t.to(self.device)[: arguments.examples] for t in learn.tensors)
        self.held_x, self.held_y = (t.to(self.device) for t in held.tensors)
        self.sigma: dict[str, float] = json.loads(Path(arguments.noise).read_text())
        self.file = Path(arguments.out) / "trials.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def evaluate(self, config: Config, seed: int, stage: str) -> None:
        started = time.monotonic()
        record: dict[str, Any] = {"stage": stage, "seed": seed, "config": config}
        try:
            record["scores"] = self._run(config, seed)
        except (RuntimeError, ValueError) as error:
            record.update(scores={}, error=str(error)[:200])
        record["seconds"] = round(time.monotonic() - started, 2)
        with self.file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        changed = {name: value for name, value in config.items() if BASE[name] != value}
        print(stage, max(record["scores"].values(), default=0.0), record["seconds"], changed, record.get("error", ""), flush=True)

    def _run(self, config: Config, seed: int) -> dict[str, float]:
        """Held-out accuracy of every average after a run."""
        torch.manual_seed(seed)
        size, batch, steps, clip = len(self.x), config["batch"], config["steps"], config["clip"]
        model = models.create("tanh-cnn", input_shape=self.info.shape, classes=10, **options(config)).to(self.device)
        trained = dict(model.named_parameters())
        optimizer = torch.optim.SGD(trained.values(), lr=config["lr"] / clip, momentum=config["momentum"])
        averages = {name: averaged(name, trained, steps) for name in AVERAGES}
        copies, views = config["copies"] if config["shift"] else 1, augmentation(config)
        clipping = lipdp.clipping.Clipper(model, CrossEntropy(tau=config["tau"]), copies=copies)
        draw = torch.Generator(self.device).manual_seed(seed)
        sampling = min(1.0, batch / size)
        # A Poisson sample is a uniform subset of binomial size; rows beyond it are masked, so that shapes stay the same.
        sizes = torch.distributions.Binomial(size, torch.tensor(sampling)).sample((steps,)).int().tolist()
        capacity = max(sizes)
        place = torch.arange(capacity, device=self.device)
        std = self.sigma[f"{batch}|{steps}"] * clip
        for step in range(steps):
            chosen = torch.randperm(size, generator=draw, device=self.device)[:capacity]
            x, y = self.x[chosen], self.y[chosen]
            rows = x if views is None else views(x, draw).flatten(0, 1)
            pending = clipping.start(rows, y, clip, mask=place < sizes[step])
            noise = [torch.randn(p.shape, generator=draw, device=self.device) for p in trained.values()]
            torch._foreach_mul_(noise, std)
            sums = pending.finish().sums
            for parameter, total, extra in zip(trained.values(), (sums[name] for name in trained), noise, strict=True):
                parameter.grad = ((total + extra) / batch).to(parameter.dtype)
            decay = 0.5 * (1 + math.cos(math.pi * step / steps)) if config["schedule"] == "cosine" else 1.0
            optimizer.param_groups[0]["lr"] = config["lr"] / clip * decay
            optimizer.step()
            for average in averages.values():
                average.update(trained)
        return {name: self._accuracy(model, average) for name, average in averages.items()}

    @torch.no_grad()
    def _accuracy(self, model: torch.nn.Module, average: Average) -> float:
        average.copy_to(dict(model.named_parameters()))
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(self.held_x.split(5000), self.held_y.split(5000), strict=True)
        )
        return round(100 * right / len(self.held_y), 3)


def ranking(trials: list[dict[str, Any]]) -> list[tuple[float, int, Config, str]]:
    """(cautious mean score, runs, settings, average) of everything tried, best first."""
    grouped: dict[str, list[dict[str, float]]] = {}
    for trial in trials:
        grouped.setdefault(json.dumps(trial["config"], sort_keys=True), []).append(trial["scores"])
    ranked = []
    for key, scores in grouped.items():
        if not all(scores):
            continue
        name = max(AVERAGES, key=lambda average: statistics.fmean(s[average] for s in scores))
        # One lucky run should not win over the mean of three: held-out accuracy varies by about 0.1 from run to run.
        ranked.append(
            (statistics.fmean(s[name] for s in scores) - 0.1 / math.sqrt(len(scores)), len(scores), json.loads(key), name)
        )
    return sorted(ranked, key=lambda entry: -entry[0])


def mutate(config: Config, draw: random.Random) -> Config:
    """A few settings changed: numbers by a random factor, the others by a neighbouring or another choice."""
    new = dict(config)
    for name in draw.sample([*FACTORS, *CHOICES], k=draw.choice((1, 2, 2, 3))):
        if name in FACTORS:
            new[name] = float(f"{config[name] * math.exp(draw.gauss(0, math.log(FACTORS[name]))):.3g}")
        else:
            new[name] = draw.choice([choice for choice in CHOICES[name] if choice != config[name]])
    if (new["copies"] > 1) != (new["shift"] > 0):  # copies that are all the same, or one copy moved at random, help nobody
        new["copies"], new["shift"] = (4, max(1, new["shift"])) if new["copies"] != config["copies"] or new["shift"] else (1, 0)
    # What is drawn anew each time costs time in proportion: long runs of large batches of many copies are left out.
    if new["copies"] * new["batch"] * new["steps"] > 4 * 4096 * 1200:
        new["copies"], new["shift"] = config["copies"], config["shift"]
        new["batch"], new["steps"] = config["batch"], config["steps"]
    return new


def work(rank: int, arguments: argparse.Namespace) -> None:
    """One process of a search, or of confirming its best."""
    torch.set_num_threads(1)
    until, trials = time.monotonic() + arguments.seconds, Trials(arguments)
    draw = random.Random(f"{arguments.action}/{rank}/{len(trials.read())}")
    waiting = [BASE | change | arguments.fix for change in STARTS[rank :: arguments.workers]] if not trials.read() else []
    fewest = arguments.confirmations
    while time.monotonic() < until:
        ranked = ranking(trials.read())
        if arguments.action == "confirm":
            due = [(runs, config) for _, runs, config, _ in ranked[:4] if runs < fewest]
            if len(due) <= rank:
                break
            runs, config = due[rank]
            trials.evaluate(config, 1000 + 10 * rank + runs, "confirm")
        elif waiting:
            trials.evaluate(waiting.pop(0), draw.randrange(2**31), "start")
        elif ranked:
            place = min(int(draw.expovariate(0.4)), len(ranked) - 1, 9)
            again = draw.random() < 0.12 and ranked[0][1] < 3
            config = ranked[0][2] if again else mutate(ranked[place][2], draw) | arguments.fix
            trials.evaluate(config, draw.randrange(2**31), "search")


def make_noise(out: Path) -> None:
    from lipdp.privacy import calibrate_noise

    size = round(data.info("mnist").train_size * (1 - HELD_OUT))
    table = json.loads(out.read_text()) if out.exists() else {}
    for batch in BATCHES:
        for steps in STEPS:
            if f"{batch}|{steps}" not in table:
                rate = batch / size
                table[f"{batch}|{steps}"] = calibrate_noise(epsilon=EPSILON, delta=DELTA, sampling_rate=rate, steps=steps)
                out.write_text(json.dumps(table, indent=1))


def _rows(config: Config) -> int:
    """Of a microbatch that holds a whole batch of up to 8192 examples, or an even part of it."""
    most = config["batch"] + 4 * math.sqrt(config["batch"])
    return math.ceil(most / math.ceil(config["batch"] / 8192)) * (config["copies"] if config["shift"] else 1)


def test(arguments: argparse.Namespace) -> None:
    """The best settings, with the engine, on the whole training set; only now is the test set read."""
    folder = Path(arguments.out)
    if arguments.config:
        config, average, found = {**BASE, **json.loads(arguments.config)}, arguments.average, None
    else:
        trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
        best, runs, config, average = ranking(trials)[0]
        found = {"held_out": best, "runs": runs, "trials": len(trials)}
    recipe = as_recipe(config, average)
    print(recipe, flush=True)
    for seed in arguments.seeds:
        rows = _rows(config)
        result = train(recipe, epsilon=EPSILON, seed=seed, device=arguments.device, evaluations=1, microbatch_size=rows)
        line = {**result.summary(), "config": config, "average": average, "chosen_by": found, "batch_rows": rows}
        with (folder / "test.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        print(f"seed {seed}: {100 * result.accuracy:.2f}% at epsilon {upwards(result.epsilon)}, {result.seconds:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("noise", "search", "confirm", "test"))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--confirmations", type=int, default=3, help="runs that the best settings should have")
    parser.add_argument("--fix", type=json.loads, default={}, help="JSON: settings that hold for every trial")
    parser.add_argument("--examples", type=int, default=None, help="fewer examples, to try the script")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--config", default=None, help="JSON: changes of the base settings to test, in the place of the best")
    parser.add_argument("--average", default="ema 0.98", choices=list(AVERAGES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--noise", default=str(Path(__file__).parents[1] / "results" / "clipping" / "dpsgd_mnist" / "noise.json"))
    parser.add_argument("--out", default="found")
    arguments = parser.parse_args()
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    if arguments.action == "noise":
        make_noise(Path(arguments.noise))
    elif arguments.action == "test":
        test(arguments)
    elif arguments.workers == 1:
        work(0, arguments)
    else:
        torch.multiprocessing.spawn(work, (arguments,), nprocs=arguments.workers)


if __name__ == "__main__":
    main()
