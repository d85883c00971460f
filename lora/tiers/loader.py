"""The threads that do what would hold up a step: one reads adapters, one writes them to the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ...kernels.threads import compute_alone
from ...platform.core.errors import OutriderError
from ..files.peft_config import adapter_error

T = TypeVar("T")


class Done(NamedTuple, Generic[T]):
    """A job that has ended: with its result, or with the reason why there is none."""

    ticket: T
    result: Any
    error: OutriderError | None
    seconds: float


class Job(NamedTuple, Generic[T]):
    """Work to be done; see `Loader.submit`."""

    ticket: T
    work: Callable[[], Any]
    what: str


class Loader(Generic[T]):
    """Does jobs in two threads of its own, long ones in one and short ones, which wait for no long one, in the other,
    each in their order, or at once (`do`); results are handed over by `poll` and `wait`.

    Belongs to one thread, except for the work itself. Whatever a job raises is its own result.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._jobs: dict[bool, deque[Job[T]]] = {False: deque(), True: deque()}  # by whether they are short
        self._done: deque[Done[T]] = deque()
        self._closed = False
        self._threads: dict[bool, threading.Thread] = {}
        self.num_in_flight = 0
        """Submitted and not yet handed over."""

    def submit(self, ticket: T, work: Callable[[], Any], what: str, *, short: bool = False) -> None:
        """Have `work` done.

        The result carries `ticket`. `what` names the work where it fails, such as "load the adapter 'x'".
        """
        if short not in self._threads:
            self._closed = False
            self._threads[short] = threading.Thread(target=self._run, args=(short,), name="lora-loader", daemon=True)
            self._threads[short].start()
        self.num_in_flight += 1
        with self._changed:
            self._jobs[short].append(Job(ticket, work, what))
            self._changed.notify_all()

    def do(self, ticket: T, work: Callable[[], Any], what: str) -> None:
        """Do it at once, in the calling thread: for what takes less time than two threads take to make way."""
        done: Done[T] = Done(ticket, None, adapter_error(f"cannot {what}: interrupted"), 0.0)
        self.num_in_flight += 1
        try:
            done = _do(Job(ticket, work, what))
        finally:  # an interrupt from the keyboard comes out, and leaves no job behind
            self._done.append(done)

    def poll(self) -> list[Done[T]]:
        """Jobs that have ended since the last call, without waiting."""
        results: list[Done[T]] = []
        while self._done:  # only this thread takes from it
            results.append(self._done.popleft())
        self.num_in_flight -= len(results)
        return results

    def wait(self, timeout: float) -> list[Done[T]]:
        """Wait up to `timeout` seconds for the first when any is under way."""
        if self.num_in_flight:
            with self._changed:
                self._changed.wait_for(lambda: self._done, timeout)
        return self.poll()

    def close(self) -> None:
        """End the threads after the jobs under way; those not begun are dropped."""
        with self._changed:
            self._closed = True
            for jobs in self._jobs.values():
                self.num_in_flight -= len(jobs)
                jobs.clear()
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join()
        self._threads.clear()

    def _run(self, short: bool) -> None:
        compute_alone()
        jobs = self._jobs[short]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: jobs or self._closed)
                if self._closed:
                    return
                job = jobs.popleft()
            done = _do(job)
            with self._changed:
                self._done.append(done)
                self._changed.notify_all()
            del job, done  # an adapter that is unloaded must not live on here until the next job


def _do(job: Job[T]) -> Done[T]:
    started = time.perf_counter()
    result: Any = None
    error: OutriderError | None = None
    try:
        result = job.work()
    except OutriderError as caught:
        error = caught
    except Exception as caught:  # whatever a job runs into, out of memory too, the thread lives on for the others
        error = adapter_error(f"cannot {job.what}: {type(caught).__name__}: {caught}")
    return Done(job.ticket, result, error, time.perf_counter() - started)
