"""From a read adapter to its rows on the device: what the loader's threads do for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..adapter import Adapter
from ..device.layout import ModelLayout, PackedModules, PackedWeights
from ..device.pool import Allocation
from ..device.sites import AdapterSites


class HostEntry(NamedTuple):
    """One adapter in host memory."""

    adapter: Adapter
    """Its tensors are views of what follows."""
    packed: tuple[PackedModules, ...]
    """As it is copied to the target's sites, and to the drafter's."""
    num_bytes: int
    """Memory that it takes."""


class Placer:
    """Packs adapters and writes them to device rows. Everything but `writing` is for the loader's threads."""

    def __init__(self, sites: Sequence[AdapterSites], device: torch.device) -> None:
        """`sites`: the target's, and the drafter's."""
        self._sites = sites
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # beside the one that steps use

    @property
    def on_gpu(self) -> bool:
        """Return whether rows are in a GPU's memory."""
        return self._device.type == "cuda"

    @property
    def layouts(self) -> list[ModelLayout]:
        """Layouts of the target's rows and of the drafter's."""
        return [sites.layout for sites in self._sites]

    def pack(self, adapter: Adapter) -> HostEntry:
        """Make an adapter ready to be copied."""
        parts = (adapter.modules, adapter.draft_modules)
        return self.adopt(adapter, [sites.pack(modules) for sites, modules in zip(self._sites, parts, strict=True)])

    def adopt(self, adapter: Adapter, packed: Sequence[PackedModules]) -> HostEntry:
        """An adapter that is packed already, whose own tensors are not kept; for a GPU in memory that it can read by
        itself (pinned)."""
        if self.on_gpu:
            packed = [_pinned(part) for part in packed]
        target, draft = (PackedWeights(sites.layout, part) for sites, part in zip(self._sites, packed, strict=True))
        num_bytes = sum(part.num_bytes for part in packed)
        return HostEntry(replace(adapter, modules=target, draft_modules=draft), tuple(packed), num_bytes)

    def writing(self, allocation: Allocation, entry: HostEntry) -> Callable[[], None]:
        """The work of writing an adapter's rows, for any thread; made by the thread that steps.

        When it returns, the rows are written and may be used by any stream.
        """
        if not self.on_gpu:
            return lambda: self._write(allocation, entry)
        # Steps under way may still read these rows for their former owner.
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(self._device))

        def write() -> None:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_event(before)
            with torch.cuda.stream(self._stream):
                self._write(allocation, entry)
            self._stream.synchronize()

        return write

    def _write(self, allocation: Allocation, entry: HostEntry) -> None:
        for sites, part in zip(self._sites, entry.packed, strict=True):
            sites.write(allocation, part)


def _pinned(packed: PackedModules) -> PackedModules:
    linears, vocabulary = (part._replace(data=part.data.pin_memory()) for part in packed[:2])
    return packed._replace(linears=linears, vocabulary=vocabulary)
