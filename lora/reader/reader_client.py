"""The engine's side of the reader process. That process reads adapters; their rows come back in shared memory.

A thread that reads an adapter takes some ten milliseconds of Python, and shares Python's lock with the thread that
steps. A process does not (`reader_process`). The host tier keeps the shared mapping. If the process fails, the caller
reads instead, which only takes longer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from ...platform.core.errors import ErrorInfo, error_from_info
from ...platform.core.threads import usable_cores
from ...platform.core.wire import receive, send
from ..adapter import Adapter, AdapterSource
from ..files.folder import AdapterFiles
from ..step_yield import LongStepFlag
from .reader_messages import decode_adapter, describe

logger = logging.getLogger(__name__)

SWITCH = "OUTRIDER_LORA_READER"
"""Environment variable; "0" switches the reader process off."""

READS_BEFORE = 8
"""Adapters read in a thread before the process is started, so that an engine with few adapters has no such process."""
BYTES_BEFORE = 256 << 20
"""Memory that these reads take, in bytes, after which it is started sooner: one adapter of rank 32 of an 8B model takes
176 MB, and delays steps much longer if a thread reads it."""
START_SECONDS = 60.0
"""Longest time until the process is ready."""
READ_SECONDS = 10.0
"""Longest time until it answers, in addition to the time for the files."""
BYTES_A_SECOND = 5 << 20
"""Bytes of an adapter's files that add one second to that time: 176 MB may take 44 s. The process may wait 13 s for
idle processors, and its pauses make it 8 s after that, or more on a slow machine."""
NICE = 5
"""Niceness added to that of this process: running requests come before one that waits for its adapter."""
_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "THP_MEM_ALLOC_ENABLE": "0",
}
"""Settings of the C allocator. One adapter's memory is reused for the next: allocating fresh memory takes longer than
reading the weights."""
MAX_FAILURES = 3
"""Failures in a row after which it is not started again."""


def shortens_steps(num_computing: int, *, long_steps: bool = False) -> bool:
    """True if reading in another process is possible here, and makes steps shorter.

    It needs a core in addition to the `num_computing` threads of a step, or long steps. Otherwise the process and the
    step wait for each other longer than threads wait for Python's lock.
    """
    return (
        os.environ.get(SWITCH) != "0"
        and bool(sys.executable)
        and hasattr(os, "memfd_create")
        and hasattr(os, "sched_getaffinity")
        and (long_steps or usable_cores() > num_computing)
    )


class AdapterReader:
    """Starts the process on demand and keeps it. Thread-safe: one thread at a time reads."""

    def __init__(self, files: AdapterFiles) -> None:
        """Read adapters as `files` does. The process is not started yet."""
        self._files = files
        self._lock = threading.Lock()  # guards the fields below, except for killing the process
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._ready = False
        self._started = 0.0
        self._num_failures = 0
        self._closed = False
        self._wanted = False
        self._num_bytes = 0  # of requested adapters
        descriptor = LongStepFlag.create()
        self.flag = LongStepFlag(descriptor)
        """Flag of long steps; the thread that steps sets it."""
        self._flag_file = os.fdopen(descriptor, "rb", 0)  # closed with this object
        self.num_reads = 0
        """Requested adapters so far."""
        self.num_answers = 0
        """Adapters that the process has read, or refused."""

    @property
    def pid(self) -> int | None:
        """Id of the process; None when there is none."""
        process = self._process
        return None if process is None else process.pid

    def read(self, source: AdapterSource) -> Adapter | None:
        """Read an adapter. None: the caller must read it, because the process is not ready, gone, busy or too slow, or
        needs the base's weights.

        Raises:
            AdapterError: as in `AdapterFiles.read`.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            found = self._ask(source)
        finally:
            self._lock.release()
        if isinstance(found, ErrorInfo):
            raise error_from_info(found)
        return found

    def _ask(self, source: AdapterSource) -> Adapter | ErrorInfo | None:
        num_bytes = self._files.num_bytes(source)
        self.num_reads += 1
        self._num_bytes += num_bytes
        self._wanted = self._wanted or self.num_reads > READS_BEFORE or self._num_bytes > BYTES_BEFORE
        if not self._is_ready():
            return None
        assert self._connection is not None
        try:
            self._connection.settimeout(READ_SECONDS + num_bytes / BYTES_A_SECOND)
            send(self._connection, source)
            message, memory = receive(self._connection)
            found = self._decode(message, memory)
        except Exception as error:  # it is gone or hangs, or its memory cannot be mapped
            self._failed(f"{type(error).__name__}: {error}")
            return None
        self._num_failures = 0
        return found

    def _decode(self, message: dict[str, Any], memory: list[int]) -> Adapter | ErrorInfo | None:
        try:
            if "unable" in message:
                logger.debug("an adapter is read in a thread: %s", message["unable"])
                return None
            self.num_answers += 1
            if "error" in message:
                return ErrorInfo(*message["error"])
            (descriptor,) = memory
            return decode_adapter(message["adapter"], descriptor, self._files)
        finally:
            for descriptor in memory:
                os.close(descriptor)

    # --- the process ---

    def start(self) -> None:
        """Start the process now."""
        self.wait_ready(0)

    def wait_ready(self, timeout: float) -> bool:
        """Start the process, and wait until it is ready."""
        end = time.monotonic() + timeout
        with self._lock:
            self._wanted = True
            while not self._is_ready() and time.monotonic() < end:
                time.sleep(0.01)
            return self._ready

    def _is_ready(self) -> bool:
        """Return whether the process can read now; start it when enough adapters were read."""
        if self._closed or not self._wanted or self._num_failures >= MAX_FAILURES:
            return False
        if self._process is None:
            self._start()
        elif not self._ready:
            self._check_started()
        return self._ready

    def _start(self) -> None:
        self._started = time.monotonic()
        try:
            self._process = self._spawn()
        except OSError as error:
            self._failed(f"it cannot be started: {error}")
            return
        with contextlib.suppress(OSError):  # unless forbidden
            # From its first instruction on: its imports are a second of work.
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._connection, theirs = socket.socketpair()
        with theirs:
            # A group of its own: an interrupt typed in the terminal is not for it. Not a session: with autogroups Linux
            # gives each session the same share of a core, and its niceness would have no effect. A program that is
            # started, not a copy of this process: it runs no code of the user's script. `-P`: no folder of the caller's
            # comes before the standard library.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            environment = {
                **os.environ,
                **_MEMORY,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            return subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.reader_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def _check_started(self) -> None:
        assert self._connection is not None
        said = select.poll()  # unlike `select` for any descriptor
        said.register(self._connection, select.POLLIN)
        try:
            if said.poll(0):
                self._connection.settimeout(READ_SECONDS)
                receive(self._connection)
                send(self._connection, describe(os.getpid(), self._files), self._flag_file.fileno())
                self._ready = True
            elif time.monotonic() - self._started > START_SECONDS:
                raise TimeoutError(f"it is not ready after {START_SECONDS:.0f} seconds")
        except (OSError, EOFError, ValueError) as error:
            self._failed(str(error))

    def _failed(self, reason: str) -> None:
        self._stop()
        if self._closed:
            return
        self._num_failures += 1
        then = "is not started again" if self._num_failures >= MAX_FAILURES else "is started again when it is needed"
        logger.warning("the adapters' reader process failed (%s); it %s", reason, then)

    def _stop(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        self._ready = False
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; `subprocess` reaps it later
                process.wait(1.0)

    def close(self) -> None:
        """Kill the process and do not restart it. Threads that wait for its answer read instead."""
        self._closed = True
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()  # ends the wait of the thread that has the lock
        with self._lock:
            self._stop()
