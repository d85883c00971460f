"""Calls that are made once for all callers of the same moment, and not again soon after a failure."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ....core.errors import OutriderError
from .workers import Workers

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class TimedMemory(Generic[K, T]):
    """Remembers values for a while, the newest ones where there are too many. Not thread-safe."""

    def __init__(self, max_entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[K, tuple[T, float]] = OrderedDict()

    def get(self, key: K) -> tuple[T] | None:
        """The value, in a tuple since it may be None; None when there is none or its time is over."""
        entry = self._entries.get(key)
        if entry is None or self._clock() >= entry[1]:
            self._entries.pop(key, None)
            return None
        return (entry[0],)

    def put(self, key: K, value: T, seconds: float) -> None:
        """Remember a value."""
        self._entries[key] = (value, self._clock() + seconds)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def drop(self, key: K) -> None:
        """Forget a value, if it is there."""
        self._entries.pop(key, None)


class SharedCalls(Generic[T]):
    """Calls by key. Any thread may ask; the functions run in `workers`."""

    _MAX_FAILURES = 4096

    def __init__(self, workers: Workers, failure_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A call that failed is answered with the same error for `failure_seconds`."""
        self._workers = workers
        self._failure_seconds = failure_seconds
        self._lock = threading.RLock()
        self._running: dict[Hashable, Future[T]] = {}
        self._failures: TimedMemory[Hashable, OutriderError] = TimedMemory(self._MAX_FAILURES, clock)

    def call(self, key: Hashable, function: Callable[[], T]) -> Future[T]:
        """The result of `function`, or of the call with this key that is under way.

        Raises:
            OutriderError: the error of a call that failed just now; OverloadedError: too many wait.
        """
        with self._lock:
            running = self._running.get(key)
            if running is not None:
                return running
            failure = self._failures.get(key)
            if failure is not None:
                error = failure[0]
                raise type(error)(error.message, param=error.param)  # not the object itself: it has a traceback
            future = self._running[key] = self._workers.submit(function)
        future.add_done_callback(lambda done: self._end(key, done))
        return future

    def _end(self, key: Hashable, future: Future[T]) -> None:
        with self._lock:
            self._running.pop(key, None)
            error = future.exception()
            if isinstance(error, OutriderError):
                self._failures.put(key, error, self._failure_seconds)
