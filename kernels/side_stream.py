"""Work concurrent with other work of a captured graph: a second stream, forked from the first one and joined to it
again.

Outside of a capture there is no second stream: events between single launches cost the host more than they save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Join = Callable[[], None]
"""Function that lets the first stream wait for the work of the second one."""


class SideStream:
    """Second stream of a CUDA device. The work of the two must not depend on each other until they are joined."""

    def __init__(self, device: torch.device) -> None:
        # Short launches go first: a large product, whose blocks fill the multiprocessors, would delay them to its end.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def run(self, work: Callable[[], None]) -> Join:
        """Launch `work` after all launches of the current stream so far, and concurrently with its launches until the
        join. The work allocates no memory: its tensors are those of the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        return lambda: current.wait_stream(self._stream)


@functools.cache
def _side_stream(device: torch.device) -> SideStream:
    return SideStream(device)


def prepare(device: torch.device) -> None:
    """Create the device's second stream, which must not happen during a capture."""
    if device.type == "cuda":
        _side_stream(device)


def run_alongside(work: Callable[[], None], device: torch.device) -> Join:
    """Launch `work` in the second stream while a graph is captured, else at once."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _side_stream(device).run(work)
    work()
    return lambda: None
