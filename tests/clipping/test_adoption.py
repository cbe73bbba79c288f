"""How layers show their gradients is found once, and holds as long as nothing about them changes."""

import pytest
import torch

from lipdp.clipping.adoption import trained_layers
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError


class Own(torch.nn.Linear):
    """Computes what its base does."""


def network():
    return torch.nn.Sequential(Own(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def test_ways_are_found_once_and_again_when_a_class_changes(monkeypatch):
    model = network()
    trained = trained_layers(model)
    ways = trained.ways(model, None)
    assert [layer.name for layer in ways.shown] == ["0", "2"]
    assert trained.ways(model, None) is ways
    monkeypatch.setattr(Own, "forward", lambda self, x: 2 * torch.nn.Linear.forward(self, x))
    changed = trained.ways(model, None)
    assert changed is not ways
    assert "0" in changed.replayed.layers, "its rule speaks of another forward"


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_layer_that_is_changed_while_the_model_runs_is_refused(monkeypatch, where):
    model = network()
    with torch.enable_grad(), recording(model, 5) as recorded:
        total = model(torch.randn(5, 3)).sum()
        monkeypatch.setattr(Own if where == "class" else model[0], "forward", lambda *args: None, raising=False)
        with pytest.raises(UnsupportedError, match=r"layer '0' .* has changed"):
            recorded.contributions(total)
