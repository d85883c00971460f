"""Run sections in a process of their own, and start another process when it dies, hangs or loses its device.

A kernel that never returns cannot be interrupted, and after an illegal memory access everything that a process does on
a GPU fails. Neither may cost the results of other sections.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from .report import is_over, read, write

GRACE = 10.0
"""Seconds from a section's deadline until its process is killed."""
LOST_DEVICE = 3
"""Exit code of a process that ended to leave the other sections to a new one."""
USAGE = 2
_POLL = 0.1


class Timed(NamedTuple):
    """A section and the time, by `time.monotonic`, after which it begins nothing new."""

    name: str
    ends: float


class UsageError(Exception):
    """Error when no process can run the sections; the process has printed the reason."""


def deadlines(boxes: Sequence[tuple[str, float]], seconds: float) -> list[Timed]:
    """Deadlines of sections (name, box) that begin now. The rest of a section's box is there for the next ones."""
    now = time.monotonic()
    sums = accumulate(box for _, box in boxes)
    return [Timed(name, now + min(end, seconds)) for (name, _), end in zip(boxes, sums, strict=True)]


def drive(
    command: Sequence[str], sections: Sequence[Timed], last: float, folder: Path, on_end: Callable[[], None]
) -> None:
    """Run all sections, each once.

    Args:
        command: command of a process that runs the sections named behind it, as NAME=END.
        last: time by `time.monotonic`; no section ends later, however late those before it were.
        on_end: called whenever a section is over.

    Raises:
        UsageError: the process reports that nothing can run.
    """
    pending = list(sections)
    while pending:
        arguments = [f"{name}={ends}" for name, ends in pending]
        process = subprocess.Popen([*command, *arguments], start_new_session=True)
        try:
            reason = _watch(process, pending, folder, on_end)
        finally:
            _kill(process)
        if pending and process.returncode == USAGE and len(pending) == len(sections):
            raise UsageError
        blamed = pending[:] if process.returncode == USAGE else pending[:1] if reason else []
        for section in blamed:
            _break_off(folder, section.name, reason)
            pending.remove(section)
            on_end()
        if blamed:  # its delay must not shorten the others
            delay = max(0.0, time.monotonic() - blamed[0].ends)
            pending = [Timed(name, min(ends + delay, last)) for name, ends in pending]


def _watch(process: subprocess.Popen[bytes], pending: list[Timed], folder: Path, on_end: Callable[[], None]) -> str:
    """Remove ended sections from `pending` until the process ends or overruns. Returns why the first pending section
    failed; "" when it did not cause the end."""
    while True:
        code = process.poll()
        entries = read(folder)
        while pending and is_over(entries.get(pending[0].name)):
            pending.pop(0)
            on_end()
        if code is not None:
            is_next = bool(pending) and pending[0].name not in entries  # it has not begun
            return "" if code == LOST_DEVICE and is_next else f"its process ended with {code}"
        if pending and time.monotonic() > pending[0].ends + GRACE:
            return f"killed: it did not end in {GRACE:g} s after its time"
        time.sleep(_POLL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _break_off(folder: Path, name: str, reason: str) -> None:
    entry = read(folder).get(name, {"rows": []})
    write(folder, name, entry | {"traceback": reason, "seconds": None})
