"""Metrics of `LLM.get_metrics` as vLLM's objects, under vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.compat.vllm_metrics import VLLM_PREFIX
from ..core.messages import EngineStats, SpeculationCounts

if TYPE_CHECKING:
    from .output_processor import RequestState

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
"""Bounds of histograms: seconds to the first token."""
INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
"""Seconds between tokens."""
END_TO_END = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
"""Seconds of a request."""
LENGTH = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of a prompt or an output."""


@dataclass
class Metric:
    """A metric with its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number of this moment."""

    value: float


@dataclass
class Vector(Metric):
    """Counts by position: of accepted drafts."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Observations; `buckets` says for each upper bound how many are not above it, "+Inf" included."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Observations:
    """Observations of one histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        buckets, total = {}, 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(VLLM_PREFIX + name, dict(labels), total, self._sum, buckets)


class RequestTotals:
    """Counts of the requests that one client has finished."""

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self.finished: Counts[str] = Counts()
        """Sequences by finish reason."""
        self.histograms = {
            "time_to_first_token_seconds": _Observations(FIRST_TOKEN),
            "request_queue_time_seconds": _Observations(FIRST_TOKEN),
            "e2e_request_latency_seconds": _Observations(END_TO_END),
            "request_prefill_time_seconds": _Observations(END_TO_END),
            "request_decode_time_seconds": _Observations(END_TO_END),
            "request_time_per_output_token_seconds": _Observations(INTER_TOKEN),
            "request_prompt_tokens": _Observations(LENGTH),
            "request_generation_tokens": _Observations(LENGTH),
        }

    def count(self, state: RequestState) -> None:
        """Count a finished request; one that failed before its first token, or was pooled, has no times."""
        metrics, add = state.metrics, {name: kept.add for name, kept in self.histograms.items()}
        self.num_prompt_tokens += state.num_prompt_tokens
        add["request_prompt_tokens"](state.num_prompt_tokens)
        lengths = [len(sequence.token_ids) for sequence in state.sequences]
        for sequence, length in zip(state.sequences, lengths, strict=True):
            self.num_generated_tokens += length
            self.finished[sequence.finish_reason or "abort"] += 1
            add["request_generation_tokens"](length)
        first, end = metrics.first_token_time, metrics.finished_time
        if first is None or end is None:
            return
        add["time_to_first_token_seconds"](first - metrics.arrival_time)
        add["request_queue_time_seconds"](metrics.queue_seconds)
        add["request_prefill_time_seconds"](max(0.0, first - metrics.arrival_time - metrics.queue_seconds))
        add["request_decode_time_seconds"](end - first)
        add["e2e_request_latency_seconds"](end - metrics.arrival_time)
        if max(lengths) > 1:
            add["request_time_per_output_token_seconds"]((end - first) / (max(lengths) - 1))


def collect_metrics(model: str, stats: EngineStats, totals: RequestTotals) -> list[Metric]:
    """All metrics of an engine and of its client's finished requests."""
    labels = {"model_name": model, "engine": "0"}
    return [*_of_engine(labels, stats), *_of_requests(labels, totals), *_of_speculation(labels, stats)]


def _of_engine(labels: dict[str, str], stats: EngineStats) -> Iterator[Metric]:
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": stats.kv_cache_usage,
    }
    for name, number in gauges.items():
        yield Gauge(VLLM_PREFIX + name, dict(labels), float(number))
    counters = {
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "num_preemptions": stats.num_preemptions,
    }
    for name, count in counters.items():
        yield Counter(VLLM_PREFIX + name, dict(labels), count)


def _of_requests(labels: dict[str, str], totals: RequestTotals) -> Iterator[Metric]:
    yield Counter(VLLM_PREFIX + "prompt_tokens", dict(labels), totals.num_prompt_tokens)
    yield Counter(VLLM_PREFIX + "generation_tokens", dict(labels), totals.num_generated_tokens)
    for reason in sorted({"stop", "length", "abort", *totals.finished}):
        yield Counter(VLLM_PREFIX + "request_success", labels | {"finished_reason": reason}, totals.finished[reason])
    for name, kept in totals.histograms.items():
        yield kept.histogram(name, labels)


def _of_speculation(labels: dict[str, str], stats: EngineStats) -> Iterator[Metric]:
    """Counts of drafts by adapter; of the base model ("") also without any."""
    by_adapter = {"": SpeculationCounts()}
    for entry in stats.speculation:
        by_adapter.setdefault(entry.adapter, SpeculationCounts()).add(entry.counts)
    for adapter, counts in by_adapter.items():
        own = labels | {"adapter": adapter}
        prefix = f"{VLLM_PREFIX}spec_decode_num_"
        yield Counter(prefix + "drafts", dict(own), counts.num_verifications)
        yield Counter(prefix + "draft_tokens", dict(own), counts.num_draft_tokens)
        yield Counter(prefix + "accepted_tokens", dict(own), counts.num_accepted_tokens)
        yield Vector(prefix + "accepted_tokens_per_pos", dict(own), list(counts.accepted_per_pos))
