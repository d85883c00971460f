"""From the rounds of one cell (mode, task, adapter variant, batch size) to its figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .driver import RequestTimes, Round
from .limit import measure_limit
from .modes import Mode
from .steps import steps_by_kind

_DRAWS = 1000
"""Of the rounds, to find the error of a median."""


@dataclass(slots=True)
class Cell:
    """One combination, and its rounds."""

    mode: Mode
    task: str
    kind: str
    """See `workload`: base model, adapter with or without draft weights, random text."""
    batch_size: int
    num_prompt_tokens: int
    """Of all requests of a round."""
    rounds: list[Round]
    calibrations: list[Round] = field(default_factory=list)
    """With one draft a step, where the limit needs it."""


def figures(cell: Cell, off: Cell) -> dict[str, Any]:
    """The figures of a cell as vLLM's users know them, with names for a result file; times in milliseconds.

    Throughputs are those of the median round. `speedup` is the median over rounds of output tokens/s over that of
    off's round beside it, `speedup_quartiles` their spread and `speedup_error` the standard error of the median;
    `speedup_total` compares all rounds together, `speedup_best` the two fastest ones. Where the processor computes the
    steps, `cpu_ms_per_token` is the time that their thread was running, and `cpu_speedup` the median of off's over it:
    free of what other processes take.
    """
    requests = [request for round_ in cell.rounds for request in round_.requests]
    median = statistics.median(round_.seconds for round_ in cell.rounds)
    tokens = statistics.mean(round_.output_tokens for round_ in cell.rounds)
    pairs = list(zip(cell.rounds, off.rounds, strict=True))
    decode = [_ratio(plain.tpot, ours.tpot) for ours, plain in pairs]
    speedups = [_ratio(_speed(ours), _speed(plain)) for ours, plain in pairs]
    row: dict[str, Any] = {
        "task": cell.task,
        "kind": cell.kind,
        "mode": cell.mode.name,
        "method": cell.mode.method,
        "batch_size": cell.batch_size,
        "requests": len(cell.rounds[0].requests),
        "output_tokens": round(tokens, 1),
        "seconds": {"median": round(median, 4), "min": round(min(r.seconds for r in cell.rounds), 4)},
        "request_throughput": round(len(cell.rounds[0].requests) / median, 3),
        "output_throughput": round(tokens / median, 2),
        "total_token_throughput": round((tokens + cell.num_prompt_tokens) / median, 2),
        **latencies(requests),
        "speedup": round(statistics.median(speedups), 4),
        "speedup_quartiles": [round(float(share), 4) for share in np.percentile(speedups, (25, 75))],
        "speedup_error": _error_of_median(speedups),
        "speedup_total": round(_ratio(_total_speed(cell.rounds), _total_speed(off.rounds)), 4),
        **_cpu_figures(pairs),
        "speedup_best": round(_ratio(max(map(_speed, cell.rounds)), max(map(_speed, off.rounds))), 4),
        "decode_speedup": round(statistics.median(decode), 4),
        "same_text_as_off": _same_text(pairs),
    }
    row |= _acceptance(requests)
    row["drafts_chosen"] = _chosen(cell.rounds)
    row["steps"] = steps_by_kind(cell.rounds)
    if cell.mode.fixed:
        limit = measure_limit(
            cell.mode,
            statistics.median(decode),
            [step for round_ in off.rounds for step in round_.steps],
            [step for round_ in cell.rounds for step in round_.steps],
            [step for round_ in cell.calibrations for step in round_.steps],
        )
        row["limit"] = limit.as_dict() if limit is not None else None
    return row


def _cpu_figures(pairs: Sequence[tuple[Round, Round]]) -> dict[str, Any]:
    times = [(_cpu_per_token(ours), _cpu_per_token(plain)) for ours, plain in pairs]
    known = [(mine, theirs) for mine, theirs in times if mine is not None and theirs is not None]
    if not known:
        return {}
    return {
        "cpu_ms_per_token": round(1e3 * statistics.median(mine for mine, _ in known), 4),
        "cpu_speedup": round(statistics.median(_ratio(theirs, mine) for mine, theirs in known), 4),
    }


def _cpu_per_token(round_: Round) -> float | None:
    return None if round_.cpu_seconds is None else round_.cpu_seconds / round_.output_tokens


def _speed(round_: Round) -> float:
    return round_.output_tokens / round_.seconds


def _total_speed(rounds: Sequence[Round]) -> float:
    return sum(round_.output_tokens for round_ in rounds) / sum(round_.seconds for round_ in rounds)


def _error_of_median(values: Sequence[float]) -> float | None:
    """Standard error by drawing as many of the values again and again (bootstrap: Efron 1979); None for one value."""
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_DRAWS, len(values)))
    return round(float(np.median(drawn, axis=1).std()), 4)


def _ratio(over: float, under: float) -> float:
    return over / under if under else 1.0


def latencies(requests: Sequence[RequestTimes]) -> dict[str, Any]:
    """TTFT, TPOT (the first token excluded), ITL and E2EL of requests, as `spread` gives them."""
    return {
        "ttft_ms": spread([request.ttft for request in requests]),
        "tpot_ms": spread([request.tpot for request in requests if len(request.token_ids) > 1]),
        "itl_ms": spread([gap for request in requests for gap in request.itl]),
        "e2el_ms": spread([request.e2el for request in requests]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile in milliseconds; None for no values."""
    if not len(seconds):
        return None
    found: dict[str, Callable[[Any], Any]] = {
        "mean": np.mean,
        "median": np.median,
        "p99": lambda values: np.percentile(values, 99),
    }
    return {name: round(1e3 * float(function(np.asarray(seconds))), 3) for name, function in found.items()}


def _same_text(pairs: Sequence[tuple[Round, Round]]) -> dict[str, int]:
    """How many of the requests, over all rounds, got the tokens that off gave."""
    same = [
        mine.token_ids == theirs.token_ids
        for ours, plain in pairs
        for mine, theirs in zip(ours.requests, plain.requests, strict=True)
    ]
    return {"same": sum(same), "of": len(same)}


def _acceptance(requests: Sequence[RequestTimes]) -> dict[str, Any]:
    counts = [request.speculation for request in requests if request.speculation is not None]
    drafts = sum(count.num_drafts for count in counts)
    drafted = sum(count.num_draft_tokens for count in counts)
    accepted = sum(count.num_accepted_tokens for count in counts)
    if not drafted:
        return {"acceptance_rate": None, "acceptance_length": None, "acceptance_per_position": []}
    positions = [0] * max(len(count.accepted_per_pos) for count in counts)
    for count in counts:
        for place, number in enumerate(count.accepted_per_pos):
            positions[place] += number
    return {
        "acceptance_rate": round(accepted / drafted, 4),
        "acceptance_length": round(1 + accepted / drafts, 4),
        "acceptance_per_position": [round(number / drafts, 4) for number in positions],
    }


def _chosen(rounds: Sequence[Round]) -> dict[str, float]:
    """Share of the proposals by their number of drafts, where some could be made."""
    counts = Counter(number for round_ in rounds for step in round_.steps for number in step.proposed)
    total = sum(counts.values())
    return {str(number): round(counts[number] / total, 4) for number in sorted(counts)}
