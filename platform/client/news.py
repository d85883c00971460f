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
NOTICED_SECONDS = 2e-3
"""...but nobody waits when it would be for less than this: with up to six requests."""


class _Entry:
    """A running request's consumer."""

    __slots__ = ("event", "told")

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.told = float("-inf")
        """When it was told last, by the loop's clock."""


class News:
    """The consumers, by request id. One thread only, the event loop's."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.shares_cores = False
        """Whether the engine computes on this machine's cores; else everybody is told at once."""
        self._entries: dict[str, _Entry] = {}
        self._held: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None  # while any are held

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request_id: str) -> asyncio.Event:
        """The event of a new request's consumer; it clears it itself."""
        entry = self._entries[request_id] = _Entry()
        self.idle.clear()
        return entry.event

    def close(self, request_id: str, event: asyncio.Event) -> None:
        """The consumer has its last output, or has gone. May be called twice."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.event is event:  # not a later request with the same id
            del self._entries[request_id]
            self._held.discard(request_id)
        if not self._entries:
            self.idle.set()

    def tell(self, request_id: str) -> None:
        """Tell a consumer, without delay."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.event.set()

    def tell_all(self, states: Sequence[RequestState]) -> None:
        """Tell those whose requests have news: of a first token, an end or a failure at once, of others in time."""
        now, interval = asyncio.get_running_loop().time(), self._interval()
        for state in states:
            entry = self._entries.get(state.request_id)
            if entry is None:
                continue
            if state.finished or now - entry.told >= interval:
                entry.told = now
                entry.event.set()
                self._held.discard(state.request_id)
            else:
                self._held.add(state.request_id)
        if self._held and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(interval, self._tell_held)
        elif not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _interval(self) -> float:
        """Least time between two tellings of a consumer, in seconds."""
        interval = len(self._entries) * PIECE_SECONDS / SHARE if self.shares_cores else 0.0
        return interval if interval >= NOTICED_SECONDS else 0.0

    def _tell_held(self) -> None:
        """The engine takes its time: nobody waits for its next step."""
        self._timer, now = None, asyncio.get_running_loop().time()
        for request_id in self._held:
            entry = self._entries[request_id]
            entry.told = now
            entry.event.set()
        self._held.clear()
