"""Wrong sampling parameters are refused with the field's name."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.platform.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 1.0),
        ("seed", 2**64),
        ("stop", [1]),
        ("stop", [""]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("bad_words", "word"),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("prompt_logprobs", True),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: 101}),
        ("allowed_token_ids", []),
        ("speculative", -1),
        ("speculative", "yes"),
    ],
)
def test_wrong_values_name_their_field(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


def test_stop_may_be_one_string():
    assert SamplingParams(stop="end").stop_strings == ["end"]


def test_top_k_minus_one_means_no_limit():
    assert SamplingParams(top_k=-1).top_k == 0


def test_logit_bias_keys_may_be_strings_as_json_has_them():
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}


@pytest.mark.parametrize(("value", "cap"), [(None, None), (True, None), (False, 0), (0, 0), (3, 3)])
def test_speculative_is_a_switch_or_a_cap(value, cap):
    assert SamplingParams(speculative=value).max_drafts == cap


def test_clone_is_deep_and_checked():
    first = SamplingParams(stop=["a"])
    second = first.clone(n=2)
    second.stop_strings.append("b")
    assert first.stop_strings == ["a"]
    with pytest.raises(InvalidRequestError):
        first.clone(n=0)
