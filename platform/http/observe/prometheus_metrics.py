"""Prometheus metrics: counts of this process, and the engine's, taken from a snapshot at every scrape."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...client.metrics import END_TO_END, FIRST_TOKEN, INTER_TOKEN, LENGTH
from ...core.adapter_names import label_text
from ...core.compat.vllm_metrics import VLLM_PREFIX, vllm_names
from ...core.labels import OTHER
from ...core.messages import EngineStats
from ...core.outputs import RequestOutput
from ..body.foreign_fields import HARMLESS, IDLE
from .metric_families import EngineCounters, FamilyCollector, engine_families
from .recent_rates import RecentRates
from .request_log import PromptNote, current_note
from .series_labels import PREFIX, Labels, SeriesLabels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the text format, which every scraper reads."""
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Media type of OpenMetrics. The names are the same: its grammar allows colons."""

_TPOT = "Mean time between the tokens of a finished sequence."
_LORA_LOAD = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30)


class RequestRecorder:
    """Recorder of one prompt's generation."""

    __slots__ = (
        "_arrived", "_first", "_gaps", "_labels", "_last", "_metrics", "_num_tokens", "_record", "_tokens", "_waited"
    )  # fmt: skip

    def __init__(self, metrics: Metrics, labels: Labels, record: PromptNote | None, arrived: float) -> None:
        self._metrics = metrics
        self._record = record
        self._labels = labels
        self._arrived = arrived
        self._waited = max(0.0, time.monotonic() - arrived)  # for one of its tenant's places, before the engine's queue
        self._first = self._last = 0.0  # when the first and the previous output came; 0 before the first
        self._num_tokens: dict[int, int] = {}  # generated so far, by sequence
        # Series that every output counts in: to find one by its labels costs as much as to count. Made at first use.
        self._tokens: Counter | None = None
        self._gaps: Histogram | None = None

    def on_output(self, output: RequestOutput) -> None:
        """Count an output that holds only what is new."""
        now = time.monotonic()
        metrics, labels = self._metrics, self._labels
        metrics.recent.observe(labels, output, now - (self._last or self._arrived), first=self._last == 0.0)
        if self._last == 0.0:
            self._first = now
            metrics.prompt_tokens.labels(*labels).inc(len(output.prompt_token_ids))
            metrics.prompt_length.labels(*labels).observe(len(output.prompt_token_ids))
            metrics.time_to_first_token.labels(*labels).observe(now - self._arrived)
            if output.metrics is not None:
                queued = self._waited + output.metrics.queue_seconds
                metrics.queue_time.labels(*labels).observe(queued)
                metrics.prefill_time.labels(*labels).observe(max(0.0, now - self._arrived - queued))
        else:
            if self._gaps is None:
                self._gaps = metrics.inter_token_latency.labels(*labels)
            self._gaps.observe(now - self._last)
        self._last = now
        if self._record is not None:
            self._record.on_output(output, now)
        if self._tokens is None and output.outputs:
            self._tokens = metrics.generation_tokens.labels(*labels)
        for completion in output.outputs:
            assert self._tokens is not None
            self._tokens.inc(len(completion.token_ids))
            count = self._num_tokens.get(completion.index, 0) + len(completion.token_ids)
            self._num_tokens[completion.index] = count
            if completion.finish_reason is not None:
                metrics.output_length.labels(*labels).observe(count)
                if count > 1:
                    metrics.time_per_output_token.labels(*labels).observe((now - self._first) / (count - 1))
                self.on_end(completion.finish_reason)
        if output.finished:
            metrics.decode_time.labels(*labels).observe(now - self._first)
            metrics.end_to_end.labels(*labels).observe(now - self._arrived)

    def on_end(self, reason: str) -> None:
        """Count a sequence that ended: the engine's finish reason, or "abort" or "error" without its word."""
        self._metrics.finished.labels(reason, *self._labels).inc()
        if self._record is not None:
            self._record.on_end(reason)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, vllm_model: str | None = None) -> None:
        """`vllm_model`: the label `model_name` of metrics under vLLM's names, too; None: without these."""
        disable_created_metrics()  # a time series more for each counter, which nobody asked for
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self._shown: Any = registry if vllm_model is None else WithVllmNames(registry, vllm_model)
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
        times, gaps, ends, sizes = FIRST_TOKEN, INTER_TOKEN, END_TO_END, LENGTH
        self.time_to_first_token, self.queue_time, self.inter_token_latency, self.end_to_end = (
            histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", labels, times),
            histogram(
                "request_queue_time_seconds",
                "From a request's arrival to its first step, waits for places too.",
                labels,
                times,
            ),
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
        self.recent = RecentRates()
        self._labels = SeriesLabels()
        self._stats = EngineStats()
        self._ended = EngineCounters()  # of the engine's runs before the one of `_stats`
        self.max_loras = 0
        """Largest number of adapters that run at once; 0 without adapters."""
        self.engine_restarts = 0
        """Number of times that the engine has been started again."""
        self.register(self._engine_families)
        ProcessCollector(registry=registry)  # memory, CPU time, open files and start of the process of the API

    def recorder(self, adapter: str, tenant: str, arrived: float | None = None) -> RequestRecorder:
        """Recorder for one prompt that is about to be generated from.

        Args:
            adapter: "" for the base model.
            tenant: "" for none.
            arrived: moment of the request's arrival, on the monotonic clock; by default it is now.
        """
        note = current_note()
        record = None if note is None else PromptNote(note, label_text(adapter))
        arrived = time.monotonic() if arrived is None else arrived
        return RequestRecorder(self, self._labels(adapter, tenant), record, arrived)

    def on_error(self, reason: str, tenant: str) -> None:
        """Count an HTTP request that was answered with an error."""
        self.errors.labels(reason, self._labels.tenant(tenant)).inc()

    def on_ignored(self, paths: Iterable[str]) -> None:
        """Count fields of one request that were ignored. Only known names have a label of their own."""
        for path in paths:
            name = path.rpartition(".")[2]
            self.ignored_fields.labels(name if name in HARMLESS or name in IDLE else OTHER).inc()

    def register(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Add families to the exposition that are made for each scrape."""
        self._registry.register(FamilyCollector(families))

    def _engine_families(self) -> Iterable[Metric]:
        label = self._labels.adapter
        return engine_families(self._stats, self.counters, self.engine_restarts, self.max_loras, label)

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

    def update(self, stats: EngineStats) -> None:
        """Take the engine's latest snapshot. What a run counted between its last one and its death is lost."""
        if stats.run_id != self._stats.run_id:
            self._ended.add(self._stats, self._labels)
        self._stats = stats
        for seconds in stats.lora_load_seconds:
            self._lora_load.observe(seconds)

    def render(self) -> bytes:
        """The exposition, as `CONTENT_TYPE` says."""
        return generate_latest(self._shown)

    def render_openmetrics(self) -> bytes:
        """The exposition in OpenMetrics, as `OPENMETRICS_TYPE` says."""
        return openmetrics.generate_latest(self._shown, escaping="allow-utf-8")


class WithVllmNames(Collector):
    """All families of a registry, and a copy under vLLM's name of each that vLLM has. The copies have vLLM's labels
    `model_name` and `engine` beside ours."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for family in self._registry.collect():
            yield family
            for name in vllm_names(family.name.removeprefix(PREFIX)):
                yield self._renamed(family, VLLM_PREFIX + name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            renamed.samples.append(Sample(name + suffix, {**self._labels, **sample.labels}, sample.value))
        return renamed
