"""Work under SCHED_IDLE: a thread runs only while a processor would do nothing otherwise."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class _GivenUpError(BaseException):
    """The result is not wanted any more. No handler of the work's own errors catches it."""


def run_idle(work: Callable[[Callable[[], None]], T], seconds: float, discard: Callable[[T], object]) -> T | None:
    """Run `work` in a thread under SCHED_IDLE and return its result.

    A thread under this policy gives its processor at once to any other thread of its scheduling group that wants it, so
    it does not delay threads that wait for each other. It gets 0.3% of a processor that is never idle, and without
    privileges a thread cannot leave the policy; hence a thread of its own, and a time limit. Threads that `work` starts
    have the policy too.

    Args:
        work: Gets a function to be called every few hundred microseconds. After the time limit it ends the thread,
            which may still take seconds to get there.
        seconds: The time limit.
        discard: Gets a result that comes after the time limit, in that thread.

    Returns:
        None after the time limit, and if the system has no such policy or no room for a thread.
    """
    future: Future[T | None] = Future()

    def check() -> None:
        if future.cancelled():
            raise _GivenUpError

    def run() -> None:
        try:
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        except (AttributeError, OSError):
            if future.set_running_or_notify_cancel():
                future.set_result(None)
            return
        try:
            result = work(check)
        except _GivenUpError:
            return
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        else:
            discard(result)

    try:
        threading.Thread(target=run, name="outrider-idle", daemon=True).start()
    except RuntimeError:  # too many threads
        return None
    try:
        return future.result(seconds)
    except TimeoutError:
        return None if future.cancel() else future.result()
