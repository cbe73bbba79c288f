"""Imported by the process that the ranks of a test are forked from: what a first run imports and compiles is there then."""

from __future__ import annotations

import warnings

import torch

from tests.training.rank_tasks import some_cases

torch.set_num_threads(1)  # no threads that a fork would lose
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    some_cases(["clipless", "bookkeeping"], 8, private=False)
