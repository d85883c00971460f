"""Recording of device work, which is then replayed with one launch instead of hundreds.

A recording holds addresses and constants. Inputs that differ between replays must be in tensors that keep their
addresses. Tensors that the work allocates belong to the recordings, which share one pool of memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]


class Captured(NamedTuple):
    """Recorded work and its outputs."""

    outputs: tuple[Tensor, ...]
    """Tensors that the work returned. A replay writes them again; the next replay of any recording of the backend may
    overwrite them."""
    replay: Callable[[], None]
    """Run the work again with the present contents of its inputs. The host does not wait."""


class GraphBackend(Protocol):
    """Method of recording work on a device."""

    def capture(self, work: Work) -> Captured:
        """Record `work`. It may run several times meanwhile; `outputs` are valid after a replay only.

        Raises:
            RuntimeError: it cannot be recorded, or there is no memory for it.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory; they run serially in one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Captured:
        """See GraphBackend."""
        # The first run is not recorded: kernels are compiled and libraries allocate workspaces, which a capture
        # forbids.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # freeing memory may call the driver in the middle of a capture
        try:
            with torch.cuda.stream(self._stream):
                # Calls of other threads to the driver, which load adapters meanwhile, do not fail the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return Captured(outputs, graph.replay)
