"""Turns: how what reads adapters lets the threads that compute steps go on."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from typing import Protocol

from ...platform.core.threads import give_way as give_up_lock

_LOCK_SECONDS = 0.5e-3
"""For which a thread keeps Python's lock from the one that steps, at most."""
_WORK_SECONDS = 0.5e-3
_REST = 3.0
"""Times as long as it worked that the reader process pauses, where processors are scarce."""
_ASIDE_SECONDS = 0.05
"""Seconds for which it stands aside at most while one long step comes after another."""
_LOOK_SECONDS = 1e-3
"""Seconds between two looks whether they have ended."""
_PROMPT_TOKENS = 8
"""Tokens from which a row counts as part of a prompt."""


class StepSignal:
    """A byte of memory in which the process that steps tells the reader's that a long step is under way: one with
    prompts beside sequences that decode. These wait for their next token longer than usual then, and for nobody else.
    """

    def __init__(self, descriptor: int) -> None:
        """Descriptor of the file in memory, which may be closed then."""
        self._memory = mmap.mmap(descriptor, 1)
        self._is_set = False

    @staticmethod
    def make() -> int:
        """The descriptor of a new one; not set."""
        descriptor = os.memfd_create("outrider-steps", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 1)
        return descriptor

    def step(self, counts: Iterable[int]) -> None:
        """A step begins, with rows of so many tokens."""
        long = [count >= _PROMPT_TOKENS for count in counts]
        if (any(long) and not all(long)) != self._is_set:
            self._is_set = not self._is_set
            self._memory[0] = self._is_set

    def is_set(self) -> bool:
        """State that the other process said last."""
        return bool(self._memory[0])


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

    def __init__(self, signal: StepSignal | None = None) -> None:
        """`signal`: of the process that steps."""
        self._signal = signal
        self._patience = _ASIDE_SECONDS
        self._since = time.thread_time()
        self._num_processors = len(os.sched_getaffinity(0))
        self._load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> None:
        used = time.thread_time() - self._since
        if used < _WORK_SECONDS:
            return
        if self._num_runnable() > self._num_processors:
            time.sleep(_REST * used)
            self._stand_aside()
        self._since = time.thread_time()

    def _stand_aside(self) -> None:
        """Wait for the end of a long step, but not of many in a row: who waits for an adapter has patience, too."""
        while self._signal is not None and self._signal.is_set():
            if self._patience <= 0:
                return
            self._patience -= _LOOK_SECONDS
            time.sleep(_LOOK_SECONDS)
        self._patience = _ASIDE_SECONDS

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
