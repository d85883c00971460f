"""Starts the other ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Protocol


class RemoteRank(Protocol):
    """A rank other than the first, as rank 0 sees it."""

    link: socket.socket
    """Socket to it, for `messages`."""

    def ended(self) -> str | None:
        """How it ended; None: it has not, or nobody knows."""

    def end(self) -> None:
        """End it by force."""


class RankProcess:
    """A rank in a process of this machine."""

    def __init__(self, num_threads: int) -> None:
        self.link, theirs = socket.socketpair()
        with theirs:
            # A group of its own: an interrupt typed in the terminal is not for it. A program that is started, not a
            # copy of this process: it runs no code of the user's script. `-P`: no folder of the caller's comes before
            # the standard library.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.rank_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ended(self) -> str | None:
        """See `RemoteRank`. Waits a little: its socket closes before the system says that it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit status {self._process.wait(0.5)}"
        return None

    def end(self) -> None:
        """See `RemoteRank`."""
        self.link.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; `subprocess` reaps it later
            self._process.wait(5.0)
