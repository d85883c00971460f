"""Acceptance of adapters with and without draft weights of their own, from the engine's snapshots.

The engine counts by adapter. What has been added between two snapshots is put down to the state that the adapter had
at the first of them (at the second one, if it was not known before), so that training draft weights and loading an
adapter again with them shows what they bring. Counts between two snapshots around such a change go to the old state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from ...core.adapter_names import label_text
from ...core.messages import EngineStats, SpeculationCounts

DRAFT_IN_USE = "loaded"
"""`AdapterInfo.draft` of an adapter whose draft weights are used."""


class Split(NamedTuple):
    """Counts of one adapter since the server started."""

    with_draft_weights: SpeculationCounts
    without_draft_weights: SpeculationCounts

    @property
    def total(self) -> SpeculationCounts:
        """Sum of both."""
        return _sum(self)


class AcceptanceTotals:
    """Follows the snapshots of an engine, and of those that replace it when it dies."""

    def __init__(self) -> None:
        self._run_id = ""
        self._seen: dict[str, SpeculationCounts] = {}  # this run's counts as of the latest snapshot
        self._has_draft: dict[str, bool] = {}
        self.by_adapter: defaultdict[str, Split] = defaultdict(lambda: Split(SpeculationCounts(), SpeculationCounts()))
        """Counts by adapter name as people see it; "" is the base model."""

    def update(self, stats: EngineStats) -> None:
        """Take a snapshot."""
        if stats.run_id != self._run_id:
            self._run_id, self._seen = stats.run_id, {}
        now: dict[str, SpeculationCounts] = {}
        for entry in stats.speculation:  # one a tenant
            now.setdefault(label_text(entry.adapter), SpeculationCounts()).add(entry.counts)
        states = {label_text(info.name): info.draft == DRAFT_IN_USE for info in stats.adapters}
        for name, counts in now.items():
            new = counts.since(self._seen.get(name, SpeculationCounts()))
            has_draft = self._has_draft.get(name, states.get(name, False))
            self.by_adapter[name][not has_draft].add(new)
        self._seen = now
        # Nothing of adapters that are gone and have no counts, of which there may be any number.
        self._has_draft = {n: s for n, s in (self._has_draft | states).items() if n in states or n in self.by_adapter}

    def total(self) -> SpeculationCounts:
        """All adapters and the base model."""
        return _sum(chain.from_iterable(self.by_adapter.values()))


def _sum(parts: Iterable[SpeculationCounts]) -> SpeculationCounts:
    total = SpeculationCounts()
    for part in parts:
        total.add(part)
    return total
