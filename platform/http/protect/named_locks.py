"""NamedLocks: order of work on what has a name."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class NamedLocks:
    """A lock for each name, such as a tenant's: who holds it before it waits for a thread waits for one piece of work
    of each other tenant at most, however much one of them sends."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of those who wait or work

    def of(self, name: str) -> asyncio.Lock:
        """The lock of a name."""
        return self._locks.setdefault(name, asyncio.Lock())
