"""What only a new process can tell, all of it in one: what is imported when, and what is the same in every process."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import torch

from lipdp.digest import keyed_words

_CODE = """
import json, resource, sys
told = {}
sys.modules["dp_accounting"] = None  # as if it were not installed
import lipdp, lipdp.data, lipdp.errors, torch
told["heavy"] = [name for name in ("sklearn", "scipy", "pooch", "torchvision") if name in sys.modules]
asked = {"sampling_rate": 0.1, "delta": 1e-5}
told["without dp-accounting"] = []
for question, about in (
    (lipdp.privacy.epsilon, {"noise_multiplier": 1.0, "steps": 1}),
    (lipdp.privacy.calibrate_noise, {"epsilon": 1.0, "steps": 10}),
    (lipdp.privacy.max_steps, {"epsilon": 1.0, "noise_multiplier": 2.0}),
):
    try:
        question(**asked, **about)
    except lipdp.errors.ConfigurationError as error:
        told["without dp-accounting"].append(str(error))
lipdp.PrivateClassifier
told["estimators"] = "sklearn" in sys.modules
from lipdp.digest import keyed_words
told["words"] = keyed_words(torch.arange(10.0), b"k" * 32).tolist()

del sys.modules["dp_accounting"]
from tests.training.test_cheap_step import counts
told["clipless"], told["bookkeeping"] = counts("clipless"), counts("bookkeeping")

from lipdp._numerics import keep_freed_memory
keep_freed_memory()
def used():
    torch.ones(5 * 2**20)  # 20 MB
used()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    used()
    torch.ones(2**18)
told["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps(told))
"""


def test_what_a_new_process_tells() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["heavy"] == [], "imported, and few need it"
    assert ["pip install dp-accounting" in text for text in told["without dp-accounting"]] == [True] * 3
    assert told["estimators"], "an estimator is there, and scikit-learn is not"
    assert told["words"] == keyed_words(torch.arange(10.0), b"k" * 32).tolist()
    for method, (functions, calls) in {"clipless": (287, 510), "bookkeeping": (417, 900)}.items():
        assert told[method][0] <= functions, f"a step of {method} enters more functions of the library than it did"
        assert told[method][1] <= calls, f"a step of {method} makes more calls of the library than it did"
    # 20 MB are 5,000 pages: given back and mapped again, they would be faults in each of the eight rounds, not in one or two.
    assert told["faults"] < 12_000 or platform.libc_ver()[0] != "glibc"  # other libraries keep memory in other ways
