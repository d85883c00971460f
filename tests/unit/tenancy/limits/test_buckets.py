"""Never more than the limit allows, in any span of time; unused tokens are refunded."""

import itertools
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.platform.tenancy.limits.buckets import MINUTE, SECOND, RateBucket

TIMES = st.integers(0, 3 * MINUTE)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("charge"), TIMES, st.integers(1, 60)),
        st.tuples(st.just("give back"), TIMES, st.integers(0, 60)),
    ),
    max_size=40,
)


def play(limit, steps):
    """Charge whenever the bucket allows it; returns (time, amount, used amount) of each charge."""
    bucket, now = RateBucket(limit, 0), 0
    running, done = [], []
    for kind, seconds, amount in steps:
        now += seconds
        if kind == "charge" and amount <= limit and bucket.wait_for(amount, now) == 0:
            running.append((now, amount, bucket.charge(amount, now)))
        elif kind == "give back" and running:
            began, charged, charge = running.pop(amount % len(running))
            unused = min(amount, charged)
            bucket.give_back(charge, unused, now)
            done.append((began, charged, charged - unused))
        assert bucket.wait_for(0, now) == 0, "the debt is above the limit"
    return sorted(done + [(began, charged, charged) for began, charged, _ in running])


@settings(max_examples=150)
@given(limit=st.integers(1, 60), steps=STEPS)
@example(  # a long request, whose charge time has paid for, is given back wholly: that must not make room twice
    limit=60, steps=[("charge", 0, 60), ("charge", MINUTE, 60), ("give back", 0, 60), ("charge", 0, 60)]
)
def test_no_span_of_time_has_more_than_the_limit(limit, steps):
    charges = play(limit, steps)
    for first, last in itertools.combinations_with_replacement(range(len(charges)), 2):
        span = Fraction(charges[last][0] - charges[first][0], MINUTE)
        assert sum(used for _, _, used in charges[first : last + 1]) <= limit * (1 + span)


@settings(max_examples=100)
@given(limit=st.integers(1, 1000), debt=st.integers(0, 1000), amount=st.integers(1, 1000), later=TIMES)
def test_the_wait_is_exact(limit, debt, amount, later):
    amount, debt = min(amount, limit), min(debt, limit)
    bucket = RateBucket(limit, 0)
    bucket.charge(debt, 0)
    wait = bucket.wait_for(amount, later)
    if wait:
        assert bucket.wait_for(amount, later + wait - 1) == 1
    assert bucket.wait_for(amount, later + wait) == 0


@settings(max_examples=100)
@given(limit=st.integers(1, 1000), amounts=st.lists(st.integers(0, 1000), min_size=1, max_size=8), later=TIMES)
def test_an_immediate_refund_leaves_no_trace(limit, amounts, later):
    bucket = RateBucket(limit, 0)
    bucket.charge(limit // 2, 0)
    before = bucket.remaining(later), bucket.reset(later)
    charges = [(amount, bucket.charge(amount, later)) for amount in amounts]
    for amount, charge in reversed(charges):
        bucket.give_back(charge, amount, later)
    assert (bucket.remaining(later), bucket.reset(later)) == before


def test_tokens_paid_by_time_are_not_refunded():
    bucket = RateBucket(60, 0)
    charge = bucket.charge(60, 0)
    now = 45 * SECOND  # pays 45 of the 60
    assert bucket.remaining(now) == 45
    bucket.give_back(charge, 60, now)
    assert bucket.remaining(now) == 60
    bucket.charge(30, now)
    assert bucket.remaining(now) == 30


def test_the_oldest_charge_is_paid_first():
    bucket = RateBucket(60, 0)
    old, new = bucket.charge(30, 0), bucket.charge(30, 0)
    now = 30 * SECOND
    bucket.give_back(old, 30, now)  # paid for already
    assert bucket.remaining(now) == 30
    bucket.give_back(new, 30, now)
    assert bucket.remaining(now) == 60


def test_a_changed_limit_keeps_its_charges():
    bucket = RateBucket(60, 0)
    bucket.charge(30, 0)
    bucket.set_limit(20, 0)
    assert bucket.remaining(0) == 0
    assert bucket.wait_for(1, 0) == 33 * SECOND  # 11 tokens at 20 a minute
    bucket.set_limit(100, 0)
    assert bucket.remaining(0) == 70


def test_a_clock_set_back_pays_no_debt():
    bucket = RateBucket(60, MINUTE)
    bucket.charge(60, MINUTE)
    assert bucket.remaining(0) == 0
    assert bucket.remaining(MINUTE + SECOND) == 1


def test_adjacent_charges_without_a_key_are_merged():
    """Charges that cannot be refunded are merged; a charge with a key is not merged with the next."""
    bucket = RateBucket(100, 0)
    for amount, key in ((2, ""), (3, ""), (1, "k"), (4, ""), (5, "l")):
        bucket.charge(amount, 0, key)
    assert bucket.dump(0) == [(5 * MINUTE, ""), (MINUTE, "k"), (4 * MINUTE, ""), (5 * MINUTE, "l")]
