"""Admission: everything that a request needs, or an error with the time to retry."""

import asyncio
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limit_helpers import Clock, Usage, crowd, refused, run, settle

from outrider.platform.core.errors import RateLimitError, ShuttingDownError
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.limits.buckets import SECOND
from outrider.platform.tenancy.limits.demand import Demand
from outrider.platform.tenancy.limits.limiter import Limiter, shown_duration


class Setting:
    def __init__(self, tenant=None, key=None):
        self.clock, self.usage = Clock(), Usage()
        self.limiter = Limiter(self.usage, self.clock)
        self.tenant, self.key = tenant or Limits(), key or Limits()

    def principal(self, key_id="k1"):
        return Principal(tenant="acme", key_id=key_id, tenant_limits=self.tenant, key_limits=self.key)

    async def admit(self, prompt=10, max_tokens=10, key_id="k1", **options):
        demand = Demand((prompt,), max_tokens=max_tokens, room=(1000 - prompt,), **options)
        return await self.limiter.admit(self.principal(key_id), demand)

    def remaining(self, what, key_id="k1"):
        return int(self.limiter.headers(self.principal(key_id))[f"x-ratelimit-remaining-{what}"])


def test_without_limits_nothing_is_kept_or_reported():
    async def scenario():
        setting = Setting()
        ticket = await setting.admit(max_tokens=None)
        assert ticket.max_tokens == [990]
        assert setting.limiter.headers(setting.principal()) == {}
        setting.limiter.release(ticket, 20)
        assert setting.limiter._scopes.all() == []

    run(scenario())


def test_requests_a_minute():
    async def scenario():
        setting = Setting(Limits(requests_per_minute=2))
        for _ in range(2):
            setting.limiter.release(await setting.admit(), 20)
        error = await refused(setting.admit(), "requests_per_minute")
        assert error.retry_after == 30.0
        assert error.headers == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1m0s",
        }
        setting.clock.seconds = 30.0
        await setting.admit()
        await refused(setting.admit(), "requests_per_minute")

    run(scenario())


def test_unused_reserved_tokens_are_refunded():
    async def scenario():
        setting = Setting(Limits(tokens_per_minute=100))
        ticket = await setting.admit(prompt=10, max_tokens=60)
        assert setting.remaining("tokens") == 30
        await refused(setting.admit(prompt=10, max_tokens=30), "tokens_per_minute")
        setting.limiter.release(ticket, 15)
        assert setting.remaining("tokens") == 85
        setting.limiter.release(ticket, 0)  # a second call does nothing
        assert setting.remaining("tokens") == 85

    run(scenario())


def test_several_prompts_and_sequences_are_counted_each():
    async def scenario():
        setting = Setting(Limits(requests_per_minute=10, tokens_per_minute=1000))
        demand = Demand((10, 20), n=3, max_tokens=5)
        await setting.limiter.admit(setting.principal(), demand)
        assert setting.remaining("requests") == 4
        assert setting.remaining("tokens") == 1000 - (10 + 20) - 6 * 5

    run(scenario())


def test_a_refused_request_has_used_nothing():
    """By one of several limits: the others are not charged."""

    async def scenario():
        setting = Setting(Limits(requests_per_minute=10, tokens_per_minute=100), Limits(tokens_per_minute=50))
        await setting.admit(prompt=10, max_tokens=30)
        before = setting.limiter.headers(setting.principal())
        await refused(setting.admit(prompt=10, max_tokens=30), "tokens_per_minute")
        assert setting.limiter.headers(setting.principal()) == before

    run(scenario())


def test_the_headers_are_of_the_tighter_limit():
    async def scenario():
        setting = Setting(Limits(requests_per_minute=10), Limits(requests_per_minute=8))
        await setting.admit(key_id="k1")
        assert setting.limiter.headers(setting.principal("k1"))["x-ratelimit-limit-requests"] == "8"
        for _ in range(7):
            await setting.admit(key_id="k2")
        headers = setting.limiter.headers(setting.principal("k1"))
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("10", "2")

    run(scenario())


def test_tenants_and_keys_have_limits_of_their_own():
    async def scenario():
        setting = Setting(key=Limits(requests_per_minute=1))
        await setting.admit(key_id="k1")
        await setting.admit(key_id="k2")
        error = await refused(setting.admit(key_id="k1"), "requests_per_minute")
        assert "API key k1" in error.message

    run(scenario())


def test_concurrency_and_the_queue():
    async def scenario():
        setting = Setting(Limits(max_concurrent_requests=1, max_queued_requests=1, requests_per_minute=100))
        running = await setting.admit()
        waiting = asyncio.create_task(setting.admit())
        await settle()
        assert setting.limiter.num_waiting == 1
        await refused(setting.admit(), "max_queued_requests")
        setting.limiter.release(running, 0)
        ticket = await waiting
        assert setting.limiter.num_waiting == 0
        setting.limiter.release(ticket, 0)
        await setting.admit()

    run(scenario())


def test_a_client_that_disconnects_while_waiting_has_used_nothing():
    async def scenario():
        setting = Setting(Limits(max_concurrent_requests=1, requests_per_minute=100, tokens_per_minute=100))
        running = await setting.admit()
        before = setting.limiter.headers(setting.principal())
        waiting = asyncio.create_task(setting.admit())
        await settle()
        assert setting.remaining("requests") == 98
        waiting.cancel()
        await settle()
        assert setting.limiter.headers(setting.principal()) == before
        assert setting.limiter.num_waiting == 0
        setting.limiter.release(running, 20)
        await setting.admit()

    run(scenario())


def test_a_full_key_does_not_block_the_tenants_other_keys():
    async def scenario():
        setting = Setting(Limits(max_concurrent_requests=2), Limits(max_concurrent_requests=1))
        first = await setting.admit(key_id="k1")
        waiting = asyncio.create_task(setting.admit(key_id="k1"))
        await settle()
        await setting.admit(key_id="k2")
        assert not waiting.done()
        setting.limiter.release(first, 0)
        await waiting

    run(scenario())


def test_waiting_requests_are_refused_on_shutdown():
    async def scenario():
        setting = Setting(Limits(max_concurrent_requests=1))
        await setting.admit()
        waiting = asyncio.create_task(setting.admit())
        await settle()
        setting.limiter.refuse_waiting(ShuttingDownError("the end"))
        with pytest.raises(ShuttingDownError):
            await waiting

    run(scenario())


def test_other_limits_count_from_the_next_request_on():
    async def scenario():
        setting = Setting(Limits(requests_per_minute=1))
        await setting.admit()
        setting.tenant = Limits(requests_per_minute=5)
        assert setting.remaining("requests") == 4
        setting.tenant = Limits()
        for _ in range(9):
            await setting.admit()

    run(scenario())


def test_a_budget_starts_from_the_ledger():
    async def scenario():
        setting = Setting(Limits(token_budget=1000, budget_period="day"))
        setting.usage.tokens = 900
        ticket = await setting.admit(prompt=10, max_tokens=50)
        assert setting.usage.asked == [("acme", "", 1_795_219_200, 1_795_289_400)]
        error = await refused(setting.admit(prompt=10, max_tokens=50), "token_budget")
        assert error.retry_after == 1.0, "what runs may give some back"
        assert error.code == "insufficient_quota"
        setting.limiter.release(ticket, 60)
        error = await refused(setting.admit(prompt=10, max_tokens=50), "token_budget")
        assert error.retry_after == 1_795_305_600 - setting.clock.wall
        ticket = await setting.admit(prompt=10, max_tokens=None)
        assert ticket.max_tokens == [30], "what is left"
        assert len(setting.usage.asked) == 1

    run(scenario())


def test_an_unreadable_budget_admits_no_request():
    async def scenario():
        setting = Setting(Limits(token_budget=1000))
        setting.usage.error = ShuttingDownError("away")
        with pytest.raises(ShuttingDownError):
            await setting.admit()
        setting.usage.error = None
        await setting.admit()

    run(scenario())


def test_a_budget_is_read_once_for_all_and_again_after_a_minute():
    async def scenario():
        setting = Setting(Limits(token_budget=1000))
        setting.usage.gate = asyncio.Event()
        tasks = [asyncio.create_task(setting.admit()) for _ in range(3)]
        await settle()
        tasks[0].cancel()  # one that goes does not stop the reading for the others
        setting.usage.gate.set()
        await asyncio.gather(*tasks[1:])
        assert len(setting.usage.asked) == 1
        setting.clock.seconds = 61.0
        setting.clock.wall += 61.0
        setting.usage.tokens = 1000  # another server's
        await setting.admit()
        await settle()
        await refused(setting.admit(), "token_budget")
        assert len(setting.usage.asked) == 2

    run(scenario())


def test_a_budget_stays_as_it_was_while_the_ledger_is_away():
    async def scenario():
        setting = Setting(Limits(token_budget=1000))
        await setting.admit()
        setting.clock.seconds, setting.usage.error = 61.0, ShuttingDownError("away")
        await setting.admit()
        await settle()
        await setting.admit()
        await refused(setting.admit(max_tokens=2000), "token_budget")

    run(scenario())


def test_a_call_that_generates_nothing_counts_as_a_request():
    async def scenario():
        setting = Setting(Limits(requests_per_minute=2, tokens_per_minute=5))
        await setting.limiter.charge_call(setting.principal())
        await setting.limiter.charge_call(setting.principal())
        with pytest.raises(RateLimitError):
            await setting.limiter.charge_call(setting.principal())

    run(scenario())


def test_idle_scopes_are_forgotten():
    async def scenario():
        setting, scopes = Setting(key=Limits(requests_per_minute=1)), {}
        for key in ("idle", "running", "recent"):
            setting.clock.seconds = 61.0 if key == "recent" else 0.0
            ticket = await setting.admit(key_id=key)
            scopes[key] = weakref.ref(ticket.scopes[0])
            if key == "running":
                running = ticket
            else:
                setting.limiter.release(ticket, 0)
        del ticket
        crowd(setting.limiter)
        await setting.admit(key_id="new")
        assert [key for key, scope in scopes.items() if scope() is not None] == ["running", "recent"]
        setting.limiter.release(running, 0)

    run(scenario())


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (12 * 10**6, "12ms"),
        (1_500_000_000, "1.5s"),
        (60 * SECOND, "1m0s"),
        (361 * SECOND, "6m1s"),
    ],
)
def test_durations(nanoseconds, text):
    assert shown_duration(nanoseconds) == text


STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "release", "cancel", "wait"]), st.integers(0, 20), st.sampled_from(["a", "b"])),
    max_size=30,
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_whatever_happens_all_of_it_comes_back(steps):
    """Any mix of ends: at last nothing is taken, reserved or waiting, and a minute later the limits are whole."""

    async def scenario():
        tenant = Limits(max_concurrent_requests=3, tokens_per_minute=200, requests_per_minute=20, token_budget=10_000)
        setting = Setting(tenant, Limits(max_concurrent_requests=2, max_queued_requests=2))
        tasks, running = [], []
        for kind, number, key in steps:
            if kind == "admit":
                tasks.append(asyncio.create_task(setting.admit(prompt=1 + number, max_tokens=10, key_id=key)))
            elif kind == "release" and running:
                setting.limiter.release(running.pop(number % len(running)), number)
            elif kind == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            else:
                setting.clock.seconds += number
            await settle()
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    running.append(task.result())
                elif not task.cancelled():
                    assert isinstance(task.exception(), RateLimitError)
        while tasks or running:
            for ticket in running:
                setting.limiter.release(ticket, 1)
            running = []
            await settle()
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                running.append(task.result())
        setting.clock.seconds += 60
        for scope in setting.limiter._scopes.all():
            assert (scope.slots.taken, scope.num_waiting, scope.slots.num_waiting) == (0, 0, 0)
            assert scope.budget is None or scope.budget.reserved == 0
            assert scope.is_idle(setting.clock.monotonic_ns())

    run(scenario())
