"""Data of other types than the model's: converted where that is safe, refused by name where it is not."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import DataError
from lipdp.program.dtypes import Types, model_dtype

SIZE = 48
GIVEN = {
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.uint16,
    "bool": torch.bool,
}


def rows(dtype=torch.float32):
    """Numbers that every type can hold, so that converting changes nothing."""
    x = torch.randint(0, 2 if dtype == torch.bool else 9, (SIZE, 4), generator=torch.Generator().manual_seed(0))
    return x.to(dtype), x.float()


def labels():
    return torch.arange(SIZE) % 3


def clipless(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((4,), norm=5.0), nn.SpectralLinear(4, 3, dtype=dtype), nn.ClipGradient(0.2))
    return model, losses.CrossEntropy(), {}


def clipped(dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=dtype))
    return model, torch.nn.CrossEntropyLoss(reduction="none"), {"method": "bookkeeping", "max_grad_norm": 1.0}


KINDS = {"clipless": clipless, "clipped": clipped}


def trained(kind, data, dtype=torch.float32, **options):
    model, loss, settings = KINDS[kind](dtype)
    batch = options.pop("batch_size", SIZE)  # all of them: samples and noise depend on the data, their types included
    plan = lipdp.plan(
        model, loss, dataset_size=SIZE, batch_size=batch, delta=1e-3, noise_multiplier=1e-6, steps=2, accountant="rdp", **settings
    )
    lipdp.fit(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.5), plan, data, validation=data, seed=1, reproducible=True, **options
    )
    return {name: p.detach() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.allclose(one[name], other[name], rtol=0, atol=1e-4) for name in one)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_on_the_converted_data(kind, given):
    x, plain = rows(GIVEN[given])
    expected = trained(kind, TensorDataset(plain, labels()))
    assert same(trained(kind, TensorDataset(x, labels())), expected)
    if given == "uint8":
        assert same(trained(kind, Subset(TensorDataset(x, labels()), range(SIZE))), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["float64", "uint8"])
def test_whole_batches_leave_the_data_as_they_were(kind, given):
    """At sampling rate 1 rows are views of the dataset: conversion must copy, and no change of it be seen where there is none."""
    x, plain = rows(GIVEN[given])
    before = x.clone()
    found = trained(kind, TensorDataset(x, labels()), batch_size=SIZE)
    assert torch.equal(x, before)
    assert same(found, trained(kind, TensorDataset(plain, labels()), batch_size=SIZE))


@pytest.mark.parametrize("given", ["float32", "float16", "int64", "bool"])
def test_models_in_double_precision(given):
    x, plain = rows(getattr(torch, given))
    double = TensorDataset(plain.double(), labels())
    assert same(trained("clipless", TensorDataset(x, labels()), torch.float64), trained("clipless", double, torch.float64))


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_that_takes_data(kind, given):
    x, plain = rows(GIVEN[given])
    y = labels()
    model, loss, _ = KINDS[kind]()
    assert lipdp.evaluate(model, loss, TensorDataset(x, y)) == lipdp.evaluate(model, loss, TensorDataset(plain, y))
    norms = lipdp.clipping.per_example_norms(model, loss, x, y)
    assert torch.equal(norms, lipdp.clipping.per_example_norms(model, loss, plain, y))
    found, expected = (lipdp.clipping.clipped_gradients(model, loss, part, y, 0.5) for part in (x, plain))
    assert same(found, expected)
    if kind == "clipless":
        radii, expected = lipdp.certify(model, x, y), lipdp.certify(model, plain, y)
        assert torch.allclose(radii, expected, rtol=1e-5, atol=1e-5)
        assert bool((radii <= expected).all())
        assert torch.equal(lipdp.attack(model, x, y, 0.3, steps=2), lipdp.attack(model, plain, y, 0.3, steps=2))
        diagnosed = lipdp.diagnose.diagnose(model, loss, (x, y), public=True)
        assert diagnosed.rows == lipdp.diagnose.diagnose(model, loss, (plain, y), public=True).rows


def test_statistics_and_settled_features():
    def model():
        torch.manual_seed(0)
        layers = nn.BoundedInput((4,), norm=4.0), nn.Standardize(4, radius=4.0), nn.BoundedInput((4,)), nn.SpectralLinear(4, 3)
        return nn.Sequential(*layers)

    results = []
    for x in rows(torch.uint8):
        made, loss = model(), losses.CrossEntropy()
        paid = [lipdp.privacy.Release("statistics", "gaussian", 1e-6)]  # hardly any noise: it depends on the data's type
        sizes = {"dataset_size": SIZE, "batch_size": SIZE, "steps": 2}
        plan = lipdp.plan(made, loss, delta=1e-3, noise_multiplier=1e-6, releases=paid, accountant="rdp", **sizes)
        data = TensorDataset(x, labels())
        lipdp.fit(made, loss, torch.optim.SGD(made.parameters(), lr=0.5), plan, data, seed=1, reproducible=True, settle=True)
        results.append(made.state_dict())
    assert same(*results)
    front = torch.nn.Linear(4, 2)
    x, plain = rows(torch.float64)
    found, expected = (lipdp.models.extract_features(front, TensorDataset(part, labels())) for part in (x, plain))
    assert torch.equal(found.tensors[0], expected.tensors[0])


def test_a_number_beyond_the_models_type_is_refused_with_its_record():
    x = torch.ones(SIZE, 4, dtype=torch.float64)
    x[7, 2] = 1e300
    for kind in KINDS:
        with pytest.raises(DataError, match="a record contains a NaN or an infinity, as float32"):
            trained(kind, TensorDataset(x, labels()))
    trained("clipless", TensorDataset(x, labels()), torch.float64)  # where it is a number
    model, loss, settings = clipless()
    plan = lipdp.plan(model, loss, dataset_size=SIZE, batch_size=16, delta=1e-3, noise_multiplier=1.0, steps=2, **settings)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), plan, seed=0, reproducible=True)
    engine.step(x, labels(), sample="own")  # a loop of one's own: left out, as any record that is not finite
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


# --------------------------------------------------------------------------------------------------------- token ids


class OneHot(torch.nn.Module):
    """Whole numbers without any embedding: only its forward says so."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(20, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        if self.training:
            return self.inner(F.one_hot(ids, 5).flatten(1).float())
        self.calls += 1
        return self.inner(F.one_hot(ids, 5).flatten(1).float())


def tokens():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(9, 5), torch.nn.Flatten(), torch.nn.Linear(20, 3))


@pytest.mark.parametrize("given", ["uint8", "int16", "int32", "int64"])
def test_token_ids_stay_whole_numbers(given):
    ids, _ = rows(GIVEN[given])
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    data, plain = (TensorDataset(part, labels()) for part in (ids, ids.long()))
    assert lipdp.evaluate(tokens(), loss, data) == lipdp.evaluate(tokens(), loss, plain)
    model = tokens()
    plan = lipdp.plan(
        model,
        loss,
        dataset_size=SIZE,
        batch_size=16,
        delta=1e-3,
        noise_multiplier=1.0,
        steps=1,
        method="bookkeeping",
        max_grad_norm=1,
    )
    lipdp.fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), plan, data, seed=1, reproducible=True)
    assert Types(nn.Sequential(nn.BoundedEmbedding(9, 5, length=4), nn.TokenMean())).inputs(ids).dtype == torch.int64


def test_a_model_that_takes_whole_numbers_in_its_own_way_keeps_them():
    model, ids = OneHot(), torch.randint(0, 5, (SIZE, 4))
    model.train()
    model.inner.eval()
    state, draw = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    types = Types(model)
    assert types.inputs(ids).dtype == torch.int64
    assert torch.equal(torch.get_rng_state(), draw)
    assert (model.training, model.inner.training) == (True, False)
    assert same(model.state_dict(), state)  # asking left no trace
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    lipdp.clipping.per_example_norms(model, loss, ids, labels())


def test_floating_point_token_ids_are_refused():
    with pytest.raises(DataError, match=r"table of embeddings.*float64.*\.long\(\)"):
        Types(tokens()).inputs(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(DataError, match="table of embeddings"):
        lipdp.evaluate(tokens(), losses.CrossEntropy(), TensorDataset(rows()[1], labels()))
    with pytest.raises(DataError, match="token ids"):
        lipdp.attack(tokens(), torch.zeros(3, 4, dtype=torch.long), None, 0.1)
    with pytest.raises(DataError, match="real entries"):
        lipdp.certify(tokens(), torch.zeros(3, 4, dtype=torch.long))


class Mixed(torch.nn.Module):
    """A table of numbers, one column of which is a category that the model looks up itself."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = torch.nn.Embedding(9, 2), torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.inner(torch.cat([self.table(x[:, 0].long()), x[:, 1:].to(self.inner.weight.dtype)], 1))


def test_a_model_that_looks_up_a_column_takes_either():
    loss = losses.CrossEntropy()
    model = Mixed()
    expected = lipdp.evaluate(model, loss, TensorDataset(rows()[1], labels()))
    for given in ("float64", "int64", "int16"):
        assert lipdp.evaluate(model, loss, TensorDataset(rows(GIVEN[given])[0], labels())) == expected


# ----------------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("given", ["uint8", "int16", "int32", "bool"])
@pytest.mark.parametrize("kind", KINDS)
def test_class_numbers_of_any_whole_type(kind, given):
    y = (labels() % 2).to(GIVEN[given])
    x = rows()[1]
    assert same(trained(kind, TensorDataset(x, y)), trained(kind, TensorDataset(x, y.long())))
    model, loss, _ = KINDS[kind]()
    assert lipdp.evaluate(model, loss, TensorDataset(x, y)) == lipdp.evaluate(model, loss, TensorDataset(x, y.long()))


@pytest.mark.parametrize("given", ["float64", "float16", "int64", "uint8", "bool"])
@pytest.mark.parametrize(
    "loss", [losses.MAE(), losses.Huber(), torch.nn.MSELoss(reduction="none"), torch.nn.BCEWithLogitsLoss(reduction="none")]
)
def test_targets_of_regression(loss, given):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    x, (y, plain) = rows()[1], (part[:, 0] for part in rows(torch.bool if given == "bool" else GIVEN[given]))
    found, expected = (lipdp.clipping.clipped_gradients(model, loss, x, part, 0.5) for part in (y, plain))
    assert same(found, expected)
    assert lipdp.evaluate(model, loss, TensorDataset(x, y))["loss"] == lipdp.evaluate(model, loss, TensorDataset(x, plain))["loss"]


def test_targets_keep_their_digits_beside_a_model_in_half_precision():
    types = Types(torch.nn.Linear(4, 1, dtype=torch.bfloat16), losses.MAE())
    assert types.targets(torch.zeros(3, dtype=torch.float64)).dtype == torch.float32
    assert types.targets(torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert Types(torch.nn.Linear(4, 1), lambda outputs, mask: outputs[:, 0] * mask).targets(torch.ones(3) > 0).dtype == torch.bool


def test_class_numbers_in_floating_point_are_refused_by_name():
    for kind in KINDS:
        with pytest.raises(DataError, match=r"convert them with \.long\(\)"):
            trained(kind, TensorDataset(rows()[1], labels().double()))
    with pytest.raises(DataError, match="class numbers from 0 to 2"):
        lipdp.attack(clipless()[0], rows()[1], labels().float(), 0.1)
    with pytest.raises(DataError, match="class numbers from 0 to 2"):
        lipdp.attack(clipless()[0], rows()[1], labels() + 1, 0.1)


# ----------------------------------------------------------------------------------------- what can't be converted


def test_complex_numbers_and_odd_tensors_are_refused_by_name():
    x, y = rows()[1], labels()
    for kind in KINDS:
        model, loss, _ = KINDS[kind]()
        with pytest.raises(DataError, match=r"inputs are complex numbers \(complex64\)"):
            trained(kind, TensorDataset(x.to(torch.complex64), y))
        with pytest.raises(DataError, match="inputs are complex"):
            lipdp.evaluate(model, loss, TensorDataset(x.to(torch.complex64), y))
        with pytest.raises(DataError, match="targets are complex"):
            lipdp.evaluate(model, loss, TensorDataset(x, y.to(torch.complex64)))
        with pytest.raises(DataError, match="dense"):
            lipdp.clipping.per_example_norms(model, loss, x.to_sparse(), y)

    class Spectrum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x.abs())

    loss = torch.nn.CrossEntropyLoss(reduction="none")
    lipdp.clipping.per_example_norms(Spectrum(), loss, x.to(torch.complex64), y)  # a model that takes them gets them


class Records(Dataset):
    def __init__(self, record):
        self.record = record

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return self.record


NUMBERS = np.arange(4.0)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (("text", 1), "input must be a tensor, an array or a number; this dataset gives a str"),
        ((NUMBERS, "cat"), "target must be .* gives a str: number the classes from 0"),
        (([1.0, "two"], 1), "can't be put into one tensor"),
        ((np.array([None, 1], dtype=object), 1), "can't be put into one tensor"),
        ((None, 1), "can't be put into one tensor"),
        ((NUMBERS, 1, 2), "gives 3 parts"),
        ((NUMBERS,), "gives 1 parts"),
        ({"x": NUMBERS, "y": 1}, "a dict of inputs with one column .label. or .labels.; this has x, y"),
    ],
)
def test_records_that_are_no_numbers_are_refused_by_name(record, text):
    for run in (
        lambda: trained("clipless", Records(record)),
        lambda: lipdp.evaluate(*clipless()[:2], Records(record)),
    ):
        with pytest.raises(DataError, match=text):
            run()


def test_arrays_and_numbers_of_numpy():
    class Arrays(Records):
        def __getitem__(self, i):
            return rows()[1][i].numpy().astype(np.float64), np.int32(i % 3)

    assert same(trained("clipless", Arrays(None)), trained("clipless", TensorDataset(rows()[1], labels())))


# ------------------------------------------------------------------------------------------------------ certificates


def test_radii_hold_for_the_inputs_as_given():
    """Float64 inputs are rounded before the model sees them: close to a decision's boundary that is most of what is certified."""
    model = nn.Sequential(nn.BoundedInput((2,), norm=2000.0), nn.SpectralLinear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
    draw = torch.Generator().manual_seed(0)
    base = 1000 + torch.rand(4000, 1, generator=draw, dtype=torch.float64)
    gap = 0.02 * torch.rand(4000, 1, generator=draw, dtype=torch.float64)
    x = torch.cat([base + gap, base], 1)
    radii = lipdp.certify(model, x)
    assert float((radii > 0).double().mean()) > 0.5
    direction = torch.tensor([[-1.0, 1.0]], dtype=torch.float64) / 2**0.5
    moved = x + 0.999999 * radii[:, None] * direction
    assert torch.equal(model(moved.float()).argmax(1), model(x.float()).argmax(1))
    u, rounded = 2.0**-24, lipdp.certify(model, x.float())
    allowed = ((rounded - 2 * u * x.norm(dim=1)) / (1 + u)).clamp_min(0.0)
    assert bool((radii <= allowed).all())
    assert torch.allclose(radii, allowed, rtol=1e-6, atol=1e-9)


def test_what_a_model_computes_in():
    assert model_dtype(torch.nn.Linear(2, 2, dtype=torch.float16)) == torch.float16
    assert model_dtype(torch.nn.ReLU()) is None
    assert Types(torch.nn.ReLU()).inputs(torch.zeros(2, 2, dtype=torch.float16)).dtype == torch.float16
    assert model_dtype(torch.nn.BatchNorm1d(3, affine=False)) == torch.float32
