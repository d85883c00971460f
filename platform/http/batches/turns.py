"""Turns of lines: which may be sent now, so that batches leave room for the requests of clients that wait.

A line runs when all hold:
- fewer than `max_lines` lines of all batches run;
- the engine has a free seat, so that no client's request waits behind it;
- its tenant has a free slot, and half of the tenant's slots are left to its clients (`max_concurrent_requests`).

Those who wait are let in by their order, and one that may not run yet does not block the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from ...tenancy.accounts.principal import Principal

LOOK_SECONDS = 0.02
"""Seconds between two looks at what clients use, while lines wait."""


class Load(NamedTuple):
    """Present load of the server."""

    has_seat: bool
    """True if the engine could run one more sequence at once."""
    max_lines: int


class _Waiter(NamedTuple):
    principal: Principal
    turn: asyncio.Future[None]


class Turns:
    """Turns of all lines of a server. Belongs to its event loop."""

    def __init__(self, load: Callable[[], Load], has_slot: Callable[[Principal], bool]) -> None:
        """`has_slot` returns True if the limits let one more sequence of a principal run at once."""
        self._load = load
        self._has_slot = has_slot
        self._waiting: list[_Waiter] = []
        self._running: Counter[str] = Counter()  # by tenant
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        """Lines that run."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Lines that wait for their turn."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, principal: Principal) -> AsyncIterator[None]:
        """A context in which one line of the principal runs."""
        waiter = _Waiter(principal, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._look()
        try:
            await waiter.turn
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self._running[principal.tenant] -= 1
                self._running += Counter()  # without zeros
            self._look()

    def _look(self) -> None:
        """Let in the first one who may run. The next look sees it in the engine: two might take one seat."""
        load = self._load()
        if load.has_seat and self._running.total() < load.max_lines:
            waiter = next((w for w in self._waiting if not w.turn.done() and self._may_run(w.principal)), None)
            if waiter is not None:
                self._waiting.remove(waiter)
                self._running[waiter.principal.tenant] += 1
                waiter.turn.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()

    def _may_run(self, principal: Principal) -> bool:
        bounds = (principal.tenant_limits.max_concurrent_requests, principal.key_limits.max_concurrent_requests)
        slots = min((bound for bound in bounds if bound is not None), default=None)
        if slots is not None and self._running[principal.tenant] >= max(1, slots // 2):
            return False
        return self._has_slot(principal)
