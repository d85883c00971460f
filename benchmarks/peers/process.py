"""Worker processes on the driver's side: started, asked, and stopped while others run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SETTLE_SECONDS = 0.05


class WorkerError(Exception):
    """Error of a worker that failed, ended or did not answer; the message says which."""


def descendants(pid: int) -> list[int]:
    """Ids of a process and of its running descendants, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:  # grows while it is read
        found += children.get(parent, [])
    return found


def peak_rss(pid: int) -> int:
    """Peak of a process's resident memory so far, in bytes; 0 when it has ended."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class Worker:
    """Worker: one engine with one model in one mode. Between questions all its processes are stopped (SIGSTOP), so that
    an engine whose idle threads spin (vLLM's do, on one core) takes nothing from the others."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, timeout: float) -> None:
        """Start it and wait until it is ready; `log` gets what it prints.

        Raises:
            WorkerError: it did not become ready.
        """
        self._timeout = timeout
        self._log = log
        self._received = b""
        self._peaks: dict[int, int] = {}
        started = time.perf_counter()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C is for the driver
            )
        try:
            self.ready = self._read()
            self.start_seconds = time.perf_counter() - started
            time.sleep(_SETTLE_SECONDS)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask for a round; returns the answer. The worker computes only during this call.

        Raises:
            WorkerError: it failed and cannot be asked again.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read()
        except BrokenPipeError:
            raise WorkerError(self._ended()) from None
        for pid in descendants(self._process.pid):
            self._peaks[pid] = max(peak_rss(pid), self._peaks.get(pid, 0))
        self._signal(signal.SIGSTOP)
        return answer

    @property
    def peak_bytes(self) -> int:
        """Sum of the peaks of resident memory of its processes, up to the last answer; shared pages count in each."""
        return sum(self._peaks.values())

    def close(self) -> None:
        """Kill all its processes."""
        pids = descendants(self._process.pid) if self._process.poll() is None else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _read(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            WorkerError: no answer came, or an error came.
        """
        for line in self._lines(time.monotonic() + self._timeout):
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise WorkerError(answer["error"])
            return answer
        raise WorkerError(self._ended())

    def _lines(self, deadline: float) -> Iterator[bytes]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while True:
            line, separator, rest = self._received.partition(b"\n")
            if separator:
                self._received = rest
                yield line
                continue
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"no answer in {self._timeout:g} seconds")
            received = os.read(descriptor, 65536)
            if not received:
                return
            self._received += received

    def _ended(self) -> str:
        status = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with status {status}; last line: {lines[-1].strip()[:300] if lines else 'none'}"
