"""From the rounds of one cell (mode, task, adapter variant, batch size) to its figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..request_figures import Round, acceptance, row_figures, sum_speculation
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
    """One of the kinds in `tasks`: base model, adapter with or without draft weights, random text."""
    batch_size: int
    rounds: list[Round]


def figures(cell: Cell, off: Cell) -> dict[str, Any]:
    """The figures of a cell, with names for a result file; times in milliseconds.

    `speedup` is the median over rounds of output tokens/s over those of the round of `off` that ran interleaved with
    it, `speedup_error` the standard error of the median. `cpu_speedup` compares processor time; None on a GPU.
    """
    pairs = list(zip(cell.rounds, off.rounds, strict=True))
    speedups = [ours.speed / plain.speed for ours, plain in pairs]
    timed = [(ours, plain) for ours, plain in pairs if ours.cpu_seconds and plain.cpu_seconds]
    cpu = [a.output_tokens / b.output_tokens * b.cpu_seconds / a.cpu_seconds for a, b in timed]
    counts = sum_speculation(Round.joined(cell.rounds).requests)
    steps = sum(counts.steps_by_k)
    chosen = counts.by_drafter(cell.mode.drafters)
    tokens = sum(made for _, made in chosen.values())
    return {
        "task": cell.task,
        "kind": cell.kind,
        "mode": cell.mode.name,
        "method": cell.mode.method,
        "batch_size": cell.batch_size,
        "output_tokens": round(statistics.mean(found.output_tokens for found in cell.rounds), 1),
        "seconds": round(statistics.median(found.seconds for found in cell.rounds), 4),
        **row_figures(cell.rounds),
        "speedup": round(statistics.median(speedups), 4),
        "speedup_error": _error_of_median(speedups),
        "cpu_speedup": round(statistics.median(cpu), 4) if cpu else None,
        "same_text_as_off": _same_text(pairs),
        **(acceptance(counts) or _NO_ACCEPTANCE),
        "tokens_per_step": round(tokens / steps, 4) if steps else None,
        "drafts_verified": {str(k): round(count / steps, 4) for k, count in enumerate(counts.steps_by_k) if count},
        "tokens_by_drafter": {name: round(made / tokens, 4) for name, (_, made) in chosen.items() if made},
    }


def _error_of_median(values: Sequence[float]) -> float | None:
    """Standard error of the median by bootstrap (Efron 1979); None for one value."""
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values), (_DRAWS, len(values)))
    return round(float(np.median(drawn, axis=1).std()), 4)


def _same_text(pairs: Sequence[tuple[Round, Round]]) -> dict[str, int]:
    """Number of requests, over all rounds, with the tokens that off gave, and number of all requests."""
    same = [
        mine.token_ids == theirs.token_ids
        for ours, plain in pairs
        for mine, theirs in zip(ours.requests, plain.requests, strict=True)
    ]
    return {"same": sum(same), "of": len(same)}
