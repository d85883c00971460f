"""Device work that is recorded once and launched again as a whole: one launch in place of hundreds.

A recording holds addresses and numbers. Whatever differs from one replay to the next must therefore stand in tensors
that stay where they are; tensors that the work makes are the recording's own, and their memory serves other recordings
too as soon as nothing refers to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]


class Captured(NamedTuple):
    """Recorded work."""

    outputs: tuple[Tensor, ...]
    """What it returned. A replay writes them anew; they are good until the next replay of any recording of the backend,
    which may use the same memory."""
    replay: Callable[[], None]
    """Does it again, with what the tensors it reads hold then. The host does not wait."""


class GraphBackend(Protocol):
    """How work is recorded."""

    def capture(self, work: Work) -> Captured:
        """Do `work` and record it: it may run more than once, and `outputs` hold its results only after a replay.

        Raises:
            RuntimeError: it cannot be recorded, or there is no memory for it.
        """
        ...


class CudaGraphs:
    """CUDA graphs whose memory is one pool: they run one after the other, in one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Captured:
        """See GraphBackend."""
        # Once without recording: kernels are compiled and libraries take their workspaces, which a capture forbids.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what it frees may call the driver in the middle of a capture
        try:
            with torch.cuda.stream(self._stream):
                # Other threads load adapters: what they ask of the driver meanwhile is no error.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return Captured(outputs, graph.replay)
