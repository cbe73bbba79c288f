"""Metrics of a model on data that are not private, or not protected by this guarantee: validation and test sets."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from lipdp.bounds import program_of
from lipdp.bounds.calculus import has_rule
from lipdp.bounds.propagate import way_out
from lipdp.errors import DataError, LipdpError, LipdpWarning
from lipdp.inputs import Inputs, call, logits_of, loss_of, mapped
from lipdp.losses import predict
from lipdp.planning.settings import per_example_loss
from lipdp.program import Program, check_program
from lipdp.program.dtypes import Types
from lipdp.program.reading import undisturbed
from lipdp.training.batches import check_dataset, gather
from lipdp.training.guards import Undoing
from lipdp.training.held import HeldState
from lipdp.training.watch import read_flags

_COMPARED = (1, 3)  # numbers of random examples on which a program is compared with its model
_ENTRIES = 2**22  # outputs that a loss is tried on at a time


def evaluate(
    model: torch.nn.Module,
    loss: Any,
    dataset: Any,
    *,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Mean loss, and accuracy where targets are class numbers. It reads the data as they are: a query that is not accounted.

    Their types are converted to the model's, as in training. A model that the calculus has a program of is evaluated by that, in
    its evaluation mode, and its own Python does not see the data; see :func:`outputs_of`.

    Args:
        model: any network.
        loss: one value for each example.
        dataset: a map-style dataset of (input, target) pairs.
        batch_size: examples that go through the model at once.
        device: where to compute; by default where the model is.
    """
    size = check_dataset(dataset)
    place = torch.device(device) if device is not None else next((p.device for p in model.parameters()), torch.device("cpu"))
    known = per_example_loss(loss)
    types = Types(model, known)
    if isinstance(known, torch.nn.Module):
        known.to(place)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    total, correct, classified = 0.0, 0, False
    compute: Callable[[Any], Any] | None = None
    state: HeldState | None = None
    undoing = Undoing()
    try:
        with torch.no_grad(), undoing:
            for start in range(0, size, batch_size):
                inputs, targets = gather(dataset, torch.arange(start, min(start + batch_size, size)))
                inputs = types.inputs(mapped(lambda leaf: leaf.to(place), inputs))
                if compute is None:
                    compute = outputs_of(model, inputs)
                    if not isinstance(compute, Program):  # the model's own code will see the data
                        state = HeldState(model, trained=True)
                        undoing.add(state.hold(), only_after_errors=True)
                outputs, targets = compute(inputs), types.targets(targets.to(place))
                total += float(loss_of(known, outputs, targets).double().sum())
                outputs = logits_of(outputs)
                if targets.ndim == 1 and not targets.is_floating_point() and isinstance(outputs, torch.Tensor):
                    classified = True
                    correct += int((predict(outputs) == (targets > 0 if outputs[0].numel() == 1 else targets)).sum())
            if state is not None:
                state.refuse(read_flags(state.same()))
    except BaseException:
        undoing.finish()
        raise
    finally:
        for module, mode in modes:
            module.training = mode
    metrics = {"loss": total / size}
    if classified:
        metrics["accuracy"] = correct / size
    return metrics


def outputs_of(model: torch.nn.Module, inputs: Inputs) -> Callable[[Any], Any]:
    """What computes the model's outputs for inputs like these, in the mode that it is in.

    It is the program that the calculus would analyse (:func:`lipdp.bounds.program_of`), made from the model as it is now and seen
    to agree with it; nobody's Python is called with the data then. Where there is none (several inputs, layers without rules, a
    forward that can't be traced, hooks: things that only clipping takes), it is the model itself.
    """
    refused = any(way_out(module) and not has_rule(module) for module in model.modules())  # tracing would be in vain
    if isinstance(inputs, torch.Tensor) and inputs.ndim > 1 and not refused:
        try:
            program = program_of(model, tuple(inputs.shape[1:]))
            if program.input_dtype == inputs.dtype or not program.input_dtype.is_floating_point:
                check_program(program, _COMPARED, gradients=False)
                return program
        except LipdpError:
            pass
    return lambda batch: call(model, batch)


def note_trained_records(train: Any, validation: Any) -> None:
    """Warn of records for validation that are visibly trained on: the same dataset, rows of it, the same memory."""
    base, rows = _base_of(train)
    other, others = _base_of(validation)
    if _share(base, rows, other, others):
        warnings.warn(
            "validation holds records of train: figures of training records, as they are, are a release that this run's epsilon "
            "does not cover. Hold others out, rest, held_out = torch.utils.data.random_split(data, [0.9, 0.1]), and plan for the "
            "rest; for data that are public say public=True",
            LipdpWarning,
            stacklevel=3,
        )


def _base_of(dataset: Any) -> tuple[Any, set[int] | None]:
    """What a subset was taken of, and which of its records; ``None``: all."""
    rows: torch.Tensor | None = None
    while isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        own = torch.as_tensor(dataset.indices)
        rows = own if rows is None else own[rows]
        dataset = dataset.dataset
    return dataset, None if rows is None else set(rows.tolist())


def _share(base: Any, rows: set[int] | None, other: Any, others: set[int] | None) -> bool:
    """Whether rows of two datasets are the same ones: of one dataset, or of two TensorDatasets whose inputs lie over each other."""
    shift = 0
    if base is not other:
        if not (isinstance(base, TensorDataset) and isinstance(other, TensorDataset)):
            return False
        ends = []
        for held in (base.tensors[0], other.tensors[0]):
            if held.device.type == "meta" or held.layout is not torch.strided or not held.is_contiguous():
                return False
            ends.append((held.device, held.data_ptr(), held.data_ptr() + held.numel() * held.element_size()))
        (one, start, end), (two, first, last) = ends
        if one != two or max(start, first) >= min(end, last):
            return False
        widths = [(end - start) // len(base), (last - first) // len(other)]
        if widths[0] != widths[1] or (first - start) % widths[0]:
            return True
        shift = (first - start) // widths[0]
    elif rows is None or others is None:
        return True
    mine = range(len(base)) if rows is None else rows
    return any(number + shift in mine for number in (range(len(other)) if others is None else others))


def check_of_targets(model: torch.nn.Module, loss: Any, dataset: Any) -> Callable[[torch.Tensor], None] | None:
    """What refuses class numbers that the loss does not take.

    A label beyond the outputs would be noticed only in the step that draws its record. So the loss is tried on zeros in place of
    outputs, whose shape is that of one record's. ``None``: the targets are no whole numbers, or the model can't be asked yet.
    """
    check_dataset(dataset)
    inputs, targets = gather(dataset, torch.arange(1))
    if not callable(loss) or targets.is_floating_point() or targets.is_complex():
        return None
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    types, modes = Types(model, loss), [(module, module.training) for module in model.modules()]
    try:
        with undisturbed(model):
            model.eval()
            # Of zeros: no record is shown to the model's own code for a shape.
            outputs = logits_of(call(model, types.inputs(mapped(lambda leaf: torch.zeros_like(leaf, device=place), inputs))))
        one = torch.zeros(outputs.shape, dtype=outputs.dtype)
        trial = copy.deepcopy(loss).cpu() if isinstance(loss, torch.nn.Module) else loss
    except Exception:  # what can't be evaluated now is found out where it is used
        return None
    finally:
        for module, mode in modes:
            module.training = mode

    def check(given: torch.Tensor) -> None:
        rows = max(1, _ENTRIES // max(1, one.numel()))
        for start in range(0, len(given), rows):
            part = types.targets(given[start : start + rows].cpu())
            objection = _objection(trial, one, part)
            if objection is not None:
                raise DataError(objection)

    return check


def _objection(loss: Any, one: torch.Tensor, targets: torch.Tensor) -> str | None:
    try:
        loss(one.expand(len(targets), *one.shape[1:]), targets)
    except DataError as error:
        return f"a record has a target that the loss does not take. {error}"
    except IndexError:  # torch's text shows the target
        classes = f", here 0 to {one.shape[1] - 1}" if one.ndim > 1 else ""
        return (
            f"a record has a target that the loss does not take: it has to be the number of an output{classes}. Number the classes "
            "from 0."
        )
    except Exception:  # of a loss that does not do with zeros, say
        return None
    return None
