"""The network of Opacus' MNIST example, trained by lipdp: docs/from_opacus.md says which line took which line's place.

python examples/opacus_mnist.py                       60,000 records, ε = 3
python examples/opacus_mnist.py --records 6000 …      a part of them
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Subset

import lipdp


def network() -> torch.nn.Module:
    """Two convolutions and two dense layers, 26,010 parameters; nothing in it is lipdp's."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def main(records: int, batch_size: int, steps: int, epsilon: float) -> float:
    """Train, and return the accuracy on the test set."""
    train, test, info = lipdp.data.load("mnist")
    train = Subset(train, range(min(records, len(train))))
    model, loss = network(), torch.nn.CrossEntropyLoss(reduction="none")  # one value for each example
    plan = lipdp.plan(
        model,
        loss,
        dataset_size=len(train),
        batch_size=batch_size,
        epsilon=epsilon,
        delta=1e-5,
        steps=steps,
        method="bookkeeping",
        max_grad_norm=1.0,
        input_shape=info.shape,
    )
    optimizer, scheduler = lipdp.suggest_optimizer(model, plan)
    engine = lipdp.PrivacyEngine(model, loss, optimizer, plan, input_shape=info.shape)
    for x, y in engine.batches(train):
        engine.step(x, y)
        scheduler.step()
    accuracy = lipdp.evaluate(model, loss, test)["accuracy"]
    print(f"test accuracy {100 * accuracy:.1f} %, {lipdp.privacy.guarantee(engine.epsilon, plan.delta)}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--epsilon", type=float, default=3.0)
    main(**vars(parser.parse_args()))
