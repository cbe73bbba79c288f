"""Settings of private heads on chosen sets of features, on held-out tenths of the training set.

    python benchmarks/accuracy/heads.py linear cifar10 --out found          a grid of settings, for all ε at once
    python benchmarks/accuracy/heads.py choose cifar10 --out found          the best, as recipes: OUT/DATASET-recipes.toml
    python benchmarks/accuracy/heads.py hidden cifar10 --sets sets.json --epsilon 8 --seconds 60 --out found     random search

``sets.json`` maps names to sets (the name of a list in feature_sets.py does too); without it the best of
features.py are taken, after those of ``--lists`` were compared too. Lines are appended to OUT/DATASET-heads.jsonl. Batches
are the whole training part, so noise follows from the Gaussian mechanism exactly (columns.py). The test set is never read.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from columns import FADE, Setting, gaussian_mu, train_columns
from feature_sets import LISTS
from trials import Config, run_trial

from features import FLIPS, RADIUS, STATISTICS, Session, assembled, even_parts, parse_common
from lipdp import data
from lipdp.recipes import Recipe, save_recipe

HIDDEN: Config = {
    "head": "mlp", "hidden": 512, "depth": 1, "init": 1.0, "pool": False, "tau": 8.0, "clip": 0.2, "clip_hidden": 0.2,
    "normalise": False, "allocation": "per_layer", "lr": 20.0, "lr_hidden": 2.0, "momentum": 0.9, "schedule": "linear", "ema": 0.9,
    "steps": 200,
}  # fmt: skip
SHOWN = ("time", "clip", "momentum", "ema", "decay", "normalise")
FACTORS = {"clip": 1.8, "clip_hidden": 1.8, "lr": 1.7, "lr_hidden": 2.2, "tau": 1.7, "init": 1.7}
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden": (128, 256, 512, 1024), "steps": (120, 200, 350), "ema": (0.9, 0.97), "allocation": ("per_layer", "optimal"),
    "normalise": (False, True), "momentum": (0.8, 0.9, 0.95),
}  # fmt: skip


def linear_settings(epsilon: float, longer: float, loss: str) -> list[Setting]:
    """A grid around what the comparison of features found: longer for larger budgets. Squares are fitted sooner."""
    first = 8e3 * epsilon**0.98 if loss == "cross_entropy" else 1e3 * epsilon**0.75
    times = [longer * scale * first for scale in (1, 2, 4, 8)]
    kinds = [(clip, False) for clip in (0.05, 0.1, 0.2, 0.4)] + [(0.3, True)]
    if loss == "squares":
        kinds = [(clip, False) for clip in (0.1, 0.2, 0.4, 0.8)]
    averages = (0.9, 0.97)
    return [Setting(epsilon, t, clip, ema=e, normalise=kind, loss=loss) for t in times for clip, kind in kinds for e in averages]


def heads_file(session: Session) -> Path:
    return session.file.with_name(session.file.name.replace("-features", "-heads"))


def write(session: Session, record: dict[str, Any]) -> None:
    with heads_file(session).open("a") as stream:
        stream.write(json.dumps(record) + "\n")


def linear(session: Session, sets: dict[str, Any], epsilons: list[float], longer: float, loss: str) -> None:
    settings = [s for epsilon in epsilons for s in linear_settings(epsilon, longer, loss)]
    file = heads_file(session)
    before = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for name, made in sets.items():
        if any(entry.get("set") == made and entry.get("loss") == loss for entry in before):
            continue
        if session.over():
            return
        scores: list[list[float]] = []
        parts = even_parts(made, session.blocks)
        for fold in range(session.folds):
            held, kept = session.images.parts(fold)
            x, _ = assembled(made, parts, session.blocks, kept, 100 + fold)
            labels, classes = session.images.labels, session.images.info.classes
            x_train, y_train = x[kept], labels[kept]
            found = []
            for start in range(0, len(settings), 160):
                chosen = settings[start : start + 160]
                found += train_columns(
                    x_train, y_train, x[held], labels[held], classes, chosen, session.steps, STATISTICS, 10 + fold, session.scale
                )
            scores.append(found)
        means = [statistics.fmean(column) for column in zip(*scores, strict=True)]
        for epsilon in epsilons:
            ranked = sorted(
                ((m, vars(s)) for m, s in zip(means, settings, strict=True) if s.epsilon == epsilon), key=lambda pair: -pair[0]
            )
            shown = [f"{m:.2f} {' '.join(f'{key}={s[key]:g}' for key in SHOWN)}" for m, s in ranked[:5]]
            print(f"{name} eps={epsilon:g} {len(scores)} folds: {'; '.join(shown)}", flush=True)
            write(session, {"kind": "linear", "name": name, "set": made, "epsilon": epsilon, "folds": len(scores),
                            "steps": session.steps, "loss": loss, "ranked": ranked})  # fmt: skip


def hidden(session: Session, sets: dict[str, Any], epsilon: float, seed: int) -> None:
    """Random changes of the best settings so far, one set after the other in turn, scored on all folds."""
    draw = random.Random(seed)
    left = gaussian_mu(epsilon) ** 2 - STATISTICS**-2
    inputs: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    best: dict[str, tuple[float, Config]] = dict.fromkeys(sets, (0.0, HIDDEN))
    for name, made in sets.items():
        inputs[name] = []
        parts = even_parts(made, session.blocks)
        for fold in range(session.folds):
            held, kept = session.images.parts(fold)
            x, _ = assembled(made, parts, session.blocks, kept, 100 + fold)
            labels = session.images.labels
            inputs[name].append((x[kept][:, None], x[held][:, None], labels[kept], labels[held]))
            del x
    while not session.over():
        for name in sets:
            config = dict(best[name][1])
            if best[name][0] > 0:
                for key in draw.sample([*FACTORS, *CHOICES], k=draw.choice((1, 2, 3))):
                    if key in FACTORS:
                        config[key] = float(f"{config[key] * math.exp(draw.gauss(0, math.log(FACTORS[key]))):.3g}")
                    else:
                        config[key] = draw.choice(CHOICES[key])
            sigma = math.sqrt(config["steps"] / left) / session.scale
            scores = []
            for fold, (x, held, y, held_y) in enumerate(inputs[name]):
                config["batch"] = len(x)
                scores.append(run_trial(config, (x, held), (y, held_y), session.images.info.classes, sigma, fold, False)["one"])
            score = statistics.fmean(scores)
            if score > best[name][0]:
                best[name] = (score, config)
            print(f"{name} eps={epsilon:g} hidden {score:.2f} best {best[name][0]:.2f} {config}", flush=True)
            write(
                session, {"kind": "hidden", "name": name, "epsilon": epsilon, "score": score, "config": config, "set": sets[name]}
            )
            if session.over():
                return


def best_sets(session: Session) -> dict[str, Any]:
    """Of the compared sets, without what was not paid for: the best on average over ε, and the best for the least ε."""
    paid = [entry for entry in session.done if "oracle" not in entry["set"] and all(entry["scores"].values())]
    if not paid:
        raise SystemExit(f"{session.file} holds no sets to choose from; run features.py first, or pass --sets")
    least = min(paid[0]["scores"], key=float)
    chosen = [
        max(paid, key=lambda entry: statistics.fmean(entry["scores"].values())),
        max(paid, key=lambda entry: float(entry["scores"][least])),
    ]
    return {entry["name"]: entry["set"] for entry in chosen}


def choose(file: Path, out: Path) -> None:
    """For each ε the linear head with the best mean over folds, as a recipe: what utility.py runs."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    out.unlink(missing_ok=True)
    for epsilon in sorted({r["epsilon"] for r in records if r["kind"] == "linear"}):
        best = max((r for r in records if r["kind"] == "linear" and r["epsilon"] == epsilon), key=lambda r: r["ranked"][0][0])
        score, setting = best["ranked"][0]
        dataset = file.name.removesuffix("-heads.jsonl")
        save_recipe(as_recipe(dataset, epsilon, best["set"], setting, best["steps"], f"held-out {score:.2f}, {best['name']}"), out)
        print(f"eps={epsilon:g}: {score:.2f} {best['name']} {setting}")


def as_recipe(dataset: str, epsilon: float, made: dict[str, Any], setting: dict[str, Any], steps: int, note: str) -> Recipe:
    """What was found as a recipe. What a head learns depends on its time: the learning rate times the steps."""
    options = {
        "blocks": [library_block(block, FLIPS[dataset]) for block in made["blocks"]],
        "centre": "private",
        "radius": made.get("radius", RADIUS[dataset]),
        "clip": FADE if setting["normalise"] else setting["clip"],
        **{name: made[name] for name in ("straighten", "relu") if made.get(name)},
    }
    return Recipe(
        f"{dataset.replace('_', '-')}-patches-eps{epsilon:g}",
        dataset,
        "patches-linear",
        options,
        front="stored",
        loss=setting.get("loss", "cross_entropy"),
        temperature=1.0,
        batch_size=data.info(dataset).train_size,
        epochs=float(steps),
        learning_rate=setting["time"] / steps * (1 - setting["momentum"]),
        momentum=setting["momentum"],
        schedule="linear",
        ema_decay=setting["ema"],
        allocation="per_layer",
        statistics_budget=round(0.16 / epsilon, 4),
        epsilon=epsilon,
        provenance=note,
    )


def library_block(block: dict[str, Any], flip: bool) -> dict[str, Any]:
    """A block's settings as lipdp.features.stacks names them."""
    own = {name: value for name, value in block.items() if name not in ("kind", "mix", "shifts", "orders")}
    own["decorrelate"] = block["mix"]
    if block["kind"] == "patch":
        return {"kind": "patches", "mirror": flip, **own}
    s = block["shifts"]
    shifts = [(0, 0), (s, 0), (-s, 0), (0, s), (0, -s)] if s else [(0, 0)]
    return {"kind": "scattering", **own, "shifts": shifts, "orders": block["orders"], "flip": flip}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("linear", "hidden", "choose"))
    parser.add_argument("--sets", help="a list's name, or JSON: names to sets; by default the best of OUT/DATASET-features.jsonl")
    parser.add_argument("--only", nargs="*", help="names of sets")
    parser.add_argument("--lists", nargs="*", default=[], help="compare these lists of sets first")
    parser.add_argument("--screen", type=float, default=60.0, help="seconds for that")
    parser.add_argument("--loss", choices=("cross_entropy", "squares"), default="cross_entropy", help="of linear heads")
    parser.add_argument("--longer", type=float, default=1.0, help="factor on the learning times that are tried")
    parse_common(parser)
    arguments = parser.parse_args()
    out = Path(arguments.out)
    if arguments.action == "choose":
        choose(out / f"{arguments.dataset}-heads.jsonl", out / f"{arguments.dataset}-recipes.toml")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    session = Session(arguments)
    for name, made in ((name, made) for chosen in arguments.lists for name, made in LISTS[chosen].items()):
        if time.monotonic() - session.started < arguments.screen:
            session.score(name, made)
    if arguments.sets in LISTS:
        sets = LISTS[arguments.sets]
    else:
        sets = json.loads(Path(arguments.sets).read_text()) if arguments.sets else best_sets(session)
    sets = {name: made for name, made in sets.items() if not arguments.only or name in arguments.only}
    print(f"ready after {time.monotonic() - session.started:.1f} s: {', '.join(sets)}", flush=True)
    if arguments.action == "linear":
        linear(session, sets, [1.0, 3.0, 8.0], arguments.longer, arguments.loss)
        choose(out / f"{arguments.dataset}-heads.jsonl", out / f"{arguments.dataset}-recipes.toml")
    else:
        hidden(session, sets, arguments.epsilon[0], arguments.seed)


if __name__ == "__main__":
    main()
