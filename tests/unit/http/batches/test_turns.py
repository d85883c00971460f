"""Turns of lines, the clients' requests before them."""

import asyncio

from outrider.platform.http.batches.turns import Load, Turns
from outrider.platform.tenancy.accounts.principal import Limits, Principal

ACME, OTHER = Principal(tenant="acme"), Principal(tenant="other")
BOUND = Principal(tenant="bound", tenant_limits=Limits(max_concurrent_requests=4))


class Server:
    def __init__(self, max_lines: int = 100) -> None:
        self.load = Load(True, max_lines)
        self.full: set[str] = set()
        self.turns = Turns(lambda: self.load, lambda principal: principal.tenant not in self.full)
        self.running: list[str] = []
        self.end = asyncio.Event()

    async def line(self, principal: Principal, end: asyncio.Event | None = None) -> None:
        async with self.turns.turn(principal):
            self.running.append(principal.tenant)
            await (end or self.end).wait()
            self.running.remove(principal.tenant)


def run(scenario, **options) -> None:
    async def main() -> None:
        server = Server(**options)
        async with asyncio.timeout(10):
            await scenario(server)
            assert not server.running

    asyncio.run(main())


def test_no_more_lines_than_may_run():
    async def scenario(server):
        lines = [asyncio.create_task(server.line(ACME)) for _ in range(5)]
        await asyncio.sleep(0.2)
        assert len(server.running) == 2
        server.end.set()
        await asyncio.gather(*lines)

    run(scenario, max_lines=2)


def test_no_line_while_the_engine_has_no_seat():
    async def scenario(server):
        server.load, server_load = Load(False, 100), server.load
        task = asyncio.create_task(server.line(ACME))
        await asyncio.sleep(0.1)
        assert not server.running
        server.load = server_load
        server.end.set()
        await task

    run(scenario)


def test_batch_lines_leave_half_of_a_tenants_slots():
    async def scenario(server):
        server.full = {"acme"}
        lines = [asyncio.create_task(server.line(who)) for who in (ACME, BOUND, BOUND, BOUND, OTHER)]
        await asyncio.sleep(0.3)
        assert sorted(server.running) == ["bound", "bound", "other"]
        server.full = set()
        server.end.set()
        await asyncio.gather(*lines)

    run(scenario)


def test_a_cancelled_line_leaves_the_turn():
    async def scenario(server):
        first, second = (asyncio.create_task(server.line(ACME)) for _ in range(2))
        await asyncio.sleep(0.05)
        third = asyncio.create_task(server.line(ACME, end=asyncio.Event()))
        await asyncio.sleep(0)
        second.cancel()
        third.cancel()
        await asyncio.gather(second, third, return_exceptions=True)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        server.running.clear()
        last = asyncio.create_task(server.line(ACME))
        server.end.set()
        await last

    run(scenario, max_lines=1)
