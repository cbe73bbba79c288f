"""``lipdp new``: a folder to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipdp.cli import options
from lipdp.cli.output import console, print_json
from lipdp.errors import ConfigurationError

__all__ = ["EXAMPLE", "new"]

EXAMPLE = "Example: lipdp new my-experiment && cd my-experiment && python train.py"

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
    print(f"epsilon {{history.epsilon:.3f}} at delta {{plan.delta:g}}: test accuracy {{100 * accuracy:.1f}} %")
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
    console().print(f"made {name} with {', '.join(content)}. Next: cd {name} && python train.py", markup=False, soft_wrap=True)
