"""Mixes of adapters: one form for one sum, and refusals."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.lora_request import MAX_PARTS, LoRAMix, LoRAPart, LoRARequest, mix_of, split_mix

A, B, C = (LoRARequest(name, path=f"/{name}") for name in "abc")


def test_a_mix_is_exported():
    assert outrider.LoRAMix is LoRAMix


def test_names():
    mix = mix_of([(B, 0.3), (A, 0.7)])
    assert mix == LoRAMix((LoRAPart(A, 0.7), LoRAPart(B, 0.3)))
    assert (mix.name, mix.label) == ("a:0.7+b:0.3", "a+b")
    assert mix_of([(A, -2)]).name == "+a:-2.0"
    assert mix_of([(A, 1), (B, 1e-5)]).name == "a:1.0+b:1.0e-05"
    assert (A.name, A.label) == ("a", "a")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(A, 1)], A),
        ([(A, 0.25), (A, 0.75)], A),
        ([(A, 0.5), (B, 0), (A, 0.25)], LoRAMix((LoRAPart(A, 0.75),))),
        ([(A, 1), (B, -0.0)], A),
        ([(A, 0)], None),
        ([(A, 2), (A, -2)], None),
        ([], None),
        ([(A, np.float32(0.5)), (B, Fraction(1, 4))], LoRAMix((LoRAPart(A, 0.5), LoRAPart(B, 0.25)))),
    ],
)
def test_simplest_form(parts, expected):
    mixed = mix_of(parts)
    assert mixed == expected
    assert type(mixed) is type(expected)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(-8, 8)), max_size=MAX_PARTS), st.randoms())
def test_order_does_not_matter(parts, random):
    """Weights are integers, so that their sums are exact."""
    shuffled = parts.copy()
    random.shuffle(shuffled)
    assert mix_of(parts) == mix_of(shuffled)


@pytest.mark.parametrize(
    "weight",
    [float("nan"), float("inf"), -float("inf"), 100.5, -101, 10**400, True, "1", None, 1j, np.bool_(True), [0.5]],
)
def test_weights_that_are_refused(weight):
    with pytest.raises(InvalidRequestError, match=r"adapters: the weight of adapter 'a'.* from -100 to 100") as caught:
        mix_of([(A, weight)], param="adapters")
    assert caught.value.param == "adapters"


def test_limits_and_conflicts():
    many = [(LoRARequest(str(i), path="/x"), 1) for i in range(MAX_PARTS)]
    assert len(mix_of(many).parts) == MAX_PARTS
    with pytest.raises(InvalidRequestError, match="at most 8 adapters"):
        mix_of([*many, (A, 1)])
    with pytest.raises(InvalidRequestError, match="got 120"):
        mix_of([(A, 60), (A, 60)])
    for other in (LoRARequest("a", path="/elsewhere"), LoRARequest("a", path="/a", draft_path="/d")):
        with pytest.raises(InvalidRequestError, match="'a' names two adapters"):
            mix_of([(A, 1), (other, 1)])
    assert mix_of([(A, 0.5), (LoRARequest("a", 7, "/a"), 0.5)]) == A, "the number has no meaning"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:0.7+b:0.3", [("a", 0.7), ("b", 0.3)]),
        ("+a:.5", [("a", 0.5)]),
        ("a:-1.5+b:1.e-2", [("a", -1.5), ("b", 0.01)]),
        ("a+b", [("a", 1.0), ("b", 1.0)]),
        ("+a:2.", [("a", 2.0)]),
        ("+nobody:0.5", [("nobody", 0.5)]),
        ("a+nobody", [("a", 1.0), ("nobody", 1.0)]),
        ("v:2+a:0.5", [("v:2", 1.0), ("a", 0.5)]),
        ("v:2:0.5+a", [("v:2", 0.5), ("a", 1.0)]),
        ("w:0.5+a", [("w:0.5", 1.0), ("a", 1.0)]),
        ("+c++:0.5", [("c++", 0.5)]),
        ("org/name:3.0+a", [("org/name", 3.0), ("a", 1.0)]),
        ("a:2+b:0.5", [("a:2", 1.0), ("b", 0.5)]),
        ("a:1e-2+b", [("a:1e-2", 1.0), ("b", 1.0)]),
        ("+a:1.0e999", [("a", float("inf"))]),
        *((name, None) for name in ("a:0.5", "a:2", "v1:0.5", "llama3:8b", "a:03", "model:latest", "v:2:0.5")),
        ("nobody", None),
        ("a:b", None),
        ("+a:nan", None),
        ("+a:0x1", None),
        ("+a:1_0.0", None),
        ("+a:٣.٣", None),
        ("+w:0.5", None),
        ("+a", None),
        ("a+", None),
        ("+:0.5", None),
        (":0.5+a", [(":0.5", 1.0), ("a", 1.0)]),
        ("", None),
    ],
)
def test_mixes_in_text(text, expected):
    assert split_mix(text, {"a", "b", "v:2", "w:0.5", "c++", "org/name"}.__contains__) == expected


def test_too_many_in_text():
    with pytest.raises(InvalidRequestError, match="at most 8"):
        split_mix("+".join("a" * 9), lambda name: True)
    with pytest.raises(InvalidRequestError):
        split_mix("+" * 1_000_000, lambda name: False)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-100, 100)), min_size=1, max_size=4))
def test_a_mix_is_read_back_from_its_name(parts):
    requests = {"a": A, "b": B, "c": C}
    try:
        mixed = mix_of([(requests[name], weight) for name, weight in parts])
    except InvalidRequestError:  # a sum beyond the limit
        return
    if isinstance(mixed, LoRAMix):
        read = split_mix(mixed.name, requests.__contains__)
        assert mix_of([(requests[name], weight) for name, weight in read]) == mixed
