"""Worker processes on the driver's side: started, asked, and stopped while others run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

_SETTLE_SECONDS = 0.05


class WorkerError(Exception):
    """Error of a worker that failed, ended or did not answer; the message says which."""


def processes(pid: int) -> list[psutil.Process]:
    """A process and its running descendants, parents first; empty when it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


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
            self._each(psutil.Process.suspend)
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask for a round; returns the answer. The worker computes only during this call.

        Raises:
            WorkerError: it failed and cannot be asked again.
        """
        self._each(psutil.Process.resume)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read()
        except BrokenPipeError:
            raise WorkerError(self._ended()) from None
        for process in processes(self._process.pid):
            self._peaks[process.pid] = max(peak_rss(process.pid), self._peaks.get(process.pid, 0))
        self._each(psutil.Process.suspend)
        return answer

    @property
    def peak_bytes(self) -> int:
        """Sum of the peaks of resident memory of its processes, up to the last answer; shared pages count in each."""
        return sum(self._peaks.values())

    def close(self) -> None:
        """Kill all its processes."""
        self._each(psutil.Process.kill)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in processes(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)

    def _read(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            WorkerError: no answer came, or an error came.
        """
        assert self._process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._each(psutil.Process.kill)  # ends the wait for a line

        timeout = threading.Timer(self._timeout, give_up)
        timeout.start()
        line = self._process.stdout.readline()
        timeout.cancel()
        if not line:
            raise WorkerError(f"no answer in {self._timeout:g} seconds" if is_late.is_set() else self._ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _ended(self) -> str:
        status = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with status {status}; last line: {lines[-1].strip()[:300] if lines else 'none'}"
