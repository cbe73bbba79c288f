"""Images that nothing was tuned for: PrivateImageClassifier with its defaults beside a head that was searched for.

    python benchmarks/accuracy/own_images.py --device cuda                     all cases at ε = 3
    python benchmarks/accuracy/own_images.py --few --threads 1                 all cases on a slow processor, 15 settings for 56
    python benchmarks/accuracy/own_images.py table                             the table of docs/accuracy.md

Cases: scikit-learn's digits as they are (8 × 8) and enlarged to 28 × 28, a fifth of them to test; folders of PNGs of 5,000 and
20,000 training images of Fashion-MNIST, read back by lipdp.data.images; CIFAR-10 with its first 2 and first 5 classes, and with
10,000 images; test sets whole, or of those classes. The classifier gets nothing but ε. The searched head stands on the same
features, with the same δ: learning times, clips, averages, with and without a release of the mean, the best mean over two held-out
tenths of the training part; it is then trained three times on the whole training part. Its search is not paid for. Every call reads
the test part of each case for both heads, once, and writes a line for each ε to results/accuracy/own_images.jsonl, with the commit
that it ran on. What is compared are the means over the seeds; "behind" is the searched one less the default.

Features are computed once for each set of images: the classifier's plan, optimiser, schedule, averages and noise are its own, and
its head is trained on the stored outputs of its front (the plan for that head is checked to be the same).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from columns import FADE, Setting, gaussian_mu, train_columns
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lipdp
from lipdp import data
from lipdp.data.images import read_images
from lipdp.estimators.base import plan_head
from lipdp.estimators.images import _channels_first, _sized
from lipdp.features import extract_features, split_front

RESULTS = Path(__file__).parents[1] / "results/accuracy/own_images.jsonl"
STEPS, FOLDS = 150, 2
Case = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # images and labels to learn from, and to judge by


def digits(side: int) -> Case:
    """A fifth to test, in the order of a fixed seed."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images / 16).float()[:, None]
    if side != 8:
        images = F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False).clamp(0, 1)
    labels, order = load_digits().target, np.random.default_rng(0).permutation(len(images))
    pixels, fifth = images.numpy(), len(order) // 5
    test, train = order[:fifth], order[fifth:]
    return pixels[train], labels[train], pixels[test], labels[test]


def parts(name: str) -> Case:
    """Both parts of a known dataset as whole numbers from 0 to 255."""
    train, test, _ = data.load(name, download=False)
    pixels = [(part.tensors[0] * 255).round().to(torch.uint8).numpy() for part in (train, test)]
    return pixels[0], train.tensors[1].numpy(), pixels[1], test.tensors[1].numpy()


def clothes(count: int) -> Case:
    """The first training images as a folder of PNGs, one folder for each class, read back as ``lipdp train --images`` does."""
    from PIL import Image

    images, labels, test, test_labels = parts("fashion_mnist")
    with tempfile.TemporaryDirectory() as place:
        for number in range(count):
            folder = Path(place) / str(labels[number])
            folder.mkdir(exist_ok=True)
            Image.fromarray(images[number, 0]).save(folder / f"{number:05d}.png")
        pixels, names = read_images(place)
    return np.asarray(pixels), np.asarray(names), test[:, 0].reshape(-1, *np.asarray(pixels).shape[1:]), test_labels.astype(str)


def photographs(classes: int, count: int | None = None) -> Case:
    """CIFAR-10's first classes, or its first images."""
    images, labels, test, test_labels = parts("cifar10")
    kept, judged = labels < classes, test_labels < classes
    return images[kept][:count], labels[kept][:count], test[judged], test_labels[judged]


CASES = {
    "digits": lambda: digits(8),
    "digits-28": lambda: digits(28),
    "clothes-5000": lambda: clothes(5000),
    "clothes-20000": lambda: clothes(20_000),
    "photographs-2-classes": lambda: photographs(2),
    "photographs-5-classes": lambda: photographs(5),
    "photographs-10000": lambda: photographs(10, 10_000),
}


def searched_settings(epsilon: float, delta: float, records: int, few: bool) -> list[Setting]:
    """Learning times κ·N·μ for κ around the classifier's 3; clips from hardly any to the whole gradient at one length."""
    reach = records * gaussian_mu(epsilon, delta)
    kappas = (1.0, 2.0, 3.0, 5.0, 9.0) if few else (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 16.0)
    clips = ((0.03, False), (0.1, False), (FADE, True)) if few else ((0.03, False), (0.1, False), (0.3, False), (FADE, True))
    averages = (0.9,) if few else (0.9, 0.97)
    return [Setting(epsilon, k * reach, c, ema=a, normalise=n) for k in kappas for c, n in clips for a in averages]


def on_sphere(features: Tensor, learn: Tensor, multiplier: float | None, seed: int) -> Tensor:
    """Features on the unit sphere; less the released mean of those to learn from, where it has a multiplier."""
    if multiplier is not None:
        longest = 1.5 * math.sqrt(3)  # three blocks of weight 1, as the classifier's
        draw = torch.Generator(features.device).manual_seed(seed)
        short = features[learn] * (longest / features[learn].norm(dim=1, keepdim=True)).clamp_max(1)
        noise = multiplier * longest * torch.randn(features.shape[1], generator=draw, device=features.device)
        features = features - (short.sum(0) + noise) / len(learn)
    return F.normalize(features, eps=1e-9).bfloat16()


def searched(model: lipdp.PrivateImageClassifier, case: tuple[Tensor, Tensor, Tensor, Tensor], few: bool) -> dict[str, Any]:
    """The best head on the classifier's own features: found on held-out tenths, judged on the test part once."""
    train, labels, test, test_labels = case
    both = torch.cat([train, test])
    records, device = len(train), train.device
    classes, epsilon, delta = int(labels.max()) + 1, float(model.epsilon), float(model.delta_)
    settings = searched_settings(epsilon, delta, records, few)
    multipliers: list[float | None] = [None] if 32 * both.shape[1] ** 0.5 > epsilon * records else [None, 32 / epsilon]
    order = torch.randperm(records, generator=torch.Generator().manual_seed(7)).to(device)
    tenths = order.tensor_split(10)
    best: tuple[float, float | None, Setting] | None = None
    for multiplier in multipliers:
        scores = []
        for fold in range(FOLDS):
            held, kept = tenths[fold], torch.cat([tenth for number, tenth in enumerate(tenths) if number != fold])
            x = on_sphere(train, kept, multiplier, fold)
            scores.append(
                train_columns(
                    x[kept], labels[kept], x[held], labels[held], classes, settings, STEPS, multiplier, 10 + fold, delta=delta
                )
            )
        means = [statistics.fmean(column) for column in zip(*scores, strict=True)]
        own = max(zip(means, settings, strict=True), key=lambda pair: pair[0])
        if best is None or own[0] > best[0]:
            best = own[0], multiplier, own[1]
    assert best is not None
    held_out, multiplier, setting = best
    x = on_sphere(both, torch.arange(records, device=device), multiplier, 99)
    # As often as there are seeds: the mean is what a searched head can expect.
    final = train_columns(x[:records], labels, x[records:], test_labels, classes, [setting] * 3, STEPS, multiplier, 20, delta=delta)
    return {
        "accuracy": statistics.fmean(final),
        "held_out": held_out,
        "settings": len(settings) * len(multipliers),
        "mean_released": multiplier is not None,
        **{name: getattr(setting, name) for name in ("time", "clip", "ema", "normalise")},
    }


class OnStored(lipdp.PrivateImageClassifier):
    """The classifier, its head trained on stored outputs of its front instead of computing them for every seed."""

    def _train(self, model, loss, optimizer, scheduler, plan, data, *, seed, **options):
        front, head = split_front(model)
        stored = stored_features(front, data.tensors[0])
        rows = TensorDataset(stored, data.tensors[1])
        same = plan_head(
            head,
            loss,
            dataset_size=plan.dataset_size,
            batch_size=plan.batch_size,
            epsilon=float(self.epsilon),
            delta=plan.delta,
            steps=plan.steps,
            statistics_budget=0.1 if self.choice_.settings["centre"] == "private" else None,
        )
        if (same.noise_multiplier, same.sensitivity, same.epsilon) != (plan.noise_multiplier, plan.sensitivity, plan.epsilon):
            raise RuntimeError(f"the head's plan is another one: {same} and {plan}")
        super()._train(head, loss, optimizer, scheduler, same, rows, seed=seed, **{**options, "settle": False})
        self.model_ = torch.nn.Sequential(*front, *self.model_)


_STORED: dict[str, Tensor] = {}


def stored_features(front: torch.nn.Module, pixels: Tensor) -> Tensor:
    """The front's outputs; kept for these pixels in the memory of this process."""
    key = f"{front}"[:20_000] + hashlib.sha256(pixels.cpu().numpy().tobytes()).hexdigest()
    if key not in _STORED:
        while len(_STORED) > 2:  # one case: what is learned from, and what is judged
            _STORED.pop(next(iter(_STORED)))
        labels = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
        _STORED[key] = extract_features(front, TensorDataset(pixels, labels), device=pixels.device, keep=pixels.device).tensors[0]
    return _STORED[key]


def run(name: str, epsilons: list[float], seeds: int, device: str, few: bool, log: Path) -> None:
    images, labels, test, test_labels = CASES[name]()
    for epsilon in epsilons:
        scores, seconds = [], []
        for seed in range(seeds):
            started = time.process_time()
            model = OnStored(epsilon=epsilon, random_state=seed, device=device).fit(images, labels)
            seconds.append(time.process_time() - started)
            judged = features_of(model, test, device)
            _, head = split_front(model.model_)
            with torch.no_grad():
                said = torch.cat([head(part).argmax(1) for part in judged.split(4096)]).cpu().numpy()
            scores.append(100 * float((model.classes_[said] == test_labels).mean()))
        stored = features_of(model, images, device), features_of(model, test, device)
        codes = [torch.from_numpy(np.searchsorted(model.classes_, own)).to(device) for own in (labels, test_labels)]
        other = searched(model, (stored[0], codes[0], stored[1], codes[1]), few)
        mean = statistics.fmean(scores)
        record = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "case": name,
            "images": len(images),
            "judged": len(test),
            "shape": list(images.shape[1:]),
            "classes": len(model.classes_),
            "epsilon": epsilon,
            "delta": model.delta_,
            "spent": model.epsilon_,
            "features": model.choice_.method,
            "why": model.choice_.why,
            "default": round(mean, 2),
            "defaults": [round(score, 2) for score in scores],
            "searched": {key: round(value, 2) if isinstance(value, float) and value > 1 else value for key, value in other.items()},
            "behind": round(other["accuracy"] - mean, 2),
            "process_seconds": [round(second, 1) for second in seconds],
            "device": torch.cuda.get_device_name() if "cuda" in device else "cpu",
            "command": " ".join(["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
        }
        with log.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        print(f"{name} ε={epsilon:g}: {mean:.2f}, searched {other['accuracy']:.2f}, behind {record['behind']:.2f}", flush=True)


def commit() -> str:
    """What ran, and whether the library or this script differ from what is committed."""
    here = Path(__file__).parents[2]
    said = [
        subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout.strip()
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "src", "benchmarks/accuracy"])
    ]
    return said[0] + (" and changes" if said[1] else "")


def features_of(model: lipdp.PrivateImageClassifier, images: np.ndarray, device: str) -> Tensor:
    """What the classifier's front makes of images, brought to 32 × 32 pixels as it does."""
    front, _ = split_front(model.model_)
    return stored_features(front, _sized(_channels_first(images)).to(device))


def table() -> None:
    latest = {(line["case"], line["epsilon"]): line for line in map(json.loads, RESULTS.read_text().splitlines())}
    print("| images | N | classes | ε | defaults | searched head | behind |\n|---|---|---|---|---|---|---|")
    for name in CASES:
        for (case, epsilon), line in sorted(latest.items()):
            if case == name:
                shape = " × ".join(map(str, line["shape"]))
                print(
                    f"| {name} ({shape}) | {line['images']:,} | {line['classes']} | {epsilon:g} | {line['default']:.1f} | "
                    f"{line['searched']['accuracy']:.1f} | {line['behind']:.1f} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default. Or: table")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--few", action="store_true", help="15 settings instead of 56: for a processor")
    parser.add_argument("--threads", type=int, help="of torch's, on a processor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--log", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.cases == ["table"]:
        table()
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for name in arguments.cases or CASES:
        run(name, arguments.epsilon, arguments.seeds, arguments.device, arguments.few, arguments.log)


if __name__ == "__main__":
    main()
