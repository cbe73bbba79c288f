"""docs/scale.md on Accelerate: processes and devices are its, the loop is ours; what it wraps or steps itself is refused."""

from __future__ import annotations

import pytest
import torch

import lipdp
from lipdp import losses
from lipdp.errors import ConfigurationError
from tests.training.common import planned, same, small, toy, weights
from tests.training.rank_tasks import under_an_accelerator
from tests.training.ranks import results

accelerate = pytest.importorskip("accelerate")
LOSS = losses.CrossEntropy(tau=4.0)


def _trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    history = lipdp.fit(model, LOSS, optimizer, planned(model, LOSS, steps=3), toy(), seed=3, reproducible=True)
    return weights(model), history.epsilon


def test_a_run_under_an_accelerator_is_the_run_without():
    accelerator = accelerate.Accelerator(cpu=True)
    model = small().to(accelerator.device)
    found, alone = _trained(model), _trained(small())
    assert same(found[0], alone[0])
    assert found[1] == alone[1]
    assert accelerator.is_main_process
    assert same(weights(accelerator.unwrap_model(model)), found[0])


def test_a_step_of_its_own_is_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared = accelerator.prepare(optimizer)
    engine = lipdp.PrivacyEngine(model, LOSS, optimizer, planned(model, LOSS, steps=3))
    before = weights(model)
    accelerator.backward(LOSS(model(torch.randn(4, 6)), torch.zeros(4, dtype=torch.long)).sum())
    with pytest.raises(ConfigurationError, match="has no noise"):
        prepared.step()
    assert same(weights(model), before)
    engine.close()


def test_its_processes_train_together():
    found = results(2, under_an_accelerator)
    alone = _trained(small())
    for rank, (processes, is_main, wrapped, trained, epsilon) in enumerate(found):
        assert processes == 2
        assert is_main == (rank == 0)
        assert wrapped[0] == "UnsupportedError"
        assert "wrapped.module" in wrapped[1]
        assert same(trained, found[0][3])
        assert max(float((trained[name] - value).abs().max()) for name, value in alone[0].items()) < 1e-5
        assert epsilon == alone[1]
