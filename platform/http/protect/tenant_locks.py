"""TenantLocks: order of work that one thread does for all tenants."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class TenantLocks:
    """A lock for each tenant. Who holds it before it waits for the thread waits for one piece of work of each other
    tenant at most, however much one of them sends."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of tenants that wait or work

    def of(self, tenant: str) -> asyncio.Lock:
        """The tenant's lock."""
        return self._locks.setdefault(tenant, asyncio.Lock())
