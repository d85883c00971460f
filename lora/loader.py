"""The thread that does what would hold up a step: it reads adapters and writes them to the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ..kernels.threads import compute_alone
from ..platform.core.errors import OutriderError
from .peft_config import adapter_error

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


class Jobs(Generic[T]):
    """Jobs to be done: long ones and short ones, each in their order. Where both wait they take turns, so that a short
    one waits for one long one at most, and no stream of short ones holds up a long one."""

    def __init__(self) -> None:
        self._short: deque[Job[T]] = deque()
        self._long: deque[Job[T]] = deque()
        self._long_next = False

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def push(self, job: Job[T], *, short: bool) -> None:
        """One more job."""
        (self._short if short else self._long).append(job)

    def pop(self) -> Job[T]:
        """The next job; IndexError when there is none."""
        takes_long = bool(self._long) and (self._long_next or not self._short)
        self._long_next = not takes_long
        return (self._long if takes_long else self._short).popleft()

    def clear(self) -> None:
        """Forget all."""
        self._short.clear()
        self._long.clear()


class Loader(Generic[T]):
    """Does one job after another in a thread of its own; results are handed over by `poll` and `wait`.

    Belongs to one thread, except for the work itself. Whatever a job raises is its own result.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._jobs: Jobs[T] = Jobs()
        self._done: deque[Done[T]] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.num_in_flight = 0
        """Submitted and not yet handed over."""

    def submit(self, ticket: T, work: Callable[[], Any], what: str, *, short: bool = False) -> None:
        """Have `work` done; see `Jobs` for when.

        The result carries `ticket`. `what` names the work where it fails, such as "load the adapter 'x'".
        """
        if self._thread is None:
            self._closed = False
            self._thread = threading.Thread(target=self._run, name="lora-loader", daemon=True)
            self._thread.start()
        self.num_in_flight += 1
        with self._changed:
            self._jobs.push(Job(ticket, work, what), short=short)
            self._changed.notify_all()

    def poll(self) -> list[Done[T]]:
        """Jobs that have ended since the last call, without waiting."""
        results: list[Done[T]] = []
        while self._done:  # only this thread takes from it
            results.append(self._done.popleft())
        self.num_in_flight -= len(results)
        return results

    def wait(self, timeout: float) -> list[Done[T]]:
        """The same, but wait up to `timeout` seconds for the first when any is under way."""
        if self.num_in_flight:
            with self._changed:
                self._changed.wait_for(lambda: self._done, timeout)
        return self.poll()

    def close(self) -> None:
        """End the thread after the job under way; those not begun are dropped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._closed = True
            self.num_in_flight -= len(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        thread.join()

    def _run(self) -> None:
        compute_alone()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.pop()
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
