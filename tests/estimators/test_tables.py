"""PrivateClassifier and PrivateRegressor: scikit-learn's shape, the budget that was asked for, and no look at what was not "
"paid for."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

import lipdp
from lipdp.errors import BudgetError, ConfigurationError, DataError, LipdpNotice, LipdpWarning, RepeatedRunWarning
from lipdp.estimators import Categorical, Numeric, categorical, numeric
from lipdp.estimators.methods import METHODS, choose_method, make_model, make_optimizer
from lipdp.estimators.repeats import forget_rows
from lipdp.estimators.schema import Schema

UNIT = Numeric(0, 1)
# Two fits differ, for their noise is secret: what compares two of them can only hold for fits that are not private.
COMPARES_TWO_FITS = {
    "check_classifier_data_not_an_array",
    "check_regressor_data_not_an_array",
    "check_regressors_int",
    "check_supervised_y_2d",
    "check_fit_idempotent",
}

QUICK = {
    "check_no_attributes_set_in_init",
    "check_estimators_unfitted",
    "check_n_features_in",
    "check_estimator_sparse_array",
    "check_set_params",
    "check_requires_y_none",
}


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    forget_rows()


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs, for what is not about learning."""
    monkeypatch.setattr("lipdp.estimators.methods._STEPS", 10)


def _rows(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(seed).uniform(0, 1, (count, 3))
    return rows, (rows[:, 0] > rows[:, 1]).astype(int)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_within_its_budget(method) -> None:
    x, y = _rows(600)
    model = lipdp.PrivateClassifier(3.0, schema=UNIT, method=method).fit(x, y)
    assert model.epsilon_ <= 3.0
    assert model.plan_.epsilon == pytest.approx(model.epsilon_)
    assert model.score(x, y) > 0.85
    assert {group.source for group in model.plan_.groups} == {"clipped" if method == "clipping" else "proved"}


def test_breast_cancer_with_public_ranges() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    ranges = [(0.0, float(2 ** np.ceil(np.log2(high)))) for high in x.max(0)]  # powers of two: what a unit's habits would say
    rows, rest, labels, answers = train_test_split(x, y, random_state=0, stratify=y)
    model = lipdp.PrivateClassifier(3.0, schema=ranges).fit(rows, labels)
    assert model.score(rest, answers) > 0.85
    shares = model.predict_proba(rest)
    assert shares.shape == (len(rest), 2)
    assert shares.sum(1) == pytest.approx(1)
    assert (model.classes_[shares.argmax(1)] == model.predict(rest)).all()
    assert ((model.decision_function(rest) > 0) == (model.predict(rest) == 1)).all()


def test_a_regressor_learns_and_stays_in_its_range() -> None:
    x, _ = _rows(2000)
    y = 3 * x[:, 0] - 2 * x[:, 1] ** 2
    model = lipdp.PrivateRegressor(3.0, schema=UNIT, target=(-2, 3)).fit(x, y)
    assert model.score(x, y) > 0.8
    far = model.predict(np.full((1, 3), 1e6))
    assert -2 <= far[0] <= 3


def test_ranges_are_paid_for_from_the_same_budget() -> None:
    x, y = _rows(4000)
    x = 1000 + 50 * x
    model = lipdp.PrivateClassifier(2.0, ranges_share=0.25).fit(x, y)
    assert model.released_ == pytest.approx(0.5)
    assert model.plan_.epsilon <= 1.5
    assert model.epsilon_ <= 2.0
    assert model.released_ + model.plan_.epsilon == pytest.approx(model.epsilon_)
    assert model.score(x, y) > 0.85
    assert all(900 < column.low < 1100 < column.high + 100 for column in model.schema_.columns)
    assert "0.5000 of it for ranges" in model.report()


@pytest.mark.usefixtures("few_steps")
def test_a_regressor_pays_for_the_range_of_its_target() -> None:
    x, _ = _rows(2000)
    model = lipdp.PrivateRegressor(2.0, schema=UNIT).fit(x, 1e4 * x[:, 0])
    assert model.released_ == pytest.approx(0.4)
    assert -6000 < model.target_.low < 4000 < model.target_.high < 16000


@pytest.mark.usefixtures("few_steps")
def test_what_is_decided_does_not_depend_on_the_rows() -> None:
    """Two tables of the same size and shape: the same model, plan and choice, whatever is in them."""
    x, y = _rows(300)
    other = np.clip(np.random.default_rng(5).normal(7, 100, x.shape), -1e5, 1e5)
    plans = []
    for rows, labels in ((x, y), (other, 1 - y)):
        model = lipdp.PrivateClassifier(1.0, classes=[0, 1], schema=Numeric(-5, 5), random_state=0).fit(rows, labels)
        plans.append((model.plan_.to_json(), model.choice_, model.public_, str(model.model_)))
    assert plans[0] == plans[1]


def test_the_choice_follows_public_numbers_and_says_why() -> None:
    numbers = Schema((0, 1, 2), (UNIT, UNIT, Categorical([1, 2])))
    few, many = (choose_method("auto", records=n, outputs=2, epsilon=1.0, schema=numbers) for n in (100, 10_000))
    assert (few.method, many.method) == ("kernel", "kernel")
    assert "3 columns, mostly numbers" in few.why
    little, much = (choose_method("auto", records=n, outputs=1, epsilon=1.0, schema=numbers) for n in (50, 10_000))
    assert (little.method, much.method) == ("linear", "kernel")
    assert "N·ε is 50, below 100" in little.why
    words = Schema((0, 1, 2), (UNIT, Categorical(["a", "b"]), Categorical([1, 2])))
    chosen = choose_method("auto", records=10_000, outputs=2, epsilon=1.0, schema=words)
    assert chosen.method == "clipping"
    assert "2 of the 3 columns are categories" in chosen.why
    assert choose_method("auto", records=10_000, outputs=1, epsilon=1.0, schema=words).method == "linear"
    wide = Schema(tuple(range(50)), (UNIT,) * 50)
    assert "50 columns are many" in choose_method("auto", records=10_000, outputs=2, epsilon=1.0, schema=wide).why
    with pytest.raises(ConfigurationError, match=r"there is no method named 'kernle'.*Did you mean 'kernel'"):
        choose_method("kernle", records=10, outputs=2, epsilon=1.0, schema=numbers)


def test_a_sum_over_categories_is_learned() -> None:
    """20 columns of 6 categories, each with a weight: next to nothing for a kernel on all of them."""
    draw = np.random.default_rng(1)
    rows, weights = draw.integers(0, 6, (4000, 20)), draw.normal(size=(20, 6))
    labels = (weights[np.arange(20), rows].sum(1) > 0).astype(int)
    schema = Categorical(range(6))
    model = lipdp.PrivateClassifier(3.0, schema=schema).fit(rows[:3000], labels[:3000])
    assert model.choice_.method == "clipping"
    assert model.score(rows[3000:], labels[3000:]) > 0.85


def test_a_line_and_a_curve_are_learned_by_one_method() -> None:
    """The columns lie beside the random features: neither a plain sum nor a disc is lost."""
    draw = np.random.default_rng(2)
    rows = draw.uniform(-1, 1, (3000, 4))
    for labels in (rows.sum(1) > 0, (rows[:, :2] ** 2).sum(1) > 0.6):
        forget_rows()
        model = lipdp.PrivateClassifier(3.0, schema=Numeric(-1, 1)).fit(rows[:2400], labels[:2400])
        assert model.choice_.method == "kernel"
        assert model.score(rows[2400:], labels[2400:]) > 0.85


def test_three_kinds_of_features_share_one_bound() -> None:
    """Columns, a kernel on all of them, a kernel of each by itself: rows of norm 1 together, so Δ is the clip."""
    numbers = Schema((0, 1, 2), (UNIT, UNIT, Categorical([1, 2])))
    choice = choose_method("auto", records=5000, outputs=1, epsilon=1.0, schema=numbers)
    model = make_model(choice, numbers, 1)
    rows = torch.randn(50, numbers.width)
    seen = torch.nn.Sequential(*list(model)[:-2])(rows)
    assert torch.allclose(seen.norm(dim=1), torch.ones(50), atol=1e-4)
    assert seen.shape[1] == 1000 + numbers.width + 1
    decided = lipdp.plan(
        model, lipdp.losses.Huber(), dataset_size=5000, batch_size=5000, delta=1e-5, noise_multiplier=9.0, steps=100
    )
    assert decided.sensitivity == pytest.approx(choice.settings["clip"], rel=1e-3)


@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
@pytest.mark.parametrize(("records", "momentum"), [(30, 0.0), (9000, 0.9)])
def test_momentum_where_plain_steps_would_be_unstable(records, momentum) -> None:
    numbers = Schema((0, 1), (UNIT, UNIT))
    for outputs, loss in ((2, lipdp.losses.Squares()), (1, lipdp.losses.Huber())):
        choice = choose_method("kernel", records=records, outputs=outputs, epsilon=3.0, schema=numbers)
        model = make_model(choice, numbers, outputs)
        decided = lipdp.plan(model, loss, dataset_size=records, batch_size=records, delta=1e-5, noise_multiplier=15.0, steps=100)
        optimizer, _ = make_optimizer(choice, model, decided)
        (group,) = optimizer.param_groups
        assert group["momentum"] == momentum
        plain = group["lr"] / (1 - momentum)
        assert (plain > choice.settings["unstable"]) == (momentum > 0)
        wanted = choice.settings["noise"] * records / 1.5
        assert plain * decided.sensitivity * 100 / 2 == pytest.approx(min(wanted, 30 * decided.sensitivity * 100 / 2))


@pytest.mark.parametrize("epsilon", [100.0, 1e4])
def test_much_privacy_budget_does_no_harm(epsilon) -> None:
    """The rate that uses up the noise grows with ε; steps beyond what descent bears would throw away what was learned."""
    rows = np.random.default_rng(0).uniform(0, 1, (1000, 2))
    values = rows[:, 0] - rows[:, 1]
    assert lipdp.PrivateRegressor(epsilon, schema=UNIT, target=(-1, 1)).fit(rows, values).score(rows, values) > 0.97
    forget_rows()
    assert lipdp.PrivateClassifier(epsilon, schema=UNIT).fit(rows, values > 0).score(rows, values > 0) > 0.97


def test_shares_are_in_the_order_of_the_outputs() -> None:
    x, y = _rows(100)
    model = lipdp.PrivateClassifier(0.5, schema=UNIT).fit(x, y)
    margins = np.linspace(-5, 5, 201)
    shares = model._shares(np.stack([0.3 - margins / 2, 0.3 + margins / 2], axis=1))
    assert (np.diff(shares[:, 1]) > 0).all()
    assert np.allclose(shares.sum(1), 1)
    middle = np.abs(margins) < 0.85
    assert np.allclose(shares[middle, 1], 0.5 + margins[middle] / 2)


def test_a_fit_that_can_not_learn_says_so_and_one_that_can_does_not() -> None:
    with pytest.warns(LipdpNotice, match="this fit can't learn"):
        lipdp.PrivateClassifier(0.01, schema=UNIT, classes=[0, 1]).fit(*_rows(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LipdpNotice)
        lipdp.PrivateClassifier(1.0, schema=UNIT).fit(*_rows(100))


def test_a_frame_with_mixed_columns() -> None:
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(0)
    table = pandas.DataFrame(
        {
            "age": draw.integers(18, 90, 800),
            "income": pandas.array(draw.integers(0, 9, 800) * 1000, dtype="Int64"),
            "job": draw.choice(["clerk", "nurse", "smith"], 800),
            "member": draw.integers(0, 2, 800).astype(bool),
        }
    )
    table.loc[3, "income"] = pandas.NA
    y = np.where((table["age"] > 50) ^ (table["job"] == "nurse"), "yes", "no")
    schema = {"age": (18, 90), "income": numeric(0, 10_000, missing=True), "job": categorical(["clerk", "nurse", "smith"])}
    model = lipdp.PrivateClassifier(3.0, schema=schema).fit(table, pandas.Series(y))
    assert model.released_ == 0  # a boolean column's type says its range
    assert model.score(table, y) > 0.75
    assert list(model.feature_names_in_) == list(table.columns)
    assert set(model.predict(table[["age", "income", "job", "member"]])) <= {"yes", "no"}
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table.rename(columns={"age": "years"}))
    unseen = table.assign(job="pilot")
    with pytest.raises(DataError, match="not among its 3 declared"):
        model.predict(unseen)


def test_dates_are_numbers_by_a_public_range() -> None:
    pandas = pytest.importorskip("pandas")
    days = np.random.default_rng(0).integers(0, 3000, 600)
    joined = pandas.to_datetime("2015-01-01") + pandas.to_timedelta(days, unit="D")
    late = np.where(days > 1500, "late", "early")
    table = pandas.DataFrame({"joined": joined})
    with pytest.raises(DataError, match=r"dates\(first, last\) for dates"):
        lipdp.PrivateClassifier(3.0).fit(table, late)
    model = lipdp.PrivateClassifier(3.0, schema={"joined": ("2015-01-01", "2023-06-30")})
    with pytest.raises(ConfigurationError, match="the schema says"):
        model.fit(table, late)
    model.set_params(schema={"joined": lipdp.estimators.dates("2015-01-01", "2023-06-30")}).fit(table, late)
    assert model.score(table, late) > 0.9
    assert (model.predict(table.astype(str)) == model.predict(table)).all()


def test_categories_that_nobody_declared_are_refused_before_anything_is_spent(tmp_path) -> None:
    pandas = pytest.importorskip("pandas")
    budget = lipdp.privacy.Budget(tmp_path / "b", epsilon=9, delta=1e-4, dataset="d")
    for column in (["a", "b"] * 20, pandas.Categorical(["a", "b"] * 20), pandas.date_range("2024", periods=40)):
        table = pandas.DataFrame({"n": np.arange(40.0), "c": column})
        with pytest.raises(DataError, match=r"column 'c' holds no numbers, and the categories .* are private too"):
            lipdp.PrivateClassifier(budget=budget).fit(table, [0, 1] * 20)
    with pytest.raises(DataError, match="dates or durations"):
        lipdp.PrivateClassifier(schema={"c": (0, 1)}, budget=budget).fit(table, [0, 1] * 20)
    assert budget.spent == 0


def test_arrays_of_texts_with_a_schema() -> None:
    rows = np.array([["a", "1"], ["b", "2"]] * 100, dtype=object)
    model = lipdp.PrivateClassifier(3.0, schema=[["a", "b"], (0, 3)]).fit(rows, [0, 1] * 100)
    assert model.score(rows, [0, 1] * 100) == 1


@pytest.mark.usefixtures("few_steps")
def test_folds_compose_and_it_is_said() -> None:
    from lipdp.training import account

    x, y = _rows(120)
    model = lipdp.PrivateClassifier(1.0, schema=UNIT)
    before, account._expected = account._expected, 0  # other tests repeat runs all the time
    try:
        with pytest.warns(RepeatedRunWarning, match=r"fit 2 on some of the same rows .*ε is up to 2.000 at δ = 2e-05, not 1.000"):
            cross_val_score(model, x, y, cv=3)
        forget_rows()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RepeatedRunWarning)
            for seed in (1, 2, 3):
                model.fit(*_rows(120, seed))
    finally:
        account._expected = before


@pytest.mark.filterwarnings("ignore:3 ranges are found")
@pytest.mark.usefixtures("few_steps")
def test_one_account_pays_for_all_fits_and_refuses_the_one_too_many(tmp_path) -> None:
    x, y = _rows(200)
    budget = lipdp.privacy.Budget(tmp_path / "b", epsilon=2.0, delta=1e-4, dataset="d")
    model = lipdp.PrivateClassifier(2.0, budget=budget).fit(x, y)
    spent = budget.spent
    assert 0.4 < spent <= 2.0
    with pytest.raises(BudgetError, match="nothing was released"):
        clone(model).fit(x, y)
    assert budget.spent == spent  # not even ranges


def test_pipelines_and_clones() -> None:
    x, y = _rows()
    pipe = make_pipeline(FunctionTransformer(np.sqrt), lipdp.PrivateClassifier(3.0, schema=UNIT))
    assert clone(pipe).fit(x, y).score(x, y) > 0.8
    with pytest.raises(NotFittedError):
        lipdp.PrivateClassifier().predict(x)
    model = clone(lipdp.PrivateClassifier(schema={0: UNIT, 1: Categorical([1])}))
    assert model.get_params()["schema"] == {0: UNIT, 1: Categorical([1])}


@pytest.mark.usefixtures("few_steps")
def test_a_reproducible_fit_is_repeatable_and_says_what_it_is() -> None:
    x, y = _rows(100)
    one, two = (lipdp.PrivateClassifier(schema=UNIT, random_state=3, reproducible=True).fit(x, y) for _ in range(2))
    assert (one.decision_function(x) == two.decision_function(x)).all()
    assert not one.private_
    assert "NOT PRIVATE" in one.report()
    secret = [lipdp.PrivateClassifier(schema=UNIT, random_state=3).fit(x, y) for _ in range(2)]
    assert (secret[0].decision_function(x) != secret[1].decision_function(x)).any()
    assert "NOT PRIVATE" not in secret[0].report()


@pytest.mark.parametrize(
    ("change", "rows", "labels", "message"),
    [
        ({"epsilon": -1}, None, None, "epsilon is -1"),
        ({"epsilon": "1"}, None, None, "epsilon is '1'"),
        ({"delta": 2.0}, None, None, "delta is 2.0"),
        ({"method": "svm"}, None, None, "there is no method named 'svm'"),
        ({"ranges_share": 1.5}, None, None, "ranges_share is 1.5"),
        ({"random_state": "a"}, None, None, "random_state is 'a'"),
        ({"reproducible": True}, None, None, "draws everything from random_state"),
        ({"schema": {9: (0, 1)}}, None, None, "the schema declares 9"),
        ({"classes": [0]}, None, None, "at least two different labels"),
        ({"classes": [0, 7]}, None, None, "not among the 2 declared classes"),
        ({"budget": 3}, None, None, "budget is 3"),
        ({"budget": "nowhere"}, None, None, "there is no budget at nowhere"),
        ({}, np.full((20, 2), np.nan), [0, 1] * 10, "NaN"),
        ({"schema": UNIT}, np.full((20, 2), np.nan), [0, 1] * 10, "column '0' has a missing value"),
        ({}, np.zeros((20, 2)), [1] * 20, "one class only: there is nothing to tell apart"),
        ({}, np.zeros((20, 2)), [0, 1], "X has 20 rows and y has 2"),
        ({}, np.zeros((0, 2)), [], "minimum of 1 is required"),
        ({}, np.zeros(20), [0, 1] * 10, "Reshape your data"),
        ({}, np.zeros((20, 2)), np.linspace(0, 1, 20), "continuous"),
        ({}, [["a", "b"]] * 20, [0, 1] * 10, "X holds texts"),
    ],
)
def test_what_is_refused(change, rows, labels, message) -> None:
    x, y = _rows(20)
    rows, labels = (x if rows is None else rows), (y if labels is None else labels)
    with pytest.raises((ValueError, TypeError), match=message):
        lipdp.PrivateClassifier(**change).fit(rows, labels)


def test_sparse_rows_are_refused() -> None:
    from scipy.sparse import csr_matrix

    for schema in (None, UNIT):
        with pytest.raises(DataError, match="dense data is required"):
            lipdp.PrivateClassifier(schema=schema).fit(csr_matrix(np.eye(4)), [0, 1, 0, 1])


@pytest.mark.usefixtures("few_steps")
def test_one_class_may_be_all_that_occurs_where_others_are_declared() -> None:
    model = lipdp.PrivateClassifier(schema=UNIT, classes=["no", "yes"]).fit(np.zeros((200, 2)), ["no"] * 200)
    assert set(model.predict(np.zeros((3, 2)))) == {"no"}


@pytest.mark.parametrize("target", [3, (1, 0), (0, 1, 2)])
def test_a_target_that_is_no_range(target) -> None:
    with pytest.raises(ConfigurationError, match=r"target is|range"):
        lipdp.PrivateRegressor(target=target).fit(*_rows(20))


def _checks(estimator) -> list:
    return list(estimator_checks_generator(estimator, legacy=True, expected_failed_checks=None))


# All of scikit-learn's own checks take half a minute: a part here, all of them where LIPDP_SKLEARN_CHECKS is set.
@pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpWarning")
@pytest.mark.parametrize("kind", [lipdp.PrivateClassifier, lipdp.PrivateRegressor])
@pytest.mark.usefixtures("few_steps")
def test_checks_of_scikit_learn(kind) -> None:
    if not os.environ.get("LIPDP_SKLEARN_CHECKS"):
        done = [check(estimator) for estimator, check in _checks(kind()) if check.func.__name__ in QUICK]
        assert len(done) >= len(QUICK)
        return
    for result in check_estimator(kind(), on_fail=None, on_skip=None):
        assert result["status"] in ("passed", "skipped") or result["check_name"] in COMPARES_TWO_FITS, result
    repeatable = check_estimator(kind(reproducible=True, random_state=0), on_fail=None, on_skip=None)
    assert {result["status"] for result in repeatable} <= {"passed", "skipped"}


def test_iris_has_three_classes() -> None:
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = lipdp.PrivateClassifier(8.0, schema=[(4, 8), (2, 5), (1, 7), (0, 3)]).fit(x, names)
    assert model.score(x, names) > 0.7
    assert model.decision_function(x).shape == (150, 3)
    with pytest.warns(LipdpWarning, match="Declare what is public"):
        lipdp.PrivateClassifier(1.0).fit(x, names)


@pytest.mark.parametrize("classes", [5, "ab", [1], [1, 1], [None, "a"], [0, 1, float("nan")], [(1, 2), (3, 4)], [[1], [2, 3]]])
def test_classes_that_can_not_be_meant(classes) -> None:
    with pytest.raises(ConfigurationError, match="classes is"):
        lipdp.PrivateClassifier(classes=classes, schema=Numeric(0, 1)).fit([[0.0], [1.0]], [0, 1])


def test_a_target_or_y_that_can_not_be_meant() -> None:
    x = [[0.0], [1.0]]
    with pytest.raises(ConfigurationError, match="target is"):
        lipdp.PrivateRegressor(target=Numeric(0, 1, missing=True), schema=Numeric(0, 1)).fit(x, [0.0, 1.0])
    for estimator in (lipdp.PrivateRegressor(target=(0, 1), schema=Numeric(0, 1)), lipdp.PrivateClassifier(schema=Numeric(0, 1))):
        for y in ([[1, 2], [3, 4]], [[1], [2, 3]]):
            with pytest.raises(DataError, match="no column"):
                estimator.fit(x, y)


def test_what_was_declared_is_told_in_all_of_its_digits() -> None:
    """Who signs compares ranges with what is public: 1.7e+09 to 1.7e+09 is none, and a comma in a category no two of them."""
    assert numeric(1_700_000_000, 1_700_086_400).said == "from 1700000000 to 1700086400"
    assert numeric(-0.1, 1e16 + 2, missing=True).said == "from -0.1 to 1.0000000000000002e+16, or missing"
    assert categorical(["Ulm", "a, b", "", 3, 2**60 + 1, True]).said == f"one of Ulm, 'a, b', '', 3, {2**60 + 1}, True"
