"""NamedLocks: order of work on what has a name."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class NamedLocks:
    """A lock for each name; names without a holder or waiter take no memory."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> asyncio.Lock:
        """The lock of a name."""
        return self._locks.setdefault(name, asyncio.Lock())
