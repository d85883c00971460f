"""Statistics of an engine's adapters."""

from __future__ import annotations

from typing import NamedTuple

from ...platform.core.messages import AdapterInfo


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
