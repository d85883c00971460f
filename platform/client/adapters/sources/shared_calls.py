"""Calls in threads, made once for all callers of the same moment, with answers that are kept for a while."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

from ....core.errors import OutriderError, OverloadedError

T = TypeVar("T")

_MAX_KEPT = 4096
"""Most cached answers; the oldest are evicted."""


class SharedCalls:
    """Calls by key, in at most `max_threads` daemon threads: a store that does not answer must not keep the process
    from ending. Any thread may ask."""

    def __init__(
        self, name: str, max_threads: int, max_waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._max_threads = max_threads
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: OrderedDict[Hashable, tuple[Future[Any], float]] = OrderedDict()  # with the end of its time
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(max_waiting)
        self._num_threads = 0
        self._num_unfinished = 0  # calls that wait or run

    def call(
        self, key: Hashable, function: Callable[[], T], keep_seconds: float = 0.0, nothing_seconds: float = 0.0
    ) -> Future[T]:
        """The result of `function`, or of the call with this key that is in flight or whose answer is kept.

        Args:
            keep_seconds: time for which the answer is kept.
            nothing_seconds: time for which an answer of None, or a typed error, is kept.

        Raises:
            OverloadedError: too many calls wait already.
        """
        with self._lock:
            future, end = self._calls.get(key, (None, 0.0))
            if future is not None and self._clock() < end:
                return future
            future = Future()
            try:
                self._queue.put_nowait(lambda: self._run(key, future, function, keep_seconds, nothing_seconds))
            except queue.Full:
                raise OverloadedError(f"{self._queue.maxsize} adapters are waiting to be fetched already") from None
            self._keep(key, future, float("inf"))
            self._num_unfinished += 1
            if self._num_threads < min(self._num_unfinished, self._max_threads):
                self._num_threads += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return future

    def drop(self, key: Hashable) -> None:
        """Forget the answer of a key."""
        with self._lock:
            self._calls.pop(key, None)

    def fail_waiting(self, error: OutriderError) -> None:
        """Let all who wait now have `error`; the results of what runs for them are dropped."""
        with self._lock:
            waiting = [(key, future) for key, (future, _) in self._calls.items() if not future.done()]
            for key, future in waiting:
                del self._calls[key]
                with contextlib.suppress(InvalidStateError):  # it has just come
                    future.set_exception(error)

    def _keep(self, key: Hashable, future: Future[Any], end: float) -> None:
        self._calls[key] = (future, end)
        self._calls.move_to_end(key)
        now = self._clock()
        while self._calls and (len(self._calls) > _MAX_KEPT or next(iter(self._calls.values()))[1] <= now):
            self._calls.popitem(last=False)  # answers may be large

    def _serve(self) -> None:
        while True:
            self._queue.get()()
            with self._lock:
                self._num_unfinished -= 1

    def _run(
        self, key: Hashable, future: Future[T], function: Callable[[], T], keep_seconds: float, nothing_seconds: float
    ) -> None:
        try:
            result = function()
        except BaseException as error:
            seconds = nothing_seconds if isinstance(error, OutriderError) else 0.0
            self._end(key, future, seconds, partial(future.set_exception, error))
        else:
            seconds = nothing_seconds if result is None else keep_seconds
            self._end(key, future, seconds, partial(future.set_result, result))

    def _end(self, key: Hashable, future: Future[Any], seconds: float, settle: Callable[[], None]) -> None:
        with self._lock:
            if self._calls.get(key, (None, 0.0))[0] is future:
                del self._calls[key]
                if seconds > 0:
                    self._keep(key, future, self._clock() + seconds)
        with contextlib.suppress(InvalidStateError):  # no caller is waiting any more
            settle()
