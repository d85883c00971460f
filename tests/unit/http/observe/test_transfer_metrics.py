"""Metrics of each adapter's loads and evictions, and of KV events."""

from prometheus_client.parser import text_string_to_metric_families

from outrider.platform.core.messages import AdapterTransfers, EngineStats
from outrider.platform.http.observe import series_labels
from outrider.platform.http.observe.prometheus_metrics import Metrics


def samples(metrics, name):
    """Values of a counter by its labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = [s for family in families for s in family.samples if s.name == f"outrider:{name}_total"]
    return {tuple(s.labels.values()): s.value for s in found}


def test_loads_and_evictions_by_adapter_and_level():
    metrics = Metrics()
    transfers = [AdapterTransfers("sql", {"host": 3, "device": 2}, {"host": 1}), AdapterTransfers("json", {"host": 1})]
    metrics.update(EngineStats(run_id="1", lora_transfers=transfers))
    assert samples(metrics, "lora_adapter_loads") == {("sql", "host"): 3, ("sql", "device"): 2, ("json", "host"): 1}
    assert samples(metrics, "lora_adapter_evictions") == {("sql", "host"): 1}
    metrics.update(EngineStats(run_id="2", lora_transfers=[AdapterTransfers("sql", {"host": 1})]))
    assert samples(metrics, "lora_adapter_loads")["sql", "host"] == 4, "counters do not fall"


def test_adapters_beyond_the_bound_are_added_up(monkeypatch):
    monkeypatch.setattr(series_labels, "MAX_ADAPTERS", 2)
    metrics = Metrics()
    transfers = [AdapterTransfers(f"a{i}", {"host": 1}, {"device": 2}) for i in range(50)]
    metrics.update(EngineStats(lora_transfers=transfers))
    assert samples(metrics, "lora_adapter_loads") == {("a0", "host"): 1, ("a1", "host"): 1, ("other", "host"): 48}
    assert samples(metrics, "lora_adapter_evictions")["other", "device"] == 96


def test_batches_of_kv_events():
    metrics = Metrics()
    metrics.update(EngineStats(run_id="1", kv_event_batches=9, kv_event_batches_dropped=4))
    metrics.update(EngineStats(run_id="2", kv_event_batches=2))
    assert samples(metrics, "kv_event_batches") == {(): 11}
    assert samples(metrics, "kv_event_batches_dropped") == {(): 4}
