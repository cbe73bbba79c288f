"""Tables: the AUROC, the features' bounds, and a run from the table to the figure."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch.utils.data import TensorDataset

import lipdp
from lipdp import data, losses, models
from lipdp.bounds import analyse
from lipdp.data import DatasetInfo
from lipdp.errors import ConfigurationError, DataError
from lipdp.features.kernels import Asinh, Constant, Landmarks, RandomFourier
from lipdp.recipes import Recipe, get, names, prepare, train
from lipdp.recipes.run import AUROC, auroc
from lipdp.recipes.spaces import RandomSuggester, default_space

TINY = Recipe(
    "tiny-table", "adbench/tiny", "tabular", {"fourier": 60, "scale": 1.0, "clip": 0.3}, temperature=2.0, batch_size=256,
    epochs=12, learning_rate=8.0, ema_decay=0.9, delta=1e-4, schedule="cosine",
    front="stored", metric="auroc",
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> DatasetInfo:
    """A ring inside a cloud: nothing for a linear model."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 2, generator=draw)
    y = (x.norm(dim=1) > 1.5).long()
    parts = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
    info = DatasetInfo("adbench/tiny", 2, (2,), 1200, 300, ("in", "out"), "none", "none", "none")
    monkeypatch.setattr(data, "load", lambda name, root=None: (*parts, info))
    return info


@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=60))
@settings(max_examples=100, deadline=None)
def test_auroc_is_sklearns(rows: list[tuple[int, bool]]) -> None:
    labels = [label for _, label in rows]
    if len(set(labels)) < 2:
        with pytest.raises(DataError, match="both classes"):
            auroc(torch.tensor([float(s) for s, _ in rows]), torch.tensor(labels))
        return
    scores = np.array([s for s, _ in rows], dtype=float)
    assert auroc(torch.from_numpy(scores), torch.tensor(labels)) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auroc_refuses_what_has_no_rank() -> None:
    with pytest.raises(DataError, match="NaN"):
        auroc(torch.tensor([0.0, math.nan]), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="for each row"):
        auroc(torch.zeros(3), torch.zeros(2))


def test_random_features_estimate_the_gaussian_kernel() -> None:
    layer = RandomFourier(3, 20_000, scale=1.7)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    kernel = torch.exp(-torch.cdist(x, x).square() / (2 * 1.7**2))
    assert torch.allclose(layer(x) @ layer(x).T, kernel, atol=0.03)


@pytest.mark.parametrize(
    "layer",
    [RandomFourier(4, 30, scale=(0.5, 2.0)), Asinh(0.3), Constant(4, 2.0), Landmarks(4, 30, 0.7, 0.01)],
    ids=lambda m: type(m).__name__,
)
def test_bounds_of_fixed_layers_hold_against_ascent(layer: torch.nn.Module) -> None:
    """The norm that the calculus gives the layer behind it, against gradient ascent."""
    radius = 2.0
    model = lipdp.nn.Sequential(lipdp.nn.BoundedInput((4,), norm=radius), layer)
    limit = lipdp.sensitivities(lipdp.nn.Sequential(*model, torch.nn.Linear(_width(layer), 2, bias=False)), losses.CrossEntropy())
    bound = next(iter(limit.values())) / math.sqrt(2)  # Δ = √2·‖input‖
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ascent = torch.optim.Adam([x], lr=0.05)
    for _ in range(150):
        ascent.zero_grad()
        (-model(x).norm(dim=1).sum()).backward()
        ascent.step()
    reached = float(model(x).norm(dim=1).max().detach())
    assert reached <= bound * (1 + 1e-5)


@pytest.mark.parametrize(
    "layer",
    [RandomFourier(4, 30, scale=1.5), Asinh(0.3), Constant(4, 2.0), Landmarks(4, 30, 2.0, 0.01)],
    ids=lambda m: type(m).__name__,
)
def test_their_gains_hold_against_attacks(layer: torch.nn.Module) -> None:
    """No step within the certified radius, which rests on the layer's Lipschitz constant, changes a decision."""
    torch.manual_seed(2)
    model = lipdp.nn.Sequential(lipdp.nn.BoundedInput((4,), norm=50.0), layer, torch.nn.Linear(_width(layer), 2)).eval()
    x = torch.randn(200, 4)
    with torch.no_grad():
        decided = model(x).argmax(1)
    radii = lipdp.certify(model, x, decided).float()
    assert float(radii.median()) > 0
    moved = x.clone()
    for _ in range(40):
        moved.requires_grad_()
        margin = model(moved).gather(1, decided[:, None]) - model(moved).gather(1, 1 - decided[:, None])
        (slope,) = torch.autograd.grad(margin.sum(), moved)
        step = moved.detach() - 0.2 * radii[:, None] * torch.nn.functional.normalize(slope)
        away = step - x
        moved = x + away * (0.999 * radii / away.norm(dim=1).clamp_min(1e-12)).clamp_max(1.0)[:, None]
    with torch.no_grad():
        assert torch.equal(model(moved).argmax(1), decided)


@given(columns=st.integers(1, 6), scale=st.floats(0.2, 5.0), spread=st.floats(0.1, 30.0), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_no_kernel_value_is_steeper_than_its_bound(columns: int, scale: float, spread: float, seed: int) -> None:
    """‖∇k_j‖ ≤ √(2/e)/s for every landmark, whatever the number of columns: what the layer's gain rests on."""
    draw = torch.Generator().manual_seed(seed)
    layer = Landmarks(columns, 5, scale, 0.01, seed=seed).double()
    x = spread * torch.randn(40, columns, generator=draw, dtype=torch.float64)
    x = torch.cat([x, layer.points + scale * torch.randn(5, columns, generator=draw, dtype=torch.float64)]).requires_grad_()
    values = torch.exp(-torch.log1p(((x[:, None] - layer.points) / scale).square()).sum(2))
    assert torch.allclose((values - layer.centre) @ layer.whitener, layer(x))
    for number in range(5):
        (slope,) = torch.autograd.grad(values[:, number].sum(), x, retain_graph=True)
        assert float(slope.norm(dim=1).max()) <= (1 + 1e-9) * math.sqrt(2 / math.e) / scale


def test_bounds_of_landmarks_are_reached() -> None:
    """One landmark of many columns: its kernel value at the point itself, and its slope where each column gives it as much."""
    columns, scale = 400, 30.0
    layer = Landmarks(columns, 1, scale, 0.01).double()
    found = analyse(lipdp.nn.Sequential(lipdp.nn.BoundedInput((columns,), norm=1e3), layer), 1.0)
    away = scale * math.sqrt(math.exp(0.5 / columns) - 1)
    x = (layer.points + away).requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).sum(), x)
    assert 0.99 < float(slope.norm()) / found.lipschitz <= 1
    far = layer.points + torch.tensor([[0.0], [1e9]], dtype=torch.float64)  # kernel values 1 and 0
    assert 0.99 < float(layer(far).detach().abs().max()) / found.output.norm <= 1


def test_landmark_features_of_standard_normal_rows_are_white() -> None:
    """Mean 0 and variance 1 in every direction, to the error of 8,000 draws; a ridge leaves those small that have little of it."""
    rows = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(5))
    layer, ridged = Landmarks(3, 20, 2.0, 1e-6), Landmarks(3, 20, 2.0, 0.1)
    assert float(layer(rows).mean(0).abs().max()) < 0.05
    sizes = torch.linalg.eigvalsh(layer(rows).T.cov())
    assert 0.7 < float(sizes.min()) < float(sizes.max()) < 1.3
    sizes = torch.linalg.eigvalsh(ridged(rows).T.cov())
    assert float(sizes.min()) < 0.05
    assert 0.5 < float(sizes.max()) < 1.0
    again, other = Landmarks(3, 20, 2.0, 1e-6), Landmarks(3, 20, 2.0, 1e-6, seed=1)
    assert torch.equal(again.points, layer.points)
    assert not torch.equal(other.points, layer.points)


def test_landmarks_far_away_and_wrong_ones() -> None:
    layer = Landmarks(3, 20)
    far = torch.full((1, 3), 1e30)
    assert torch.allclose(layer(far), -layer.centre @ layer.whitener, atol=1e-4)  # all kernel values are 0 there
    with pytest.raises(DataError, match="batch, 3"):
        layer(torch.zeros(2, 4))
    for wrong in ({"features": 0}, {"outputs": 0}, {"scale": 0.0}, {"ridge": math.inf}):
        with pytest.raises(ConfigurationError, match="Landmarks"):
            Landmarks(**{"features": 3, "outputs": 5, **wrong})
    for wrong in ({"fourier": 10}, {"scale": (1.0, 2.0)}):
        with pytest.raises(ConfigurationError, match="landmarks"):
            models.create("tabular", input_shape=(5,), classes=2, landmarks=10, **wrong)


def _width(layer: torch.nn.Module) -> int:
    return int(layer(torch.zeros(1, 4)).shape[1])


@pytest.mark.parametrize(
    "options",
    [
        {"fourier": 20, "scale": 2.0},
        {"input_mode": "ball"},
        {"hidden": (8,), "hidden_clip": 0.1},
        {"compress": 0.1, "reach": 1.0},
        {"landmarks": 20, "scale": 2.0, "ridge": 1e-3},
    ],
    ids=str,
)
def test_sensitivities_are_the_clips(options: dict) -> None:
    model = models.create("tabular", input_shape=(5,), classes=2, clip=0.2, **options)
    found = list(lipdp.sensitivities(model, losses.CrossEntropy(tau=3.0)).values())
    assert found[-1] == pytest.approx(0.2, rel=1e-4)
    assert all(value == pytest.approx(0.1, rel=1e-4) for value in found[:-1])
    # One example's true gradient stays below, whatever the weights and the input are.
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=5.0, generator=draw)
    loss = losses.CrossEntropy(tau=3.0)
    for scale in (1e-3, 1.0, 1e4):
        row, label = scale * torch.randn(1, 5, generator=draw), torch.tensor([1])
        gradients = torch.autograd.grad(loss(model(row), label).sum(), list(model.parameters()))
        for gradient, limit in zip(gradients, found, strict=True):
            assert float(gradient.norm()) <= limit * (1 + 1e-5)


@pytest.mark.parametrize("options", [{"fourier": 12, "compress": 0.5}, {"landmarks": 12}], ids=str)
def test_the_model_exports(options: dict) -> None:
    model = models.create("tabular", input_shape=(5,), classes=2, **options).eval()
    torch.nn.init.normal_(model[-2].weight)
    x = torch.randn(7, 5)
    plain = model.export()
    assert torch.allclose(plain(x), model(x), atol=1e-5)


def test_a_run_learns_what_a_line_cannot(tiny: DatasetInfo) -> None:
    result = train(TINY, epsilon=4.0, seed=1, reproducible=True, accountant="rdp", evaluations=1)
    assert result.auroc > 0.93
    assert result.summary()["auroc"] == result.auroc
    assert result.epsilon <= 4.0
    line = train(TINY.but(options={"clip": 0.3}), epsilon=4.0, seed=1, reproducible=True, accountant="rdp", evaluations=1)
    assert line.auroc < 0.7


def test_features_of_few_columns_estimate_the_sum_of_their_kernels() -> None:
    """The mean over all pairs of columns of the pair's Gaussian kernel, computed one by one."""
    layer = RandomFourier(4, 40_000, scale=1.3, each=2)
    assert ((layer.weight != 0).sum(1) == 2).all()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    pairs = [(i, j) for i in range(4) for j in range(i)]
    kernel = sum(torch.exp(-torch.cdist(x[:, pair], x[:, pair]).square() / (2 * 1.3**2)) for pair in pairs) / len(pairs)
    assert torch.allclose(layer(x) @ layer(x).T, kernel, atol=0.03)
    assert "each=2" in repr(layer)
    with pytest.raises(ConfigurationError, match="1 to 4 columns"):
        RandomFourier(4, 10, each=5)


def test_centred_features_are_paid_for(tiny: DatasetInfo) -> None:
    options = {"fourier": 60, "scale": 2.0, "clip": 0.3, "centre": True}
    recipe = TINY.but(options=options, statistics_budget=0.1)
    result = train(recipe, epsilon=4.0, seed=1, reproducible=True, accountant="rdp", evaluations=1)
    assert [release.name for release in result.plan.releases] == ["statistics"]
    assert result.epsilon <= 4.0
    assert result.auroc > 0.93
    # The sensitivity is the clip, whatever the means turned out to be, and what the last layer gets has norm 1.
    assert list(result.plan.sensitivities.values()) == [pytest.approx(0.3, rel=1e-4)]
    rows = torch.randn(50, 2, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        features = result.model[:-2](rows)
    assert torch.allclose(features.norm(dim=1), torch.ones(50), atol=1e-4)
    (centring,) = (layer for layer in result.model if isinstance(layer, lipdp.nn.Standardize))
    assert float(centring.mean.norm()) > 0.1
    for wrong in ({"standardise": True, "fourier": 60}, {"fourier": 0}):
        with pytest.raises(ConfigurationError, match="centre"):
            models.create("tabular", input_shape=(2,), classes=2, **{**options, **wrong})


def test_stored_and_computed_fronts_are_the_same_run(tiny: DatasetInfo) -> None:
    runs = [
        train(TINY.but(front=front, epochs=1.4), epsilon=4.0, seed=2, reproducible=True, accountant="rdp", evaluations=1)
        for front in ("stored", "computed")
    ]
    assert [run.steps for run in runs] == [7, 7]
    assert runs[0].auroc == pytest.approx(runs[1].auroc, abs=1e-3)
    # The same steps on the same batches, whether or not the features are stored.
    assert torch.allclose(_weights_after(TINY, tiny, settle=True), _weights_after(TINY, tiny, settle=False), atol=1e-5)


def _weights_after(recipe: Recipe, info: DatasetInfo, settle: bool) -> torch.Tensor:
    learn = data.load(recipe.dataset)[0]
    ready = prepare(recipe, info, noise_multiplier=2.0, accountant="rdp", seed=4)
    lipdp.fit(ready.model, ready.loss, ready.optimizer, ready.plan, learn, seed=4, reproducible=True, evaluations=1, settle=settle)
    return ready.model[-2].weight.detach()


def test_a_batch_is_at_most_the_table(tiny: DatasetInfo) -> None:
    ready = prepare(TINY.but(batch_size=1200), tiny, noise_multiplier=2.0, accountant="rdp", dataset_size=900)
    assert (ready.plan.batch_size, ready.plan.sampling_rate) == (900, 1.0)


def test_the_history_has_the_validation_auroc(tiny: DatasetInfo) -> None:
    result = train(TINY, epsilon=4.0, seed=1, reproducible=True, accountant="rdp", evaluations=3, validation_fraction=0.25)
    rows = result.history.metrics
    assert len(rows[AUROC]) == len(rows["step"]) == 3
    assert rows[AUROC][-1] == pytest.approx(result.auroc, abs=1e-9)
    assert result.plan.dataset_size == 900


@pytest.mark.parametrize(("schedule", "half"), [("cosine", 0.5), ("constant", None)])
def test_the_schedule_is_kept(tiny: DatasetInfo, schedule: str, half: float | None) -> None:
    ready = prepare(TINY.but(schedule=schedule), tiny, noise_multiplier=1.0, accountant="rdp")
    if half is None:
        assert ready.scheduler is None
    else:
        assert isinstance(ready.scheduler, torch.optim.lr_scheduler.LambdaLR)
        assert ready.scheduler.lr_lambdas[0](ready.plan.steps / 2) == pytest.approx(half)


def test_class_weights_and_statistics_reach_the_plan(tiny: DatasetInfo) -> None:
    ready = prepare(
        TINY.but(class_weights=(0.1, 1.0), statistics_budget=0.1, options={"standardise": True, "radius": 4.0}),
        tiny, epsilon=2.0, accountant="rdp",
    )  # fmt: skip
    assert [release.name for release in ready.plan.releases] == ["statistics"]
    assert ready.loss.class_weights == (pytest.approx(0.1), 1.0)
    with pytest.raises(ConfigurationError, match="two classes"):
        prepare(TINY, lipdp.data.info("digits"), epsilon=1.0)


@pytest.mark.parametrize("name", ["adbench-yeast", "adbench-yeast-bookkeeping", "adbench-magic"])
def test_whatever_their_spaces_draw_is_a_model(name: str) -> None:
    recipe = get(name)
    for seed in range(4):
        made = recipe.changed(default_space(recipe).settings(RandomSuggester(seed), recipe))
        assert len(models.create(made.model, input_shape=(8,), classes=2, **made.options)) >= 4


def test_every_adbench_table_has_its_recipes() -> None:
    tables = {"aloi", "campaign", "celeba", "census", "donors", "magic", "shuttle", "skin", "yeast"}
    for table in tables:
        clipless, clipped = get(f"adbench-{table}"), get(f"adbench-{table}-bookkeeping")
        assert (clipless.method, clipped.method) == ("clipless", "bookkeeping")
        assert clipless.dataset == clipped.dataset == f"adbench/{table}"
        for recipe in (clipless, clipped):
            assert (recipe.metric, recipe.epsilon) == ("auroc", 1.0)
            assert recipe.provenance
            noise = {"epsilon": 1.0} if recipe.statistics_budget else {"noise_multiplier": 2.0}
            ready = prepare(recipe, lipdp.data.info(recipe.dataset), **noise, accountant="rdp")
            assert ready.plan.delta <= 1e-4
    assert {f"adbench-{table}" for table in tables} < set(names())
