"""Turns: how what reads adapters lets the threads that compute steps go on."""

from __future__ import annotations

import os
import time
from typing import Protocol

from ..platform.core.threads import give_way as give_up_lock

_LOCK_SECONDS = 0.5e-3
"""For which a thread keeps Python's lock from the one that steps, at most."""
_WORK_SECONDS = 0.2e-3
_REST = 3.0
"""The reader process works for so long and then rests for so many times as long, where processors are scarce."""


class Turn(Protocol):
    """Called between two pieces of work, of some 100 µs each at most where adapters are small; may take its time."""

    def __call__(self) -> None: ...


class LockTurns:
    """For a thread beside the one that steps, which wants Python's lock."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self) -> None:
        if time.perf_counter() - self._since > _LOCK_SECONDS:
            give_up_lock()
            self._since = time.perf_counter()


class ProcessorTurns:
    """For a process beside the one that steps, where more threads want to run than there are processors.

    The threads of an operation wait for each other, so that a processor that one of them has to do without is missing
    to all. The scheduler would take it away for a clock tick at a time (4 ms: a step of a small model), whatever the
    priorities; many short absences cost each step a little.
    """

    def __init__(self) -> None:
        self._since = time.thread_time()
        self._num_processors = len(os.sched_getaffinity(0))
        self._load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> None:
        used = time.thread_time() - self._since
        if used < _WORK_SECONDS:
            return
        if self._num_runnable() > self._num_processors:
            time.sleep(_REST * used)
        self._since = time.thread_time()

    def _num_runnable(self) -> int:
        """Threads that run or could, this one included: "0.20 0.18 0.12 1/80 11206"."""
        return int(os.pread(self._load, 100, 0).split(b"/")[0].rsplit(b" ")[-1])


_turn: Turn = LockTurns()


def take_turns(turn: Turn) -> None:
    """How this process does it from now on."""
    global _turn
    _turn = turn


def give_way() -> None:
    """For what reads: let others go on, if it is time."""
    _turn()
