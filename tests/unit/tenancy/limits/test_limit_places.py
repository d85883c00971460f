"""Slots are taken in the order in which they were asked for, and none is lost."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.errors import ShuttingDownError
from outrider.platform.tenancy.limits.places import Places


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_first_come_first_served():
    async def scenario():
        places = Places(2)
        running = places.claim(1), places.claim(1)
        one, two, other = (places.claim(count) for count in (1, 2, 1))
        places.leave(running[0])
        assert [claim.is_held for claim in (one, two, other)] == [True, False, False]
        places.leave(running[1])
        assert not other.is_held, "it overtook the one that needs two"
        places.leave(one)
        assert [claim.is_held for claim in (two, other)] == [True, False]
        assert (places.taken, places.num_waiting) == (2, 1)
        places.leave(two)
        assert other.is_held

    run(scenario)


def test_a_request_that_leaves_the_queue_unblocks_later_ones():
    async def scenario():
        places = Places(2)
        places.claim(1)
        large, small = places.claim(2), places.claim(1)
        places.leave(large)
        assert small.is_held
        assert places.taken == 2

    run(scenario)


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_cancelled_request_has_no_slot(granted_first):
    async def scenario():
        places = Places(1)
        running, first, second = (places.claim(1) for _ in range(3))
        task = asyncio.ensure_future(first.granted)
        if not granted_first:
            task.cancel()
        places.leave(running)
        assert (first.is_held, second.is_held) == (granted_first, not granted_first)
        places.leave(first)
        assert second.is_held
        assert (places.taken, places.num_waiting) == (1, 0)

    run(scenario)


def test_other_limits():
    async def scenario():
        places = Places(4)
        three, one = places.claim(3), places.claim(1)
        waiting = places.claim(3)
        places.set_limit(2)  # fewer than it needs
        places.leave(three)
        assert not waiting.is_held
        places.leave(one)  # alone it may run
        assert waiting.is_held
        other = places.claim(1)
        assert not other.is_held
        places.set_limit(None)
        assert other.is_held

    run(scenario)


def test_all_waiting_requests_are_refused():
    async def scenario():
        places = Places(1)
        running, *waiting = (places.claim(1) for _ in range(4))
        places.refuse_waiting(ShuttingDownError("the end"))
        for claim in waiting:
            with pytest.raises(ShuttingDownError):
                await claim.granted
            places.leave(claim)
        assert (places.taken, places.num_waiting) == (1, 0)
        places.leave(running)
        assert places.taken == 0

    run(scenario)


@settings(max_examples=60)
@given(limit=st.integers(1, 4), steps=st.lists(st.tuples(st.sampled_from("tlc"), st.integers(1, 4)), max_size=30))
def test_never_above_the_limit_and_no_request_lost(limit, steps):
    async def scenario():
        places, waiting, running = Places(limit), [], []
        for kind, number in steps:
            if kind == "t":
                waiting.append(places.claim(min(number, limit)))
            elif kind == "l" and running:
                places.leave(running.pop(number % len(running)))
            elif kind == "c" and waiting:
                places.leave(waiting.pop(number % len(waiting)))
            granted = [claim for claim in waiting if claim.is_held]
            assert granted == waiting[: len(granted)], "not in their order"
            waiting = waiting[len(granted) :]
            running += granted
            assert places.taken == sum(claim.count for claim in running) <= limit
            assert places.num_waiting == len(waiting)
            assert not waiting or places.taken + waiting[0].count > limit, "there is room for the first one"

    run(scenario)
