"""Yielding to the engine's step: code that reads adapters lets the threads that compute a step run first."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..platform.core.threads import yield_lock as release_gil

_GIL_SECONDS = 0.5e-3
"""Longest time for which a loader thread keeps Python's lock (the GIL) from the thread that steps."""
_WORK_SECONDS = 0.5e-3
"""Processor time of a thread between two checks of the machine's load."""
_MOST_SECONDS = 10e-3
"""Longest working time that counts between two calls: a thread of a pool may have done other work since the last."""
_PAUSE_RATIO = 3.0
"""Length of a pause, in multiples of the working time before it, if processors are scarce."""
_LARGE_PAUSE_RATIO = 12.0
"""Length of a pause for a large adapter, in multiples of the working time before it: its work would delay steps for a
second or more (docs/decisions/0008)."""
LARGE_BYTES = 64 << 20
"""Memory that reading an adapter takes, in bytes, from which it is large."""
_MAX_WAIT_SECONDS = 0.05
"""Longest time for which the reader process waits while one long step follows another."""
_POLL_SECONDS = 1e-3
"""Time between two checks of the flag of long steps."""
_LOAD = Path("/proc/loadavg")
_PROMPT_TOKENS = 8
"""Tokens from which a row counts as part of a prompt."""


class LongStepFlag:
    """A byte of shared memory, set by the engine's process while a long step runs: one with both prompts and decodes.
    The decoding sequences wait longer than usual for their next token, so the reader process pauses."""

    def __init__(self, descriptor: int) -> None:
        """Map the file of `create`; the descriptor may be closed then."""
        self._memory = mmap.mmap(descriptor, 1)
        self._is_set = False

    @staticmethod
    def create() -> int:
        """Create a file in memory for a flag, which is not set. Returns its descriptor."""
        descriptor = os.memfd_create("outrider-steps", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 1)
        return descriptor

    def update(self, counts: Iterable[int]) -> None:
        """Set or clear the flag for a step that starts, by the number of tokens of each row."""
        long = [count >= _PROMPT_TOKENS for count in counts]
        if (any(long) and not all(long)) != self._is_set:
            self._is_set = not self._is_set
            self._memory[0] = self._is_set

    def is_set(self) -> bool:
        """Return the state last written by the engine's process."""
        return bool(self._memory[0])


class GilYielder(threading.local):
    """Releases the GIL now and then, in threads other than the one that steps. Each thread has its own time."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self) -> None:
        """Release the GIL when this thread has had it for some time."""
        if time.perf_counter() - self._since > _GIL_SECONDS:
            release_gil()
            self._since = time.perf_counter()


@functools.cache
def _opened(path: Path) -> int:
    """Descriptor of a file, opened once: reading it takes 3 µs, opening and reading it 23 µs."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class CpuYielder(threading.local):
    """Pauses a thread of a process other than the engine's while more threads want to run than there are processors.
    Each thread has its own time.

    The threads of an operation wait for each other, so one without a processor delays all of them. The operating system
    would preempt a thread for a clock tick at a time (4 ms, the step of a small model), whatever their niceness. Many
    short pauses cost each step only a little.
    """

    def __init__(self, flag: LongStepFlag | None = None) -> None:
        """Pause also while `flag` is set."""
        self._flag = flag
        self._pause_ratio = _PAUSE_RATIO
        self._check: Callable[[], None] | None = None
        self._wait_left = _MAX_WAIT_SECONDS
        self._since = time.thread_time()
        self._num_processors = len(os.sched_getaffinity(0))

    def begin(self, num_bytes: int, check: Callable[[], None] | None = None) -> None:
        """Choose the length of this thread's pauses for an adapter whose reading takes `num_bytes` of memory. With
        `check` it makes no pauses, and calls that instead, which may raise."""
        self._pause_ratio = _LARGE_PAUSE_RATIO if num_bytes >= LARGE_BYTES else _PAUSE_RATIO
        self._check = check

    def __call__(self) -> None:
        """Pause when this thread has worked for some time and processors are scarce."""
        if self._check is not None:
            self._check()
            return
        used = min(time.thread_time() - self._since, _MOST_SECONDS)
        if used < _WORK_SECONDS:
            return
        if self._num_runnable() > self._num_processors:
            time.sleep(self._pause_ratio * used)
            self._wait_for_long_step()
        self._since = time.thread_time()

    def _wait_for_long_step(self) -> None:
        """Wait for the end of a long step, but not of many in a row: requests wait for the adapter, too."""
        while self._flag is not None and self._flag.is_set():
            if self._wait_left <= 0:
                return
            self._wait_left -= _POLL_SECONDS
            time.sleep(_POLL_SECONDS)
        self._wait_left = _MAX_WAIT_SECONDS

    def _num_runnable(self) -> int:
        """Number of runnable threads, this one included: 1 of "0.20 0.18 0.12 1/80 11206"; 0 if it is unknown."""
        try:
            return int(os.pread(_opened(_LOAD), 64, 0).split(b"/")[0].rsplit(b" ")[-1])
        except (OSError, ValueError):  # ValueError: the program has closed all files, and this is another one
            return 0


_yielder: Callable[[], None] = GilYielder()


def set_yielder(yielder: Callable[[], None]) -> None:
    """Choose how this process yields from now on."""
    global _yielder
    _yielder = yielder


def yield_to_steps() -> None:
    """Yield to steps, if it is time. Called between two pieces of work of at most some 100 µs."""
    _yielder()
