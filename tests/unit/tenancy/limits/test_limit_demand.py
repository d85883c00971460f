"""Demands of requests under their limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.platform.core.errors import InvalidRequestError, PromptTooLongError
from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.limits.demand import Demand, fit


def granted(demand, *limits, most=None):
    """`fit` for a context of 100 tokens."""
    return fit(replace(demand, room=tuple(100 - length for length in demand.prompt_tokens)), limits, most)


def test_without_limits_the_room_is_granted():
    assert granted(Demand((10, 90))) == [90, 10]
    assert granted(Demand((10,), max_tokens=5)) == [5]


def test_a_missing_max_tokens_is_lowered():
    assert granted(Demand((10,)), Limits(max_output_tokens=7)) == [7]
    assert granted(Demand((10,)), Limits(max_context_tokens=30)) == [20]
    assert granted(Demand((10,)), Limits(max_context_tokens=30), Limits(max_output_tokens=5)) == [5]
    assert granted(Demand((10,)), Limits(tokens_per_minute=50)) == [40]
    assert granted(Demand((10,), n=2), Limits(tokens_per_minute=50)) == [20]
    assert granted(Demand((10, 20), n=2), Limits(tokens_per_minute=50)) == [5, 5]
    assert granted(Demand((10,)), most=25) == [15]
    assert granted(Demand((10, 90)), most=200) == [90, 10], "if all fit, none is lowered to an equal share"
    assert granted(Demand((10,)), most=3) == [1], "the budget's own check refuses it"


@pytest.mark.parametrize(
    ("demand", "limits", "param", "words"),
    [
        (Demand((10,), max_tokens=8), Limits(max_output_tokens=7), "max_tokens", "max_output_tokens"),
        (
            Demand((10,), max_tokens=8, max_tokens_field="max_completion_tokens"),
            Limits(max_output_tokens=7),
            "max_completion_tokens",
            "max_output_tokens",
        ),
        (Demand((10,), max_tokens=8), Limits(max_context_tokens=17), "max_tokens", "max_context_tokens"),
        (Demand((10,)), Limits(max_context_tokens=10), "prompt", "max_context_tokens"),
        (Demand((10,), max_tokens=8), Limits(tokens_per_minute=17), "max_tokens", "tokens_per_minute"),
        (Demand((10, 10)), Limits(tokens_per_minute=20), "prompt", "tokens_per_minute"),
        (Demand((10,), n=3), Limits(max_concurrent_requests=2), "n", "max_concurrent_requests"),
        (Demand((10,) * 3), Limits(max_concurrent_requests=2), "prompt", "max_concurrent_requests"),
        (Demand((10,), n=3), Limits(requests_per_minute=2), "n", "requests_per_minute"),
    ],
)
def test_an_impossible_demand_is_an_error_that_names_both(demand, limits, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        granted(demand, Limits(), limits)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_output_tokens=8),
        Limits(max_context_tokens=18),
        Limits(tokens_per_minute=34),
        Limits(max_concurrent_requests=3),
        Limits(requests_per_minute=3),
    ],
)
def test_a_demand_equal_to_the_limit_is_granted(limits):
    assert granted(Demand((10,), n=3, max_tokens=8), limits) == [8]


def test_a_prompt_that_is_only_scored_may_fill_the_context():
    assert granted(Demand((10,), max_tokens=0), Limits(max_context_tokens=10)) == [0]
    with pytest.raises(PromptTooLongError):
        granted(Demand((11,), max_tokens=0), Limits(max_context_tokens=10))


def test_too_long_is_the_error_that_clients_know():
    with pytest.raises(PromptTooLongError):
        granted(Demand((10,)), Limits(max_context_tokens=9))


MAYBE = st.none() | st.integers(1, 200)


@given(
    prompts=st.lists(st.integers(1, 99), min_size=1, max_size=4),
    n=st.integers(1, 3),
    named=st.none() | st.integers(1, 100),
    limits=st.lists(
        st.builds(Limits, tokens_per_minute=MAYBE, max_context_tokens=MAYBE, max_output_tokens=MAYBE), max_size=2
    ),
)
def test_a_grant_is_within_all_limits(prompts, n, named, limits):
    demand = Demand(tuple(prompts), n=n, max_tokens=named)
    try:
        tokens = granted(demand, *limits)
    except InvalidRequestError:
        return
    assert named is None or set(tokens) == {named}
    for limit in limits:
        assert limit.tokens_per_minute is None or demand.num_tokens(tokens) <= limit.tokens_per_minute
        assert limit.max_output_tokens is None or max(tokens) <= limit.max_output_tokens
        for prompt, most in zip(prompts, tokens, strict=True):
            assert limit.max_context_tokens is None or prompt + most <= limit.max_context_tokens
