"""When the consumers of running requests are told that there is something new.

Each telling costs the consumer's way out: counts for metrics, JSON, a system call for its socket. Where the engine
computes on the same cores, that is time that its steps miss. So with many requests at once, and a model whose steps are
short, a consumer is not told of every token by itself; it finds a few at its next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .output_processor import RequestState

PIECE_SECONDS = 80e-6
"""What a telling costs."""
SHARE = 0.25
"""Of a core that tellings may cost..."""
NOTICED_SECONDS, MOST_SECONDS = 2e-3, 50e-3
"""...but nobody waits when it would be for less than the first of these (up to six requests at once), or for longer
than the second, which reads as well as a stream."""


class Consumer:
    """A running request's."""

    __slots__ = ("_event", "held", "told")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.told = float("-inf")
        """When it was told last, by the loop's clock."""
        self.held = False
        """Whether there is something that it has neither been told of nor taken."""

    async def wait(self) -> None:
        """Until there is something new."""
        await self._event.wait()

    def tell(self) -> None:
        """There is."""
        self.held = False
        self._event.set()

    def taken(self) -> None:
        """It has taken all there was."""
        self.held = False
        self._event.clear()


class News:
    """The consumers, by request id. One thread only, the event loop's."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.shares_cores = False
        """Whether the engine computes on this machine's cores; else everybody is told at once."""
        self._consumers: dict[str, Consumer] = {}
        self._held: list[Consumer] = []  # some of them may not be any more
        self._timer: asyncio.TimerHandle | None = None  # while there are any

    def __len__(self) -> int:
        return len(self._consumers)

    def open(self, request_id: str) -> Consumer:
        """A new request's consumer."""
        consumer = self._consumers[request_id] = Consumer()
        self.idle.clear()
        return consumer

    def close(self, request_id: str, consumer: Consumer) -> None:
        """It has its last output, or has gone. May be called twice."""
        consumer.held = False
        if self._consumers.get(request_id) is consumer:  # not a later request with the same id
            del self._consumers[request_id]
        if not self._consumers:
            self.idle.set()

    def tell(self, request_id: str) -> None:
        """Tell a consumer, without delay."""
        consumer = self._consumers.get(request_id)
        if consumer is not None:
            consumer.tell()

    def tell_all(self, states: Sequence[RequestState]) -> None:
        """Tell the consumers of what one step of the engine brought: of a request's first tokens, its end or a failure
        at once, of others in time."""
        loop = asyncio.get_running_loop()
        now, interval = loop.time(), self._interval(len(states))
        for state in states:
            consumer = self._consumers.get(state.request_id)
            if consumer is None:
                continue
            if state.finished or now - consumer.told >= interval:
                consumer.told = now
                consumer.tell()
            elif not consumer.held:
                consumer.held = True
                self._held.append(consumer)
        self._held = [consumer for consumer in self._held if consumer.held]
        if self._held and self._timer is None:
            self._timer = loop.call_later(interval, self._tell_held)
        elif not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _interval(self, num_told: int) -> float:
        """Least time between two tellings of a consumer, in seconds, where a step tells so many."""
        interval = num_told * PIECE_SECONDS / SHARE if self.shares_cores else 0.0
        return min(interval, MOST_SECONDS) if interval >= NOTICED_SECONDS else 0.0

    def _tell_held(self) -> None:
        """The engine takes its time: nobody waits for its next step."""
        held, self._held, self._timer = self._held, [], None
        now = asyncio.get_running_loop().time()
        for consumer in held:
            if consumer.held:
                consumer.told = now
                consumer.tell()
