"""Wake-ups of the consumers of running requests when a step has brought tokens.

Each wake-up costs the consumer's whole way out: counts for metrics, JSON, a system call for its socket. If the
engine computes on the same cores, its steps lack that time. So with many requests at once and short steps a consumer is
not woken for every token; it finds several of them the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .output_processor import RequestState

WAKE_UP_SECONDS = 80e-6
"""Time of a core that one wake-up costs."""
MAX_CORE_SHARE = 0.25
"""Share of a core that wake-ups may cost."""
MIN_INTERVAL = 2e-3
"""Seconds below which a wait is not worth it: up to six requests are woken by every step."""
MAX_INTERVAL = 50e-3
"""Longest wait in seconds; a stream of such pieces reads as well."""


class Consumer:
    """The consumer of one running request."""

    __slots__ = ("_event", "is_held", "woken_at")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.woken_at = float("-inf")
        """Time of the last wake-up, by the loop's clock."""
        self.is_held = False
        """True when there is output for which it has not been woken, and which it has not taken."""

    @property
    def is_woken(self) -> bool:
        """True when `wait` returns at once."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait for output."""
        await self._event.wait()

    def wake(self) -> None:
        """Let `wait` return."""
        self.is_held = False
        self._event.set()

    def taken(self) -> None:
        """Note that the consumer has taken all output that there was."""
        self.is_held = False
        self._event.clear()


class StreamPacer:
    """The consumers by request id. One thread only, the event loop's."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while there is no consumer."""
        self.idle.set()
        self.shares_cores = False
        """True when the engine computes on this machine's cores; else every step wakes all its consumers."""
        self._consumers: dict[str, Consumer] = {}
        self._held: list[Consumer] = []  # some may not be held any more
        self._timer: asyncio.TimerHandle | None = None  # set while some are held

    def __len__(self) -> int:
        return len(self._consumers)

    def open(self, request_id: str) -> Consumer:
        """The consumer of a new request."""
        consumer = self._consumers[request_id] = Consumer()
        self.idle.clear()
        return consumer

    def close(self, request_id: str, consumer: Consumer) -> None:
        """Drop a consumer that has its last output, or has gone. May be called twice."""
        consumer.is_held = False
        if self._consumers.get(request_id) is consumer:  # not a later request with the same id
            del self._consumers[request_id]
        if not self._consumers:
            self.idle.set()

    def wake(self, request_id: str) -> None:
        """Wake a consumer now; unknown ids are ignored."""
        consumer = self._consumers.get(request_id)
        if consumer is not None:
            consumer.wake()

    def wake_all(self, states: Sequence[RequestState]) -> None:
        """Wake the consumers of the requests that one step advanced: now for first tokens, an end or a failure; for
        other tokens when the last wake-up is long enough ago."""
        loop = asyncio.get_running_loop()
        now, interval = loop.time(), self._interval(len(states))
        for state in states:
            consumer = self._consumers.get(state.request_id)
            if consumer is None:
                continue
            if state.finished or now - consumer.woken_at >= interval:
                consumer.woken_at = now
                consumer.wake()
            elif not consumer.is_held:
                consumer.is_held = True
                self._held.append(consumer)
        self._held = [consumer for consumer in self._held if consumer.is_held]
        if self._held and self._timer is None:
            self._timer = loop.call_later(interval, self._wake_held)
        elif not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _interval(self, num_consumers: int) -> float:
        """Least seconds between two wake-ups of a consumer, when one step advances this many."""
        interval = num_consumers * WAKE_UP_SECONDS / MAX_CORE_SHARE if self.shares_cores else 0.0
        return min(interval, MAX_INTERVAL) if interval >= MIN_INTERVAL else 0.0

    def _wake_held(self) -> None:
        """The next step takes long: held consumers do not wait for it."""
        held, self._held, self._timer = self._held, [], None
        now = asyncio.get_running_loop().time()
        for consumer in held:
            if consumer.is_held:
                consumer.woken_at = now
                consumer.wake()
