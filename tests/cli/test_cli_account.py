"""`lipdp epsilon` and `lipdp calibrate`, and the printing of numbers."""

import math

import pytest

from lipdp import privacy
from lipdp._texts import upwards
from lipdp.cli.output import duration

RUN = ("--sampling-rate", "0.01", "--steps", "100", "--delta", "1e-5")


def test_epsilon(lipdp):
    found = lipdp("epsilon", "--noise-multiplier", "1", *RUN, "--json").json
    assert found["epsilon"] == privacy.epsilon(noise_multiplier=1.0, sampling_rate=0.01, steps=100, delta=1e-5)
    assert (found["steps"], found["accountant"], found["adjacency"]) == (100, "pld", "add_remove")
    plain = lipdp("epsilon", "--noise-multiplier", "1", *RUN)
    assert f"(ε = {upwards(found['epsilon'])}, δ = 1e-05) for adding or removing one record (PLD)" in plain.stdout


def test_epsilon_from_sizes_and_epochs(lipdp):
    sizes = ("--batch-size", "600", "--dataset-size", "60000", "--epochs", "1", "--delta", "1e-5")
    found = lipdp("epsilon", "--noise-multiplier", "1", *sizes, "--json").json
    assert (found["sampling_rate"], found["steps"]) == (0.01, 100)


def test_epsilon_other_analyses(lipdp):
    pld, rdp, replace = (
        lipdp("epsilon", "--noise-multiplier", "1", *RUN, *more, "--json").json["epsilon"]
        for more in ((), ("--accountant", "rdp"), ("--adjacency", "replace_one"))
    )
    assert pld < rdp
    assert pld < replace


def test_calibrate_noise(lipdp):
    found = lipdp("calibrate", "--epsilon", "2", *RUN, "--accountant", "rdp", "--json").json
    assert found["target_epsilon"] == 2
    assert 1.99 < found["epsilon"] <= 2
    plain = lipdp("calibrate", "--epsilon", "2", *RUN, "--accountant", "rdp")
    shown = float(plain.stdout.split("multiplier ")[1].split()[0])
    assert found["noise_multiplier"] <= shown < found["noise_multiplier"] + 2e-5  # what is shown keeps the promise


def test_calibrate_steps(lipdp):
    common = ("--epsilon", "2", "--delta", "1e-5", "--batch-size", "10", "--dataset-size", "1000", "--noise-multiplier", "1")
    found = lipdp("calibrate", *common, "--accountant", "rdp", "--json").json
    cost = [
        privacy.epsilon(noise_multiplier=1, sampling_rate=0.01, steps=found["steps"] + more, delta=1e-5, accountant="rdp")
        for more in (0, 1)
    ]
    assert cost[0] <= 2 < cost[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("epsilon", "--noise-multiplier", "0", *RUN), "noise_multiplier is 0.0"),
        (("epsilon", "--noise-multiplier", "nan", *RUN), "noise_multiplier is nan"),
        (("epsilon", "--noise-multiplier", "1", "--sampling-rate", "2", "--steps", "3", "--delta", "1e-5"), "sampling_rate is 2.0"),
        (
            ("epsilon", "--noise-multiplier", "1", "--sampling-rate", "0", "--epochs", "3", "--delta", "1e-5"),
            "--sampling-rate must",
        ),
        (("epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.1", "--epochs", "nan", "--delta", "1e-5"), "--epochs must"),
        (("epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.1", "--delta", "1e-5"), "give the length"),
        (("epsilon", "--noise-multiplier", "1", "--steps", "3", "--delta", "1e-5"), "give either --sampling-rate"),
        (("epsilon", "--noise-multiplier", "1", "--steps", "3", "--delta", "1e-5", "--batch-size", "3"), "belong together"),
        (
            ("epsilon", "--noise-multiplier", "1", "--batch-size", "9", "--dataset-size", "3", "--steps", "1", "--delta", "0.1"),
            "between",
        ),
        (("epsilon", "--noise-multiplier", "1", *RUN, "--epochs", "3"), "not both"),
        (("epsilon", "--noise-multiplier", "1", *RUN, "--accountant", "abacus"), "accountant is 'abacus'"),
        (("epsilon", "--noise-multiplier", "1", *RUN, "--accountant", "rdp", "--adjacency", "replace_one"), "is refused"),
        (("calibrate", "--epsilon", "-1", *RUN), "epsilon is -1.0"),
        (("calibrate", "--epsilon", "1", *RUN, "--noise-multiplier", "1"), "give either a length"),
        (("calibrate", "--epsilon", "1", "--sampling-rate", "0.1", "--delta", "1e-5"), "give either a length"),
    ],
)
def test_refusals(lipdp, arguments, message):
    refused = lipdp(*arguments, "--json")
    assert refused.code == 2
    assert message in refused.stderr
    assert refused.json["kind"] == "ConfigurationError"


def test_budget_too_small(lipdp):
    refused = lipdp("calibrate", "--epsilon", "0.01", "--delta", "1e-5", "--sampling-rate", "0.5", "--noise-multiplier", "1")
    assert refused.code == 3
    assert refused.stderr.startswith("error: Even one step costs")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.99998, "3.000"),
        (3.0, "3.000"),
        (3.0000000000000004, "3.000"),
        (3.00001, "3.001"),
        (9.9999, "10.00"),
        (0.99999, "1.000"),
        (0.00123451, "0.001235"),
        (1234.56, "1235"),
        (12345.0, "12345"),
        (0.0, "0"),
        (math.inf, "∞"),
    ],
)
def test_epsilon_is_never_rounded_down(value, text):
    assert upwards(value) == text


def test_durations():
    assert [duration(s) for s in (0.04, 4.21, 41.4, 200, 7500)] == ["0.0 s", "4.2 s", "41 s", "3 min 20 s", "2 h 5 min"]
