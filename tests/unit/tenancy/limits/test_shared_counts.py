"""Turns of servers with shared limits: their reads, writes and waits."""

import asyncio
import json
import threading

import pytest
from limit_helpers import run
from shared_limit_helpers import Servers, in_memory
from sqlalchemy import text

from outrider.platform.core.errors import OverloadedError
from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.database.connection import DatabaseUnavailableError
from outrider.platform.tenancy.database.schema import limit_counts
from outrider.platform.tenancy.limits import counts
from outrider.platform.tenancy.limits.counts import CountTable
from outrider.platform.tenancy.limits.scopes import Scope
from outrider.platform.tenancy.limits.shared_counts import LEASE_SECONDS


def test_close_does_not_wait_for_queued_turns_of_a_hung_database(sqlite, monkeypatch):
    monkeypatch.setattr(counts, "CHANGE_SECONDS", 0.05)
    free, begun = threading.Event(), []

    async def scenario():
        table = CountTable(sqlite)
        monkeypatch.setattr(table, "_change", lambda tenant, change: (begun.append(tenant), free.wait(20)))
        for tenant in "abcd":
            await refused_by_database(table.change(tenant, lambda found, now: None))
        free.set()
        await table.close()
        assert len(begun) <= counts.NUM_THREADS, "a turn whose tenant has gone on alone was taken"

    run(scenario())


async def refused_by_database(change):
    try:
        await change
    except DatabaseUnavailableError:
        return
    raise AssertionError("the database answered")


def test_concurrent_budget_readings_start_from_the_same_count():
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


def test_a_budget_is_read_although_counts_cannot_be_written(sqlite):
    async def scenario():
        table = CountTable(sqlite)
        table._insert = text("insert into no_table values (1)")
        servers = Servers(table, Limits(token_budget=100, budget_period="day"), num=1)
        await servers.admit(0)
        await servers.close()

    run(scenario())


def test_a_request_in_a_turn_at_shutdown_does_not_queue():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1)) as servers:
            await servers.admit(0)
            asked = asyncio.create_task(servers.admit(0))
            await asyncio.sleep(0)
            servers.limiters[0].refuse_waiting(OverloadedError("stops"))
            await asyncio.wait([asked], timeout=20)
            assert isinstance(asked.exception(), OverloadedError)

    run(scenario())


def test_a_request_cancelled_in_a_turn_frees_its_slot():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1)) as servers:
            asked = asyncio.create_task(servers.admit(0))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked], timeout=20)
            assert asked.cancelled()
            ticket = await asyncio.wait_for(servers.admit(0), 20)
            await servers.release(0, ticket, 0)

    run(scenario())


def test_a_turn_loads_only_the_rows_it_needs(monkeypatch):
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
        pytest.skip("the lock ends with the process")
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


def test_tenants_that_another_server_holds_hold_up_no_other(database):
    if database.is_sqlite:
        pytest.skip("it has one lock of all writers")
    held, free = threading.Semaphore(0), threading.Event()

    def hold(found, now):
        held.release()
        free.wait(20)

    async def other_server(tenant):
        table = CountTable(database)
        await table.change(tenant, hold)
        await table.close()

    async def scenario():
        locked = [chr(ord("a") + number) for number in range(counts.NUM_THREADS)]
        others = [asyncio.create_task(asyncio.to_thread(asyncio.run, other_server(tenant))) for tenant in locked]
        for _ in locked:
            await asyncio.to_thread(held.acquire)
        table = CountTable(database)
        waiting = [asyncio.create_task(table.change(tenant, lambda found, now: None)) for tenant in locked]
        await asyncio.sleep(0)
        await table.change("free", lambda found, now: None)
        assert not any(task.done() for task in waiting)
        free.set()
        await asyncio.gather(*waiting, *others)
        await table.close()

    run(scenario())


def test_a_lock_timeout_refuses_the_tenant_for_a_moment(sqlite, monkeypatch):
    monkeypatch.setattr(counts, "CHANGE_SECONDS", 0.05)
    free = threading.Event()

    async def scenario():
        table = CountTable(sqlite)
        monkeypatch.setattr(table, "_change", lambda tenant, change: tenant != "locked" or free.wait(20))
        await refused_by_database(table.change("locked", lambda found, now: None))
        monkeypatch.setattr(counts, "CHANGE_SECONDS", 20)
        await table.change("other", lambda found, now: None)
        await refused_by_database(table.change("locked", lambda found, now: None))  # at once
        free.set()
        await table.close()

    run(scenario())


def test_counts_of_another_version_are_begun_again(sqlite):
    with sqlite.write() as connection:
        connection.execute(
            limit_counts.insert(), {"tenant": "acme", "counts": {"": [0, [], [], [1, 2, 3, 4, 5, 6], {}]}}
        )
    seen = []

    async def scenario():
        table = CountTable(sqlite)
        for _ in range(2):
            await table.change("acme", lambda found, now: seen.append(found) or {"k": [1]})
        await table.close()

    run(scenario())
    assert seen == [{}, {"k": [1]}]


def test_the_first_arrival_gets_the_last_slot_of_a_turn():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1)) as servers:
            running = await servers.admit(0)
            first = asyncio.create_task(servers.admit(0))
            await asyncio.sleep(0)
            servers.limiters[0].release(running, 0)
            second = asyncio.create_task(servers.admit(0))
            ticket = await first
            assert not second.done()
            await servers.release(0, ticket, 0)
            await second

    run(scenario())


def test_a_waiting_request_is_known_to_all_servers_after_its_first_turn():
    async def scenario():
        async with in_memory(Limits(max_concurrent_requests=1)) as servers:
            running = await servers.admit(0)
            first = asyncio.create_task(servers.admit(1))
            while servers.table.num_writes < 2:
                await asyncio.sleep(0)
            servers.clock.seconds += 1
            servers.limiters[0].release(running, 0)
            second = asyncio.create_task(servers.admit(0))
            await first
            assert not second.done()
            second.cancel()

    run(scenario())
