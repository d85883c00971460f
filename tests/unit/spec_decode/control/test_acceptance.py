"""Estimates of acceptance, and the numbers of drafts that follow from them."""

import random

import pytest

from outrider.spec_decode.control.acceptance import (
    ADAPTER_MEMORY,
    NUM_POOLS,
    REQUEST_MEMORY,
    AcceptanceRate,
    adapter_rates,
    expected_drafts,
    pool_of,
    survival,
)
from outrider.spec_decode.control.goodput import Offer, StepPrices, best_plan

PRIOR = [0.6] * NUM_POOLS


def rounds(counts, p, num_rounds, num_drafts=4, seed=0):
    generator = random.Random(seed)
    for _ in range(num_rounds):
        accepted = 0
        while accepted < num_drafts and generator.random() < p:
            accepted += 1
        counts.add_round(num_drafts, num_drafts, accepted)


def test_late_positions_share_a_pool():
    assert [pool_of(position) for position in range(12)] == [0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_an_adapters_estimate_follows_its_requests(p):
    counts = AcceptanceRate(ADAPTER_MEMORY)
    assert adapter_rates(counts, 0.6) == PRIOR
    rounds(counts, p, 1000)
    assert adapter_rates(counts, 0.6)[0] == pytest.approx(p, abs=0.06)


def test_a_request_starts_from_its_adapter_and_follows_itself():
    counts = AcceptanceRate(REQUEST_MEMORY)
    assert counts.rates(PRIOR) == PRIOR
    rounds(counts, 0.0, 3)
    assert counts.rates(PRIOR)[0] == pytest.approx(0.3, abs=0.05)
    rounds(counts, 1.0, 30)
    assert counts.rates(PRIOR)[0] > 0.85


def test_positions_that_were_never_reached_follow_the_earlier_ones():
    counts = AcceptanceRate(REQUEST_MEMORY)
    rounds(counts, 1.0, 20, num_drafts=2)
    assert counts.rates(PRIOR)[4] > 0.75
    counts = AcceptanceRate(REQUEST_MEMORY)
    rounds(counts, 0.0, 20, num_drafts=2)
    assert counts.rates(PRIOR)[4] < 0.5


def test_a_drafter_that_seldom_has_drafts_is_known_for_it():
    """It makes two of eight drafts in each fourth round, and these are right."""
    counts = AcceptanceRate(ADAPTER_MEMORY)
    assert counts.made_shares([1.0] * NUM_POOLS) == [1.0] * NUM_POOLS
    for number in range(800):
        made = 2 if number % 4 == 0 else 0
        counts.add_round(8, made, made)
    shares = expected_drafts(counts.made_shares([1.0] * NUM_POOLS), 8)
    assert shares == pytest.approx([0.25] * 2 + [0.0] * 6, abs=0.03)
    assert survival(adapter_rates(counts, 0.6), 3) == pytest.approx([0.25, 0.25, 0.0], abs=0.03)


def test_survival_is_the_product_of_the_rates():
    assert survival([0.5, 0.4, 0.5, 0.5, 0.5, 0.5], 3) == pytest.approx([0.5, 0.2, 0.1])


def prices(base, each, draft=0.0):
    return StepPrices(lambda count: base + each * count, lambda _, count: draft * count)


def test_no_drafts_if_each_costs_as_much_as_a_token():
    plan = best_plan([Offer(0, survival(PRIOR, 8))], prices(1.0, 1.0), 1, fair=False)
    assert (plan.num_drafts, plan.gain) == ([0], 1.0)


def test_all_drafts_if_they_are_free():
    plan = best_plan([Offer(0, survival([0.9] * NUM_POOLS, 8))], prices(1.0, 0.0), 1, fair=False)
    assert plan.num_drafts == [8]
    assert plan.gain == pytest.approx(sum(0.9**j for j in range(9)))


def test_drafts_of_all_rows_compete():
    offers = [Offer(0, survival([p] * NUM_POOLS, 8)) for p in (0.9, 0.5, 0.1)]
    first, second, third = best_plan(offers, prices(1.0, 0.12), 3, fair=False).num_drafts
    assert first > second >= third


def test_while_a_batch_drains_drafts_of_quick_rows_are_worth_less():
    offers = [Offer(0, survival([p] * NUM_POOLS, 8)) for p in (0.95, *[0.05] * 7)]
    costs = prices(1.0, 0.06)
    assert sum(best_plan(offers, costs, 8, fair=True).num_drafts) < sum(
        best_plan(offers, costs, 8, fair=False).num_drafts
    )


def test_rows_without_an_offer_count_as_one_token():
    offers = [Offer(0, survival([0.9] * NUM_POOLS, 4))]
    alone = best_plan(offers, prices(1.0, 0.05), 1, fair=False)
    among = best_plan(offers, prices(1.0, 0.05), 16, fair=False)
    assert among.gain < alone.gain
    assert best_plan([], prices(1.0, 0.05), 4, fair=True).num_drafts == []


def test_the_passes_of_a_drafter_count_once_for_all_rows():
    offers = [Offer(0, survival([0.7] * NUM_POOLS, 4), rows=4)]
    cheap = best_plan(offers, prices(1.0, 0.0, draft=0.05), 4, fair=False)
    dear = best_plan(offers, prices(1.0, 0.0, draft=0.9), 4, fair=False)
    assert cheap.num_drafts[0] > dear.num_drafts[0]
