"""Fields checked by their annotations: what is read, what is refused, and that the message names the field."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp.errors import ConfigurationError
from lipdp.fields import (
    Array,
    Bound,
    Count,
    Positive,
    Probability,
    Range,
    Scale,
    Size,
    check_fields,
    check_weights,
    parse_json,
    read,
)


@dataclass(frozen=True)
class Inner:
    kind: Literal["inner"]
    pair: tuple[str, Positive]


@dataclass(frozen=True)
class Other:
    kind: Literal["other", "another"]
    level: Annotated[Fraction, Range(least=0, most=1)]


@dataclass(frozen=True)
class Outer:
    count: Count
    size: Size
    share: Probability
    bound: Bound
    name: str
    flag: bool
    many: tuple[Inner, ...]
    either: Inner | Other
    by_name: dict[str, Scale]
    anything: Any = None
    maybe: Positive | None = None
    numbers: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self, "an outer")


GOOD = {
    "count": 3,
    "size": 0,
    "share": 0.5,
    "bound": None,
    "name": "é",
    "flag": False,
    "many": [{"kind": "inner", "pair": ["a", 2]}],
    "either": {"kind": "another", "level": "1/3"},
    "by_name": {"x": 1.0},
    "maybe": 2,
    "numbers": [1, -2.5],
}


def test_plain_data_become_an_object():
    made = read(Outer, GOOD, "the file")
    assert made.bound == math.inf
    assert made.many == (Inner("inner", ("a", 2.0)),)
    assert made.either == Other("another", Fraction(1, 3))
    assert type(made.maybe) is float
    assert read(Outer, made, "the file") is made
    assert read(Count, np.int64(4), "x") == 4
    assert read(Positive, np.float32(0.5), "x") == 0.5


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("count",), 0, "the file.count is 0: it has to be a whole number, at least 1"),
        (("count",), True, "the file.count is True"),
        (("count",), 3.0, "the file.count"),
        (("count",), 2**60, "the file.count"),
        (("size",), -1, "at least 0"),
        (("share",), 1, "above 0 and below 1"),
        (("share",), "0.5", "the file.share is '0.5'"),
        (("share",), math.nan, "the file.share is nan"),
        (("bound",), -math.inf, "the file.bound is -inf"),
        (("name",), "\ud800", "the file.name"),
        (("flag",), 0, "true or false"),
        (("many",), {}, "the file.many is {}: it has to be a list"),
        (("many", 0, "pair"), ["a"], r"the file.many\[0\].pair"),
        (("many", 0, "pair", 1), 0, r"the file.many\[0\].pair\[1\] is 0: it has to be a finite number, above 0"),
        (("many", 0, "kind"), "outer", "one of 'inner'"),
        (("either", "kind"), ["other"], "the file.either.kind"),
        (("either", "level"), "1/0", "fraction"),
        (("either", "level"), "4/3", "at most 1"),
        (("either", "level"), 0.5, "fraction"),
        (("by_name", "x"), 1e-31, r"the file.by_name\['x'\]"),
        (("maybe",), 0, "the file.maybe is 0"),
        (("numbers", 1), 10**400, r"the file.numbers\[1\]"),
    ],
)
def test_what_is_refused_is_named(path, value, said):
    content = json.loads(json.dumps(GOOD))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigurationError, match=said):
        read(Outer, content, "the file")


def test_unknown_and_missing_fields():
    with pytest.raises(ConfigurationError, match="has a field 'more'"):
        read(Outer, {**GOOD, "more": 1}, "the file")
    with pytest.raises(ConfigurationError, match="lacks the field 'share'"):
        read(Outer, {name: value for name, value in GOOD.items() if name != "share"}, "the file")
    with pytest.raises(ConfigurationError, match="fields of Outer"):
        read(Outer, [], "the file")
    with pytest.raises(ConfigurationError, match="an outer's count is -3"):
        dataclasses.replace(read(Outer, GOOD, "the file"), count=-3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(GOOD)), value=JSON)
def test_nothing_but_a_refusal_comes_of_anything(name, value):
    try:
        made = read(Outer, {**GOOD, name: value}, "the file")
    except ConfigurationError:
        return
    check_fields(made, "it")


@settings(max_examples=100, deadline=None)
@given(value=JSON)
def test_json_as_the_standard_has_it(value):
    text = json.dumps(value)
    strange = "NaN" in text or "Infinity" in text
    try:
        assert parse_json(text, "it") == value
    except ConfigurationError:
        assert strange


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '[{"a": {"b": 1, "b": 1}}]', "NaN", "-Infinity", "[" * 10**5, "1" * 5000, "", None, b"{}"]
)
def test_what_is_no_json(text):
    with pytest.raises(ConfigurationError):
        parse_json(text, "it")
    if text == "NaN":
        assert math.isnan(parse_json(text, "it", constants=True))


def test_tensors():
    kind = Annotated[torch.Tensor, Array(2, torch.float32)]
    good = torch.ones(2, 3)
    assert read(kind, good, "x") is good
    for bad in (good[0], good.double(), good.to_sparse(), good * math.nan, good[:0], [[1.0]], None):
        with pytest.raises(ConfigurationError, match="2 dimension"):
            read(kind, bad, "x")


def test_weights_of_a_module():
    module = torch.nn.Linear(2, 3)
    module.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    own = module.state_dict()
    check_weights(own, dict(own), "it")
    for name, bad in (
        ("weight", torch.ones(3, 3)),
        ("weight", own["weight"].double()),
        ("weight", own["weight"].to_sparse()),
        ("bias", torch.tensor([0.0, math.nan, 0.0])),
        ("bias", [0.0, 0.0, 0.0]),
        ("mask", torch.tensor([math.inf, math.inf])),
        ("more", torch.ones(1)),
    ):
        with pytest.raises(ConfigurationError, match=name):
            check_weights(own, {**own, name: bad}, "it")
    with pytest.raises(ConfigurationError, match="weight"):
        check_weights(own, {"bias": own["bias"], "mask": own["mask"]}, "it")
    with pytest.raises(ConfigurationError, match="tensors by name"):
        check_weights(own, None, "it")
