"""Threads for work that would hold up a step: one for reads, one for writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ...kernels.threads import compute_alone

T = TypeVar("T")


class LoaderThreads(Generic[T]):
    """Runs jobs in two threads, each in its order: long ones in one, short ones, which wait for no long one, in the
    other. `poll` and `wait` return the results.

    Belongs to one thread, except for the jobs themselves. A job must not raise: a failure is its result.
    """

    def __init__(self) -> None:
        self._jobs: dict[bool, SimpleQueue[Callable[[], T] | None]] = {}  # by whether they are short
        self._threads: list[threading.Thread] = []
        self._results: SimpleQueue[T] = SimpleQueue()
        self.num_in_flight = 0
        """Jobs submitted whose results have not been returned yet."""

    def submit(self, job: Callable[[], T], *, short: bool = False) -> None:
        """Run a job in a thread."""
        if short not in self._jobs:
            self._jobs[short] = SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self._jobs[short],), name="lora-loader", daemon=True)
            self._threads.append(thread)
            thread.start()
        self.num_in_flight += 1
        self._jobs[short].put(job)

    def add_result(self, result: T) -> None:
        """Add the result of work that the calling thread did itself."""
        self.num_in_flight += 1
        self._results.put(result)

    def poll(self) -> list[T]:
        """Return the results since the last call, without waiting."""
        results: list[T] = []
        while not self._results.empty():  # only this thread takes from it
            results.append(self._results.get())
        self.num_in_flight -= len(results)
        return results

    def wait(self, timeout: float) -> list[T]:
        """Wait up to `timeout` seconds for the first result, unless no job is in flight."""
        if not self.num_in_flight:
            return []
        try:
            first = self._results.get(timeout=timeout)
        except Empty:
            return []
        self.num_in_flight -= 1
        return [first, *self.poll()]

    def close(self) -> None:
        """Stop the threads after the jobs in flight; jobs not begun are dropped."""
        for jobs in self._jobs.values():
            while not jobs.empty():
                try:
                    jobs.get_nowait()
                except Empty:  # the thread has taken it
                    break
                self.num_in_flight -= 1
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._jobs, self._threads = {}, []

    def _run(self, jobs: SimpleQueue[Callable[[], T] | None]) -> None:
        compute_alone()
        while (job := jobs.get()) is not None:
            self._results.put(job())
            job = None  # an unloaded adapter must not stay in memory until the next job
