"""Limits that change while requests run and wait, and bounds for all tenants together."""

import asyncio

import pytest
from limit_helpers import NUM_KEPT, crowd

from outrider.platform.core.errors import OverloadedError
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.limits.demand import Demand
from outrider.platform.tenancy.limits.limiter import Limiter
from outrider.platform.tenancy.limits.queue_bound import Bounds

from .test_limiter import Setting, refused, run, settle


def principal(reading, limits, key_id="k1"):
    return Principal(tenant="acme", key_id=key_id, tenant_limits=limits, reading=reading)


def test_an_earlier_request_does_not_restore_old_limits():
    """One that runs long: its answer has headers, too."""

    async def scenario():
        limiter = Setting().limiter
        before = principal(1, Limits(max_concurrent_requests=2, requests_per_minute=9))
        after = principal(2, Limits(max_concurrent_requests=1, requests_per_minute=3, token_budget=100))
        running = await limiter.admit(before, Demand((1,), max_tokens=1))
        waiting = asyncio.create_task(limiter.admit(after, Demand((1,), max_tokens=79)))
        await settle()
        assert limiter.headers(before)["x-ratelimit-limit-requests"] == "3"
        await settle()
        assert not waiting.done(), "there is one slot now"
        limiter.release(running, 2)
        await waiting
        limiter.headers(before)
        await refused(limiter.admit(after, Demand((1,), max_tokens=29)), "token_budget")

    run(scenario())


def test_requests_that_wait_go_on_when_the_limit_is_raised():
    async def scenario():
        limiter = Setting().limiter
        before = principal(1, Limits(max_concurrent_requests=1))
        await limiter.admit(before, Demand((1,), max_tokens=1))
        waiting = asyncio.create_task(limiter.admit(before, Demand((1,), max_tokens=1)))
        await settle()
        limiter.change_limits([principal(2, Limits(max_concurrent_requests=2)), Principal(tenant="idle")])
        await settle()
        assert waiting.done()

    run(scenario())


def test_limits_that_change_while_a_budget_is_read():
    async def scenario():
        setting = Setting()
        setting.usage.gate, setting.usage.tokens = asyncio.Event(), 90
        limits = Limits(token_budget=1000), Limits(token_budget=100, budget_period="day")
        first = asyncio.create_task(setting.limiter.admit(principal(1, limits[0]), Demand((1,), max_tokens=20)))
        await settle()
        setting.limiter.headers(principal(2, limits[1]))  # another request, of after the change
        setting.usage.gate.set()
        await refused(first, "token_budget")
        assert len(setting.usage.asked) == 2, "of the other period, too"

    run(scenario())


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        (Limits(requests_per_minute=1), "requests_per_minute"),
        (Limits(tokens_per_minute=20), "tokens_per_minute"),
        (Limits(token_budget=20), "token_budget"),
        (Limits(max_concurrent_requests=1, max_queued_requests=0), "max_queued_requests"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("of", ["tenant", "key"])
def test_making_room_forgets_nothing_that_is_in_use(limits, param, of):
    async def scenario():
        setting = Setting(**{of: limits})
        running = await setting.admit()
        crowd(setting.limiter)
        await refused(setting.admit(), param)
        setting.limiter.release(running, 20)

    run(scenario())


def test_making_room_never_forgets_the_scope_that_is_being_used():
    """The tenant's is idle when the next key's scope makes room."""

    async def scenario():
        setting = Setting(Limits(requests_per_minute=2), Limits(requests_per_minute=2))
        setting.limiter.headers(setting.principal("k1"))
        crowd(setting.limiter, NUM_KEPT - 2)
        for key in ("k2", "k3"):
            await setting.admit(key_id=key)
        await refused(setting.admit(key_id="k4"), "requests_per_minute")

    run(scenario())


@pytest.mark.parametrize("bounded", ["tenant", "key"])
def test_the_queue_bound_is_for_all_tenants_together(bounded):
    async def scenario():
        limiter = Limiter(Setting().usage)
        limiter.queue.bounds = lambda: Bounds(max_waiting=2, num_seats=100)
        limits = {f"{bounded}_limits": Limits(max_concurrent_requests=1)}

        def admit(tenant, n=1):
            return limiter.admit(Principal(tenant=tenant, key_id=tenant, **limits), Demand((1,), n=n, max_tokens=1))

        running = [await admit(name) for name in ("a", "b", "c")]
        waiting = [asyncio.create_task(admit(name)) for name in ("a", "b")]
        await settle()
        assert limiter.num_waiting == 2
        with pytest.raises(OverloadedError, match="max_num_queued_reqs is 2"):
            await admit("c")
        await admit("d")  # which need not wait
        limiter.release(running[0], 2)
        await waiting[0]
        running.append(asyncio.create_task(admit("c")))
        await settle()
        assert limiter.num_waiting == 2
        for task in (waiting[1], running[-1]):
            task.cancel()
        await settle()
        assert limiter.num_waiting == 0

    run(scenario())


def test_a_tenants_own_bound_is_reported_first():
    async def scenario():
        setting = Setting(Limits(max_concurrent_requests=1, max_queued_requests=0))
        setting.limiter.queue.bounds = lambda: Bounds(max_waiting=0, num_seats=9)
        await setting.admit()
        await refused(setting.admit(), "max_queued_requests")

    run(scenario())
