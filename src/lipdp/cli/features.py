"""``lipdp train --images`` and ``lipdp features``: a classifier of one's own images, and networks that learn from drawings."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lipdp.cli import options
from lipdp.cli.output import console, duration, guarantee, print_json
from lipdp.errors import ConfigurationError

__all__ = ["app", "train_images"]

app = typer.Typer(name="features", no_args_is_help=True, help="Public features: networks that learn from drawings.")
_STEPS = {"large": 5401, "small": 2101}
_VIEWS = (32, 48)


@app.command("train")
def train(
    network: Annotated[str, typer.Argument(help="large (minutes on a GPU), or small, which large teaches.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of the optimiser.", show_default="5401 for large, 2101 for small")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of drawings, views and first weights; public.")] = 0,
    batch: Annotated[int, typer.Option(min=2, help="Drawings in a step.")] = 1024,
    pool: Annotated[int, typer.Option(min=2, help="Drawings at hand; a thousand of them are replaced now and then.")] = 65_536,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda …; auto takes CUDA where there is one.")] = "auto",
    checkpoint: Annotated[Path | None, typer.Option(help="File to save the lesson in as it goes; it goes on from there.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Where to put it.", show_default="the user's cache")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Teach a network on drawings, without labels, photographs or private data, and keep it for features='large'."""
    import torch

    from lipdp._checks import choose
    from lipdp.data.files import data_root
    from lipdp.features.learned import read_network, write_network
    from lipdp.features.learning import Lesson, learn, learn_from
    from lipdp.features.residual import SHAPES, ResidualNetwork, folded_weights

    name = choose("network", network, tuple(SHAPES))
    if output is not None and output.suffix != ".npz":
        raise ConfigurationError(f"--output is a file that ends in .npz, and '{output}' does not")
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    lesson = Lesson(steps=steps or _STEPS[name], seed=seed, batch=batch, pool=pool)
    progress = console(stderr=True)

    def watch(step: int, loss: float, right: float) -> None:
        progress.print(f"step {step:,} of {lesson.steps:,}: loss {loss:.3f}, {100 * right:.1f} %")

    about = {"name": name, "steps": lesson.steps, "seed": seed, "command": shlex.join(["lipdp", *sys.argv[1:]])}
    if name == "small":
        known = read_network("large")
        teacher = ResidualNetwork(known.shape)
        teacher.load_state_dict(dict(known.weights))
        learned = learn_from(teacher, SHAPES[name], lesson, device=place, checkpoint=checkpoint, watch=watch)
        about["teacher"] = known.digest
    else:
        learned = learn(SHAPES[name], lesson, device=place, checkpoint=checkpoint, watch=watch)
    # A small one of one's own is no stand-in for the one that comes with lipdp: it goes by the name of its file.
    first = output or data_root() / "networks" / f"{'my-' if name == 'small' else ''}{name}.npz"
    written = {}
    for view in _VIEWS if name == "large" else _VIEWS[:1]:
        file = first if view == lesson.view else first.with_name(f"{first.stem}-{view}{first.suffix}")
        written[str(file)] = write_network(file, SHAPES[name], folded_weights(learned), view, about, device=place).digest
    if as_json:
        print_json({"network": name, "steps": lesson.steps, "files": written})
        return
    for file_name, digest in written.items():
        console().print(f"wrote '{file_name}', sha256 {digest}", markup=False, soft_wrap=True)


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
