"""Certificates: attacked, compared with closed forms, and refused where they would not hold."""

from __future__ import annotations

import math

import pytest
import torch

from lipdp import models, nn, parametrize
from lipdp.certify import attack, certified_accuracy, certify
from lipdp.certify.constants import freeze
from lipdp.certify.radii import chord_radius
from lipdp.errors import ConfigurationError, DataError, UnboundedError, UnsupportedError
from lipdp.losses import predict


class Net(torch.nn.Module):
    """Ordinary, unconstrained layers in a module of one's own."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.pool = torch.nn.MaxPool2d(2)
        self.drop = torch.nn.Dropout(0.5)
        self.fc = torch.nn.Linear(64, 5)

    def forward(self, x):
        return self.fc(self.drop(torch.flatten(self.pool(torch.relu(self.conv(x))), 1))) * 0.5


def residual(mode):
    block = nn.Sequential(nn.SpectralConv2d(4, 4, 3, padding=1), nn.GroupSort(2), nn.LayerCentering(1))
    return nn.Sequential(
        nn.BoundedInput((1, 8, 8), norm=2.0, mode=mode),
        nn.SpectralConv2d(1, 4, 3, padding=1, stride=2),
        nn.Residual(block),
        nn.ScaledAvgPool2d(2),
        nn.Flatten(),
        nn.SpectralLinear(16, 5),
    )


def mixed():
    return nn.Sequential(
        nn.BoundedInput((1, 8, 8), norm=2.0, mode="floor", floor=0.5),
        nn.SpectralConvTranspose2d(1, 2, 2, stride=2),
        nn.FourierConv2d(2, 4, 3, stride=2, padding=1),
        nn.Flatten(2),
        nn.SpectralConv1d(4, 4, 3, padding=1),
        nn.Flatten(),
        nn.L1Linear(256, 16),
        nn.LayerNorm(16),
        nn.SpectralLinear(16, 5),
    )


def reparametrised():
    return nn.Sequential(
        nn.BoundedInput((1, 8, 8), norm=2.0),
        nn.SpectralConv2d(1, 4, 3, stride=2, padding=1, constraint=parametrize.MatrixExp()),
        nn.GroupSort(2),
        nn.Flatten(),
        nn.SpectralLinear(64, 5, constraint=parametrize.Cayley()),
    )


def create(name, mode, **options):
    return models.create(name, input_shape=(1, 8, 8), classes=5, input_mode=mode, input_norm=2.0, **options)


def floored(name):
    model = residual("ball") if name == "residual" else create("mlp", "ball", hidden=(32, 16), centre=False)
    for position, layer in enumerate(model):
        if isinstance(layer, nn.BoundedInput):
            model[position] = nn.BoundedInput((1, 8, 8), norm=2.0, mode="floor", floor=4.0)
    return model


NETWORKS = {
    "mlp ball": lambda: create("mlp", "ball", hidden=(32, 16)),
    "mlp sphere": lambda: create("mlp", "sphere", hidden=(32, 16), clip=0.01),
    "mlp sphere, not centred": lambda: create("mlp", "sphere", hidden=(32,), centre=False),
    "lenet ball": lambda: create("lenet", "ball", channels=(4, 8), hidden=16),
    "lenet sphere": lambda: create("lenet", "sphere", channels=(4, 8), hidden=16),
    "residual ball": lambda: residual("ball"),
    "residual sphere": lambda: residual("sphere"),
    "residual floor": lambda: floored("residual"),
    "mlp floor": lambda: floored("mlp"),
    "mixed": mixed,
    "reparametrised": reparametrised,
    "unconstrained": Net,
    "unconstrained, bounded": lambda: torch.nn.Sequential(nn.BoundedInput((1, 8, 8), mode="sphere"), Net()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_attack_within_the_radius_succeeds(name):
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    parametrize.project_(model)
    x = torch.randn(24, 1, 8, 8, dtype=torch.float64)
    x *= torch.linspace(0.05, 3.0, len(x), dtype=x.dtype).reshape(-1, 1, 1, 1)  # inside the ball and outside
    radii = certify(model, x)
    assert radii.shape == (24,)
    assert (radii > 0).all()
    model.eval()
    before = predict(model(x))
    attacked = attack(model, x, None, 0.999 * radii, steps=25)
    assert (attacked - x).flatten(1).norm(dim=1).le(radii).all()
    assert torch.equal(predict(model(attacked)), before)
    if name in (
        "mlp ball",
        "mlp sphere",
        "mlp sphere, not centred",
    ):  # where the bounds are nearly tight, an attack that is worth its name succeeds not far outside
        assert (predict(model(attack(model, x, None, 4 * radii, steps=25))) != before).all()


def orthonormal(outputs, mode="ball", bias=False, norm=10.0):
    model = nn.Sequential(nn.BoundedInput((6,), norm=norm, mode=mode), nn.SpectralLinear(6, outputs, bias=bias)).double()
    parametrize.project_(model)
    return model


def test_the_certificate_of_an_orthonormal_layer_is_tight():
    torch.manual_seed(1)
    model, x = orthonormal(6), torch.randn(50, 6, dtype=torch.float64)
    radii, logits = certify(model, x), model(x)
    top = logits.topk(2, dim=1).values
    assert torch.allclose(radii, (top[:, 0] - top[:, 1]) / math.sqrt(2), rtol=1e-4)
    assert torch.equal(predict(model(attack(model, x, None, 0.999 * radii))), predict(logits))
    assert (predict(model(attack(model, x, None, 1.001 * radii))) != predict(logits)).all()


def test_the_certificate_of_a_scalar_classifier_is_tight():
    torch.manual_seed(2)
    model, x = orthonormal(1), torch.randn(50, 6, dtype=torch.float64)
    logits = model(x)[:, 0]
    radii = certify(model, x)
    assert torch.allclose(radii, logits.abs(), rtol=1e-4)
    decision = logits > 0
    assert torch.equal(model(attack(model, x, None, 0.999 * radii))[:, 0] > 0, decision)
    assert torch.equal(model(attack(model, x, None, 1.001 * radii))[:, 0] > 0, ~decision)
    for targets in (decision.long(), decision * 2 - 1, decision.double()):  # {0, 1} and {−1, 1}
        assert torch.equal(certify(model, x, targets), radii)
        assert (certify(model, x, 1 - targets if targets.min() == 0 else -targets) == 0).all()


def test_the_certificate_on_the_sphere_is_nearly_tight():
    """A plane through the centre is at the angle arcsin(2s), where the chord allows 2·arcsin(s): off by √(1 − s²)."""
    torch.manual_seed(3)
    model, x = orthonormal(6, mode="sphere"), torch.randn(50, 6, dtype=torch.float64)
    radii, decisions = certify(model, x), predict(model(x))
    top = model(x).topk(2, dim=1).values
    share = (top[:, 0] - top[:, 1]) / math.sqrt(2) / 20
    exact = radii / (1 - share.square()).sqrt()
    assert torch.allclose(exact, x.norm(dim=1) * 2 * share, rtol=1e-4)
    assert torch.equal(predict(model(attack(model, x, None, 0.999 * exact))), decisions)
    assert (predict(model(attack(model, x, None, 1.002 * exact, steps=100))) != decisions).all()


def test_chord_radius_against_the_geometry_itself():
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    distance = torch.linspace(0.01, 4.5, 200, dtype=torch.float64)
    radius = 2.0
    allowed = chord_radius(distance, z.norm(dim=1), radius)
    assert torch.isinf(allowed[distance >= 4]).all()
    finite = distance < 4
    z, distance, allowed = z[finite], distance[finite], allowed[finite]
    worst = torch.zeros(len(z), dtype=torch.float64)
    for _ in range(3000):
        step = torch.randn(z.shape, generator=generator, dtype=torch.float64)
        moved = z + 0.9999 * allowed[:, None] * step / step.norm(dim=1, keepdim=True)
        scaled = radius * moved / moved.norm(dim=1, keepdim=True)
        worst = torch.maximum(worst, (scaled - radius * z / z.norm(dim=1, keepdim=True)).norm(dim=1))
    assert (worst <= distance).all()
    inner = distance <= radius * math.sqrt(2)
    assert (worst[inner] > 0.9 * distance[inner]).all()


def test_inputs_outside_the_ball_profit_from_its_geometry():
    """1-Lipschitz everywhere; a sphere for inputs that stay outside, so up to r₀ − R."""
    torch.manual_seed(6)
    x = torch.randn(200, 6, dtype=torch.float64)
    x *= torch.linspace(0.5, 3.0, 200, dtype=torch.float64)[:, None] / x.norm(dim=1, keepdim=True)
    model, sphere = orthonormal(6, norm=1.0), orthonormal(6, norm=1.0, mode="sphere")
    sphere.load_state_dict(model.state_dict())
    radii, lengths = certify(model, x), x.norm(dim=1)
    top = model(x).topk(2, dim=1).values
    plain = (top[:, 0] - top[:, 1]) / math.sqrt(2)
    expected = torch.maximum(plain, torch.minimum(certify(sphere, x), (lengths - 1).clamp_min(0)))
    assert torch.allclose(radii, expected, rtol=1e-4)
    assert (radii > 1.5 * plain).sum() > 50
    assert ((expected == lengths - 1) & (radii > plain)).any()
    assert torch.equal(predict(model(attack(model, x, None, 0.999 * radii))), predict(model(x)))


def test_decisions_that_no_input_changes_have_an_infinite_radius():
    model = orthonormal(2, mode="sphere", bias=True, norm=0.01)
    model[1].bias.data.copy_(torch.tensor([0.09, 0.0]))
    assert torch.isinf(certify(model, torch.randn(5, 6, dtype=torch.float64))).all()
    assert torch.isinf(certify(model, torch.zeros(5, 6, dtype=torch.float64))).all()


def test_an_input_at_the_centre_of_the_sphere_has_no_radius():
    assert certify(orthonormal(6, mode="sphere"), torch.zeros(2, 6, dtype=torch.float64)).eq(0).all()


def test_wrong_decisions_have_radius_zero():
    model, x = orthonormal(6), torch.randn(20, 6, dtype=torch.float64)
    decisions = predict(model(x))
    y = torch.where(torch.arange(20) < 10, decisions, (decisions + 1) % 6)
    radii = certify(model, x, y)
    assert (radii[:10] > 0).all()
    assert (radii[10:] == 0).all()
    assert certified_accuracy(radii, (0.0, 1e9)) == {0.0: 0.5, 1e9: 0.0}


def test_raw_units_and_batches():
    model, x = orthonormal(6), torch.randn(20, 6, dtype=torch.float64)
    radii = certify(model, x)
    assert torch.allclose(certify(model, x, input_lipschitz=4.0), radii / 4)
    assert torch.allclose(certify(model, x, batch_size=7), radii)
    assert certify(model, x[:0]).shape == (0,)


def chain(*modes):
    """A network with a scaling behind every layer, as tables' networks have behind their fixed features."""
    layers, size = [], 6
    for number, mode in enumerate(modes):
        layers += [nn.BoundedInput((size,), norm=2.0 - 0.5 * number, mode=mode), torch.nn.Linear(size, 8, bias=False)]
        size = 8
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(8, 4, bias=False)).double()


@pytest.mark.parametrize(
    "modes", [("sphere", "sphere"), ("ball", "sphere"), ("sphere", "ball"), ("ball", "ball"), ("ball", "sphere", "sphere")]
)
def test_no_attack_succeeds_behind_several_scalings(modes):
    torch.manual_seed(1)
    model = chain(*modes)
    x = torch.randn(40, 6, dtype=torch.float64) * torch.linspace(0.2, 3.0, 40, dtype=torch.float64)[:, None]
    radii, before = certify(model, x), predict(model(x))
    assert len(freeze(model, (6,), x.dtype).scalings) == len(modes)
    assert (radii > 0).all()
    assert torch.equal(predict(model(attack(model, x, None, 0.999 * radii, steps=30, restarts=3))), before)
    far = attack(model, x, None, 12 * radii, steps=30, restarts=3)
    assert (predict(model(far)) != before).double().mean() > 0.5  # not far outside, it succeeds


def test_two_spheres_are_one():
    """Scaling twice to the same sphere does nothing the second time, and the radii are nearly those of one."""
    torch.manual_seed(0)
    once = orthonormal(6, "sphere", norm=1.0)
    twice = nn.Sequential(once[0], nn.BoundedInput((6,), mode="sphere"), once[1])
    x = torch.randn(30, 6, dtype=torch.float64)
    one, two = certify(once, x), certify(twice, x)
    assert (two <= one * (1 + 1e-9)).all()
    small = one < 0.3 * x.norm(dim=1)
    assert small.any()
    assert (two[small] > 0.9 * one[small]).all()


@pytest.mark.parametrize("size", [0.0, 1e2, 1e3, 1e4, 1e6])
def test_large_numbers_that_cancel_inside_take_their_rounding_off(size):
    """(x + b) − b is x in exact arithmetic; in float32 its last digits are those of b."""
    model = torch.nn.Sequential(nn.BoundedInput((4,)), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(4))
        model[1].bias.fill_(size)
        model[2].weight.copy_(torch.eye(4)[:2])
        model[2].bias.fill_(-size)
    draw = torch.Generator().manual_seed(0)
    x = 0.5 * torch.rand(2000, 4, generator=draw)
    radii, before = certify(model, x), model(x).argmax(1)
    exact = (x[:, 0] - x[:, 1]).abs().double() / 2**0.5
    for _ in range(50):
        move = torch.randn(2000, 4, generator=draw)
        move *= (0.99 * radii / move.norm(dim=1)).float()[:, None]
        assert torch.equal(model(x + move).argmax(1), before)
    assert (radii <= exact).all()
    assert (radii > 0.9 * exact).double().mean() > (0.95 if size <= 1e2 else 0.6 if size <= 1e3 else -1)


def test_rounding_only_shrinks_radii():
    torch.manual_seed(5)
    model = create("mlp", "sphere", hidden=(32,))
    x = torch.randn(30, 1, 8, 8)
    coarse, fine = certify(model, x), certify(model.double(), x.double())
    assert (coarse <= fine).all()
    assert torch.allclose(coarse, fine, rtol=1e-2, atol=1e-5)


def test_present_weights_count():
    """Weights that are shorter than their set allows give larger radii; unconstrained ones have the norm they have."""
    model, x = orthonormal(6), torch.randn(20, 6, dtype=torch.float64)
    radii = certify(model, x)
    model[1].weight.data.mul_(0.5)
    assert torch.allclose(certify(model, x), radii, rtol=1e-3)
    plain = torch.nn.Linear(6, 6, bias=False, dtype=torch.float64)
    plain.weight.data.copy_(model[1].weight * 14)
    assert torch.allclose(certify(plain, x), radii, rtol=1e-3)


def test_the_model_is_left_alone():
    model = create("mlp", "ball", hidden=(8,)).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    certify(model, torch.ones(2, 1, 8, 8))
    attack(model, torch.ones(2, 1, 8, 8), radius=0.5, steps=2)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_weights_outside_their_set_are_refused(factor):
    for model, x in ((orthonormal(6), torch.zeros(1, 6).double()), (residual("ball"), torch.zeros(1, 1, 8, 8))):
        model[1].weight.data.mul_(factor)
        with pytest.raises(ConfigurationError, match=r"layer '1' \(Spectral.*project_\(model\)"):
            certify(model, x)


def test_other_constrained_layers_must_be_where_their_projection_puts_them():
    class Clamped(parametrize.Constrained, torch.nn.ReLU):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.ones(()))

        def project_(self):
            self.a.clamp_(-1, 1)

    model = torch.nn.Sequential(Clamped(), torch.nn.Linear(3, 2))
    certify(model, torch.ones(1, 3))
    model[0].a.data.fill_(1.5)
    with pytest.raises(ConfigurationError, match=r"Clamped.*moves its parameter 'a' by 0\.5"):
        certify(model, torch.ones(1, 3))


class Around(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.input = nn.BoundedInput((4,), mode="sphere")

    def forward(self, x):
        return self.input(x) + x


class Beside(torch.nn.Module):
    """Two spheres side by side: neither is passed by everything."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.BoundedInput((2,), mode="sphere"), nn.BoundedInput((2,), norm=2.0, mode="sphere")

    def forward(self, x):
        return self.one(x) + self.two(x)


class Squares(torch.nn.Module):
    def forward(self, x):
        return x * x


class Dropping(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        (Around(), UnsupportedError, "reads what comes before the sphere of layer 'input'"),
        (torch.nn.Sequential(torch.nn.Linear(4, 2), Beside()), UnsupportedError, "reads what comes before the sphere"),
        (torch.nn.Sequential(torch.nn.Linear(4, 2), Squares()), UnboundedError, "unboundedly steep"),
        (torch.nn.Sequential(torch.nn.Softplus(threshold=0)), UnsupportedError, "jumps"),
        (Dropping(), UnsupportedError, "draws at random"),
        (torch.nn.Unflatten(1, (2, 2)), ConfigurationError, "one decision per example"),
        (torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.RReLU()), UnsupportedError, "RReLU"),
    ],
)
def test_what_has_no_certificate_is_refused(model, error, match):
    with pytest.raises(error, match=match):
        certify(model, torch.ones(2, 4))


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((torch.ones(3, 6).to(torch.complex64),), {}, DataError),
        ((torch.ones(6),), {}, DataError),
        ((torch.ones(3, 6).double(), torch.ones(2)), {}, DataError),
        ((torch.ones(3, 6).double(), torch.full((3,), 6)), {}, DataError),
        ((torch.full((3, 6), torch.nan).double(),), {}, DataError),
        ((torch.ones(3, 6).double(),), {"input_lipschitz": 0.0}, ConfigurationError),
        ((torch.ones(3, 6).double(),), {"batch_size": 0}, ConfigurationError),
    ],
)
def test_bad_arguments(arguments, options, error):
    with pytest.raises(error):
        certify(orthonormal(6), *arguments, **options)


def test_attack_stays_in_its_ball_and_takes_targets():
    model, x = orthonormal(6), torch.randn(10, 6, dtype=torch.float64)
    y = (predict(model(x)) + 1) % 6  # wrong already
    assert torch.equal(attack(model, x, y, 0.0, steps=3), x)
    assert (attack(model, x, y, 0.3, steps=3) - x).norm(dim=1).max() <= 0.3 * (1 + 1e-9)
    for options in ({"steps": 0}, {"restarts": 0}, {"radius": -1.0}, {"radius": math.inf}):
        with pytest.raises(ConfigurationError):
            attack(model, x, y, **options)


def test_the_floor_counts_with_its_constant():
    """Below the floor r/c times the identity, so the certificate is that of the orthonormal layer over r/c."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.BoundedInput((6,), norm=2.0, mode="floor", floor=10.0), nn.SpectralLinear(6, 6, bias=False)).double()
    parametrize.project_(model)
    x = torch.randn(50, 6, dtype=torch.float64)
    radii, logits = certify(model, x), model(x)
    top = logits.topk(2, dim=1).values
    assert torch.allclose(radii, (top[:, 0] - top[:, 1]) / math.sqrt(2) / 0.2, rtol=1e-4)
    assert torch.equal(predict(model(attack(model, x, None, 0.999 * radii))), predict(logits))


def test_reparametrised_weights_are_measured_as_they_are_used():
    layer = nn.SpectralLinear(6, 6, bias=False, constraint=parametrize.Cayley())
    with torch.no_grad():
        layer.weight.mul_(50.0)  # any θ is legal
    model, x = nn.Sequential(nn.BoundedInput((6,), norm=10.0), layer).double(), torch.randn(20, 6, dtype=torch.float64)
    top = model(x).topk(2, dim=1).values
    assert torch.allclose(certify(model, x), (top[:, 0] - top[:, 1]) / math.sqrt(2), rtol=1e-2)


def test_columns_of_an_l1_layer_are_measured():
    """√in_features is what its set allows; what it has is the norm of its weights."""
    model = nn.Sequential(nn.BoundedInput((6,), norm=10.0), nn.L1Linear(6, 6, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(6))
    x = torch.randn(20, 6, dtype=torch.float64)
    top = x.topk(2, dim=1).values
    assert torch.allclose(certify(model, x), (top[:, 0] - top[:, 1]) / math.sqrt(2), rtol=1e-2)
    with torch.no_grad():
        model[1].weight.mul_(1.1)
    with pytest.raises(ConfigurationError, match="outside its constraint set"):
        certify(model, x)


def test_each_pair_of_outputs_has_its_own_constant():
    """What all rows of the last matrix share is in its norm, and in no difference of outputs."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(4, 6, generator=generator)
    common = torch.nn.Linear(6, 4)
    with torch.no_grad():
        common.weight.copy_(rows + 30 * torch.randn(6, generator=generator))
    model = nn.Sequential(
        nn.BoundedInput((6,), norm=5.0), nn.SpectralLinear(6, 6), nn.GroupSort(2), common, nn.ClipGradient(0.1)
    ).eval()
    x = torch.randn(40, 6, generator=generator)
    radii = certify(model, x)
    outputs = model(x).detach().double()
    decision = outputs.argmax(1)
    steep = torch.cdist(common.weight.detach().double(), common.weight.detach().double())
    norm = float(torch.linalg.matrix_norm(model[1].weight.detach().double(), 2))
    ratios = (outputs.amax(1, keepdim=True) - outputs) / (steep[decision] * norm)
    expected = ratios.scatter(1, decision[:, None], math.inf).amin(1)
    assert bool((radii <= expected).all())
    assert torch.allclose(radii, expected, rtol=1e-2, atol=3e-3)  # less what rounding of outputs of norm 375 may have added
    general = outputs.topk(2, dim=1).values.diff(dim=1)[:, 0].abs() / (
        2**0.5 * float(torch.linalg.matrix_norm(common.weight.detach(), 2)) * norm
    )
    assert float((expected / general).median()) > 5
    moved = attack(model, x, radius=radii.float() * 0.999, steps=30, restarts=2)
    assert torch.equal(model(moved).argmax(1), decision)
    assert bool((model(attack(model, x, radius=8 * radii.float(), steps=60)).argmax(1) != decision).any())


def test_a_last_matrix_that_serves_twice_counts_with_its_norm():
    shared = torch.nn.Linear(4, 4, bias=False)
    model = nn.Sequential(nn.BoundedInput((4,)), shared, nn.GroupSort(2), shared).eval()
    assert freeze(model, (4,), torch.float32).pairs is None
    assert freeze(nn.Sequential(nn.BoundedInput((4,)), shared), (4,), torch.float32).pairs is not None
    assert freeze(nn.Sequential(nn.BoundedInput((4,)), torch.nn.Linear(4, 1)), (4,), torch.float32).pairs is None
