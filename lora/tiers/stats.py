"""Statistics of the engine's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...platform.core.messages import AdapterInfo
from ..registry.registry import AdapterRegistry
from ..registry.versions import AdapterVersion
from .residency import Residency


class AdapterStats(NamedTuple):
    """A snapshot for the engine's statistics."""

    adapters: list[AdapterInfo]
    """Registered ones that are in memory or in use."""
    running: list[str]
    """Names with admitted requests."""
    waiting: list[str]
    """Names with requests to be admitted."""
    load_seconds: list[float]
    """Durations of the latest loads that ended since the last snapshot, failed ones too."""
    num_adapters: int = 0
    """Registered."""
    host_bytes: int = 0
    rows_used: int = 0
    """Rank rows of the device that are some adapter's, or still being written for one that is gone."""
    num_rows: int = 0
    """Rank rows of the device."""
    load_failures: int = 0
    """Loads that brought no adapter, so far."""
    device_evictions: int = 0
    """Adapters that made way for others on the device, so far."""
    host_evictions: int = 0
    """Adapters that made way for others in host memory, so far."""


def describe(version: AdapterVersion, residency: Residency) -> AdapterInfo:
    """One version as users see it."""
    return AdapterInfo(
        name=version.name,
        path=version.path,
        digest=version.digest.hex() if version.digest else "",
        rank=version.rank,
        rows=version.rows,
        level=residency.level(version.digest),
        pinned=version.pinned,
        num_running=len(version.running),
        draft=version.draft,
        num_waiting=len(version.waiting),
        num_bytes=version.num_bytes,
        load_seconds=version.load_seconds,
    )


def snapshot(registry: AdapterRegistry, residency: Residency, load_seconds: list[float]) -> AdapterStats:
    """The statistics now. Takes as long as memory holds adapters, however many are registered."""
    pool = residency.pool
    in_use = list(registry.in_use())
    return AdapterStats(
        adapters=[describe(version, residency) for version in _present(registry, residency)],
        running=sorted({version.label for version in in_use if version.running}),
        waiting=sorted({version.label for version in in_use if version.waiting}),
        load_seconds=load_seconds,
        num_adapters=len(registry),
        host_bytes=residency.host.num_bytes,
        rows_used=pool.num_rows - pool.num_free,
        num_rows=pool.num_rows,
        load_failures=registry.num_failures,
        device_evictions=residency.num_device_evictions,
        host_evictions=residency.num_host_evictions,
    )


def _present(registry: AdapterRegistry, residency: Residency) -> Iterator[AdapterVersion]:
    """Current versions with requests, or with content in memory."""
    found = {version: None for digest in residency.host for version in registry.with_content(digest)}
    return (version for version in {**found, **dict.fromkeys(registry.in_use())} if version.current)
