"""Metrics of a model on data that are not private, or not protected by this guarantee: validation and test sets."""

from __future__ import annotations

from typing import Any

import torch

from lipdp.inputs import call, logits_of, loss_of, mapped
from lipdp.losses import predict
from lipdp.program.dtypes import Types
from lipdp.training.batches import check_dataset, gather
from lipdp.training.settings import per_example_loss

__all__ = ["evaluate"]


def evaluate(
    model: torch.nn.Module,
    loss: Any,
    dataset: Any,
    *,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Mean loss, and accuracy where targets are class numbers. It reads the data as they are: a query that is not accounted.

    Their types are converted to the model's, as in training.
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
    try:
        with torch.no_grad():
            for start in range(0, size, batch_size):
                inputs, targets = gather(dataset, torch.arange(start, min(start + batch_size, size)))
                inputs = mapped(lambda leaf: leaf.to(place), inputs)
                outputs, targets = call(model, types.inputs(inputs)), types.targets(targets.to(place))
                total += float(loss_of(known, outputs, targets).double().sum())
                outputs = logits_of(outputs)
                if targets.ndim == 1 and not targets.is_floating_point() and isinstance(outputs, torch.Tensor):
                    classified = True
                    correct += int((predict(outputs) == (targets > 0 if outputs[0].numel() == 1 else targets)).sum())
    finally:
        for module, mode in modes:
            module.training = mode
    metrics = {"loss": total / size}
    if classified:
        metrics["accuracy"] = correct / size
    return metrics
