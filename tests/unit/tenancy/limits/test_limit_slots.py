"""Slots are taken in the order in which they were asked for, and none is lost."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.errors import ShuttingDownError
from outrider.platform.tenancy.limits.slots import Slots


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_first_come_first_served():
    async def scenario():
        slots = Slots(2)
        running = slots.claim(1), slots.claim(1)
        one, two, other = (slots.claim(count) for count in (1, 2, 1))
        slots.leave(running[0])
        assert [claim.is_held for claim in (one, two, other)] == [True, False, False]
        slots.leave(running[1])
        assert not other.is_held, "it overtook the one that needs two"
        slots.leave(one)
        assert [claim.is_held for claim in (two, other)] == [True, False]
        assert (slots.taken, slots.num_waiting) == (2, 1)
        slots.leave(two)
        assert other.is_held

    run(scenario)


def test_a_request_that_leaves_the_queue_unblocks_later_ones():
    async def scenario():
        slots = Slots(2)
        slots.claim(1)
        large, small = slots.claim(2), slots.claim(1)
        slots.leave(large)
        assert small.is_held
        assert slots.taken == 2

    run(scenario)


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_cancelled_request_has_no_slot(granted_first):
    async def scenario():
        slots = Slots(1)
        running, first, second = (slots.claim(1) for _ in range(3))
        task = asyncio.ensure_future(first.granted)
        if not granted_first:
            task.cancel()
        slots.leave(running)
        assert (first.is_held, second.is_held) == (granted_first, not granted_first)
        slots.leave(first)
        assert second.is_held
        assert (slots.taken, slots.num_waiting) == (1, 0)

    run(scenario)


def test_other_limits():
    async def scenario():
        slots = Slots(4)
        three, one = slots.claim(3), slots.claim(1)
        waiting = slots.claim(3)
        slots.set_limit(2)  # fewer than it needs
        slots.leave(three)
        assert not waiting.is_held
        slots.leave(one)  # alone it may run
        assert waiting.is_held
        other = slots.claim(1)
        assert not other.is_held
        slots.set_limit(None)
        assert other.is_held

    run(scenario)


def test_all_waiting_requests_are_refused():
    async def scenario():
        slots = Slots(1)
        running, *waiting = (slots.claim(1) for _ in range(4))
        slots.refuse_waiting(ShuttingDownError("the end"))
        for claim in waiting:
            with pytest.raises(ShuttingDownError):
                await claim.granted
            slots.leave(claim)
        assert (slots.taken, slots.num_waiting) == (1, 0)
        slots.leave(running)
        assert slots.taken == 0

    run(scenario)


@settings(max_examples=60)
@given(limit=st.integers(1, 4), steps=st.lists(st.tuples(st.sampled_from("tlc"), st.integers(1, 4)), max_size=30))
def test_never_above_the_limit_and_no_request_lost(limit, steps):
    async def scenario():
        slots, waiting, running = Slots(limit), [], []
        for kind, number in steps:
            if kind == "t":
                waiting.append(slots.claim(min(number, limit)))
            elif kind == "l" and running:
                slots.leave(running.pop(number % len(running)))
            elif kind == "c" and waiting:
                slots.leave(waiting.pop(number % len(waiting)))
            granted = [claim for claim in waiting if claim.is_held]
            assert granted == waiting[: len(granted)], "not in their order"
            waiting = waiting[len(granted) :]
            running += granted
            assert slots.taken == sum(claim.count for claim in running) <= limit
            assert slots.num_waiting == len(waiting)
            assert not waiting or slots.taken + waiting[0].count > limit, "there is room for the first one"

    run(scenario)
