"""``lipdp new``, ``lipdp doctor`` and ``lipdp features``: a folder to start from, whether this machine is ready, the networks
that learn from drawings.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from lipdp._texts import table, upwards
from lipdp.cli import options
from lipdp.cli.output import check_new_file, console, print_json
from lipdp.errors import ConfigurationError

Verdict = Literal["ok", "missing", "broken"]
_CORE = ("torch", "numpy", "cryptography", "dp-accounting", "scikit-learn", "pooch", "platformdirs", "rich", "typer")
_EXTRAS = {
    "matplotlib": "figures: pip install 'lipdp[plots]'",
    "optuna": "lipdp sweep: pip install 'lipdp[sweep]'",
    "opendp": "OpenDP's noise for mechanisms: pip install 'lipdp[mechanisms]'",
    "pandas": "DataFrames in the estimators: pip install pandas",
    "pillow": "folders of pictures in the estimators: pip install pillow",
    "tensorboard": "training.TensorBoardLogger: pip install tensorboard",
}


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    detail: str


def doctor(data: options.DataRoot = None, as_json: options.Json = False) -> None:
    """Check this installation: packages, noise, accounting, datasets, GPU. Exit code 2 where something that is needed is broken."""
    findings = [*_packages(), *(_tried(what, check) for what, check in _CHECKS.items()), *_data(data)]
    broken = [finding.what for finding in findings if finding.verdict == "broken"]
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings], "broken": broken})
    else:
        out = console()
        out.print(table(("", "verdict", "detail"), [tuple(finding) for finding in findings]))
        out.print(f"broken: {', '.join(broken)}" if broken else "All that lipdp needs works here.")
    if broken:
        raise typer.Exit(2)


def _packages() -> list[Finding]:
    findings = [Finding("Python", "ok", platform.python_version())]
    for name in _CORE:
        try:
            findings.append(Finding(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "broken", "lipdp needs it: pip install lipdp"))
    for name, purpose in _EXTRAS.items():
        try:
            findings.append(Finding(name, "ok", f"{metadata.version(name)} ({purpose.partition(':')[0]})"))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "missing", f"optional, {purpose}"))
    return findings


def _tried(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, "ok", check())
    except Exception as error:  # whatever it is, it is what the user wants to know
        return Finding(what, "broken", f"{type(error).__name__}: {error}")


def _noise() -> str:
    """Draws noise, which checks the generator against known answers on the way."""
    import torch

    from lipdp.privacy import Stream
    from lipdp.privacy.mechanism import add_noise

    drawn = add_noise({"w": torch.zeros(10_000, dtype=torch.float64)}, {"w": 1.0}, Stream())["w"]
    deviation = float(drawn.std())
    if not 0.9 < deviation < 1.1:
        raise RuntimeError(f"10,000 draws of standard deviation 1 have {deviation:.3f}")
    return f"10,000 draws, standard deviation {deviation:.3f}"


def _accounting() -> str:
    from lipdp.privacy import epsilon

    cost = epsilon(noise_multiplier=1.0, sampling_rate=0.01, steps=100, delta=1e-5)
    if not 0.5 < cost < 2:
        raise RuntimeError(f"a known run costs ε = {upwards(cost)}, not about 0.9")
    return f"ε = {upwards(cost)} for a known run"


def _step() -> str:
    """A whole private run, of two steps."""
    import torch
    from torch.utils.data import TensorDataset

    import lipdp
    from lipdp import losses, nn

    model = nn.Sequential(nn.BoundedInput((2,)), nn.SpectralLinear(2, 2, bias=False))
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=8, batch_size=4, delta=1e-2, noise_multiplier=1.0, steps=2)
    data = TensorDataset(torch.rand(8, 2), torch.tensor([0, 1] * 4))
    history = lipdp.fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan, data, evaluations=1)
    return f"two private steps, ε = {upwards(history.epsilon)}"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none: everything runs on the processor"
    triton = "with Triton" if importlib.util.find_spec("triton") else "without Triton: noise is drawn on the processor"
    return f"{torch.cuda.get_device_name(0)}, {triton}"


_CHECKS: dict[str, Callable[[], str]] = {"noise": _noise, "accounting": _accounting, "training": _step, "GPU": _gpu}


def _data(root: Path | None) -> list[Finding]:
    from lipdp.data import available
    from lipdp.data.files import data_root

    place = data_root(root)
    there = [name for name, own in available(root).items() if own.on_disk]
    parent = place if place.exists() else next(p for p in place.parents if p.exists())
    writable: Verdict = "ok" if os.access(parent, os.W_OK) else "missing"
    note = "" if writable == "ok" else "; it can't be written to: set LIPDP_DATA"
    return [Finding("datasets", writable, f"{place}: {', '.join(there)}{note}")]


NEW_EXAMPLE = "Example: lipdp new my-experiment && cd my-experiment && python train.py"

_TRAIN = '''"""{name}: a private network, from the plan to the report."""

import sys
from pathlib import Path

import lipdp
from lipdp import losses, nn

EPSILON, DELTA = 3.0, 1e-4  # decide them before you look at results
BUDGET = Path("data.budget")  # all that is released about the data is charged here


def make_model() -> nn.Sequential:
    """Its bounds are proved before a record is read: print(plan) shows them."""
    return nn.Sequential(
        nn.LayerCentering(), nn.BoundedInput((1, 8, 8), norm=1.0, mode="sphere"), nn.Flatten(),
        nn.SpectralLinear(64, 128, bias=False), nn.GroupSort(2), nn.SpectralLinear(128, 10, bias=False), nn.ClipGradient(0.4),
    )


def main(epochs: float = 40) -> None:
    train, test, info = lipdp.data.load("digits")  # put your own dataset here: (input, class number) pairs
    model, loss = make_model(), losses.CrossEntropy(tau=20.0)
    plan = lipdp.plan(model, loss, dataset_size=len(train), batch_size=1000, epsilon=EPSILON, delta=DELTA, epochs=epochs)
    print(plan)
    budget = BUDGET if BUDGET.exists() else lipdp.privacy.Budget(BUDGET, epsilon=2 * EPSILON, delta=2 * DELTA, dataset="my data")
    optimizer, scheduler = lipdp.suggest_optimizer(model, plan)
    history = lipdp.fit(model, loss, optimizer, plan, train, scheduler=scheduler, budget=budget,
                        checkpoint="run.ckpt", resume=True, callbacks=[lipdp.training.ProgressBar()])
    accuracy = lipdp.evaluate(model, loss, test)["accuracy"]
    print(f"{{lipdp.privacy.guarantee(history.epsilon, plan.delta)}}: test accuracy {{100 * accuracy:.1f}} %")
    Path("plan.json").write_text(plan.to_json())


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
'''

_README = """# {name}

    python train.py              # plan, private training, test accuracy; an interrupted run goes on
    lipdp budget show data.budget

The checkpoint (`run.ckpt`) holds the run's secret key: keep it as safe as the data. Publish weights and `plan.json`, not it.
"""

_IGNORED = "*.ckpt\n*.budget\n*.budget.*\n*.pt\n__pycache__/\n"


def new(
    name: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make.", show_default=False)],
    as_json: options.Json = False,
) -> None:
    """Make a folder with a private training script, a README and a .gitignore."""
    if name.exists() and (not name.is_dir() or any(name.iterdir())):
        raise ConfigurationError(f"'{name}' is there already and is not empty: choose another name, nothing is overwritten")
    name.mkdir(parents=True, exist_ok=True)
    title = name.resolve().name
    content = {"train.py": _TRAIN.format(name=title), "README.md": _README.format(name=title), ".gitignore": _IGNORED}
    for file, text in content.items():
        (name / file).write_text(text, encoding="utf-8")
    if as_json:
        print_json({"folder": str(name), "files": list(content)})
        return
    console().print(f"made {name} with {', '.join(content)}. Next: cd {shlex.quote(str(name))} && python train.py", soft_wrap=True)


features = typer.Typer(name="features", no_args_is_help=True, help="Public features: networks that learn from drawings.")
_STEPS = {"large": 5401, "small": 2101}
_VIEWS = (32, 48)


@features.command("train")
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
    from lipdp.features.learned import SHAPES, ResidualNetwork, folded_weights, read_network, write_network
    from lipdp.features.learning import Lesson, learn, learn_from

    name = choose("network", network, tuple(SHAPES))
    if output is not None and output.suffix != ".npz":
        raise ConfigurationError(f"--output is a file that ends in .npz, and '{output}' does not")
    if output is not None:
        check_new_file(output, "--output")
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
        console().print(f"wrote '{file_name}', sha256 {digest}", soft_wrap=True)
