"""``lipdp features``: networks that learn from drawings."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lipdp.cli import options
from lipdp.cli.output import console, print_json
from lipdp.errors import ConfigurationError

__all__ = ["app"]

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
    from lipdp.data.info import data_root
    from lipdp.features.learned import SHAPES, ResidualNetwork, folded_weights, read_network, write_network
    from lipdp.features.learning import Lesson, learn, learn_from

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
