"""From records of requests to figures, with the names and definitions of vLLM's benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.messages import SpeculationCounts
from .serving.load_options import METRICS


@dataclass(slots=True)
class RequestRecord:
    """One request; times in seconds of one clock."""

    index: int
    started: float = 0.0
    """Time of sending."""
    arrivals: list[float] = field(default_factory=list)
    """Times of the chunks with content."""
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    adapter: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str = ""
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
        if not self.streamed:
            return []
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def meets(self, limits_ms: Mapping[str, float]) -> bool:
        """True when the answer keeps all limits. For ITL the mean counts; a metric that it lacks keeps its limit."""
        itl = self.itl
        values = {
            "ttft": self.ttft,
            "tpot": self.tpot,
            "itl": sum(itl) / len(itl) if itl else None,
            "e2el": self.e2el,
        }
        return all((values[name] or 0.0) * 1e3 <= limit for name, limit in limits_ms.items())

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


def figures(
    records: Sequence[RequestRecord],
    duration: float,
    percentiles: Sequence[float],
    metrics: Sequence[str] = METRICS,
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Figures of requests that took `duration` seconds together. Failed requests are only counted.

    Args:
        goodput: limits in milliseconds by metric.
    """
    good = [record for record in records if record.error is None]
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    output_tokens = sum(record.num_output_tokens for record in good)
    found: dict[str, Any] = {
        "duration": round(duration, 4),
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": round(len(good) / duration, 4),
        "output_throughput": round(output_tokens / duration, 3),
        "total_token_throughput": round((prompt_tokens + output_tokens) / duration, 3),
    }
    if goodput:
        found["request_goodput"] = round(sum(record.meets(goodput) for record in good) / duration, 4)
    for name in metrics:
        found |= summary(name, values(good, name), percentiles)
    return found


def values(records: Sequence[RequestRecord], metric: str) -> list[float]:
    """Values of a metric in seconds: one for each request that has it; for ITL one for each gap."""
    if metric == "itl":
        return [gap for record in records for gap in record.itl]
    return [value for record in records if (value := getattr(record, metric)) is not None]


def summary(metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Figures mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms and so on; none for no values."""
    if not len(seconds):
        return {}
    ms = np.asarray(seconds) * 1e3
    found = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
    found |= {f"p{q:g}": np.percentile(ms, q) for q in percentiles}
    return {f"{name}_{metric}_ms": round(float(value), 4) for name, value in found.items()}


def acceptance(counts: SpeculationCounts) -> dict[str, Any]:
    """Rate = accepted / drafted; length = 1 + accepted / drafts; per position = accepted there / drafts. {} without
    drafts."""
    if not counts.num_draft_tokens or not counts.num_drafts:
        return {}
    return {
        "acceptance_rate": round(counts.num_accepted_tokens / counts.num_draft_tokens, 4),
        "acceptance_length": round(1 + counts.num_accepted_tokens / counts.num_drafts, 4),
        "acceptance_per_position": [round(number / counts.num_drafts, 4) for number in counts.accepted_per_pos],
    }
