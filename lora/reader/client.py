"""The engine's side of the reader process: adapters are read there, and their rows come back in shared memory.

A thread that reads an adapter takes some ten milliseconds of Python, and shares Python's lock with the thread that
steps. So the engine has another process do it (`process`), and maps what it made; the mapping is what the host
tier keeps. Whatever goes wrong with the process costs time and nothing else: the caller then reads by itself.
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
from collections.abc import Sequence
from typing import Any

from ...platform.core.errors import ErrorInfo, error_from_info
from ..adapter import AdapterSource, num_bytes
from ..device.layout import ModelLayout
from ..files.folder import AdapterFiles
from ..tiers.step_signal import StepSignal
from .messages import ReadyRows, decode_adapter, describe, receive, send

logger = logging.getLogger(__name__)

SWITCH = "OUTRIDER_LORA_READER"
"""Environment variable: "0" reads adapters in a thread of the engine's process alone."""

READS_BEFORE = 8
"""Adapters that are read without it first, unless it is started before: who has no more does not pay for a process."""
START_SECONDS = 60.0
"""Seconds within which the process must be ready."""
READ_SECONDS = 10.0
"""Seconds within which it must answer, beside the time for the files."""
BYTES_A_SECOND = 20 << 20
"""Bytes of an adapter's files for which it gets a second more."""
NICE = 5
"""Niceness of the process beyond this one's: requests that run come before one that waits for its adapter."""
_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "THP_MEM_ALLOC_ENABLE": "0",
}
"""Settings of the C allocator: memory of one adapter is used again for the next, as fresh memory takes longer to get
than the weights take to read."""
MAX_FAILURES = 3
"""In a row: then it is not started again."""


def pays(num_computing: int, *, long_steps: bool = False) -> bool:
    """Return whether reading in another process is possible here, and of use: beside the `num_computing` threads of a
    step there is a core for it, or steps are long. In short ones, without a core for it, they would wait for each other
    longer than for Python's lock."""
    return (
        os.environ.get(SWITCH) != "0"
        and bool(sys.executable)
        and hasattr(os, "memfd_create")
        and hasattr(os, "sched_getaffinity")
        and (long_steps or len(os.sched_getaffinity(0)) > num_computing)
    )


class AdapterReader:
    """Starts the process when it is needed and keeps it. For any thread: one at a time reads, others wait."""

    def __init__(self, files: AdapterFiles, layouts: Sequence[ModelLayout]) -> None:
        """Starts nothing. Adapters are read as `files` do and packed as `layouts` do."""
        self._files = files
        self._layouts = layouts
        self._lock = threading.Lock()  # guards what follows, but for the end of the process
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._ready = False
        self._started = 0.0
        self._num_failures = 0
        self._closed = False
        self._wanted = False
        descriptor = StepSignal.make()
        self.signal = StepSignal(descriptor)
        """Signal of long steps; the thread that steps sets it."""
        self._signal = os.fdopen(descriptor, "rb", 0)  # closed with this object
        self.num_reads = 0
        """Adapters asked for so far."""
        self.num_answers = 0
        """Adapters that the process has read, or refused."""

    @property
    def pid(self) -> int | None:
        """Id of the process; None: there is none."""
        process = self._process
        return None if process is None else process.pid

    def read(self, source: AdapterSource) -> ReadyRows | None:
        """An adapter, read and packed; None when the caller must do it: the process is not ready yet, is gone, does not
        answer in time, or cannot tell without the base's weights.

        Raises:
            AdapterError: as in `AdapterFiles.read`.
        """
        with self._lock:
            self.num_reads += 1
            if not self._is_ready():
                return None
            assert self._connection is not None
            try:
                size = num_bytes(source, self._files.draft and self._files.draft.method)
                self._connection.settimeout(READ_SECONDS + size / BYTES_A_SECOND)
                send(self._connection, source)
                message, memory = receive(self._connection)
                found = self._understood(message, memory)
            except Exception as error:  # it is gone or hangs, or its memory cannot be mapped
                self._failed(f"{type(error).__name__}: {error}")
                return None
            self._num_failures = 0
        if isinstance(found, ErrorInfo):
            raise error_from_info(found)
        return found

    def _understood(self, message: dict[str, Any], memory: list[int]) -> ReadyRows | ErrorInfo | None:
        try:
            if "unable" in message:
                logger.debug("an adapter is read in a thread: %s", message["unable"])
                return None
            self.num_answers += 1
            if "error" in message:
                return ErrorInfo(*message["error"])
            (descriptor,) = memory
            return decode_adapter(message["adapter"], descriptor, self._layouts)
        finally:
            for descriptor in memory:
                os.close(descriptor)

    # --- the process ---

    def start(self) -> None:
        """Start the process at once, however few adapters are read."""
        self.wait_ready(0)

    def wait_ready(self, timeout: float) -> bool:
        """Start it, and wait until it can read."""
        end = time.monotonic() + timeout
        with self._lock:
            self._wanted = True
            while not self._is_ready() and time.monotonic() < end:
                time.sleep(0.01)
            return self._ready

    def _is_ready(self) -> bool:
        """Return whether the process can read now. Start it when it is time to."""
        if self._closed or not (self._wanted or self.num_reads > READS_BEFORE) or self._num_failures >= MAX_FAILURES:
            return False
        if self._process is None:
            self._start()
        elif not self._ready:
            self._look_for_start()
        return self._ready

    def _start(self) -> None:
        self._started = time.monotonic()
        try:
            self._process = self._spawn()
        except OSError as error:
            self._failed(f"it cannot be started: {error}")
            return
        with contextlib.suppress(OSError):  # not where it is forbidden
            # From its first instruction on: its imports are a second of work.
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._connection, theirs = socket.socketpair()
        with theirs:
            # A group of its own: an interrupt typed in the terminal is not for it. Not a session: Linux may give each
            # session the same share of a core (autogroups), and its niceness would count for nothing.
            # A program that is started, not a copy of this process: it runs no code of the user's script. `-P`: no
            # folder of the caller's comes before the standard library.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            environment = {
                **os.environ,
                **_MEMORY,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            return subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def _look_for_start(self) -> None:
        assert self._connection is not None
        said = select.poll()  # unlike `select` for any descriptor
        said.register(self._connection, select.POLLIN)
        try:
            if said.poll(0):
                self._connection.settimeout(READ_SECONDS)
                receive(self._connection)
                send(self._connection, describe(os.getpid(), self._files, self._layouts), self._signal.fileno())
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
        """End the process, whatever it does."""
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
        """End the process; who waits for it reads by himself. It is not started any more."""
        self._closed = True
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()  # ends the wait of who has the lock
        with self._lock:
            self._stop()
