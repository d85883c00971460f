"""Prometheus metrics: counts of this process, and the engine's, taken from a snapshot at every scrape."""

from __future__ import annotations

import copy
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
from ...core.compat.vllm_metrics import VLLM_PREFIX, residency, vllm_names
from ...core.labels import OTHER
from ...core.messages import EngineStats
from ...core.outputs import RequestOutput
from ..body.foreign_fields import HARMLESS, IDLE
from .generations import Generation
from .metric_families import EngineCounters, FamilyCollector, engine_families
from .recent_rates import RecentRates
from .series_labels import PREFIX, Labels, SeriesLabels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the text format, which every scraper reads."""
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Media type of OpenMetrics. The names are the same: its grammar allows colons."""

_TPOT = "Mean time between the tokens of a finished sequence."
_LORA_LOAD = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30)


class RequestRecorder:
    """Recorder of one generation's metrics."""

    __slots__ = ("_before", "_gaps", "_generation", "_labels", "_metrics", "_tokens")

    def __init__(self, metrics: Metrics, labels: Labels, generation: Generation) -> None:
        self._metrics = metrics
        self._labels = labels
        self._generation = generation
        self._before: float | None = None  # when the previous output came
        # Series that every output counts in: to find one by its labels costs as much as to count. Made at first use.
        self._tokens: Counter | None = None
        self._gaps: Histogram | None = None

    def on_output(self, output: RequestOutput) -> None:
        """Count an output that the generation has been updated with."""
        metrics, labels, generation = self._metrics, self._labels, self._generation
        now, first, arrived = generation.last_at, generation.first_at, generation.prepared.arrival_time
        assert now is not None
        assert first is not None
        since = arrived if self._before is None else self._before
        metrics.recent.observe(labels, output, now - since, first=self._before is None)
        if self._before is None:
            self._on_first(now - arrived)
        else:
            if self._gaps is None:
                self._gaps = metrics.inter_token_latency.labels(*labels)
            self._gaps.observe(now - since)
        self._before = now
        if self._tokens is None and output.outputs:
            self._tokens = metrics.generation_tokens.labels(*labels)
        for completion in output.outputs:
            assert self._tokens is not None
            self._tokens.inc(len(completion.token_ids))
            if completion.finish_reason is not None:
                count = generation.num_tokens[completion.index]
                metrics.output_length.labels(*labels).observe(count)
                if count > 1:
                    metrics.time_per_output_token.labels(*labels).observe((now - first) / (count - 1))
                self.on_end(completion.finish_reason)
        if output.finished:
            metrics.decode_time.labels(*labels).observe(now - first)
            metrics.end_to_end.labels(*labels).observe(now - arrived)

    def _on_first(self, seconds: float) -> None:
        metrics, labels, generation = self._metrics, self._labels, self._generation
        queued = 0.0 if generation.metrics is None else generation.metrics.queue_seconds
        metrics.prompt_tokens.labels(*labels).inc(len(generation.prompt_token_ids))
        metrics.prompt_length.labels(*labels).observe(len(generation.prompt_token_ids))
        metrics.time_to_first_token.labels(*labels).observe(seconds)
        metrics.queue_time.labels(*labels).observe(queued)
        metrics.prefill_time.labels(*labels).observe(max(0.0, seconds - queued))

    def on_end(self, reason: str) -> None:
        """Count a sequence that ended: the engine's finish reason, or the generation's `failure`."""
        self._metrics.finished.labels(reason, *self._labels).inc()


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, vllm_model: str | None = None) -> None:
        """`vllm_model`: the label `model_name` of metrics under vLLM's names, too; None: without these."""
        disable_created_metrics()  # a time series more for each counter, which is not wanted
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
                "From a request's arrival to its first step, waits for slots too.",
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

    def recorder(self, generation: Generation, tenant: str) -> RequestRecorder:
        """Recorder for a prompt that is about to run; `tenant` is "" for none."""
        lora = generation.prepared.lora
        return RequestRecorder(self, self._labels("" if lora is None else lora.label, tenant), generation)

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
        return engine_families(self._stats, self.counters, self.engine_restarts, self.max_loras, self._labels)

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
    `model_name` and `engine` in addition to ours."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for family in self._registry.collect():
            yield family
            for name in vllm_names(family.name.removeprefix(PREFIX)):
                yield self._renamed(family, VLLM_PREFIX + name)
            found = [(sample.labels, sample.value) for sample in family.samples]
            for name, samples in residency(family.name.removeprefix(PREFIX), found).items():
                moved = Metric(VLLM_PREFIX + name, family.documentation, "gauge")
                for labels, value in samples:
                    moved.add_sample(moved.name, {**self._labels, **labels}, value)
                yield moved

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            renamed.samples.append(Sample(name + suffix, {**self._labels, **sample.labels}, sample.value))
        return renamed
