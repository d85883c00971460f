"""Metric families that a scrape reads where the counts are: of the engine, by its latest snapshot, of clients'
connections, and of tenants."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ...core.adapter_names import label_text
from ...core.labels import OTHER
from ...core.messages import AdapterInfo, EngineStats, LearningEntry, SpeculationCounts
from ..protect.connections import Admission
from .series_labels import PREFIX, Labels, SeriesLabels

if TYPE_CHECKING:
    from ...tenancy.service import Tenancy
    from ..batches.service import Batches

MAX_NAMES = 50
"""Adapters that `lora_requests_info` names in one label."""
_WAITING_REASONS = ("capacity", "adapter_loading", "adapter_rows", "max_loras")
"""Reasons that are shown even while no request waits for them."""


class FamilyCollector(Collector):
    """Collector that makes new families for each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        return self._families()


def _counter(name: str, help_text: str, labels: Labels, values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help_text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauge(name: str, help_text: str, labels: Labels, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, help_text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counters(**counters: tuple[str, float]) -> Iterator[Metric]:
    """Counters without labels, by name: the text of their help, and the value."""
    return (_counter(name, text, (), {(): value}) for name, (text, value) in counters.items())


def _gauges(**gauges: tuple[str, float]) -> Iterator[Metric]:
    """Gauges without labels, likewise."""
    return (_gauge(name, text, (), {(): value}) for name, (text, value) in gauges.items())


# --- connections and tenants ---


def connection_families(admission: Admission) -> Iterator[Metric]:
    """Families of clients' connections."""
    yield from _gauges(
        http_connections=("Open connections within the bound.", admission.num_open),
        http_max_connections=("Their bound.", admission.max_connections),
    )
    yield from _counters(
        http_connections_refused=("Connections above the bound.", admission.total_refused),
        http_clients_dropped=("Connections closed because their clients were too slow.", admission.total_dropped),
    )


def batch_families(batches: Batches) -> Iterator[Metric]:
    """Families of batches, on a server with a folder for them."""
    yield from _gauges(
        batches_running=("Batches that this server runs.", batches.num_running),
        batch_lines_running=("Requests of batches that run.", batches.turns.num_running),
        batch_lines_waiting=("Requests of batches that wait for their turn.", batches.turns.num_waiting),
    )


def tenancy_families(tenancy: Tenancy) -> Iterator[Metric]:
    """Families of the limiter's queue and the ledger, on a server with tenants."""
    ledger = tenancy.ledger.status
    yield from _gauges(
        limiter_waiting=("Sequences that wait for their tenant's or key's slots.", tenancy.limiter.num_waiting),
        ledger_pending_rows=("Requests that have ended and are not in the database.", ledger.num_pending),
        ledger_lag_seconds=("Since the first of them ended; 0 without any.", ledger.lag_seconds),
        ledger_database_up=("1 while the ledger's database answers.", not ledger.database_is_away),
        ledger_accepting=("1 while new requests can be accounted for.", ledger.problem is None),
        ledger_journal_bytes=("Disk that the journal takes.", ledger.journal_bytes),
        ledger_journal_max_bytes=("Disk that it may take.", ledger.journal_max_bytes),
    )
    yield from _counters(
        ledger_rows=("Requests written to the database.", ledger.num_committed),
        ledger_commits=("Transactions that wrote them.", ledger.num_commits),
    )


# --- the engine ---


@dataclass(slots=True)
class EngineCounters:
    """Counters of an engine, over one of its runs or several."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    kv_host_hits: int = 0
    num_preemptions: int = 0
    kv_event_batches: int = 0
    kv_event_batches_dropped: int = 0
    lora_load_failures: int = 0
    lora_evictions: dict[str, int] = field(default_factory=dict)
    """Evicted adapters by the level that they left."""
    lora_loads_of: Counts[Labels] = field(default_factory=Counts)
    """Loads by adapter and the level that it reached."""
    lora_evictions_of: Counts[Labels] = field(default_factory=Counts)
    """Evictions by adapter and the level that it left."""
    speculation: dict[Labels, SpeculationCounts] = field(default_factory=dict)
    """Counts by (adapter, tenant)."""

    def add(self, stats: EngineStats, labels: SeriesLabels) -> None:
        """Add one run's counters, as of a snapshot."""
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        self.kv_host_hits += stats.kv_host_hits
        self.num_preemptions += stats.num_preemptions
        self.kv_event_batches += stats.kv_event_batches
        self.kv_event_batches_dropped += stats.kv_event_batches_dropped
        self.lora_load_failures += stats.lora_load_failures
        for level, count in stats.lora_evictions.items():
            self.lora_evictions[level] = self.lora_evictions.get(level, 0) + count
        for one in stats.lora_transfers:
            name = labels.adapter(one.adapter)
            self.lora_loads_of.update({(name, level): count for level, count in one.loads.items()})
            self.lora_evictions_of.update({(name, level): count for level, count in one.evictions.items()})
        for entry in stats.speculation:  # several may share labels
            self.speculation.setdefault(labels(entry.adapter, entry.tenant), SpeculationCounts()).add(entry.counts)


def engine_families(
    stats: EngineStats, counters: EngineCounters, restarts: int, max_loras: int, labels: SeriesLabels
) -> Iterator[Metric]:
    """Families of the engine's counts: it is another process, so a scrape reads the latest snapshot of them."""
    yield from _counters(engine_restarts=("Times that the engine has been started again.", restarts))
    yield from _scheduler_families(stats, counters)
    yield from _speculation_families(counters.speculation, stats.drafters)
    yield from _learning_families(stats.learning, labels)
    yield from _lora_families(stats, counters, max_loras)
    yield from _adapter_families(stats.adapters, labels.adapter)


def _scheduler_families(stats: EngineStats, counters: EngineCounters) -> Iterator[Metric]:
    yield from _gauges(
        num_requests_running=("Sequences in the running batch.", stats.num_running),
        num_requests_waiting=("Sequences waiting to be scheduled.", stats.num_waiting),
        kv_cache_usage_perc=("Share of KV blocks in use; 1 is all.", stats.kv_cache_usage),
        engine_resident_memory_bytes=("Resident memory of the engine's process.", stats.resident_memory_bytes),
        kv_host_bytes=("Host memory of KV that left the device (swap space).", stats.kv_host_bytes),
    )
    counts = dict.fromkeys(_WAITING_REASONS, 0) | stats.num_waiting_by_reason
    reasons = {(reason,): float(count) for reason, count in counts.items()}
    yield _gauge("num_requests_waiting_by_reason", "What waiting sequences wait for.", ("reason",), reasons)
    yield from _counters(
        prefix_cache_queries=("Prompt tokens looked up.", counters.prefix_cache_queries),
        prefix_cache_hits=("Prompt tokens found in the cache.", counters.prefix_cache_hits),
        kv_host_hits=("Tokens whose KV came back from host memory.", counters.kv_host_hits),
        num_preemptions=("Sequences that lost their blocks.", counters.num_preemptions),
        kv_event_batches=("Batches of KV events.", counters.kv_event_batches),
        kv_event_batches_dropped=("Those that were not sent: the queue was full.", counters.kv_event_batches_dropped),
    )


def _speculation_families(counts: Mapping[Labels, SpeculationCounts], drafters: Sequence[str]) -> Iterator[Metric]:
    labels: Labels = ("adapter", "tenant")
    drafts = {key: c.num_verifications for key, c in counts.items()}
    drafted = {key: c.num_draft_tokens for key, c in counts.items()}
    accepted = {key: c.num_accepted_tokens for key, c in counts.items()}
    per_pos = {(*key, str(i)): n for key, c in counts.items() for i, n in enumerate(c.accepted_per_pos)}
    yield _counter("spec_decode_num_drafts", "Verification rounds.", labels, drafts)
    yield _counter("spec_decode_num_draft_tokens", "Draft tokens verified.", labels, drafted)
    yield _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", labels, accepted)
    yield _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft.",
        (*labels, "position"),
        per_pos,
    )
    chosen = {(*key, name): made for key, c in counts.items() for name, made in c.by_drafter(drafters).items()}
    steps, tokens = ({key: made[part] for key, made in chosen.items()} for part in (0, 1))
    text = "Sampling steps, by the drafter whose drafts they verified; off: without drafts."
    yield _counter("spec_decode_steps", text, (*labels, "drafter"), steps)
    yield _counter("spec_decode_tokens", "Tokens that those steps generated.", (*labels, "drafter"), tokens)
    recent = {key: c.recent_drafts for key, c in counts.items()}
    yield _gauge("spec_decode_recent_drafts", "Mean drafts of about the last 64 sampling steps.", labels, recent)


def _learning_families(entries: Sequence[LearningEntry], labels: SeriesLabels) -> Iterator[Metric]:
    """Gauges of pairs that learn now. Pairs with the same labels, as of several salts, are one."""
    pairs: dict[Labels, list[LearningEntry]] = {}
    for entry in entries:
        pairs.setdefault(labels(entry.adapter, entry.tenant), []).append(entry)

    def gauge(name: str, text: str, values: Mapping[Any, float]) -> Metric:
        return _gauge(f"learning_{name}", text, ("adapter", "tenant"), values)

    for name, text, count in (
        ("versions", "Versions of learnt draft weights that have been in use.", lambda e: e.num_versions),
        ("versions_dropped", "Those dropped because fewer drafts were accepted.", lambda e: e.num_dropped),
        ("buffer_bytes", "Memory of recorded traffic.", lambda e: e.num_bytes),
        ("failed", "Pairs whose training an error has ended.", lambda e: e.failed),
    ):
        yield gauge(name, text, {key: sum(map(count, of_pair)) for key, of_pair in pairs.items()})
    now = {key: mean(entry.acceptance for entry in of_pair) for key, of_pair in pairs.items()}
    known = {key: [e.acceptance_before for e in p if e.acceptance_before is not None] for key, p in pairs.items()}
    before = {key: mean(values) for key, values in known.items() if values}
    yield gauge("acceptance", "Share of first drafts accepted under the weights in use.", now)
    yield gauge("acceptance_before", "The same of the weights before them, if it has been measured.", before)


def _lora_families(stats: EngineStats, counters: EngineCounters, max_loras: int) -> Iterator[Metric]:
    info = (str(max_loras), _names(stats.running_adapters), _names(stats.waiting_adapters))
    labels: Labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    yield _gauge("lora_requests_info", "Adapters with requests; the value is the time.", labels, {info: time.time()})
    levels = Counts(info.level for info in stats.adapters)
    levels["disk"] += max(0, stats.num_adapters - levels.total())
    numbers = {(level,): float(levels[level]) for level in ("device", "host", "disk")}
    yield _gauge("lora_adapters", "Registered adapters by where their weights are.", ("level",), numbers)
    yield from _gauges(
        lora_rows=("Rank rows for adapters on the device.", stats.lora_rows),
        lora_rows_used=("Rank rows that adapters have.", stats.lora_rows_used),
        lora_host_bytes=("Host memory of adapters.", stats.lora_host_bytes),
        lora_max_loras=("Adapters that may run at once.", max_loras),
    )
    evictions = {(level,): counters.lora_evictions.get(level, 0) for level in ("device", "host")}
    yield _counter("lora_evictions", "Evicted adapters, by the level that they left.", ("level",), evictions)
    of_adapter: Labels = ("adapter", "level")
    text = "Loads of an adapter, by the level that it reached."
    yield _counter("lora_adapter_loads", text, of_adapter, counters.lora_loads_of)
    text = "Evictions of an adapter, by the level that it left."
    yield _counter("lora_adapter_evictions", text, of_adapter, counters.lora_evictions_of)
    yield from _counters(lora_load_failures=("Loads that brought no adapter.", counters.lora_load_failures))


def _names(names: Sequence[str]) -> str:
    """Names with commas between them, no more than a label should hold."""
    return ",".join([*map(label_text, names[:MAX_NAMES]), *([OTHER] if len(names) > MAX_NAMES else [])])


def _adapter_families(adapters: Sequence[AdapterInfo], label: Callable[[str], str]) -> Iterator[Metric]:
    """Families of each adapter's facts; adapters beyond the bound of labels are added up."""
    loaded, requests, sizes, loads = Counts[Labels](), Counts[Labels](), Counts[Labels](), dict[Labels, float]()
    for info in adapters:
        name = label(info.name)
        loaded[name, info.level, str(info.pinned).lower()] += 1
        requests[name, "running"] += info.num_running
        requests[name, "waiting"] += info.num_waiting
        sizes[(name,)] += info.num_bytes
        loads[(name,)] = max(info.load_seconds, loads.get((name,), 0.0))
    labels: Labels = ("adapter", "level", "pinned")
    yield _gauge("lora_adapter_loaded", "Adapters in use, and where their weights are.", labels, loaded)
    yield _gauge("lora_requests", "Requests of an adapter.", ("adapter", "state"), requests)
    yield _gauge("lora_adapter_bytes", "Host memory of an adapter's content.", ("adapter",), sizes)
    yield _gauge("lora_adapter_load_seconds", "The latest reading of an adapter's files.", ("adapter",), loads)
