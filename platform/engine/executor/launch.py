"""Starts the other ranks: the contract, and its implementation with processes of this machine. `ray_launch` has actors
of Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ...core.config import EngineConfig
from ...core.errors import invalid
from ...core.threads import usable_cores

LOAD_TIMEOUT = timedelta(hours=1)
"""Longest time until a rank's weights are loaded."""
THIS_MACHINE = "127.0.0.1"
"""Address of a rank if all ranks are on one machine: it is not reachable from the network."""


class RankSite(NamedTuple):
    """Location of a rank."""

    address: str
    """Its machine's address for the other ranks."""
    num_local: int
    """Ranks on its machine, which share the cores."""
    num_threads: int
    """Threads that compute, on a CPU."""
    device_index: int
    """Its GPU, among those that it sees."""


class RemoteRank(Protocol):
    """A rank other than the first, as rank 0 sees it."""

    link: socket.socket
    """Socket to it, for `messages`."""

    def ended(self) -> str | None:
        """Cause of its end; None: it runs, or the reason is unknown."""

    def end(self) -> None:
        """Kill it."""


class Launch(Protocol):
    """Started ranks. It kills them when it is closed, and if it cannot start all."""

    sites: list[RankSite]
    """Sites of all ranks, this process first."""
    remote: list[RemoteRank]
    """The ranks from 1 on."""
    store: list[Any]
    """Address of the store by which the ranks find each other: ["file", path], or ["tcp", host, port]."""

    def open_store(self) -> Any:
        """This process's store of torch.distributed at that address."""

    def close(self) -> None:
        """Kill the ranks and free their resources."""


class RankProcess:
    """A rank in a process of this machine."""

    def __init__(self, num_threads: int) -> None:
        self.link, theirs = socket.socketpair()
        with theirs:
            # A process group of its own: Ctrl-C in the terminal does not reach it. A new program, not a fork: it runs
            # no code of the user's script. `-P`: no folder of the caller's comes before the standard library.
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
        """See `RemoteRank`. Waits a little: its socket closes before the system reports its exit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit status {self._process.wait(0.5)}"
        return None

    def end(self) -> None:
        """See `RemoteRank`."""
        self.link.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; `subprocess` reaps it later
            self._process.wait(5.0)


class ProcessLaunch:
    """Ranks in processes of this machine. Implements `Launch`."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; InvalidRequestError: there are too few devices."""
        size = config.num_ranks
        if config.device == "cuda" and torch.cuda.device_count() < size:
            raise invalid("tensor_parallel_size", f"{size} needs as many GPUs; there are {torch.cuda.device_count()}")
        num_threads = max(1, usable_cores() // size)
        self.sites = [RankSite(THIS_MACHINE, size, num_threads, rank) for rank in range(size)]
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
        self.store: list[Any] = ["file", str(Path(self._folder.name) / "store")]
        self.remote: list[RemoteRank] = []
        try:
            for site in self.sites[1:]:
                self.remote.append(RankProcess(site.num_threads))
        except BaseException:
            self.close()
            raise

    def open_store(self) -> Any:
        """See `Launch`."""
        from .collectives import open_store

        return open_store(self.store, len(self.sites))

    def close(self) -> None:
        """See `Launch`."""
        for rank in self.remote:
            rank.end()
        self.remote.clear()
        self._folder.cleanup()
