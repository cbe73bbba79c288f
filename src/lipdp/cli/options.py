"""Options that several commands share, and the recipe they make: names looked up, texts made values, contradictions refused.

And what stands behind ``--nproc``: several processes for one command, started with torchrun and joined to one group.
"""

from __future__ import annotations

import ast
import os
import secrets
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipdp._texts import brief
from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.data import DatasetInfo
    from lipdp.recipes import Recipe
    from lipdp.recipes.run import Drawing
    from lipdp.training.distributed import Ranks

_BUDGET, _RECIPE, _OUTPUT = "Privacy", "Recipe settings", "Output"

_RECIPE_NAME = typer.Argument(
    metavar="RECIPE",
    help="A name that `lipdp recipes` lists, e.g. digits; or FILE.toml:NAME, of `lipdp sweep --save`.",
    show_default=False,
)
RecipeName = Annotated[str, _RECIPE_NAME]
OptionalRecipeName = Annotated[str | None, _RECIPE_NAME]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Target ε. Together with a noise multiplier, the run gets as long as this budget allows.",
        show_default="the recipe's, without a noise multiplier",
        rich_help_panel=_BUDGET,
    ),
]
NoiseMultiplier = Annotated[
    float | None,
    typer.Option(help="Noise multiplier σ of the whole step, instead of the one that ε asks for.", rich_help_panel=_BUDGET),
]
Delta = Annotated[
    float | None,
    typer.Option(
        help="δ of the guarantee, best well below 1/N. By default the recipe's; of your own records at most 1/(10 N) and 1e-5.",
        rich_help_panel=_BUDGET,
    ),
]
BudgetFile = Annotated[
    Path | None,
    typer.Option(
        "--budget",
        metavar="FILE",
        help="The dataset's account (`lipdp budget create`): charged before anything is released.",
        rich_help_panel=_BUDGET,
    ),
]
SamplingScheme = Annotated[
    str,
    typer.Option(
        "--sampling",
        help="How a step's records are drawn: poisson; truncated_poisson, with a largest batch, for a fixed memory; or fixed_size, "
        "without replacement, which is private for replaced records (--adjacency replace_one).",
        rich_help_panel=_BUDGET,
    ),
]
LargestBatch = Annotated[
    int | None,
    typer.Option(
        help="With --sampling truncated_poisson: no batch has more records.",
        show_default="six standard deviations above the batch size",
        rich_help_panel=_BUDGET,
    ),
]
Epochs = Annotated[float | None, typer.Option(help="Expected passes over the data.", rich_help_panel=_RECIPE)]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size.", rich_help_panel=_RECIPE)]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate, in units of the sensitivity.", rich_help_panel=_RECIPE)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting of the recipe, or options.NAME of its model: --set momentum=0.8 --set options.hidden=64,64. "
        "Can be repeated.",
        rich_help_panel=_RECIPE,
    ),
]
ValidationFraction = Annotated[
    float | None,
    typer.Option(help="Hold out this part of the training set, for choosing settings without the test set."),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="ROOT", help="Folder of the datasets.", show_default="$LIPDP_DATA, else the user's cache folder"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.", rich_help_panel=_OUTPUT)]

# --- accounting ---
RequiredDelta = Annotated[float, typer.Option("--delta", help="δ of the guarantee.", show_default=False)]
SamplingRate = Annotated[float | None, typer.Option(help="q: each record's chance to be in a step's batch.")]
DatasetSize = Annotated[int | None, typer.Option(help="N, with --batch-size: instead of the sampling rate.")]
RunSteps = Annotated[int | None, typer.Option("--steps", help="Number of steps T.")]
RunEpochs = Annotated[float | None, typer.Option("--epochs", help="Instead of --steps: expected passes over the data.")]
Accountant = Annotated[str, typer.Option(help="pld (tight) or rdp.")]
Adjacency = Annotated[str, typer.Option(help="Neighbouring datasets: add_remove or replace_one.")]

_WORDS: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}


def configured(
    name: str,
    settings: Sequence[str] | None,
    *,
    epsilon: float | None = None,
    validation_fraction: float | None = None,
    **flags: float | None,
) -> Recipe:
    """The recipe of this name with what the command line changes. A setting with a flag of its own beats ``--set``.

    Where a name stands for several recipes, one for each budget, ``epsilon`` chooses.
    """
    from lipdp import recipes

    recipe = recipes.get(name, epsilon)
    changes, options = _assignments(settings or (), recipe)
    changes.update({key: value for key, value in flags.items() if value is not None})
    if options:
        changes["options"] = {**recipe.options, **options}
    changed = recipe.but(**changes)
    size = training_size(dataset_info(changed.dataset), validation_fraction)
    if "batch_size" in changes and changed.batch_size > size:
        raise ConfigurationError(
            f"batch_size={changed.batch_size} is larger than the {size} training records of {changed.dataset}: the sampling rate "
            f"would exceed 1. Use at most {size}."
        )
    return changed


def check_budget(epsilon: float | None, noise_multiplier: float | None, *, epochs: float | None) -> None:
    """Refuse what says too much. Where nothing is said, ε is the recipe's own."""
    if epsilon is not None and noise_multiplier is not None and epochs is not None:
        raise ConfigurationError(
            "give two of --epsilon, --noise-multiplier and --epochs: the third follows from them. Leave out the one to be found."
        )


def drawing(sampling: str, largest_batch: int | None, adjacency: str) -> Drawing:
    """How records are drawn and for which neighbours, for a recipe's plan, with the accountant that knows it.

    Samples of fixed size are private for replaced records, which is another promise: it has to be asked for by name.
    """
    from lipdp.privacy.accounting import Adjacency as Neighbours
    from lipdp.privacy.runs import Scheme

    for option, value, known in (("--sampling", sampling, Scheme), ("--adjacency", adjacency, Neighbours)):
        if value not in typing.get_args(known):
            raise ConfigurationError(f"{option} must be one of {', '.join(typing.get_args(known))}, not {value!r}")
    fixed = sampling == "fixed_size"
    if fixed and adjacency != "replace_one":
        raise ConfigurationError(
            "--sampling fixed_size is private for replaced records, not for one more or less: say so with --adjacency replace_one "
            "(a sum moves twice as far, which costs noise), or take --sampling truncated_poisson for batches that fit in memory."
        )
    return {
        "sampling": typing.cast("Scheme", sampling),
        "largest_batch": largest_batch,
        "adjacency": typing.cast("Neighbours", adjacency),
        "accountant": "rdp" if fixed else "pld",
    }


def dataset_info(name: str) -> DatasetInfo:
    """What is public about a dataset; reads none of it."""
    from lipdp.data import info

    return info(name)


def training_size(info: DatasetInfo, validation_fraction: float | None) -> int:
    """Records that are trained on."""
    if validation_fraction is None:
        return info.train_size
    if not 0 < validation_fraction < 1:
        raise ConfigurationError(f"--validation-fraction must lie between 0 and 1, not {validation_fraction!r}; try 0.1")
    return info.train_size - round(validation_fraction * info.train_size)


def _assignments(settings: Sequence[str], recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The changes that ``--set`` asks for: of the recipe, and of its model's options."""
    hints = typing.get_type_hints(type(recipe))
    changes: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = (part.strip() for part in setting.partition("="))
        if not (key and separator):
            raise ConfigurationError(f"--set takes KEY=VALUE, e.g. --set momentum=0.8, not {setting!r}")
        if key.startswith("options."):
            option = key.removeprefix("options.")
            value = _literal(text)
            # 64 for a setting that is a list in the recipe is a list of one.
            listed = isinstance(recipe.options.get(option), list | tuple) and not isinstance(value, list | tuple)
            options[option] = (value,) if listed and value is not None else value
        elif key == "options":
            raise ConfigurationError("set the model's options one by one: --set options.NAME=VALUE")
        else:
            # An unknown name is refused by the recipe itself, with the list of those that it has.
            changes[key] = _converted(key, text, hints.get(key, str))
    return changes, options


def _converted(key: str, text: str, hint: Any) -> Any:
    """``text`` as the type that the recipe declares."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    if type(None) in choices and _WORDS.get(text.lower(), text) is None:
        return None
    for choice in choices:
        if typing.get_origin(choice) is typing.Literal:
            allowed = typing.get_args(choice)
            if text not in allowed:
                raise ConfigurationError(f"{key} must be one of {', '.join(map(str, allowed))}, not {text!r}")
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                kind = "whole number" if choice is int else "number"
                raise ConfigurationError(f"{key} must be a {kind}, not {text!r}") from None
    return text if str in choices else _literal(text)


def _literal(text: str) -> Any:
    """A value of a model's option: a number, true, false, none, a list like 64,64; anything else is a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def is_rank() -> bool:
    """Whether this process is one of those that a launcher has started."""
    return "LOCAL_RANK" in os.environ and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(count: int) -> int:
    """Run this very command in ``count`` processes of this machine; what they ended with."""
    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word == "--nproc":
            next(given, None)
        elif not word.startswith("--nproc="):
            words.append(word)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run([*launcher, "-m", "lipdp", *words], check=False).returncode


@contextmanager
def joined(device: str) -> Iterator[tuple[Ranks, str]]:
    """This process as a member of the launcher's group (alone, where none has started it), and the device that it computes on."""
    import torch
    import torch.distributed as dist

    from lipdp.training.distributed import present_ranks

    if not is_rank() or dist.is_initialized():
        yield present_ranks(), device
        return
    on_cuda = device.startswith("cuda")
    if on_cuda:
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ConfigurationError(
                f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}. Take as many processes "
                "(--nproc) as there are GPUs, or --device cpu."
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        yield present_ranks(), device
    finally:
        dist.destroy_process_group()


def shared_seed(seed: int | None, ranks: Ranks) -> int | None:
    """The seed of the initial weights, the same for all ranks: the user's, or the operating system's."""
    if seed is not None or ranks.count == 1:
        return seed
    return int.from_bytes(ranks.shared(secrets.token_bytes(7)), "big")


def usable_device(name: str) -> str:
    """A device that works here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = f"auto, cpu, cuda, {', '.join(f'cuda:{number}' for number in range(gpus))}" if gpus else "auto and cpu"
        why = "no GPU that torch can use was found" if not gpus else f"torch sees {gpus} GPU{'s' if gpus > 1 else ''}"
        raise ConfigurationError(
            f"--device {name} can't be used here: {why}. Leave it out, or take one of {here}; `lipdp doctor` says more"
        ) from None
    return name


def again(subject: Sequence[str], given: Mapping[str, float | str | None], more: Sequence[str] = ()) -> str:
    """The command for such a run of ``lipdp train``, with what decides it; without seeds and places."""
    words = ["lipdp", "train", *subject]
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else brief(value, 12)]
    return shlex.join([*words, *more])


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"{option} takes numbers with commas between them, not {text!r}") from None
