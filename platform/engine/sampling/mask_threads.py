"""Threads that compute masks concurrently with the engine, which waits a bounded time for them in each step.

The package `llguidance` bounds the states that a token may need, but not the time: a token takes microseconds in nearly
all grammars, and seconds in ambiguous ones. It releases Python's lock meanwhile, so the engine continues without the
sequences that are not ready. Once a thread is stuck, the next step's sequences have another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .grammar_state import GrammarState

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Most threads: that many slow sequences at once delay all others with grammars."""
_thread = threading.local()


@dataclass(slots=True)
class MaskJob:
    """Work on one sequence's state."""

    state: GrammarState
    work: Callable[[float], Any]
    """Called with the deadline, a time of `time.perf_counter`."""
    result: Any = None
    is_done: bool = False


class MaskThreads:
    """The threads, started for the first job."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "grammar-masks")

    def run(self, jobs: Sequence[MaskJob], seconds: float) -> None:
        """Run jobs for at most `seconds`, the quickest of last time first. Jobs that have not started by then never do;
        one that has continues, and its state is busy until it ends."""
        idle = [job for job in jobs if not job.state.is_busy]
        idle.sort(key=lambda job: job.state.seconds / (1 + job.state.num_deferred))
        if idle:
            batch = _Batch(idle, time.perf_counter() + seconds)
            future = self._pool.submit(batch.run)
            if not batch.finished.wait(seconds):
                batch.close()
                future.cancel()  # all threads are busy

    def close(self) -> None:
        """Stop the threads after the jobs that run."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Batch:
    """Jobs of a step, run in one thread until the engine closes the batch."""

    def __init__(self, jobs: Sequence[MaskJob], deadline: float) -> None:
        self.finished = threading.Event()
        self._jobs = jobs
        self._deadline = deadline
        self._lock = threading.Lock()  # held while a job is started or ended
        self._is_closed = False

    def run(self) -> None:
        for job in self._jobs:
            if not job.state.grammar.lock.acquire(blocking=False):
                continue  # another thread is busy with the same grammar
            try:
                with self._lock:
                    if self._is_closed:
                        return
                    job.state.is_busy = True
                result = self._result(job)
                with self._lock:
                    job.state.is_busy = False
                    job.result, job.is_done = result, not self._is_closed
            finally:
                job.state.grammar.lock.release()
        self.finished.set()

    def _result(self, job: MaskJob) -> Any:
        try:
            return job.work(self._deadline)
        except BaseException:  # of the package, whose panics are no Exception: the others continue
            logger.exception("a grammar could not be followed")
            job.state.fail("the grammar could not be followed; the server's log says why")
            return None

    def close(self) -> None:
        with self._lock:
            self._is_closed = True


def consume_without_gil(matcher: Any, token: int) -> bool:
    """Consume a token that fits, while other threads run: the package releases Python's lock for several matchers at
    once alone, so there is another one in each thread."""
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    if not hasattr(_thread, "executor"):
        _thread.executor = LLExecutor(num_threads=1)
        _thread.other = LLMatcher(LLTokenizer("byte"), 'start: "x"', log_level=0)
    fits: bool = _thread.executor.consume_token_par([(matcher, token), (_thread.other, token)])[0]
    return fits
