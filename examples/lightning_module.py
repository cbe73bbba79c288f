"""Lightning around a private run: lipdp trains, Lightning logs, validates and tests.

A Lightning `Trainer` draws its own batches (shuffled, not Poisson) and steps an optimiser after an ordinary backward pass: a
guarantee for such a loop would not be true. So the module's network goes to `lipdp.fit`, whose callback hands what may be
published (ε, validation figures) to any Lightning logger; `Trainer.validate` and `Trainer.test` work on the module afterwards.

    python examples/lightning_module.py        (pip install lightning)
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

import lipdp
from lipdp.training import Callback


class Digits(lightning.LightningModule):
    """A network of ordinary layers, and how Lightning judges it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.network(x)

    def test_step(self, batch: Any, index: int) -> None:
        """Accuracy of a batch; Lightning averages it."""
        x, y = batch
        self.log("test_accuracy", (self(x).argmax(1) == y).float().mean())


class ToLightning(Callback):
    """Hands the figures of each evaluation to a logger of Lightning's. They hold nothing of the training records."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def on_evaluation(self, run: Any, row: dict[str, Any]) -> None:
        """One row of the history."""
        self.logger.log_metrics({name: value for name, value in row.items() if isinstance(value, float)}, step=row["step"])


def main(epochs: int, epsilon: float) -> float:
    """Train on the digits, and return what Lightning's test says."""
    train, test, info = lipdp.data.load("digits")
    module, loss = Digits(), torch.nn.CrossEntropyLoss(reduction="none")
    plan = lipdp.plan(
        module.network,
        loss,
        dataset_size=len(train),
        batch_size=720,
        epsilon=epsilon,
        delta=1e-4,
        epochs=epochs,
        method="bookkeeping",
        max_grad_norm=1.0,
        input_shape=info.shape,
    )
    optimizer, scheduler = lipdp.suggest_optimizer(module.network, plan)
    logger = lightning.pytorch.loggers.CSVLogger("lightning_logs")
    lipdp.fit(module.network, loss, optimizer, plan, train, scheduler=scheduler, callbacks=[ToLightning(logger)])
    trainer = lightning.Trainer(accelerator="cpu", logger=logger, enable_progress_bar=False, enable_model_summary=False)
    (judged,) = trainer.test(module, DataLoader(test, batch_size=256))
    return float(judged["test_accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--epsilon", type=float, default=3.0)
    main(**vars(parser.parse_args()))
