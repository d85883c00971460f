"""Metrics of clients' connections, as they are when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..protect.connections import Admission
from .series_labels import PREFIX


class ConnectionCollector(Collector):
    """Collector that the registry asks for each scrape."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        admission = self._admission
        gauges = {
            "http_connections": ("Open connections within the bound.", admission.num_open),
            "http_max_connections": ("Their bound.", admission.max_connections),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        counters = {
            "http_connections_refused": ("Connections above the bound.", admission.total_refused),
            "http_clients_dropped": (
                "Connections closed because their clients were too slow.",
                admission.total_dropped,
            ),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value=value)
