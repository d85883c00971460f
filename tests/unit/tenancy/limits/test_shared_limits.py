"""Servers that count together: what one admits, all have admitted."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

from hypothesis import given, settings
from hypothesis import strategies as st
from limit_helpers import Clock, Usage, refused, run
from sqlalchemy import select, text

from outrider.platform.core.errors import OverloadedError, RateLimitError
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.database.connection import DatabaseUnavailableError
from outrider.platform.tenancy.database.schema import limit_counts
from outrider.platform.tenancy.limits import counts
from outrider.platform.tenancy.limits.buckets import SECOND
from outrider.platform.tenancy.limits.counts import CountTable
from outrider.platform.tenancy.limits.demand import Demand
from outrider.platform.tenancy.limits.limiter import Limiter
from outrider.platform.tenancy.limits.scopes import Scope
from outrider.platform.tenancy.limits.turns import LEASE_SECONDS


class MemoryTable:
    """A `CountTable` whose time is the test's, and that may be away."""

    def __init__(self, clock):
        self.clock, self.counts, self.is_away = clock, {}, False
        self.num_reads = self.num_writes = 0
        self.epoch = int(clock.wall) * SECOND
        self.lock = asyncio.Lock()

    async def change(self, tenant, change):
        if self.is_away:
            raise DatabaseUnavailableError("away")
        async with self.lock:
            self.num_reads += 1
            await asyncio.sleep(0)
            changed = change(json.loads(self.counts.get(tenant, "{}")), self.epoch + self.clock.monotonic_ns())
            await asyncio.sleep(0)
            if changed is not None:
                self.num_writes += 1
                self.counts[tenant] = json.dumps(changed, allow_nan=False)

    async def close(self):
        pass


class Servers:
    """Limiters over one table, and requests of one tenant to them."""

    def __init__(self, table, tenant=None, key=None, num=2, clock=None, lease_seconds=LEASE_SECONDS):
        self.table, self.tenant, self.key = table, tenant or Limits(), key or Limits()
        self.usage, self.clock = Usage(), clock or Clock()
        self.limiters = [self.server(lease_seconds) for _ in range(num)]

    def server(self, lease_seconds=LEASE_SECONDS):
        return Limiter(self.usage, self.clock, self.table, lease_seconds)

    def principal(self, key_id="k1"):
        return Principal(tenant="acme", key_id=key_id, tenant_limits=self.tenant, key_limits=self.key)

    async def admit(self, server=0, prompt=10, max_tokens=10, key_id="k1", **options):
        demand = Demand((prompt,), max_tokens=max_tokens, **options)
        return await self.limiters[server].admit(self.principal(key_id), demand, 1000)

    async def release(self, server, ticket, used):
        self.limiters[server].release(ticket, used)
        await asyncio.sleep(0.002)

    async def close(self):
        for limiter in self.limiters:
            await limiter.close()


@asynccontextmanager
async def in_memory(*limits, **options):
    clock = Clock()
    servers = Servers(MemoryTable(clock), *limits, clock=clock, **options)
    yield servers
    await servers.close()


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


def test_places_of_all_servers_and_the_order_of_those_who_wait():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1, max_queued_requests=2)) as servers:
            running, order = await servers.admit(0), []

            async def request(server):
                ticket = await servers.admit(server)
                order.append(server)
                await servers.release(server, ticket, 0)

            tasks = []
            for server in (1, 0):
                servers.clock.seconds += 1
                tasks.append(asyncio.create_task(request(server)))
                await asyncio.sleep(0.15)
            for server in range(2):
                await refused(servers.admit(server), "max_queued_requests")
            await servers.release(0, running, 0)
            await asyncio.gather(*tasks)
            assert order == [1, 0], "the one that came later, where the place was left, overtook the other"

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


def test_a_server_that_dies_leaves_its_places_and_reservations():
    async def scenario():
        limits = Limits(max_concurrent_requests=1, token_budget=1000, tokens_per_minute=1000)
        async with in_memory(limits) as servers:
            dead, servers.limiters[0] = servers.limiters[0], servers.server()
            await dead.admit(servers.principal(), Demand((10,), max_tokens=600), 1000)
            await dead.close()  # without a word to the others
            waiting = asyncio.create_task(servers.admit(1, prompt=10, max_tokens=50))
            await asyncio.sleep(0.15)
            assert not waiting.done()
            servers.clock.seconds += LEASE_SECONDS
            await waiting
            error = await refused(servers.admit(0, prompt=10, max_tokens=500), "token_budget")
            assert "used 610 tokens" in error.message, "all that it reserved, until the ledger is read again"

    run(scenario())


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


def test_who_is_cancelled_before_the_answer_has_used_nothing():
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
            await servers.admit(1)

    run(scenario())
    assert [record.message.split(" while")[0] for record in caplog.records] == [
        *("limits hold for this server alone",) * 2,
        "limits hold for all servers again",
    ]


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
    """The rule is one: whichever server is asked, it says what a server that has had all requests says."""

    async def scenario():
        tenant = Limits(tokens_per_minute=200, requests_per_minute=8, token_budget=900, budget_period="day")
        async with in_memory(tenant, Limits(tokens_per_minute=150), num=3) as servers:
            alone = Limiter(Usage(), servers.clock)
            running = []
            for kind, number, key, server in steps:
                principal, demand = servers.principal(key), Demand((1 + number,), max_tokens=number)
                if kind == "admit":
                    one, other = await asyncio.gather(
                        alone.admit(principal, demand, 1000),
                        servers.limiters[server].admit(principal, demand, 1000),
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
                    alone.release(one, number // 2, ran=number % 3 > 0)
                    servers.limiters[server].release(other, number // 2, ran=number % 3 > 0)
                    for _ in range(10):
                        await asyncio.sleep(0)
                elif kind == "wait":
                    servers.clock.seconds += number / 4
                    servers.clock.wall += number / 4

    run(scenario())


def principal_with(**limits):
    return Principal(tenant="acme", key_id="k1", tenant_limits=Limits(**limits))


def test_two_servers_and_a_real_database(database):
    """200 requests at once: exactly the limit is admitted, and what time has added since the first one."""

    async def scenario():
        limiters = [Limiter(Usage(), table=CountTable(database)) for _ in range(2)]
        principal, began = principal_with(requests_per_minute=50, token_budget=10**6), time.monotonic()
        answers = await asyncio.gather(
            *(limiters[i % 2].admit(principal, Demand((10,), max_tokens=5), 1000) for i in range(200)),
            return_exceptions=True,
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
        _, _, _, (_, _, ended, *_), shares = found[""]
        assert (ended, shares) == (12 * len(tickets), {})

    run(scenario())


def test_places_in_a_real_database(database):
    async def scenario():
        limiters = [Limiter(Usage(), table=CountTable(database)) for _ in range(2)]
        principal, running, most = principal_with(max_concurrent_requests=2), 0, 0

        async def request(limiter):
            nonlocal running, most
            ticket = await limiter.admit(principal, Demand((10,), max_tokens=5), 1000)
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
            await limiter.admit(principal, Demand((10,), max_tokens=5), 1000)
        await refused(limiter.admit(principal, Demand((10,), max_tokens=5), 1000), "requests_per_minute")
        free.set()
        await holding
        await limiter.close()

    run(scenario())


def test_close_does_not_wait_for_turns_that_a_hung_database_has_not_begun(sqlite, monkeypatch):
    monkeypatch.setattr(counts, "CHANGE_SECONDS", 0.05)
    free, begun = threading.Event(), []

    async def scenario():
        table = CountTable(sqlite)
        monkeypatch.setattr(table, "_change", lambda tenant, change: (begun.append(tenant), free.wait(20)))
        for tenant in "abcd":
            await refused_by_database(table.change(tenant, lambda found, now: None))
        free.set()
        await table.close()
        assert begun == ["a", "b"], "a turn whose tenant has gone on alone was taken"

    run(scenario())


async def refused_by_database(change):
    try:
        await change
    except DatabaseUnavailableError:
        return
    raise AssertionError("the database answered")


def test_servers_that_read_a_budget_at_once_count_from_the_same_beginning():
    async def scenario():
        async with in_memory(key=Limits(token_budget=20_000, budget_period="day")) as servers:
            ticket = await servers.admit(0, max_tokens=900)
            await servers.release(0, ticket, 900)
            servers.clock.seconds += 200
            await servers.admit(1, key_id="another")
            servers.usage.tokens = 900
            for ticket in await asyncio.gather(servers.admit(0), servers.admit(1)):
                assert ticket.scopes[0].budget.used == 900

    run(scenario())


def test_who_is_in_a_turn_when_the_server_stops_does_not_queue():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1)) as servers:
            await servers.admit(0)
            asked = asyncio.create_task(servers.admit(0))
            await asyncio.sleep(0)
            servers.limiters[0].refuse_waiting(OverloadedError("stops"))
            await asyncio.wait([asked], timeout=20)
            assert isinstance(asked.exception(), OverloadedError)

    run(scenario())


def test_a_turn_loads_what_it_needs(monkeypatch):
    async def scenario():
        async with in_memory(key=Limits(requests_per_minute=5)) as servers:
            for number in range(5):
                await servers.release(0, await servers.admit(0, key_id=f"k{number}"), 5)
            loaded, load = [], Scope.load
            monkeypatch.setattr(Scope, "load", lambda scope, *args: (loaded.append(scope.key_id), load(scope, *args)))
            await servers.admit(0, key_id="k3")
            assert loaded == ["k3"]
            assert len(json.loads(servers.table.counts["acme"])) == 5

    run(scenario())


def test_a_server_that_stops_in_its_turn_leaves_the_lock(database):
    if database.is_sqlite:
        return  # the lock ends with the process
    table, query = CountTable(database), text("select current_setting('idle_in_transaction_session_timeout')")
    with database.write() as connection:
        table._locked(connection, "acme")
        assert connection.execute(query).scalar_one() == f"{counts.CHANGE_SECONDS:g}s"
    run(table.close())


def test_a_tenant_that_waits_writes_only_to_renew_its_lease():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1, requests_per_minute=60)) as servers:
            await servers.admit(0)
            waiting = asyncio.create_task(servers.admit(1))
            while servers.table.num_reads < 4:  # in the third it says since when it waits
                await asyncio.sleep(0.01)
            before = servers.table.num_writes
            servers.clock.seconds += 1
            while servers.table.num_reads < 7:
                await asyncio.sleep(0.01)
            assert servers.table.num_writes == before
            servers.clock.seconds += LEASE_SECONDS / 4
            while servers.table.num_writes == before:
                await asyncio.sleep(0.01)
            waiting.cancel()

    run(scenario())
