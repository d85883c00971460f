"""Statistics of an engine's adapters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

from ...platform.core.labels import AdapterLabels
from ...platform.core.messages import AdapterInfo, AdapterTransfers


class AdapterStats(NamedTuple):
    """A snapshot for the engine's statistics."""

    adapters: list[AdapterInfo]
    """Registered adapters that are in memory or in use."""
    running: list[str]
    """Names with admitted requests."""
    waiting: list[str]
    """Names with requests to be admitted."""
    load_seconds: list[float]
    """Durations of the loads that ended since the last snapshot, failed ones too; the latest thousand."""
    num_adapters: int = 0
    """Registered adapters."""
    host_bytes: int = 0
    rows_used: int = 0
    """Rank rows of the device that belong to an adapter, or are still being written for one that is gone."""
    num_rows: int = 0
    """Rank rows of the device."""
    load_failures: int = 0
    """Loads that failed so far."""
    device_evictions: int = 0
    """Adapters evicted from the device so far."""
    host_evictions: int = 0
    """Adapters evicted from host memory so far."""
    transfers: Sequence[AdapterTransfers] = ()
    """Loads and evictions by adapter."""


MAX_NAMES = 2000
"""Adapters with counts of their own, and as many mixes."""


class AdapterCounts:
    """Loads and evictions by adapter, over the engine's life. The first adapters have counts of their own, the rest
    share that of "other"; none is removed: monitoring needs counters that never fall."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._label = AdapterLabels(max_names, max_names)
        self._counts: dict[str, AdapterTransfers] = {}

    def _of(self, adapter: str) -> AdapterTransfers:
        label = self._label(adapter)
        return self._counts.setdefault(label, AdapterTransfers(label))

    def loaded(self, adapter: str, level: str) -> None:
        """Count a load of an adapter to a level: files that were read, or rows that were written."""
        loads = self._of(adapter).loads
        loads[level] = loads.get(level, 0) + 1

    def evicted(self, adapter: str, level: str) -> None:
        """Count an eviction of an adapter from a level."""
        evictions = self._of(adapter).evictions
        evictions[level] = evictions.get(level, 0) + 1

    def entries(self) -> list[AdapterTransfers]:
        """A copy of them all."""
        return copy.deepcopy(list(self._counts.values()))
