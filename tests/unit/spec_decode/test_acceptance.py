"""Running estimates of acceptance: they converge, follow a change, and order requests."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.spec_decode.acceptance import HOPEFUL, MAX_PROBABILITY, Prior, Rates, RequestRates, cumulative


def verify(rates, p, times, num_drafts=4, seed=0):
    generator = random.Random(seed)
    for _ in range(times):
        accepted = 0
        while accepted < num_drafts and generator.random() < p[accepted]:
            accepted += 1
        rates.count([(num_drafts, accepted)])


def test_conditional_probabilities_by_position_are_found():
    rates, p = Rates(4, HOPEFUL, memory=400), [0.9, 0.7, 0.8, 0.5]
    verify(rates, p, 2000)
    assert rates.probabilities == pytest.approx(p, abs=0.07)


def test_a_change_is_followed_within_the_memory():
    rates = Rates(4, HOPEFUL, memory=64)
    verify(rates, [0.9] * 4, 500)
    verify(rates, [0.1] * 4, 200)
    assert rates.probabilities[0] < 0.2
    verify(rates, [0.9] * 4, 200)
    assert rates.probabilities[0] > 0.8


def test_a_position_never_tried_is_like_the_one_before():
    rates = Rates(4, Prior(0.5, 1.0))
    for _ in range(300):
        rates.count([(1, 1)])
    first, *rest = rates.probabilities
    assert first > 0.95
    assert rest == pytest.approx([first] * 3)


def test_a_new_adapter_starts_from_the_mean_of_all():
    mean = Rates(2, HOPEFUL)
    for _ in range(200):
        mean.count([(2, 0)])
        mean.count_proposals([(2, 0)])
    fresh = Rates(2, mean)
    assert fresh.probabilities[0] == pytest.approx(mean.probabilities[0])
    assert fresh.available[0] < 0.1


def test_what_is_counted_at_once_is_counted_in_full():
    """As if one by one, but for which of them are the latest."""
    generator = random.Random(0)
    outcomes = [(4, generator.choice((0, 1, 4))) for _ in range(24)]
    together, apart = Rates(4, HOPEFUL), Rates(4, HOPEFUL)
    requests = RequestRates(), RequestRates()
    expected = together.probabilities
    together.count(outcomes)
    requests[0].count(expected, outcomes)
    for outcome in outcomes:
        apart.count([outcome])
        requests[1].count(expected, [outcome])
    assert together.evidence == pytest.approx(apart.evidence)
    assert together.num_tried == apart.num_tried == 24
    assert together.probabilities == pytest.approx(apart.probabilities, abs=0.03)
    assert together.recent == pytest.approx(apart.recent, abs=0.1)
    assert requests[0].factor == pytest.approx(requests[1].factor, abs=0.05)


def test_drafts_behind_the_first_rejected_one_say_nothing():
    one, other = Rates(4, HOPEFUL), Rates(4, HOPEFUL)
    one.count([(4, 1)])
    other.count([(2, 1)])
    assert one.probabilities == other.probabilities


def test_another_text_is_noticed_within_a_dozen_rows_and_chance_is_not():
    rates = Rates(4, HOPEFUL)
    verify(rates, [0.1] * 4, 400)
    assert rates.probabilities[0] < 0.2
    rates.look_again()
    verify(rates, [0.9] * 4, 12)
    assert rates.probabilities[0] > 0.6
    assert rates.epoch == 1
    for seed in range(20):
        steady = Rates(4, HOPEFUL)
        for part in range(40):
            verify(steady, [0.6] * 4, 8, seed=100 * seed + part)
            steady.probabilities  # noqa: B018 - where changes are noticed
        assert steady.epoch <= 1


def test_requests_of_one_adapter_are_told_apart():
    rates, good, bad = Rates(4, HOPEFUL), RequestRates(), RequestRates()
    for _ in range(40):
        for request, accepted in ((good, 4), (bad, 0)):
            request.count(rates.probabilities, [(4, accepted)])
            rates.count([(4, accepted)])
    assert good.factor > 1.1
    assert bad.factor < 0.4
    bad.fade(0.0)
    assert bad.factor == 1.0


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)), max_size=60),
    st.integers(1, 8),
)
def test_whatever_is_counted_probabilities_stay_probabilities(events, num_drafts):
    rates, request = Rates(8, HOPEFUL), RequestRates()
    for asked, proposed, accepted in events:
        proposed = min(asked, proposed)
        rates.count_proposals([(asked, proposed)])
        if proposed:
            request.count(rates.probabilities, [(proposed, min(accepted, proposed))])
            rates.count([(proposed, min(accepted, proposed))])
    assert all(0.0 <= p <= 1.0 for p in rates.probabilities)
    available = rates.available
    assert all(0.0 <= a <= 1.0 for a in available)
    assert available == sorted(available, reverse=True)
    chances = cumulative(rates.probabilities, request.factor, num_drafts)
    assert len(chances) == num_drafts
    assert chances == sorted(chances, reverse=True)
    assert chances[0] <= MAX_PROBABILITY
