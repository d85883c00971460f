"""Totals of speculation over an engine's life, by adapter and tenant."""

from __future__ import annotations

import copy

from ..core.labels import MAX_TENANTS, OTHER, AdapterLabels, LabelValues
from ..core.messages import SpeculationCounts, SpeculationEntry

MAX_PAIRS = 2000
"""Pairs of adapter and tenant with counts of their own."""


class SpeculationTotals:
    """Counts by (adapter, tenant). The first ones have their own, the rest share that of `OTHER`; counts are never
    removed or moved, not even when an adapter is unloaded: monitoring needs counters that never fall."""

    def __init__(self, max_tenants: int = MAX_TENANTS, max_pairs: int = MAX_PAIRS) -> None:
        self._tenant = LabelValues(max_tenants)
        self._mix = AdapterLabels(max_adapters=max_pairs)
        self._max_pairs = max_pairs
        self._counts: dict[tuple[str, str], SpeculationCounts] = {}

    def of(self, adapter: str, tenant: str) -> SpeculationCounts:
        """The counts that this adapter's and tenant's requests are added to; "" is the base model, and no tenant."""
        key = (self._mix(adapter), self._tenant(tenant))
        if key not in self._counts and len(self._counts) >= self._max_pairs:
            key = (OTHER, OTHER)
        return self._counts.setdefault(key, SpeculationCounts())

    def entries(self) -> list[SpeculationEntry]:
        """A copy of those with steps."""
        return [
            SpeculationEntry(adapter, tenant, copy.deepcopy(counts))
            for (adapter, tenant), counts in self._counts.items()
            if counts.steps_by_k
        ]
