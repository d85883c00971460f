"""Parameters about single tokens: given log-probabilities, bounded reasoning, repetitions."""

from __future__ import annotations

import pytest

from outrider import RepetitionDetectionParams, SamplingParams
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.model_limits import check_params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"logprob_token_ids": ["1"]}, "logprob_token_ids"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs"),
        ({"logprob_token_ids": [1, 2], "logprobs": -1}, "logprobs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"thinking_token_budget": 2**63}, "thinking_token_budget"),
        ({"thinking_end_token_ids": [1] * 65}, "thinking_end_token_ids"),
        ({"thinking_start_token_ids": "<think>"}, "thinking_start_token_ids"),
        ({"repetition_detection": 3}, "repetition_detection"),
        ({"repetition_detection": {"max_patern_size": 3}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 1025}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2**31}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"min_pattern_size": 4}}, "repetition_detection.min_pattern_size"),
        ({"repetition_detection": {"min_pattern_size": -1}}, "repetition_detection.min_pattern_size"),
    ],
)  # fmt: skip
def test_wrong_values_name_their_field(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_the_largest_values_are_taken():
    params = SamplingParams(
        n=128,
        logprobs=128,
        logprob_token_ids=list(range(128)),
        thinking_token_budget=2**63 - 1,
        thinking_start_token_ids=[1] * 64,
        thinking_end_token_ids=[2] * 64,
        repetition_detection={"max_pattern_size": 1024, "min_pattern_size": 1024, "min_count": 2**31 - 1},
    )
    check_params(params, vocab_size=256, max_logprobs=0)
    assert params.logprobs == 0  # the given tokens' alone
    assert params.clone(max_tokens=5).logprob_token_ids == list(range(128))
    assert params.repetition_detection == RepetitionDetectionParams(1024, 1024, 2**31 - 1)


def test_values_that_ask_for_nothing():
    params = SamplingParams(
        logprob_token_ids=[], thinking_token_budget=-1, repetition_detection={"max_pattern_size": 0, "min_count": 5}
    )
    assert params == SamplingParams()
    assert not params.edits_logits


@pytest.mark.parametrize("name", ["logprob_token_ids", "thinking_start_token_ids", "thinking_end_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(name):
    with pytest.raises(InvalidRequestError, match="outside the vocabulary") as caught:
        check_params(SamplingParams(**{name: [256]}), vocab_size=256, max_logprobs=5)
    assert caught.value.param == name


def test_a_bound_of_reasoning_needs_its_end():
    with pytest.raises(InvalidRequestError, match="thinking_end_token_ids") as caught:
        check_params(SamplingParams(thinking_token_budget=3), vocab_size=256, max_logprobs=5)
    assert caught.value.param == "thinking_token_budget"


def test_given_tokens_cost_as_much_as_top_ones():
    given = SamplingParams(logprob_token_ids=list(range(64)))
    assert given.token_cost == SamplingParams(logprobs=64).token_cost > SamplingParams().token_cost
