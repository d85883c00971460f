"""From the times of requests to figures, with the names and definitions of vLLM's benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.messages import SpeculationCounts
from .bench_options import METRICS


@dataclass(slots=True)
class RequestRecord:
    """One request; times in seconds of one clock."""

    index: int
    started: float = 0.0
    """Time of sending."""
    arrivals: list[float] = field(default_factory=list)
    """Times of the chunks with content, or of the steps that brought tokens."""
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    adapter: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """The output if its tokens are known: in an engine of this process."""
    speculation: SpeculationCounts | None = None
    streamed: bool = True
    """True when all arrivals are known, and not only the first and the last."""

    @property
    def ttft(self) -> float | None:
        """Time to the first chunk with content; None for an empty answer."""
        return self.arrivals[0] - self.started if self.arrivals else None

    @property
    def e2el(self) -> float:
        """Time to the last chunk with content; to the end of an empty answer."""
        return (self.arrivals[-1] if self.arrivals else self.ended) - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None without a second token."""
        if self.ttft is None or self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Times between one chunk and the next, however many tokens it brings."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)] if self.streamed else []

    def as_dict(self, origin: float) -> dict[str, Any]:
        """The record for JSON; times relative to `origin`."""
        return {
            "index": self.index,
            "start": round(self.started - origin, 6),
            "ttft": self.ttft,
            "tpot": self.tpot,
            "e2el": self.e2el,
            "itl": [round(gap, 7) for gap in self.itl],
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "adapter": self.adapter,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


@dataclass(slots=True)
class Round:
    """One run of all requests of a measurement's cell, or of one batch of them."""

    seconds: float
    requests: list[RequestRecord]
    cpu_seconds: float = 0.0
    """Processor time of the thread that computes; 0 if a GPU does."""

    @classmethod
    def joined(cls, batches: Sequence[Round]) -> Round:
        """The round that consists of these batches, one after the other."""
        requests = [request for batch in batches for request in batch.requests]
        return cls(sum(batch.seconds for batch in batches), requests, sum(batch.cpu_seconds for batch in batches))

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens, over all requests."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def speed(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds


def values(records: Sequence[RequestRecord], metric: str) -> list[float]:
    """Values of a metric in seconds: one for each request that has it; for ITL one for each gap."""
    if metric == "itl":
        return [gap for record in records for gap in record.itl]
    return [value for record in records if (value := getattr(record, metric)) is not None]


def spread(seconds: Sequence[float], percentiles: Sequence[float] = (99,)) -> dict[str, float] | None:
    """Mean, median, standard deviation and percentiles ("p99") in milliseconds; None for no values."""
    if not len(seconds):
        return None
    ms = np.asarray(seconds) * 1e3
    found = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
    found |= {f"p{q:g}": np.percentile(ms, q) for q in percentiles}
    return {name: round(float(value), 4) for name, value in found.items()}


def _rates(requests: Sequence[RequestRecord], seconds: float) -> dict[str, float]:
    prompt = sum(request.num_prompt_tokens for request in requests)
    output = sum(request.num_output_tokens for request in requests)
    return {
        "request_throughput": len(requests) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }


def figures(
    records: Sequence[RequestRecord],
    duration: float,
    percentiles: Sequence[float],
    metrics: Sequence[str] = METRICS,
) -> dict[str, Any]:
    """Figures of requests that took `duration` seconds together, under vLLM's names, such as mean_ttft_ms. Failed
    requests are only counted."""
    good = [record for record in records if record.error is None]
    found: dict[str, Any] = {
        "duration": round(duration, 4),
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": sum(record.num_prompt_tokens for record in good),
        "total_output_tokens": sum(record.num_output_tokens for record in good),
        **{name: round(rate, 4) for name, rate in _rates(good, duration).items()},
    }
    for metric in metrics:
        shares = spread(values(good, metric), percentiles) or {}
        found |= {f"{name}_{metric}_ms": value for name, value in shares.items()}
    return found | acceptance(sum_speculation(good))


def row_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Figures of a cell that ran in several rounds: medians of the rounds' throughputs, and the latencies of all
    requests, each as {"mean", "median", "std", "p99"} in milliseconds or None."""
    rates = [_rates(found.requests, found.seconds) for found in rounds]
    requests = [request for found in rounds for request in found.requests]
    return {
        "requests": len(rounds[0].requests),
        **{name: round(statistics.median(rate[name] for rate in rates), 3) for name in rates[0]},
        **{f"{metric}_ms": spread(values(requests, metric)) for metric in METRICS},
    }


def sum_speculation(records: Sequence[RequestRecord]) -> SpeculationCounts:
    """Sum of the counts of requests that have some."""
    total = SpeculationCounts()
    for record in records:
        if record.speculation is not None:
            total.add(record.speculation)
    return total


def acceptance(counts: SpeculationCounts) -> dict[str, Any]:
    """Rate = accepted / drafted; length = 1 + accepted / drafts; per position = accepted there / drafts. {} without
    drafts."""
    rate, length = counts.acceptance_rate, counts.acceptance_length
    if rate is None or length is None:
        return {}
    return {
        "acceptance_rate": round(rate, 4),
        "acceptance_length": round(length, 4),
        "acceptance_per_position": [round(share, 4) for share in counts.acceptance_per_position],
    }
