"""Wrong sampling parameters are refused with the field's name."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.model_limits import check_params


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
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 9e-4),
        ("repetition_penalty", 10**400),
        ("top_k", 2**31),
        pytest.param("top_k", 10**5000, id="top_k-huge"),
        ("max_tokens", 2**63),
        ("seed", 1.0),
        ("seed", 2**64),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", "\ud800"),
        ("stop", ["a"] * 65),
        ("stop", "a" * 8193),
        ("stop", ["a" * 4096, "b" * 4097]),
        ("bad_words", ["a" * 16_385]),
        ("bad_words", ["a" * 100] * 164),
        ("allowed_token_ids", [1] * (2**18 + 1)),
        ("bad_words", ["a"] * 1001),
        ("bad_words", ["\udfff"]),
        ("bad_words_token_ids", [[5]] * 2001),
        ("bad_words_token_ids", [5]),
        ("bad_words_token_ids", [["5"]]),
        ("stop_token_ids", [1] * 1025),
        ("ignore_eos", "yes"),
        ("detokenize", None),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("bad_words", "word"),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", True),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"--5": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        pytest.param("logit_bias", {10**5000: 1}, id="logit_bias-huge"),
        ("logit_bias", {True: 1}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
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
    assert len(caught.value.message) < 250  # whatever the value was


def test_the_limits_themselves_are_allowed():
    params = SamplingParams(
        stop=["a"] * 64,
        stop_token_ids=[1] * 1024,
        bad_words=["a"] * 1000,
        bad_words_token_ids=[[5]] * 2000,
        logit_bias=dict.fromkeys(range(1024), 1.0),
        repetition_penalty=1e-3,
        top_k=2**31 - 1,
    )
    check_params(params, 1024, 0)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("logit_bias", {10: 1.0}, "logit_bias"),
        ("allowed_token_ids", [3, 10], "allowed_token_ids"),
        ("allowed_token_ids", [3] * 11, "allowed_token_ids"),
        ("stop_token_ids", [10], "stop_token_ids"),
        ("bad_words_token_ids", [[3, 10]], "bad_words"),
        ("bad_words_token_ids", [[]], "bad_words"),
        ("logprobs", 6, "logprobs"),
        ("prompt_logprobs", 6, "prompt_logprobs"),
    ],
)
def test_params_beyond_the_model_are_refused(field, value, named):
    """A model of 10 tokens, an engine with max_logprobs 5."""
    with pytest.raises(InvalidRequestError) as caught:
        check_params(SamplingParams(**{field: value}), 10, 5)
    assert caught.value.param == named
    assert named in caught.value.message


def test_siblings_differ_in_the_seed_and_share_the_rest():
    params = SamplingParams(n=3, seed=5, stop_token_ids=[1, 2])
    sibling = params.sibling(6, is_first=False)
    assert (sibling.n, sibling.seed, params.n, params.seed) == (1, 6, 3, 5)
    assert sibling.stop_token_ids is params.stop_token_ids
    assert sibling == params.clone(n=1, seed=6)


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


def test_numbers_of_numpy_become_plain_ones():
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(
        n=numpy.int64(2),
        temperature=numpy.float32(0.5),
        seed=numpy.uint8(3),
        logit_bias={numpy.int64(5): numpy.half(1)},
    )
    assert (params.n, params.temperature, params.seed, params.logit_bias) == (2, 0.5, 3, {5: 1.0})
    assert [type(value) for value in (params.n, params.temperature, params.seed)] == [int, float, int]
    for wrong in (
        {"n": numpy.float32(2)},
        {"n": numpy.bool_(True)},
        {"temperature": numpy.float32("nan")},
        {"pooling": numpy.ones(2)},
    ):
        with pytest.raises(InvalidRequestError):
            SamplingParams(**wrong)
