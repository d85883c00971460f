"""Servers with shared limits: a request admitted by one counts for all."""

import asyncio
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limit_helpers import Usage, refused, run
from shared_limit_helpers import in_memory
from sqlalchemy import select

from outrider.platform.core.errors import RateLimitError
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.database.schema import limit_counts
from outrider.platform.tenancy.limits import counts
from outrider.platform.tenancy.limits.buckets import SECOND
from outrider.platform.tenancy.limits.counts import CountTable
from outrider.platform.tenancy.limits.demand import Demand
from outrider.platform.tenancy.limits.limiter import Limiter
from outrider.platform.tenancy.limits.shared_counts import LEASE_SECONDS


def test_requests_of_all_servers_count():
    async def scenario():
        async with in_memory(Limits(requests_per_minute=4)) as servers:
            for number in range(4):
                await servers.admit(number % 2)
            for server in range(2):
                error = await refused(servers.admit(server), "requests_per_minute")
                assert error.retry_after == 15.0
                assert error.headers["x-ratelimit-remaining-requests"] == "0"
            servers.clock.seconds = 15.0
            await servers.admit(1)
            await refused(servers.admit(0), "requests_per_minute")
            await servers.limiters[0].charge_call(Principal(tenant="another"))

    run(scenario())


def test_unused_tokens_come_back_to_all_servers():
    async def scenario():
        async with in_memory(Limits(tokens_per_minute=100)) as servers:
            ticket = await servers.admit(0, prompt=10, max_tokens=60)
            await refused(servers.admit(1, prompt=10, max_tokens=30), "tokens_per_minute")
            await servers.release(0, ticket, 15)
            await servers.admit(1, prompt=10, max_tokens=75)
            await refused(servers.admit(0, prompt=1, max_tokens=0), "tokens_per_minute")

    run(scenario())


def test_slots_of_all_servers_go_by_arrival():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1, max_queued_requests=2)) as servers:
            running, order = await servers.admit(0), []

            async def request(server):
                ticket = await servers.admit(server)
                order.append(server)
                await servers.release(server, ticket, 0)

            def num_waiting():
                """Number of waiting requests that every server knows of, and since when."""
                shares = json.loads(servers.table.counts["acme"])[""][4].values()
                return sum(share[2] for share in shares if share[3])

            tasks = []
            for server in (1, 0):
                servers.clock.seconds += 1
                tasks.append(asyncio.create_task(request(server)))
                while num_waiting() < len(tasks):
                    await asyncio.sleep(0.01)
            for server in range(2):
                await refused(servers.admit(server), "max_queued_requests")
            await servers.release(0, running, 0)
            await asyncio.gather(*tasks)
            assert order == [1, 0], "the later one, on the server with the free slot, overtook the other"

    run(scenario())


def test_a_budget_of_all_servers():
    async def scenario():
        async with in_memory(Limits(token_budget=1000, budget_period="day")) as servers:
            servers.usage.tokens = 900
            ticket = await servers.admit(0, prompt=10, max_tokens=50)
            error = await refused(servers.admit(1, prompt=10, max_tokens=50), "token_budget")
            assert error.retry_after == 1.0, "what runs elsewhere may give some back"
            await servers.release(0, ticket, 20)
            await servers.admit(1, prompt=10, max_tokens=50)
            await refused(servers.admit(0, prompt=10, max_tokens=20), "token_budget")
            assert len(servers.usage.asked) == 1, "one server has read the ledger for all"

    run(scenario())


def test_slots_and_reservations_of_a_dead_server_are_freed():
    async def scenario():
        limits = Limits(max_concurrent_requests=1, token_budget=1000, tokens_per_minute=1000)
        async with in_memory(limits) as servers:
            dead, servers.limiters[0] = servers.limiters[0], servers.server()
            await dead.admit(servers.principal(), Demand((10,), max_tokens=600))
            await dead.close()  # without a word to the others
            waiting = asyncio.create_task(servers.admit(1, prompt=10, max_tokens=50))
            await asyncio.sleep(0.15)
            assert not waiting.done()
            servers.clock.seconds += LEASE_SECONDS
            await waiting
            error = await refused(servers.admit(0, prompt=10, max_tokens=500), "token_budget")
            assert "used 610 tokens" in error.message, "all that it reserved, until the ledger is read again"

    run(scenario())


@pytest.mark.slow
def test_a_lease_is_renewed_while_requests_run():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1), lease_seconds=1.0) as servers:
            await servers.admit(0)

            def running_until():
                """End of the share of the server that runs one."""
                shares = json.loads(servers.table.counts["acme"])[""][4]
                return next(share[0] for share in shares.values() if share[1] == 1)

            waiting = asyncio.create_task(servers.admit(1))
            for _ in range(4):
                before = running_until()
                servers.clock.seconds += 0.8
                while running_until() == before:
                    await asyncio.sleep(0.01)
            assert not waiting.done()
            waiting.cancel()

    run(scenario())


def test_a_request_cancelled_before_the_answer_has_used_nothing():
    async def scenario():
        async with in_memory(Limits(requests_per_minute=5, max_concurrent_requests=5)) as servers:
            for rounds in range(1, 9):
                task = asyncio.create_task(servers.admit(0))
                for _ in range(rounds):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled():
                    await servers.release(0, task.result(), 0)
                await asyncio.sleep(0.002)
                servers.clock.seconds += 60
            for _ in range(5):
                await servers.admit(1)

    run(scenario())


def test_each_server_goes_on_alone_while_the_database_is_away(caplog):
    async def scenario():
        async with in_memory(Limits(requests_per_minute=4)) as servers:
            await servers.admit(0)
            await servers.admit(1)
            servers.table.is_away = True
            for _ in range(2):
                await servers.admit(1)
            await refused(servers.admit(1), "requests_per_minute")
            for _ in range(3):
                await servers.admit(0)
            await refused(servers.admit(0), "requests_per_minute")
            servers.table.is_away = False
            await refused(servers.admit(1), "requests_per_minute")

    run(scenario())
    assert [record.message for record in caplog.records] == [
        *("limits of tenant 'acme' hold for this server alone: away",) * 2,
        "limits of tenant 'acme' hold for all servers again",
    ]


@pytest.mark.parametrize("fails", ["is_away", "is_read_only"])
def test_counts_of_an_outage_are_shared_afterwards(fails):
    async def scenario():
        limits = Limits(requests_per_minute=4, tokens_per_minute=1000, token_budget=1000, budget_period="day")
        async with in_memory(limits, lease_seconds=0.4) as servers:
            await servers.release(0, await servers.admit(0), 20)
            setattr(servers.table, fails, True)
            for _ in range(2):
                await servers.release(0, await servers.admit(0, max_tokens=60), 70)
            setattr(servers.table, fails, False)
            written = servers.table.num_writes
            while servers.table.num_writes == written:  # without another request of the tenant to that server
                await asyncio.sleep(0.01)
            ticket = await servers.admit(1)
            assert ticket.scopes[0].budget.used == 160
            error = await refused(servers.admit(1), "requests_per_minute")
            assert error.headers["x-ratelimit-remaining-tokens"] == str(1000 - 160 - 20)

    run(scenario())


def test_limits_hold_while_the_database_is_read_only():
    async def scenario():
        async with in_memory(Limits(requests_per_minute=4)) as servers:
            servers.table.is_read_only = True
            for _ in range(4):
                await servers.admit(0)
            await refused(servers.admit(0), "requests_per_minute")

    run(scenario())


def test_a_request_that_ends_during_the_first_reading_counts_once():
    async def scenario():
        async with in_memory(Limits(token_budget=1000, budget_period="day")) as servers:
            servers.table.epoch -= SECOND // 2
            ticket = await servers.admit(0)
            servers.tenant = Limits(token_budget=2000, budget_period="week")
            servers.usage.end(servers.clock, 20)
            await servers.release(0, ticket, 20)
            servers.clock.seconds += 0.25
            servers.clock.wall += 0.25
            assert (await servers.admit(0)).scopes[0].budget.used == 20

    run(scenario())


def test_a_reading_of_a_budget_counts_a_request_of_another_server_once():
    async def scenario():
        async with in_memory(Limits(token_budget=1000, budget_period="day")) as servers:
            ticket = await servers.admit(1, max_tokens=90)
            servers.clock.seconds += 90
            servers.clock.wall += 90
            servers.usage.end(servers.clock, 100)
            await servers.release(0, await servers.admit(0), 0)  # begins to read
            await servers.release(1, ticket, 100)
            assert len(servers.usage.asked) == 2
            assert (await servers.admit(0)).scopes[0].budget.used == 100

    run(scenario())


def test_tenants_without_limits_do_not_touch_the_table():
    async def scenario():
        async with in_memory() as servers:
            await servers.release(0, await servers.admit(0), 5)
            assert servers.table.num_writes == 0

    run(scenario())


def test_idle_counts_are_dropped():
    async def scenario():
        async with in_memory(key=Limits(requests_per_minute=5)) as servers:
            for key in "abc":
                await servers.release(0, await servers.admit(0, key_id=key), 5)
            servers.clock.seconds += 200
            await servers.admit(1, key_id="d")
            assert set(json.loads(servers.table.counts["acme"])) == {"d"}

    run(scenario())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "release", "call", "wait"]),
        st.integers(0, 40),
        st.sampled_from(["a", "b"]),
        st.integers(0, 2),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_three_servers_decide_as_one_would(steps):
    """Every server answers as a single server that received all requests would."""

    async def scenario():
        tenant = Limits(tokens_per_minute=200, requests_per_minute=8, token_budget=900, budget_period="day")
        async with in_memory(tenant, Limits(tokens_per_minute=150), num=3) as servers:
            alone = Limiter(servers.usage, servers.clock)
            running = []
            for kind, number, key, server in steps:
                principal, demand = servers.principal(key), Demand((1 + number,), max_tokens=number)
                if kind == "admit":
                    one, other = await asyncio.gather(
                        alone.admit(principal, demand),
                        servers.limiters[server].admit(principal, demand),
                        return_exceptions=True,
                    )
                    assert str(one) == str(other) or not isinstance(one, Exception), "another reason"
                    assert isinstance(one, Exception) == isinstance(other, Exception)
                    if not isinstance(one, Exception):
                        running.append((one, other, server))
                elif kind == "call":
                    answers = await asyncio.gather(
                        alone.charge_call(principal),
                        servers.limiters[server].charge_call(principal),
                        return_exceptions=True,
                    )
                    assert str(answers[0]) == str(answers[1])
                elif kind == "release" and running:
                    one, other, server = running.pop(number % len(running))
                    servers.usage.end(servers.clock, number // 2 if number % 3 else 0)
                    alone.release(one, number // 2, ran=number % 3 > 0)
                    servers.limiters[server].release(other, number // 2, ran=number % 3 > 0)
                    for _ in range(10):
                        await asyncio.sleep(0)
                elif kind == "wait":
                    seconds = number / 4 if number % 2 else 2 * number  # the ledger is read again after 60 s
                    servers.clock.seconds += seconds
                    servers.clock.wall += seconds

    run(scenario())


def principal_with(**limits):
    return Principal(tenant="acme", key_id="k1", tenant_limits=Limits(**limits))


def test_two_servers_and_a_real_database(database):
    """200 requests at once: exactly the limit is admitted, plus the refill since the first one."""

    async def scenario():
        limiters = [Limiter(Usage(), table=CountTable(database)) for _ in range(2)]
        principal, began = principal_with(requests_per_minute=50, token_budget=10**6), time.monotonic()
        answers = await asyncio.gather(
            *(limiters[i % 2].admit(principal, Demand((10,), max_tokens=5)) for i in range(200)), return_exceptions=True
        )
        tickets = [(i, ticket) for i, ticket in enumerate(answers) if not isinstance(ticket, Exception)]
        assert 50 <= len(tickets) <= 50 + (time.monotonic() - began) * 50 / 60
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        assert all(isinstance(error, RateLimitError) and error.param == "requests_per_minute" for error in errors)
        for i, ticket in tickets:
            limiters[i % 2].release(ticket, 12)
        for limiter in limiters:
            await limiter.close()
        with database.read() as connection:
            (found,) = connection.execute(select(limit_counts.c.counts)).scalars()
        _, _, _, (_, _, recent, *_), shares = found["scopes"][""]
        assert (sum(tokens for _, tokens in recent), shares) == (12 * len(tickets), {})

    run(scenario())


def test_slots_in_a_real_database(database):
    async def scenario():
        limiters = [Limiter(Usage(), table=CountTable(database)) for _ in range(2)]
        principal, running, most = principal_with(max_concurrent_requests=2), 0, 0

        async def request(limiter):
            nonlocal running, most
            ticket = await limiter.admit(principal, Demand((10,), max_tokens=5))
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            limiter.release(ticket, 12)

        await asyncio.gather(*(request(limiters[i % 2]) for i in range(12)))
        assert most == 2
        for limiter in limiters:
            await limiter.close()

    run(scenario())


def test_a_database_that_hangs_holds_up_one_turn_alone(sqlite, monkeypatch):
    monkeypatch.setattr(counts, "CHANGE_SECONDS", 0.3)
    held, free = threading.Event(), threading.Event()

    def hold():
        with sqlite.write():
            held.set()
            free.wait(20)

    async def scenario():
        holding = asyncio.get_running_loop().run_in_executor(None, hold)
        await asyncio.to_thread(held.wait)
        limiter, principal = Limiter(Usage(), table=CountTable(sqlite)), principal_with(requests_per_minute=3)
        for _ in range(3):
            await limiter.admit(principal, Demand((10,), max_tokens=5))
        await refused(limiter.admit(principal, Demand((10,), max_tokens=5)), "requests_per_minute")
        free.set()
        await holding
        await limiter.close()

    run(scenario())
