"""Threads for work that would delay a step: several for reads, one for writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from ...kernels.threads import compute_alone

T = TypeVar("T")

MAX_BYTES = 2 << 30
"""Bytes of long jobs in flight above which another one waits: 24 adapters of rank 16 of an 8B model."""


class _Done(NamedTuple, Generic[T]):
    """A result, and the bytes that are free again once it has been returned."""

    result: T
    num_bytes: int = 0


class _Job(NamedTuple):
    """A long job."""

    run: Callable[[], Any]
    num_bytes: Callable[[], int]
    """Returns the memory that the job and its result take."""


class LoaderThreads(Generic[T]):
    """Runs long jobs in several threads and short ones, which wait for no long one, in a further thread. `poll` and
    `wait` return the results.

    Jobs of each kind start in the order of `submit`. A long job starts when its bytes fit in addition to those of the
    long jobs in flight, or none is in flight.

    Belongs to one thread, except for the jobs themselves. A job must not raise: a failure is its result.
    """

    def __init__(self, num_threads: int = 1, max_bytes: int = MAX_BYTES) -> None:
        """Run up to `num_threads` long jobs at once, of `max_bytes` together."""
        self._num_threads, self._max_bytes = num_threads, max_bytes
        self._long_jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._short_jobs: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_readers = 0  # threads of long jobs
        self._has_writer = False  # True when there is one of short jobs
        self._num_long = 0  # long jobs so far
        self._results: SimpleQueue[_Done[T]] = SimpleQueue()
        self._next = threading.Lock()  # held by the thread whose job is the next to start
        self._room = threading.Condition()  # guards the next two
        self._num_bytes = 0
        self._closing = False
        self.num_in_flight = 0
        """Jobs submitted whose results have not been returned yet."""

    def submit(self, job: Callable[[], T], *, num_bytes: Callable[[], int] = lambda: 0) -> None:
        """Run a long job. `num_bytes` returns the memory that it takes, until its result has been returned."""
        self.num_in_flight += 1
        self._num_long += 1
        if self._num_readers < min(self._num_threads, self._num_long):
            self._num_readers += 1
            self._start(self._run_long)
        self._long_jobs.put(_Job(job, num_bytes))

    def submit_short(self, job: Callable[[], T]) -> None:
        """Run a short job."""
        self.num_in_flight += 1
        if not self._has_writer:
            self._has_writer = True
            self._start(self._run_short)
        self._short_jobs.put(job)

    def add_result(self, result: T) -> None:
        """Add the result of work that the calling thread did itself."""
        self.num_in_flight += 1
        self._results.put(_Done(result))

    def poll(self) -> list[T]:
        """Return the results since the last call, without waiting."""
        done: list[_Done[T]] = []
        while not self._results.empty():  # only this thread takes from it
            done.append(self._results.get())
        return self._returned(done)

    def wait(self, timeout: float) -> list[T]:
        """Wait up to `timeout` seconds for the first result, unless no job is in flight."""
        if not self.num_in_flight:
            return []
        try:
            first = self._results.get(timeout=timeout)
        except Empty:
            return []
        return [*self._returned([first]), *self.poll()]

    def _returned(self, done: list[_Done[T]]) -> list[T]:
        self.num_in_flight -= len(done)
        num_bytes = sum(part.num_bytes for part in done)
        self._release(num_bytes)
        return [part.result for part in done]

    def _release(self, num_bytes: int) -> None:
        """Free the bytes of jobs. Thread-safe."""
        if num_bytes:
            with self._room:
                self._num_bytes -= num_bytes
                self._room.notify_all()

    def close(self) -> None:
        """Stop the threads after the jobs in flight; jobs not started are dropped."""
        with self._room:
            self._closing = True
            self._room.notify_all()
        for jobs in (self._long_jobs, self._short_jobs):
            while not jobs.empty():
                try:
                    jobs.get_nowait()
                except Empty:  # a thread has taken it
                    break
        for _ in range(self._num_readers):
            self._long_jobs.put(None)
        self._short_jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self.num_in_flight = self._results.qsize()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="lora-loader", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_long(self) -> None:
        compute_alone()
        while (begun := self._begin()) is not None:
            job, num_bytes = begun
            self._results.put(_Done(job.run(), num_bytes))
            del begun, job  # an unloaded adapter must not stay in memory until the next job

    def _begin(self) -> tuple[_Job, int] | None:
        """Wait for a long job, and for room for it; None: there will be no more."""
        with self._next:
            job = self._long_jobs.get()
            if job is None:
                return None
            num_bytes = job.num_bytes()
            with self._room:
                self._room.wait_for(lambda: self._closing or self._fits(num_bytes))
                if self._closing:
                    return None
                self._num_bytes += num_bytes
            return job, num_bytes

    def _fits(self, num_bytes: int) -> bool:
        return not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes

    def _run_short(self) -> None:
        compute_alone()
        while (job := self._short_jobs.get()) is not None:
            self._results.put(_Done(job()))
            job = None
