"""A few daemon threads for calls that may hang: a store that does not answer must not keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ....core.errors import OverloadedError

T = TypeVar("T")


class Workers:
    """Runs calls in at most `max_threads` threads, which start when they are needed."""

    def __init__(self, name: str, max_threads: int, max_waiting: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(max_waiting)
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_unfinished = 0  # calls that wait or run

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` soon.

        Raises:
            OverloadedError: too many calls wait already.
        """
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise OverloadedError(f"{self._calls.maxsize} adapters are waiting to be fetched already") from None
        with self._lock:
            self._num_unfinished += 1
            if self._num_threads < min(self._num_unfinished, self._max_threads):
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            call()
            with self._lock:
                self._num_unfinished -= 1
