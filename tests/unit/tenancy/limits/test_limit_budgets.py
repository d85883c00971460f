"""Budgets: periods, and readings of the ledger."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limit_helpers import Clock, Usage, refused, run, settle

from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.limits.budgets import Budget, period_bounds
from outrider.platform.tenancy.limits.demand import Demand
from outrider.platform.tenancy.limits.limiter import Limiter


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("period", "now", "start", "end"),
    [
        ("day", "2026-11-21T19:30:00", "2026-11-21", "2026-11-22"),
        ("day", "2026-12-31T23:59:59.9", "2026-12-31", "2027-01-01"),
        ("week", "2026-11-21T19:30:00", "2026-11-16", "2026-11-23"),
        ("week", "2026-11-16T00:00:00", "2026-11-16", "2026-11-23"),
        ("month", "2026-11-21T19:30:00", "2026-11-01", "2026-12-01"),
        ("month", "2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
        ("month", "2024-02-29T12:00:00", "2024-02-01", "2024-03-01"),
    ],
)
def test_periods(period, now, start, end):
    assert period_bounds(period, at(now)) == (at(start), at(end))


@given(st.sampled_from(["day", "week", "month"]), st.floats(0, 4e9))
def test_periods_follow_each_other(period, now):
    start, end = period_bounds(period, now)
    assert start <= now < end
    assert period_bounds(period, start) == (start, end)
    assert period_bounds(period, end)[0] == end


def test_a_request_that_ends_during_a_reading_counts_once():
    noon = at("2026-11-21T12:00")
    budget = Budget(1000, "day", noon)
    budget.count(30, noon)
    reading = budget.begin_reading(noon)
    budget.count(7, noon - 0.1)  # its row is in the answer
    budget.count(5, noon)  # not in the answer
    budget.reserved = 100
    budget.end_reading(reading, 230, 7.0)
    assert (budget.used, budget.remaining, budget.read_at) == (235, 665, 7.0)
    reading = budget.begin_reading(noon + 60)
    assert reading.until == noon + 50
    budget.count(8, noon + 60)
    for _ in range(2):  # whatever of the last seconds is in the ledger, the answer has nothing of it
        budget.end_reading(reading, 235, 67.0)
        assert budget.used == 243


def test_a_request_released_after_a_read_that_includes_its_row_counts_once():
    """Its row was written at the end of its answer; the ticket came back only after the ledger had been read."""

    async def scenario():
        clock, usage = Clock(), Usage()
        limiter, principal = (
            Limiter(usage, clock),
            Principal(tenant="acme", key_id="k1", tenant_limits=Limits(token_budget=100)),
        )
        early, late = [await limiter.admit(principal, Demand((10,), max_tokens=10)) for _ in range(2)]
        ended_at = clock.wall + 20
        usage.tokens = 15
        clock.seconds, clock.wall = 61.0, clock.wall + 61.0
        limiter.release(await limiter.admit(principal, Demand((1,), max_tokens=1)), 0, ran=False)
        await settle()
        limiter.release(early, 15, ended_at=ended_at)
        limiter.release(late, 15)  # now: its row is in no reading yet
        await refused(limiter.admit(principal, Demand((50,), max_tokens=21)), "token_budget")
        await limiter.admit(principal, Demand((50,), max_tokens=20))

    run(scenario())


def test_a_read_that_ends_after_a_later_one_is_ignored():
    noon = at("2026-11-21T12:00")
    budget = Budget(1000, "day", noon)
    budget.end_reading(budget.begin_reading(noon), 0, 0.0)
    budget.count(500, noon + 65)
    early, late = (budget.begin_reading(noon + seconds) for seconds in (79.9, 80))
    budget.end_reading(late, 500, 81.0)
    budget.end_reading(early, 0, 82.0)
    assert budget.used == 500
    budget.end_reading(budget.begin_reading(noon - 3600), 20, 83.0)  # the clock was set back
    assert budget.used == 20


def test_concurrent_first_reads_share_one_result():
    noon = at("2026-11-21T12:00")
    one, two = (Budget(1000, "day", noon) for _ in range(2))
    readings = [budget.begin_reading(noon) for budget in (one, two)]
    one.end_reading(readings[0], 200, 7.0)
    one.count(30, noon)
    two.load(one.dump(), noon)
    two.end_reading(readings[1], 230, 8.0)
    assert two.used == 230


def test_the_later_of_two_first_readings_counts():
    noon = at("2026-11-21T12:00")
    for order in (0, 1), (1, 0):
        budgets = [Budget(1000, "day", noon) for _ in range(2)]
        readings = [budget.begin_reading(noon + 3 * index) for index, budget in enumerate(budgets)]
        first, second = (budgets[index] for index in order)
        first.end_reading(readings[order[0]], (200, 230)[order[0]], 7.0)
        second.load(first.dump(), noon + 3)
        second.end_reading(readings[order[1]], (200, 230)[order[1]], 8.0)
        assert (second.used, second.read_until) == (230, noon + 3)


def test_a_clock_that_is_set_back_a_little_delays_no_reading():
    noon = at("2026-11-21T12:00")
    budget = Budget(1000, "day", noon)
    budget.end_reading(budget.begin_reading(noon), 100, 0.0)
    budget.end_reading(budget.begin_reading(noon + 60), 100, 60.0)
    reading = budget.begin_reading(noon + 60)  # a minute later
    assert reading.until == noon + 50, "what has been read is read again"
    reading = budget.begin_reading(noon + 30)
    assert reading.until == noon + 50, "with the rows of the time that comes twice"
    budget.end_reading(reading, 130, 120.0)
    assert (budget.used, budget.read_at) == (130, 120.0)


def test_a_new_period_begins_at_zero_and_the_ledger_is_asked_again():
    budget = Budget(1000, "day", at("2026-11-21T23:59"))
    budget.end_reading(budget.begin_reading(at("2026-11-21T23:59")), 900, 7.0)
    budget.reserved = 50
    budget.roll(at("2026-11-22T00:00"))
    assert (budget.used, budget.reserved, budget.read_at) == (0, 50, float("-inf"))
    budget.count(70, at("2026-11-21T23:59"))  # of the day before
    assert budget.used == 0


def test_an_answer_about_another_period_is_not_taken():
    budget = Budget(1000, "day", at("2026-11-21T23:59"))
    reading = budget.begin_reading(at("2026-11-21T23:59"))
    budget.roll(at("2026-11-22T00:00"))
    budget.end_reading(reading, 900, 7.0)
    assert budget.used == 0
    assert budget.read_at is None, "it must still be asked"


def test_a_clock_that_is_set_back_comes_to_its_period_again():
    budget = Budget(1000, "month", at("2026-11-21"))
    budget.roll(at("2027-11-21"))
    budget.count(10, at("2027-11-21"))
    budget.roll(at("2026-11-21"))
    assert (budget.start, budget.used) == (at("2026-11-01"), 0)
