"""Prometheus metrics: counts of this process, and the engine's, taken from a snapshot at every scrape."""

from __future__ import annotations

import copy
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ...core.adapter_names import label_text
from ...core.labels import OTHER
from ...core.messages import AdapterInfo, EngineStats, SpeculationCounts
from ...core.outputs import RequestOutput
from ..body.foreign_fields import HARMLESS, IDLE
from .recent import Recent
from .request_log import PromptNote, current_note
from .series_labels import PREFIX, Labels, SeriesLabels

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the text format, which every scraper reads. OpenMetrics would rename everything: it allows no colon."""

_TPOT = "Mean time between the tokens of a finished sequence."
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_END_TO_END = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
_LENGTH = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_LORA_LOAD = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30)

MAX_NAMES = 50
"""Adapters that `lora_requests_info` names in one label."""
_WAITING_REASONS = ("capacity", "adapter_loading", "adapter_rows", "max_loras")
"""Reasons that are shown even while nobody waits for them."""


@dataclass(slots=True)
class EngineCounters:
    """Counters of an engine, over one of its runs or several."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    lora_load_failures: int = 0
    lora_evictions: dict[str, int] = field(default_factory=dict)
    """Evicted adapters by the level that they left."""
    speculation: dict[Labels, SpeculationCounts] = field(default_factory=dict)
    """Counts by (adapter, tenant)."""

    def add(self, stats: EngineStats, labels: SeriesLabels) -> None:
        """Add one run's counters, as of a snapshot."""
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        self.num_preemptions += stats.num_preemptions
        self.lora_load_failures += stats.lora_load_failures
        for level, count in stats.lora_evictions.items():
            self.lora_evictions[level] = self.lora_evictions.get(level, 0) + count
        for entry in stats.speculation:  # several may share labels
            self.speculation.setdefault(labels(entry.adapter, entry.tenant), SpeculationCounts()).add(entry.counts)


class RequestRecorder:
    """Recorder of one prompt's generation."""

    __slots__ = ("_first", "_labels", "_last", "_metrics", "_num_tokens", "_record", "_started")

    def __init__(self, metrics: Metrics, labels: Labels, record: PromptNote | None) -> None:
        self._metrics = metrics
        self._record = record
        self._labels = labels
        self._started = time.monotonic()
        self._first = self._last = 0.0  # when the first and the previous output came; 0 before the first
        self._num_tokens: dict[int, int] = {}  # generated so far, by sequence

    def on_output(self, output: RequestOutput) -> None:
        """Count an output that holds only what is new."""
        now = time.monotonic()
        metrics, labels = self._metrics, self._labels
        metrics.recent.observe(labels, output, now - (self._last or self._started), first=self._last == 0.0)
        if self._last == 0.0:
            self._first = now
            metrics.prompt_tokens.labels(*labels).inc(len(output.prompt_token_ids))
            metrics.prompt_length.labels(*labels).observe(len(output.prompt_token_ids))
            metrics.time_to_first_token.labels(*labels).observe(now - self._started)
            if output.metrics is not None:
                queued = output.metrics.queue_seconds
                metrics.queue_time.labels(*labels).observe(queued)
                metrics.prefill_time.labels(*labels).observe(max(0.0, now - self._started - queued))
        else:
            metrics.inter_token_latency.labels(*labels).observe(now - self._last)
        self._last = now
        if self._record is not None:
            self._record.on_output(output, now)
        for completion in output.outputs:
            metrics.generation_tokens.labels(*labels).inc(len(completion.token_ids))
            count = self._num_tokens.get(completion.index, 0) + len(completion.token_ids)
            self._num_tokens[completion.index] = count
            if completion.finish_reason is not None:
                metrics.output_length.labels(*labels).observe(count)
                if count > 1:
                    metrics.time_per_output_token.labels(*labels).observe((now - self._first) / (count - 1))
                self.on_end(completion.finish_reason)
        if output.finished:
            metrics.decode_time.labels(*labels).observe(now - self._first)
            metrics.end_to_end.labels(*labels).observe(now - self._started)

    def on_end(self, reason: str) -> None:
        """Count a sequence that ended: the engine's finish reason, or "abort" or "error" without its word."""
        self._metrics.finished.labels(reason, *self._labels).inc()
        if self._record is not None:
            self._record.on_end(reason)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # a time series more for each counter, which nobody asked for
        self._registry = registry = CollectorRegistry(auto_describe=False)
        labels = ("adapter", "tenant")

        def histogram(name: str, help_text: str, names: Labels, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, help_text, names, buckets=buckets, registry=registry)

        def counter(name: str, help_text: str, names: Labels) -> Counter:
            return Counter(PREFIX + name, help_text, names, registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.", labels)
        self.generation_tokens = counter("generation_tokens", "Tokens generated.", labels)
        self.finished = counter("request_success", "Finished requests.", ("finished_reason", *labels))
        self.errors = counter(
            "request_errors", "HTTP requests answered with an error: its type, or the limit.", ("reason", "tenant")
        )
        self.ignored_fields = counter("ignored_request_fields", "Fields of requests that were ignored.", ("field",))
        times, gaps, ends, sizes = _FIRST_TOKEN, _INTER_TOKEN, _END_TO_END, _LENGTH
        self.time_to_first_token, self.queue_time, self.inter_token_latency, self.end_to_end = (
            histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", labels, times),
            histogram("request_queue_time_seconds", "From a request's arrival to its first step.", labels, times),
            histogram("inter_token_latency_seconds", "Between two outputs of a request.", labels, gaps),
            histogram("e2e_request_latency_seconds", "From the request's arrival to its last token.", labels, ends),
        )
        self.prefill_time, self.decode_time, self.time_per_output_token = (
            histogram("request_prefill_time_seconds", "From a request's first step to its first token.", labels, ends),
            histogram("request_decode_time_seconds", "From a request's first token to its last.", labels, ends),
            histogram("request_time_per_output_token_seconds", _TPOT, labels, gaps),
        )
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of a request's prompt.", labels, sizes)
        self.output_length = histogram("request_generation_tokens", "Tokens of a finished sequence.", labels, sizes)
        self._lora_load = histogram("lora_load_seconds", "Reading and checking an adapter.", (), _LORA_LOAD)
        self.recent = Recent()
        self._labels = SeriesLabels()
        self._stats = EngineStats()
        self._ended = EngineCounters()  # of the engine's runs before the one of `_stats`
        self.engine_restarts = 0
        """Number of times that the engine has been started again."""
        registry.register(_EngineCollector(self))
        ProcessCollector(registry=registry)  # memory, CPU time, open files and start of the process of the API

    def recorder(self, adapter: str, tenant: str) -> RequestRecorder:
        """Recorder for one prompt that is about to be generated from; `adapter` is "" for the base model, `tenant` for
        none."""
        note = current_note()
        record = None if note is None else PromptNote(note, label_text(adapter))
        return RequestRecorder(self, self._labels(adapter, tenant), record)

    def on_error(self, reason: str, tenant: str) -> None:
        """Count an HTTP request that was answered with an error."""
        self.errors.labels(reason, self._labels.tenant(tenant)).inc()

    def on_ignored(self, paths: Iterable[str]) -> None:
        """Count fields of one request that were ignored. Only known names have a label of their own."""
        for path in paths:
            name = path.rpartition(".")[2]
            self.ignored_fields.labels(name if name in HARMLESS or name in IDLE else OTHER).inc()

    def register(self, collector: Collector) -> None:
        """Add a collector to the exposition."""
        self._registry.register(collector)

    @property
    def stats(self) -> EngineStats:
        """The engine's latest snapshot."""
        return self._stats

    @property
    def counters(self) -> EngineCounters:
        """The engine's counts as of the latest snapshot, with those of its runs that have died: they never fall."""
        counters = copy.deepcopy(self._ended)
        counters.add(self._stats, self._labels)
        return counters

    def adapter_label(self, name: str) -> str:
        """An adapter's label by the engine's name, the same in every metric."""
        return self._labels.adapter(name)

    def update(self, stats: EngineStats) -> None:
        """Take the engine's latest snapshot. What a run counted between its last one and its death is lost."""
        if stats.run_id != self._stats.run_id:
            self._ended.add(self._stats, self._labels)
        self._stats = stats
        for seconds in stats.lora_load_seconds:
            self._lora_load.observe(seconds)

    def render(self) -> bytes:
        """The exposition, as `CONTENT_TYPE` says."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Collector of the engine's own counts: they live in another process, so a scrape reads the latest snapshot of
    them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        stats, counters = self._metrics.stats, self._metrics.counters
        restarts = {(): self._metrics.engine_restarts}
        yield _counter("engine_restarts", "Times that the engine has been started again.", (), restarts)
        yield from _engine_families(stats, counters)
        yield from _speculation_families(counters.speculation)
        yield from _lora_families(stats, counters)
        yield from _adapter_families(stats.adapters, self._metrics.adapter_label)


def _counter(name: str, help_text: str, labels: Labels, values: Mapping[Any, int]) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(PREFIX + name, help_text, labels=labels), values)


def _gauge(name: str, help_text: str, labels: Labels, values: Mapping[Any, float]) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(PREFIX + name, help_text, labels=labels), values)


def _filled(family: Family, values: Mapping[Any, float]) -> Family:
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _engine_families(stats: EngineStats, counters: EngineCounters) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Sequences in the running batch.", (), {(): stats.num_running})
    yield _gauge("num_requests_waiting", "Sequences waiting to be scheduled.", (), {(): stats.num_waiting})
    counts = dict.fromkeys(_WAITING_REASONS, 0) | stats.num_waiting_by_reason
    reasons = {(reason,): float(count) for reason, count in counts.items()}
    yield _gauge("num_requests_waiting_by_reason", "What waiting sequences wait for.", ("reason",), reasons)
    yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", (), {(): stats.kv_cache_usage})
    yield _counter("prefix_cache_queries", "Prompt tokens looked up.", (), {(): counters.prefix_cache_queries})
    yield _counter("prefix_cache_hits", "Prompt tokens found in the cache.", (), {(): counters.prefix_cache_hits})
    yield _counter("num_preemptions", "Sequences that lost their blocks.", (), {(): counters.num_preemptions})


def _speculation_families(counts: Mapping[Labels, SpeculationCounts]) -> Iterator[Metric]:
    labels: Labels = ("adapter", "tenant")
    drafts = {key: c.num_drafts for key, c in counts.items()}
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


def _lora_families(stats: EngineStats, counters: EngineCounters) -> Iterator[Metric]:
    info = (_names(stats.running_adapters), _names(stats.waiting_adapters))
    labels: Labels = ("running_lora_adapters", "waiting_lora_adapters")
    yield _gauge("lora_requests_info", "Adapters with requests; the value is the time.", labels, {info: time.time()})
    levels = Counts(info.level for info in stats.adapters)
    levels["disk"] += max(0, stats.num_adapters - levels.total())
    numbers = {(level,): float(levels[level]) for level in ("device", "host", "disk")}
    yield _gauge("lora_adapters", "Registered adapters by where their weights are.", ("level",), numbers)
    yield _gauge("lora_rows", "Rank rows for adapters on the device.", (), {(): stats.lora_rows})
    yield _gauge("lora_rows_used", "Rank rows that adapters have.", (), {(): stats.lora_rows_used})
    yield _gauge("lora_host_bytes", "Host memory of adapters.", (), {(): stats.lora_host_bytes})
    evictions = {(level,): counters.lora_evictions.get(level, 0) for level in ("device", "host")}
    yield _counter("lora_evictions", "Adapters that made way, by the level that they left.", ("level",), evictions)
    failures = {(): counters.lora_load_failures}
    yield _counter("lora_load_failures", "Loads that brought no adapter.", (), failures)


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
