"""A clock and a ledger for limiters, and the ways of their tests; imported by its name."""

import asyncio
from dataclasses import dataclass, field

import pytest

from outrider.platform.core.errors import RateLimitError
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.limits.buckets import SECOND


@dataclass
class Clock:
    seconds: float = 0.0
    wall: float = 1_795_289_400.0  # 2026-11-21T19:30:00Z

    def monotonic_ns(self) -> int:
        return int(self.seconds * SECOND)

    def time(self) -> float:
        return self.wall


@dataclass
class Usage:
    """A ledger that answers when it is let to."""

    tokens: int = 0
    error: Exception | None = None
    asked: list = field(default_factory=list)
    gate: asyncio.Event | None = None
    rows: list = field(default_factory=list)

    def end(self, clock, tokens):
        """Write the row of a request that has ended."""
        self.rows.append((clock.wall, tokens))

    async def __call__(self, tenant, key_id, start, end):
        self.asked.append((tenant, key_id, start, end))
        answer = self.tokens + sum(tokens for ended_at, tokens in self.rows if start <= ended_at < end)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return answer


NUM_KEPT = 1000
"""Scopes that a limiter keeps before it looks for idle ones."""


def crowd(limiter, count=NUM_KEPT):
    """Add the scopes of `count` other tenants, which do nothing."""
    for number in range(count):
        limiter.headers(Principal(tenant=f"tenant {number}", key_id="k", tenant_limits=Limits(requests_per_minute=1)))


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 10))


async def refused(coroutine, param):
    with pytest.raises(RateLimitError) as caught:
        await coroutine
    assert caught.value.param == param
    return caught.value


async def settle():
    for _ in range(8):
        await asyncio.sleep(0)
