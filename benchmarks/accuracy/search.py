"""Look for the settings of private heads on scattering features, on a held-out part of the training set.

    python benchmarks/accuracy/search.py noise --out noise.json                          multipliers by PLD (needs dp-accounting)
    python benchmarks/accuracy/search.py screen cifar10 --noise noise.json --out found   one change at a time from the base settings
    python benchmarks/accuracy/search.py search cifar10 --epsilon 3 --seconds 90 …        random changes of the best so far
    python benchmarks/accuracy/search.py confirm cifar10 --epsilon 3 …                    the best few again, with new seeds

Every trial is appended to OUT/DATASET.jsonl at once; ``search`` and ``confirm`` start from what is there. The best go into
OUT/DATASET-best.json. The test set is never read.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from columns import DELTA
from scattering import Config, Features, Noise, feature_key, load_parts, normalised
from trials import run_trial

BATCHES, STEPS, EPSILONS = (4096, 8192, 16384), (100, 200, 350, 600, 1000), (1.0, 3.0, 8.0)
HELD_OUT = 0.1
SIZES = {"cifar10": 45_000, "fashion_mnist": 54_000, "mnist": 54_000, "digits": 1_294}
# Whether a mirrored image is of the same class.
FLIPS = {"cifar10": True, "fashion_mnist": True, "mnist": False, "digits": False}
TINY = {"batch": (128, 256), "steps": (5, 10)}

BASE: dict[str, Config] = {
    "cifar10": {"fronts": [[2, 8]], "colour": "yuv", "shifts": "square", "power": "log"},
    "fashion_mnist": {"fronts": [[2, 8]], "colour": "rgb", "shifts": "none", "power": "none"},
    "mnist": {"fronts": [[2, 8]], "colour": "rgb", "shifts": "none", "power": "none"},
    "digits": {"fronts": [[1, 4]], "colour": "rgb", "shifts": "cross1", "power": "none"},
}
COMMON: Config = {
    "norm": "paid", "stats": 20.0, "radius": 1.8, "white": 0.0, "wp": 1.0,
    "w0": 1.0, "w1": 1.0, "w2": 1.0, "wc": 1.0, "merge": "mean",
    "head": "linear", "hidden": 512, "depth": 1, "init": 1.0, "pool": False, "tau": 1.0,
    "clip": 0.3, "clip_hidden": 0.2, "normalise": False, "allocation": "per_layer",
    "lr": 40.0, "lr_hidden": 1.0, "momentum": 0.9, "schedule": "cosine", "ema": 0.95, "batch": 8192, "steps": 600,
}  # fmt: skip
MLP: Config = {"head": "mlp", "tau": 8.0, "lr": 8.0, "lr_hidden": 2.0, "clip": 0.2}
CONV: Config = {"head": "conv", "hidden": 64, "tau": 8.0, "lr": 8.0, "lr_hidden": 1.0, "clip": 0.2}

# What a change may be: a factor for numbers (log-normal), or one of a list.
FACTORS = {"clip": 1.8, "clip_hidden": 1.8, "lr": 1.6, "lr_hidden": 2.2, "tau": 1.7, "init": 1.7}
FACTORS |= {"w0": 1.6, "w1": 1.4, "w2": 1.4, "wc": 1.4, "wp": 1.4, "radius": 1.3}
CHOICES: dict[str, tuple[object, ...]] = {
    "schedule": ("cosine", "linear", "constant"),
    "ema": (0.9, 0.95, 0.98, 0.99),
    "momentum": (0.8, 0.9, 0.95),
    "batch": BATCHES,
    "steps": STEPS,
    "allocation": ("per_layer", "global", "optimal"),
    "hidden": (64, 128, 256, 512, 1024),
    "depth": (1, 2),
    "pool": (False, True),
    "normalise": (False, True),
    "stats": (10.0, 20.0, 40.0),
    "norm": ("paid", "public", "group"),
}
# Changes that mean new features: they take seconds, so they are rarer.
FEATURES: dict[str, tuple[object, ...]] = {
    "power": ("none", "log", "root"),
    "white": (0.0, 0.03, 0.1, 0.3),
    "merge": ("mean", "joint", "copies"),
    "shifts": ("none", "pair", "cross", "square"),
    "fronts": ([[2, 8]], [[2, 8], [3, 8]], [[1, 8], [2, 8]], [[1, 8], [2, 8], [3, 8]], [[2, 12]]),
}
ONLY_HIDDEN = {"clip_hidden", "lr_hidden", "init", "allocation", "hidden", "depth", "tau", "pool"}


def starts(dataset: str) -> list[Config]:
    """Changes of the base to begin with, one or two at a time."""
    images = dataset == "cifar10"
    plain: list[Config] = [{}, {"lr": 80.0}, {"white": 0.1}, {"white": 0.3}, {"fronts": [[2, 8], [3, 8]]}, {"normalise": True}]
    plain += [{"w2": 0.5}, {"w1": 1.6}, {"norm": "public"}, {"shifts": "pair" if images else "cross1", "merge": "joint"}]
    plain += [{"wc": 0.6}, {"power": "none"}] if images else [{"power": "log"}, {"shifts": "cross1"}]
    heads: list[Config] = [MLP, {**MLP, "lr_hidden": 6.0}, CONV, {**CONV, "hidden": 128, "lr_hidden": 3.0}]
    return plain + heads


def tiny_changes() -> list[Config]:
    """Every branch of the code, for a run without a GPU."""
    changes: list[Config] = [{}, {"norm": "paid"}, {"norm": "group"}, {"power": "log"}, {"power": "root"}, {"merge": "mean"}]
    changes += [
        {"merge": "joint"},
        {"fronts": [[1, 4], [2, 3]], "norm": "paid"},
        MLP,
        {**MLP, "depth": 2},
        {**MLP, "merge": "joint"},
    ]
    changes += [CONV, {**CONV, "pool": True}, {**MLP, "allocation": "global"}, {**MLP, "allocation": "optimal"}]
    changes += [{"merge": "copies"}, {"merge": "copies", "white": 0.1, "norm": "public"}, {"w2": 0.5, "wc": 2.0}]
    changes += [{"normalise": True}, {**MLP, "normalise": True}]
    changes += [{"schedule": kind} for kind in ("linear", "constant")]
    return changes


class Session:
    """A dataset, its features, and the file of trials."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.name: str = arguments.dataset
        self.device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.noise = Noise(Path(arguments.noise))
        self.learn, self.validation, self.classes = load_parts(self.name, HELD_OUT, self.device)
        if len(self.learn.images) != SIZES[self.name]:
            raise SystemExit(
                f"{self.name} has {len(self.learn.images)} training examples; the noise table is for {SIZES[self.name]}"
            )
        self.features = Features(self.learn, self.validation, FLIPS[self.name], arguments.memory, arguments.rows)
        self.file = Path(arguments.out) / f"{self.name}.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.trials = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        self._inputs: tuple[str, list[torch.Tensor]] = ("", [])

    def inputs(self, config: Config, seed: int) -> list[torch.Tensor]:
        """What the head trains on; kept from one trial to the next where nothing about it changed."""
        names = ("norm", "merge", "w0", "w1", "w2", "wc", "wp") + (("stats", "radius") if config["norm"] == "paid" else ())
        key = feature_key(config) + json.dumps([config[name] for name in names])
        if self._inputs[0] != key:
            self._inputs = ("", [])  # frees the old ones first
            parts = self.features.get(config)
            draw = torch.Generator(self.device).manual_seed(seed + 10_000)
            self._inputs = (key, normalised(parts, config, draw))
        return self._inputs[1]

    def evaluate(self, config: Config, epsilon: float, seed: int, stage: str) -> None:
        """One trial, written down."""
        started = time.monotonic()
        paid = config["stats"] if config["norm"] == "paid" else None
        record: dict[str, object] = {"stage": stage, "epsilon": epsilon, "seed": seed, "config": config}
        try:
            sigma = self.noise.multiplier(self.name, epsilon, config["batch"], config["steps"], paid)
            inputs = self.inputs(config, seed)
            ready = time.monotonic()
            labels = (self.learn.labels, self.validation.labels)
            scores = run_trial(config, inputs, labels, self.classes, sigma, seed, FLIPS[self.name])
            record.update(sigma=sigma, scores=scores, score=max(scores.values()), prepare_s=ready - started)
        except (torch.cuda.OutOfMemoryError, ValueError, RuntimeError) as error:
            record.update(score=0.0, error=str(error)[:300])
            self._inputs = ("", [])
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        record["seconds"] = time.monotonic() - started
        self.trials.append(record)
        with self.file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        print(f"{stage} eps={epsilon:g} {record['score']:.2f} {record['seconds']:.1f}s {record.get('scores', record.get('error'))} "
              f"{changed(config, self.name)}", flush=True)  # fmt: skip

    def ranking(self, epsilon: float) -> list[tuple[float, int, Config]]:
        """(cautious mean score, runs, settings) of everything tried at this ε, best first."""
        grouped: dict[str, list[float]] = {}
        for trial in self.trials:
            if trial["epsilon"] == epsilon:
                grouped.setdefault(json.dumps(trial["config"], sort_keys=True), []).append(float(trial["score"]))
        # One lucky run should not win over the mean of three: a run's accuracy varies by about 0.2.
        ranked = [(statistics.fmean(s) - 0.15 / math.sqrt(len(s)), len(s), json.loads(key)) for key, s in grouped.items()]
        return sorted(ranked, key=lambda entry: -entry[0])


def changed(config: Config, dataset: str) -> Config:
    """The settings that differ from the base."""
    base = {**COMMON, **BASE[dataset]}
    return {name: value for name, value in config.items() if base[name] != value}


def mutate(
    config: Config, draw: random.Random, choices: dict[str, tuple[object, ...]], features: dict[str, tuple[object, ...]]
) -> Config:
    """A few settings changed: numbers by a random factor, the others by another choice."""

    def applies(name: str) -> bool:
        needs = {"depth": "mlp", "pool": "conv"}.get(name, config["head"])
        paid = name not in ("stats", "radius") or config["norm"] == "paid"
        return (config["head"] != "linear" or name not in ONLY_HIDDEN) and needs == config["head"] and paid

    names = [name for name in (*FACTORS, *choices) if applies(name)]
    chosen = draw.sample(names, k=min(len(names), draw.choice((1, 2, 2, 3, 4))))
    if features and draw.random() < 0.2:
        chosen.append(draw.choice(list(features)))
    new = dict(config)
    for name in chosen:
        if name in FACTORS:
            new[name] = float(f"{config[name] * math.exp(draw.gauss(0, math.log(FACTORS[name]))):.3g}")
        else:
            among = {**choices, **features}[name]
            new[name] = draw.choice([choice for choice in among if choice != config[name]] or [config[name]])
    return new


def search(
    session: Session,
    epsilon: float,
    seconds: float,
    seeds: Iterable[Config],
    choices: dict[str, tuple[object, ...]],
    features: dict[str, tuple[object, ...]],
) -> None:
    """First ``seeds``, then changes of one of the best eight, or the best again, until the time is over."""
    until, draw = time.monotonic() + seconds, random.Random(len(session.trials))
    waiting = list(seeds)
    while time.monotonic() < until:
        ranked = session.ranking(epsilon)
        if waiting:
            config = waiting.pop(0)
        elif draw.random() < 0.15 and ranked[0][1] < 4:
            config = ranked[0][2]
        else:
            place = min(int(draw.expovariate(0.5)), len(ranked) - 1, 7)
            config = mutate(ranked[place][2], draw, choices, features)
        session.evaluate(config, epsilon, draw.randrange(2**31), "search")


def write_best(session: Session) -> None:
    """The five best settings for each ε."""
    best = {}
    for epsilon in EPSILONS:
        ranked = session.ranking(epsilon)[:5]
        best[f"{epsilon:g}"] = [{"score": score, "runs": runs, "config": config} for score, runs, config in ranked]
    content = {"dataset": session.name, "held_out": HELD_OUT, "delta": DELTA, "trials": len(session.trials), "best": best}
    (session.file.parent / f"{session.name}-best.json").write_text(json.dumps(content, indent=1))


def make_noise(out: Path, datasets: Iterable[str], grid: Callable[[str], tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """The table of noise multipliers."""
    from lipdp.privacy import calibrate_noise

    table = json.loads(out.read_text()) if out.exists() else {}
    by_size = {entry["size"]: entry["sigma"] for entry in table.values()}
    for name in datasets:
        sigma = dict(by_size.get(SIZES[name], {}))
        for batch in grid(name)[0]:
            for steps in grid(name)[1]:
                for epsilon in EPSILONS:
                    key = f"{epsilon:g}|{batch}|{steps}"
                    if key not in sigma:
                        sigma[key] = calibrate_noise(
                            epsilon=epsilon, delta=DELTA, sampling_rate=batch / SIZES[name], steps=steps, tolerance=1e-3
                        )
        table[name] = {"size": SIZES[name], "sigma": sigma}
        by_size[SIZES[name]] = sigma
        out.write_text(json.dumps(table, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("noise", "screen", "search", "confirm"))
    parser.add_argument("dataset", nargs="?", choices=sorted(SIZES))
    parser.add_argument("--epsilon", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--seconds", type=float, nargs="+", default=[90.0], help="for each epsilon; the last one for the rest")
    parser.add_argument("--same-features", action="store_true", help="search: do not change what features depend on")
    parser.add_argument("--noise", default="noise.json")
    parser.add_argument("--out", default="found")
    parser.add_argument("--device")
    parser.add_argument("--memory", type=float, default=50.0, help="GiB for features")
    parser.add_argument("--rows", type=int, default=1024, help="images that are transformed at once")
    parser.add_argument("--seeds", help="JSON list of changes of the base settings that search starts with")
    parser.add_argument("--fix", default="{}", help="JSON: settings that hold for every trial of this call")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.action == "noise":
        names = [arguments.dataset] if arguments.dataset else ["cifar10", "fashion_mnist", "mnist"]
        make_noise(Path(arguments.out), names, lambda n: (TINY["batch"], TINY["steps"]) if n == "digits" else (BATCHES, STEPS))
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    session = Session(arguments)
    base = {**COMMON, **BASE[session.name], **json.loads(arguments.fix)}
    tiny = session.name == "digits"
    if tiny:
        base.update(batch=256, steps=10, hidden=32)
    choices = {**CHOICES, **TINY, "hidden": (8, 16)} if tiny else CHOICES
    features = {**FEATURES, "fronts": ([[1, 4]], [[1, 3], [2, 2]])} if tiny else FEATURES
    changes = json.loads(arguments.seeds) if arguments.seeds else tiny_changes() if tiny else starts(session.name)
    for number, epsilon in enumerate(arguments.epsilon):
        seconds = arguments.seconds[min(number, len(arguments.seconds) - 1)]
        if arguments.action == "screen":
            # What shares features goes together, those of the base settings first.
            keys = [feature_key({**base, **change}) for change in changes]
            ordered = sorted(zip([k != keys[0] for k in keys], keys, changes, strict=True), key=lambda e: e[:2])
            until = time.monotonic() + seconds
            for _, _, change in ordered:
                if time.monotonic() < until:
                    session.evaluate({**base, **change}, epsilon, 0, "screen")
        elif arguments.action == "search":
            # What was best for another ε is a good start, and so is the list, with rates that suit this one's noise.
            others = [config for other in EPSILONS for _, _, config in session.ranking(other)[:4] if other != epsilon]
            rate = {1.0: 0.5, 8.0: 1.4}.get(epsilon, 1.0)
            listed = [{**base, **change} for change in changes] if arguments.seeds or not session.ranking(epsilon) else []
            fresh = others + [{**config, "lr": rate * config["lr"]} for config in listed]
            search(session, epsilon, seconds, fresh, choices, {} if arguments.same_features else features)
        else:
            for _, runs, config in session.ranking(epsilon)[:4]:
                for seed in range(max(0, 4 - runs)):
                    session.evaluate(config, epsilon, 100 + seed, "confirm")
        write_best(session)


if __name__ == "__main__":
    main()
