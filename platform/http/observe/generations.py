"""Prompts that are generated from, as the log, the metrics, the traces and the ledger see them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...client.prepared import Prepared
from ...core.adapter_names import label_text
from ...core.messages import SpeculationCounts
from ...core.outputs import RequestMetrics, RequestOutput


@dataclass(slots=True)
class Counts:
    """Tokens of a request's prompts that have begun to be answered: `usage`, the log, the traces and the ledger."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Generation:
    """One running prompt. `update` is called once for each output; all else only reads. Times are those of the
    monotonic clock, and latencies begin at `Prepared.arrival_time`."""

    prepared: Prepared
    counts: Counts = field(default_factory=Counts)
    """Shared by the request's prompts."""
    metrics: RequestMetrics | None = None
    """The engine's counts; None before the first output."""
    first_at: float | None = None
    """Time of the first output."""
    last_at: float | None = None
    """Time of the latest output."""
    ended_at: float | None = None
    """Time of the last output; None if there was none."""
    num_cached_tokens: int = 0
    """Cached tokens of the prompt that `counts` has."""
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Output tokens so far of each sequence, by its index."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """Finish reasons of the sequences that have ended."""
    failure: str = ""
    """ "abort" or "error" for a prompt that ended without the engine's word."""
    pieces: list[str] | None = None
    """Text of the answer, with --log-prompts."""

    def update(self, output: RequestOutput) -> None:
        """Count an output that holds only what is new."""
        self.last_at = time.monotonic()
        if self.metrics is None:
            self.metrics, self.first_at = output.metrics or RequestMetrics(), self.last_at
            self.counts.prompt_tokens += len(self.prompt_token_ids)
        self.counts.cached_tokens += self.metrics.num_cached_tokens - self.num_cached_tokens
        self.num_cached_tokens = self.metrics.num_cached_tokens
        for completion in output.outputs:
            index = completion.index
            self.counts.output_tokens += len(completion.token_ids)
            self.num_tokens[index] = self.num_tokens.get(index, 0) + len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons[index] = completion.finish_reason
            if self.pieces is not None:
                self.pieces.append(completion.text)
        if output.finished:
            self.ended_at = self.last_at

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.prepared.prompt.token_ids

    @property
    def adapter(self) -> str:
        """Adapter's label; "" for the base model."""
        return "" if self.prepared.lora is None else label_text(self.prepared.lora.label)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from the acceptance of the request, waits for slots included, to the first output."""
        return None if self.first_at is None else self.first_at - self.prepared.arrival_time


def sum_speculation(generations: Sequence[Generation]) -> SpeculationCounts:
    """Counts of drafts of a request so far. The engine counts them when a prompt ends, or when it is asked."""
    total = SpeculationCounts()
    for generation in generations:
        if generation.metrics is not None:
            total.add(generation.metrics)
    return total


def first_output(generations: Sequence[Generation]) -> float | None:
    """Time of a request's first output, on the monotonic clock; None before it."""
    return min((g.first_at for g in generations if g.first_at is not None), default=None)
