"""How long a GPU was at what was launched, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Timer(Protocol):
    """Runs from when it is made."""

    def stop(self) -> None:
        """What is launched from now on does not count."""
        ...

    def seconds(self) -> float:
        """That the device took; waits for it."""
        ...


class CudaTimer:
    """Two events of the current stream."""

    def __init__(self) -> None:
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        """See Timer."""
        self._end.record()

    def seconds(self) -> float:
        """See Timer."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000.0  # milliseconds


class HostTimer:
    """Where what runs meanwhile is the host's own work, of any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin = self._end = clock()

    def stop(self) -> None:
        """See Timer."""
        self._end = self._clock()

    def seconds(self) -> float:
        """See Timer."""
        return self._end - self._begin
