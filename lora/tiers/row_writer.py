"""Copies of adapters from host memory to their rows on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..adapter import Adapter
from ..device.layout import PackedModules
from ..device.pool import Allocation
from ..device.sites import RowSites


class RowWriter:
    """Writes adapters to the rows of the target's sites and of the drafter's."""

    def __init__(
        self,
        sites: Sequence[RowSites],
        device: torch.device,
        on_write: Callable[[Allocation, PackedModules], None] | None = None,
    ) -> None:
        """`on_write`: see `AdapterHooks`."""
        self._sites = sites
        self._on_write = on_write
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # other than the one that steps use

    @property
    def on_gpu(self) -> bool:
        """True when rows are in a GPU's memory."""
        return self._device.type == "cuda"

    def prepare(self, adapter: Adapter) -> Adapter:
        """Return the adapter in memory that the device can read: for a GPU pinned memory. Thread-safe."""
        if not self.on_gpu:
            return adapter
        return replace(adapter, target=_pin_memory(adapter.target), drafter=_pin_memory(adapter.drafter))

    def writing(self, allocation: Allocation, adapter: Adapter) -> Callable[[], None]:
        """Return the function that writes an adapter's rows, for any thread; call this in the thread that steps.

        When the function returns, the rows are written and may be used by any stream.
        """
        if not self.on_gpu:
            return lambda: self._write(allocation, adapter)
        # Steps in flight may still read these rows for their previous owner.
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(self._device))

        def write() -> None:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_event(before)
            with torch.cuda.stream(self._stream):
                self._write(allocation, adapter)
            self._stream.synchronize()

        return write

    def _write(self, allocation: Allocation, adapter: Adapter) -> None:
        if self._on_write is not None:
            self._on_write(allocation, adapter.target)
        for sites, packed in zip(self._sites, adapter.packed, strict=True):
            sites.write(allocation, packed)


def _pin_memory(packed: PackedModules) -> PackedModules:
    linears, vocabulary = (part._replace(data=part.data.pin_memory()) for part in packed[:2])
    return packed._replace(linears=linears, vocabulary=vocabulary)
