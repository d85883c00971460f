"""Servers that count their tenants' limits together, in one process."""

import asyncio
import json
from contextlib import asynccontextmanager

from limit_helpers import Clock, Usage

from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.database.connection import DatabaseUnavailableError
from outrider.platform.tenancy.limits.buckets import SECOND
from outrider.platform.tenancy.limits.demand import Demand
from outrider.platform.tenancy.limits.limiter import Limiter
from outrider.platform.tenancy.limits.shared_counts import LEASE_SECONDS


class MemoryTable:
    """A `CountTable` whose time is the test's, and that may be away."""

    def __init__(self, clock):
        self.clock, self.counts, self.is_away, self.is_read_only = clock, {}, False, False
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
            if self.is_read_only:
                raise DatabaseUnavailableError("read-only")
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
        demand = Demand((prompt,), max_tokens=max_tokens, room=(1000 - prompt,), **options)
        return await self.limiters[server].admit(self.principal(key_id), demand)

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
