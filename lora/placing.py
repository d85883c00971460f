"""From a read adapter to its rows on the device: what the loader's thread does for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .adapter import Adapter, LoraWeights
from .pool import Allocation
from .sites import AdapterSites, PackedModules


class HostEntry(NamedTuple):
    """One adapter in host memory."""

    adapter: Adapter
    """Its tensors are views of what follows."""
    packed: tuple[PackedModules, ...]
    """As it is copied to the target's sites, and to the drafter's."""
    num_bytes: int
    """Memory that it takes."""


class Placer:
    """Packs adapters and writes them to device rows. Everything but `writing` is for the loader's thread."""

    def __init__(self, sites: Sequence[AdapterSites], device: torch.device) -> None:
        """`sites`: the target's, and the drafter's."""
        self._sites = sites
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # beside the one that steps use

    def pack(self, adapter: Adapter) -> HostEntry:
        """Make an adapter ready to be copied; for a GPU in memory that it can read by itself (pinned)."""
        parts = (adapter.modules, adapter.draft_modules)
        packed = tuple(
            _pinned(sites.pack(modules)) if self._device.type == "cuda" else sites.pack(modules)
            for sites, modules in zip(self._sites, parts, strict=True)
        )
        target, draft = (
            _as_views(modules, sites.views(part))
            for modules, sites, part in zip(parts, self._sites, packed, strict=True)
        )
        gains = [weights.gain for weights in (*target.values(), *draft.values()) if weights.gain is not None]
        num_bytes = sum(part.num_bytes for part in packed) + sum(gain.nbytes for gain in gains)
        return HostEntry(replace(adapter, modules=target, draft_modules=draft), packed, num_bytes)

    def writing(self, allocation: Allocation, entry: HostEntry) -> Callable[[], None]:
        """The work of writing an adapter's rows, to be done in the loader's thread; made by the thread that steps.

        When it returns, the rows are written and may be used by any stream.
        """
        if self._device.type != "cuda":
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


def _as_views(modules: Mapping[str, LoraWeights], views: Mapping[str, LoraWeights]) -> dict[str, LoraWeights]:
    """The same weights without memory of their own."""
    return {name: weights._replace(a=views[name].a, b=views[name].b) for name, weights in modules.items()}


def _pinned(packed: PackedModules) -> PackedModules:
    linears, vocabulary = (part._replace(data=part.data.pin_memory()) for part in packed[:2])
    return packed._replace(linears=linears, vocabulary=vocabulary)
