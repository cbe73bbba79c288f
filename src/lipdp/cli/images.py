"""``lipdp train --images``: a private classifier for images of one's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lipdp.cli.output import console, duration, guarantee, print_json
from lipdp.errors import ConfigurationError

__all__ = ["train_images"]

_REPORT, _MODEL = "report.md", "model.lipdp"


def train_images(
    images: Path,
    *,
    test: Path | None,
    features: str,
    epsilon: float | None,
    delta: float | None,
    seed: int | None,
    reproducible: bool,
    device: str,
    budget: Any,
    validation_fraction: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Fit :class:`lipdp.PrivateImageClassifier` on a folder or an .npz file, and judge it on what was held out or given."""
    from lipdp.data.images import read_images
    from lipdp.estimators import PrivateImageClassifier

    if epsilon is None:
        raise ConfigurationError("--images needs a budget: give --epsilon, e.g. --epsilon 3")
    if test is not None and validation_fraction is not None:
        raise ConfigurationError("give --test or --validation-fraction, not both")
    if output is not None and any((output / name).exists() for name in (_REPORT, _MODEL)):
        raise ConfigurationError(f"'{output}' already holds another run. Choose another --output folder.")
    started = time.monotonic()
    x, y = read_images(images)
    judged, what = (read_images(test), "test") if test is not None else (None, "")
    if validation_fraction is not None:
        x, y, judged, what = *_split(x, y, validation_fraction), "validation"
    model = PrivateImageClassifier(
        epsilon=epsilon, delta=delta, features=features, random_state=seed, reproducible=reproducible, device=device, budget=budget
    ).fit(x, y)
    accuracy = None if judged is None else float(model.score(*judged))
    seconds = time.monotonic() - started
    if output is not None:
        from lipdp.saved import save_model

        output.mkdir(parents=True, exist_ok=True)
        (output / _REPORT).write_text(model.report(), encoding="utf-8")
        save_model(model.model_, output / _MODEL)
    report = {
        "images": str(images),
        "records": len(x),
        "classes": len(model.classes_),
        "features": model.choice_.method,
        "why": model.choice_.why,
        "accuracy": accuracy,
        "evaluated_on": what or None,
        "epsilon": model.epsilon_,
        "delta": model.delta_,
        "steps": model.plan_.steps,
        "seconds": seconds,
        "method": model.plan_.method,
        "noise_multiplier": model.plan_.noise_multiplier,
        "private": model.private_,
    }
    if as_json:
        print_json(report)
        return
    out = console()
    out.print(
        f"{len(x):,} images of {len(model.classes_)} classes; features {model.choice_.method}: {model.choice_.why}", markup=False
    )
    told = (
        "nothing was held out: give --test or --validation-fraction"
        if accuracy is None
        else f"{what} accuracy {100 * accuracy:.1f}%"
    )
    out.print(f"{told}, with {guarantee(model.epsilon_, model.delta_)}, in {duration(seconds)}", soft_wrap=True)
    if not model.private_:
        from lipdp.training.history import NOT_PRIVATE

        out.print(f"[bold red]{NOT_PRIVATE}[/bold red]", soft_wrap=True)


def _split(x: Any, y: Any, share: float) -> tuple[Any, Any, tuple[Any, Any]]:
    """A part held out, by a fixed shuffle."""
    import numpy as np

    order = np.random.default_rng(0).permutation(len(x))
    held = max(1, round(share * len(x)))
    return x[order[held:]], y[order[held:]], (x[order[:held]], y[order[:held]])
