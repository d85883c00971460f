"""Cases of the measurement: number of adapters, their popularity among the requests, and batch size; and the row of the
result that the rounds of each make."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..popularity import IDENTICAL
from ..request_figures import Round, row_figures, spread, values


class Case(NamedTuple):
    """One combination of batch size, adapters and popularity."""

    batch_size: int
    """Number of requests at once."""
    num_adapters: int | None
    """Number of adapters that requests may ask for. 0: they ask for the base model, in the engine with adapters. None:
    they run in the engine without adapters, with which all is compared."""
    popularity: str = ""
    """Distribution of the requests over the adapters; "" without a choice."""


def make_cases(batch_sizes: Sequence[int], num_adapters: Sequence[int], popularities: Sequence[str]) -> list[Case]:
    """Combinations by batch size, without the engine that takes no adapters."""
    cases = []
    for batch_size in dict.fromkeys(batch_sizes):
        for number in dict.fromkeys(num_adapters):
            chosen = ("",) if number == 0 else (IDENTICAL,) if number == 1 else dict.fromkeys(popularities)
            cases += [Case(batch_size, number, name) for name in chosen]
    return cases


def rows(rounds: Mapping[Case, Sequence[Round]]) -> list[dict[str, Any]]:
    """A row for each case, times in milliseconds. Ratios compare a round with the same round of another case."""
    return [_row(case, found, rounds) for case, found in rounds.items()]


def _row(case: Case, found: Sequence[Round], rounds: Mapping[Case, Sequence[Round]]) -> dict[str, Any]:
    distinct = [len({request.adapter for request in one.requests} - {None}) for one in found]
    row = {**case._asdict(), "distinct_adapters": round(statistics.mean(distinct), 2), **row_figures(found)}
    entries: list[dict[str, Any]] = [
        {
            "round": number,
            "seconds": round(one.seconds, 5),
            "output_tokens": one.output_tokens,
            "output_throughput": round(one.speed, 3),
            "ttft_ms": spread(values(one.requests, "ttft")),
            "itl_ms": spread(values(one.requests, "itl")),
        }
        for number, one in enumerate(found)
    ]
    if case.num_adapters is not None:
        ratios = _ratios(found, rounds[Case(case.batch_size, None)])
        for entry, ratio in zip(entries, ratios, strict=True):
            entry["ratio"] = round(ratio, 4)
        row["ratio"] = round(statistics.median(ratios), 4)
        single = rounds.get(Case(case.batch_size, 1, IDENTICAL))
        row["ratio_to_one_adapter"] = round(statistics.median(_ratios(found, single)), 4) if single else None
    return row | {"rounds": entries}


def _ratios(rounds: Sequence[Round], others: Sequence[Round]) -> list[float]:
    """Output tokens/s over those of another case, by round."""
    return [mine.speed / other.speed for mine, other in zip(rounds, others, strict=True)]
