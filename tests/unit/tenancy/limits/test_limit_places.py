"""Places are taken in the order in which they were asked for, and none is lost."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.errors import ShuttingDownError
from outrider.platform.tenancy.limits.places import Places


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 10))


async def settle():
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_first_come_first_served():
    async def scenario():
        places, order = Places(2), []

        async def request(name, count):
            await places.take(count)
            order.append(name)

        await places.take(2)
        tasks = []
        for name, count in (("a", 1), ("b", 2), ("c", 1)):
            tasks.append(asyncio.create_task(request(name, count)))
            await settle()
        places.leave(1)
        await settle()
        assert order == ["a"]
        places.leave(1)
        await settle()
        assert order == ["a"], "c overtook b"
        places.leave(1)
        await settle()
        assert order == ["a", "b"]
        assert (places.taken, places.num_waiting) == (2, 1)
        places.leave(2)
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c"]

    run(scenario)


def test_who_leaves_the_queue_lets_those_behind_pass():
    async def scenario():
        places = Places(2)
        await places.take(1)
        large = asyncio.create_task(places.take(2))
        await settle()
        small = asyncio.create_task(places.take(1))
        await settle()
        large.cancel()
        await small
        assert places.taken == 2

    run(scenario)


def test_granted_and_cancelled_in_the_same_moment():
    async def scenario():
        places = Places(1)
        await places.take(1)
        first, second = asyncio.create_task(places.take(1)), asyncio.create_task(places.take(1))
        await settle()
        places.leave(1)
        first.cancel()  # it has the place, and has not heard of it
        await second
        assert first.cancelled()
        assert (places.taken, places.num_waiting) == (1, 0)

    run(scenario)


def test_other_limits():
    async def scenario():
        places = Places(4)
        await places.take(4)
        task = asyncio.create_task(places.take(3))
        await settle()
        places.set_limit(2)  # fewer than it needs
        places.leave(3)
        await settle()
        assert not task.done()
        places.leave(1)  # alone it may run
        await task
        other = asyncio.create_task(places.take(1))
        await settle()
        places.set_limit(None)
        await other

    run(scenario)


def test_all_who_wait_are_refused():
    async def scenario():
        places = Places(1)
        await places.take(1)
        tasks = [asyncio.create_task(places.take(1)) for _ in range(3)]
        await settle()
        places.refuse_waiting(ShuttingDownError("the end"))
        for task in tasks:
            with pytest.raises(ShuttingDownError):
                await task
        assert (places.taken, places.num_waiting) == (1, 0)

    run(scenario)


@settings(max_examples=60)
@given(limit=st.integers(1, 4), steps=st.lists(st.tuples(st.sampled_from("tlc"), st.integers(1, 4)), max_size=30))
def test_never_more_than_the_limit_and_nobody_forgotten(limit, steps):
    async def scenario():
        places, waiting, running = Places(limit), [], []
        for kind, number in steps:
            if kind == "t":
                count = min(number, limit)
                waiting.append((count, asyncio.create_task(places.take(count))))
            elif kind == "l" and running:
                places.leave(running.pop(number % len(running)))
            elif kind == "c" and waiting:
                waiting.pop(number % len(waiting))[1].cancel()
            await settle()
            granted = [count for count, task in waiting if task.done()]
            assert granted == [count for count, _ in waiting[: len(granted)]], "not in their order"
            waiting = waiting[len(granted) :]
            running += granted
            assert places.taken == sum(running) <= limit
            assert places.num_waiting == len(waiting)
            assert not waiting or places.taken + waiting[0][0] > limit, "there is room for the first one"
        for _, task in waiting:
            task.cancel()

    run(scenario)
