"""Metrics of a server with tenants: its limiter's queue and its ledger, as they are when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .series_labels import PREFIX

if TYPE_CHECKING:
    from ...tenancy.service import Tenancy


class TenancyCollector(Collector):
    """Collector that the registry asks for each scrape, on the event loop."""

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        ledger = self._tenancy.ledger.status
        gauges = {
            "limiter_waiting": ("Sequences that wait for their tenant's or key's places.", self._waiting()),
            "ledger_pending_rows": ("Requests that have ended and are not in the database.", ledger.num_pending),
            "ledger_lag_seconds": ("Since the first of them ended; 0 without any.", ledger.lag_seconds),
            "ledger_database_up": ("1 while the ledger's database answers.", float(not ledger.database_is_away)),
            "ledger_accepting": ("1 while new requests can be accounted for.", float(ledger.problem is None)),
            "ledger_journal_bytes": ("Disk that the journal takes.", ledger.journal_bytes),
            "ledger_journal_max_bytes": ("Disk that it may take.", ledger.journal_max_bytes),
        }
        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, help_text, value=value)
        counters = {
            "ledger_rows": ("Requests written to the database.", ledger.num_committed),
            "ledger_commits": ("Transactions that wrote them.", ledger.num_commits),
        }
        for name, (help_text, count) in counters.items():
            yield CounterMetricFamily(PREFIX + name, help_text, value=count)

    def _waiting(self) -> int:
        return self._tenancy.limiter.num_waiting
