"""Counts of loads and evictions by adapter."""

from outrider.lora.registry.adapter_stats import AdapterCounts
from outrider.platform.core.messages import AdapterTransfers


def test_the_first_adapters_have_counts_of_their_own():
    counts = AdapterCounts(max_names=2)
    for name in ("a", "b", "c", "d", "a"):
        counts.loaded(name, "host")
    counts.loaded("a", "device")
    counts.evicted("d", "host")
    assert counts.entries() == [
        AdapterTransfers("a", {"host": 2, "device": 1}),
        AdapterTransfers("b", {"host": 1}),
        AdapterTransfers("other", {"host": 2}, {"host": 1}),
    ]
