"""From the rounds of one cell (mode, task, adapter variant, batch size) to its figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....core.messages import SpeculationCounts
from ..engine_runs import Round
from ..request_figures import acceptance
from .modes import Mode

_DRAWS = 1000
"""Samples of the bootstrap."""
_NO_ACCEPTANCE: dict[str, Any] = {"acceptance_rate": None, "acceptance_length": None, "acceptance_per_position": []}


@dataclass(slots=True)
class Cell:
    """One combination, and its rounds."""

    mode: Mode
    task: str
    kind: str
    """One of `workload`'s kinds: base model, adapter with or without draft weights, random text."""
    batch_size: int
    num_prompt_tokens: int
    """Number of prompt tokens of all requests of a round."""
    rounds: list[Round]


def figures(cell: Cell, off: Cell) -> dict[str, Any]:
    """The figures of a cell as vLLM's users know them, with names for a result file; times in milliseconds.

    Throughputs are those of the median round. `speedup` is the median over rounds of output tokens/s over those of the
    round of `off` that ran interleaved with it, `speedup_quartiles` the quartiles and `speedup_error` the standard
    error of the median. `cpu_speedup` compares processor time instead; None on a GPU.
    """
    requests = [request for round_ in cell.rounds for request in round_.requests]
    seconds = [round_.seconds for round_ in cell.rounds]
    median = statistics.median(seconds)
    tokens = statistics.mean(round_.output_tokens for round_ in cell.rounds)
    pairs = list(zip(cell.rounds, off.rounds, strict=True))
    speedups = [ours.speed / plain.speed for ours, plain in pairs]
    timed = [(ours, plain) for ours, plain in pairs if ours.cpu_seconds and plain.cpu_seconds]
    cpu = [a.output_tokens / b.output_tokens * b.cpu_seconds / a.cpu_seconds for a, b in timed]
    counts = SpeculationCounts()
    for found in filter(None, (request.speculation for request in requests)):
        counts.add(found)
    return {
        "task": cell.task,
        "kind": cell.kind,
        "mode": cell.mode.name,
        "method": cell.mode.method,
        "batch_size": cell.batch_size,
        "requests": len(cell.rounds[0].requests),
        "output_tokens": round(tokens, 1),
        "seconds": {"median": round(median, 4), "min": round(min(seconds), 4)},
        "request_throughput": round(len(cell.rounds[0].requests) / median, 3),
        "output_throughput": round(tokens / median, 2),
        "total_token_throughput": round((tokens + cell.num_prompt_tokens) / median, 2),
        "ttft_ms": spread([request.ttft for request in requests]),
        "tpot_ms": spread([request.tpot for request in requests if len(request.token_ids) > 1]),
        "itl_ms": spread([gap for request in requests for gap in request.itl]),
        "e2el_ms": spread([request.e2el for request in requests]),
        "speedup": round(statistics.median(speedups), 4),
        "speedup_quartiles": [round(float(share), 4) for share in np.percentile(speedups, (25, 75))],
        "speedup_error": _error_of_median(speedups),
        "cpu_speedup": round(statistics.median(cpu), 4) if cpu else None,
        "same_text_as_off": _same_text(pairs),
        **(acceptance(counts) or _NO_ACCEPTANCE),
        "drafts_verified": _shares(counts.steps_by_k),
    }


def _error_of_median(values: Sequence[float]) -> float | None:
    """Standard error of the median by bootstrap (Efron 1979); None for one value."""
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_DRAWS, len(values)))
    return round(float(np.median(drawn, axis=1).std()), 4)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile in milliseconds; None for no values."""
    if not len(seconds):
        return None
    found = {"mean": np.mean(seconds), "median": np.median(seconds), "p99": np.percentile(seconds, 99)}
    return {name: round(1e3 * float(value), 3) for name, value in found.items()}


def _same_text(pairs: Sequence[tuple[Round, Round]]) -> dict[str, int]:
    """Number of requests, over all rounds, with the tokens that off gave, and number of all requests."""
    same = [
        mine.token_ids == theirs.token_ids
        for ours, plain in pairs
        for mine, theirs in zip(ours.requests, plain.requests, strict=True)
    ]
    return {"same": sum(same), "of": len(same)}


def _shares(counts: Sequence[int]) -> dict[str, float]:
    """Share of the steps that verified 0, 1, 2, ... drafts of a request, by that number."""
    total = sum(counts)
    return {str(number): round(count / total, 4) for number, count in enumerate(counts) if count}
