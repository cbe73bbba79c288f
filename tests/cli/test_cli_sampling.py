"""`--sampling` of `lipdp plan` and `lipdp train`, and the budgets that pay for it."""

from __future__ import annotations

import json

import pytest

SHORT = ("digits", "--noise-multiplier", "3", "--epochs", "2", "--batch-size", "300")
REPLACED = ("--sampling", "fixed_size", "--adjacency", "replace_one")


def test_samples_of_fixed_size_are_for_budgets_of_replaced_records(lipdp, tmp_path):
    """Planned, drawn, trained and paid for as one scheme; the other promise is refused wherever it is given."""
    plan = lipdp("plan", *SHORT, *REPLACED, "--json").json
    assert (plan["sampling"], plan["adjacency"], plan["accountant"]) == ("fixed_size", "replace_one", "rdp")
    assert "batches of 300 without replacement" in lipdp("plan", *SHORT, *REPLACED).stdout
    own, other = tmp_path / "own", tmp_path / "other"
    total = ("--epsilon", 500, "--delta", plan["delta"], "--dataset", "digits")
    lipdp("budget", "create", own, *total, "--adjacency", "replace_one")
    lipdp("budget", "create", other, *total)
    run = lipdp("train", *SHORT, *REPLACED, "--budget", own, "--json", "--output", tmp_path / "run").json
    assert run["sampling"] == "fixed_size"
    assert run["budget"]["spent"] == pytest.approx(plan["epsilon"], rel=1e-6)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["sampling"] == "fixed_size"
    refused = lipdp("train", *SHORT, *REPLACED, "--budget", other)
    assert refused.code == 2
    assert "another promise" in " ".join(refused.stderr.split())
    assert lipdp("budget", "show", other, "--json").json["spent"] == 0


def test_truncated_samples_from_the_command_line(lipdp):
    plan = lipdp("plan", *SHORT, "--sampling", "truncated_poisson", "--largest-batch", "330", "--json").json
    assert (plan["sampling"], plan["largest_batch"], plan["adjacency"]) == ("truncated_poisson", 330, "add_remove")
    assert (
        "300 expected and 330 at most" in lipdp("plan", *SHORT, "--sampling", "truncated_poisson", "--largest-batch", "330").stdout
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--sampling", "fixed_size"), "--adjacency replace_one"),
        (("--sampling", "weighted"), "one of poisson, truncated_poisson, fixed_size"),
        (("--adjacency", "both"), "one of add_remove, replace_one"),
        (("--largest-batch", "330"), "truncated_poisson"),
        ((*REPLACED, "--largest-batch", "330"), "truncated_poisson"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_samplings_that_do_not_fit_are_refused(lipdp, command, more, words):
    refused = lipdp(command, *SHORT, *more)
    assert refused.code == 2
    assert words in " ".join(refused.stderr.split())


def test_audits_and_images_take_no_other_sampling(lipdp, tmp_path):
    assert "--audit is for Poisson" in lipdp("train", *SHORT, *REPLACED, "--audit").stderr
    assert "is for recipes" in lipdp("train", "--images", tmp_path, *REPLACED).stderr
