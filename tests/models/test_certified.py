"""scattering-certified: nothing in front of the head brings two images further apart, and its certificates hold."""

from __future__ import annotations

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.certify.constants import freeze
from lipdp.errors import ConfigurationError


def network(**options):
    torch.manual_seed(0)
    model = lipdp.models.create("scattering-certified", input_shape=(3, 16, 16), classes=4, **{"scales": [(1, 4)], **options})
    for layer in model:
        if isinstance(layer, nn.Standardize):
            layer.set_statistics(0.1 * torch.randn(layer.channels))
        elif isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight)
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"orders": (0.2, 1.0, 1.0), "radius": 5.0}, {"flip": False}, {"scales": [(1, 4), (2, 4)]}])
def test_the_front_is_non_expansive(options):
    model = network(**options)
    front = model[:-3]
    worst = 0.0
    for start in range(3):  # ascent on how far two images come apart
        generator = torch.Generator().manual_seed(start)
        x, step = torch.rand(1, 3, 16, 16, generator=generator), torch.randn(1, 3, 16, 16, generator=generator)
        step = (1e-2 * step / step.norm()).requires_grad_()
        for _ in range(12):
            apart = (front(x + step) - front(x)).norm()
            worst = max(worst, float(apart.detach() / step.detach().norm()))
            (slope,) = torch.autograd.grad(apart, step)
            step = (1e-2 * slope / slope.norm()).detach().requires_grad_()
    assert 0.3 < worst <= 1 + 1e-4
    (known,) = (scaling.front for scaling in freeze(model, (3, 16, 16), torch.float32).scalings)
    scales = len(options.get("scales", [0]))
    assert worst <= known.lipschitz <= scales**0.5 * (1 + 1e-4)


@pytest.mark.parametrize("mode", ["sphere", "ball"])
def test_no_attack_succeeds_within_the_radius(mode):
    model = network(radius=5.0, input_mode=mode, norm=2.0)
    x = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    decision = model(x).argmax(1)
    radii = lipdp.certify(model, x, decision)
    assert bool((radii > 0).all())
    moved = lipdp.attack(model, x, decision, radius=0.999 * radii.float(), steps=20)
    assert torch.equal(model(moved).argmax(1), decision)
    further = lipdp.attack(model, x, decision, radius=20 * radii.float(), steps=20)
    assert bool((model(further).argmax(1) != decision).any())


def test_sensitivity_is_norm_times_clip():
    assert lipdp.sensitivities(network(norm=2.0, clip=0.3), losses.CrossEntropy()) == {"3.weight": pytest.approx(0.6)}


@pytest.mark.parametrize("options", [{"scales": []}, {"orders": (0.2, 1.5, 1.0)}, {"orders": (0.2, 1.0)}])
def test_what_would_expand_is_refused(options):
    with pytest.raises(ConfigurationError, match=r"scale|orders"):
        network(**options)


def test_the_recipe_has_the_budget_of_its_name():
    recipe = lipdp.recipes.get("cifar10-certified-eps10")
    assert (recipe.epsilon, recipe.delta, recipe.model) == (10.0, 1e-5, "scattering-certified")
