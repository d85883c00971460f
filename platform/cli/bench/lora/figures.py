"""From the runs of a case to its figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine_runs import RequestTimes
from ..speculation.speculation_figures import spread
from .cases import Case

Seconds = NDArray[np.float64]


class Run(NamedTuple):
    """Figures of one run of all requests of a case; small, because thousands are kept."""

    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttft: Seconds
    tpot: Seconds
    itl: Seconds
    e2el: Seconds
    num_distinct: int = 0
    """Number of different adapters of its requests."""

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds


def summarize(seconds: float, requests: Iterable[RequestTimes], num_prompt_tokens: int, num_distinct: int = 0) -> Run:
    """Figures of a run from the times of its requests; `num_prompt_tokens` is the sum over all."""
    requests = list(requests)
    return Run(
        seconds=seconds,
        num_requests=len(requests),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=sum(len(request.token_ids) for request in requests),
        ttft=np.array([request.ttft for request in requests]),
        tpot=np.array([request.tpot for request in requests if len(request.token_ids) > 1]),
        itl=np.array([gap for request in requests for gap in request.itl]),
        e2el=np.array([request.e2el for request in requests]),
        num_distinct=num_distinct,
    )


@dataclass(slots=True)
class Cell:
    """One case and its runs."""

    case: Case
    runs: dict[int, Run] = field(default_factory=dict)
    """Runs by round."""
    bases: dict[int, Run] = field(default_factory=dict)
    """Run of the base engine beside each, by round; empty for the base engine's own cell."""

    @property
    def ratios(self) -> dict[int, float]:
        """Output tokens/s over those of the base engine, by round."""
        return {number: run.throughput / self.bases[number].throughput for number, run in self.runs.items()}


def figures(cell: Cell, one: Cell | None = None) -> dict[str, Any]:
    """Figures of a case, times in milliseconds; throughputs are medians over rounds.

    Args:
        cell: With one round at least.
        one: The case with one adapter at the same batch size, where it was measured.
    """
    case, runs = cell.case, list(cell.runs.values())
    row: dict[str, Any] = {
        "batch_size": case.batch_size,
        "num_adapters": case.num_adapters,
        "popularity": case.popularity,
        "ranks": list(case.ranks),
        "distinct_adapters": round(statistics.mean(run.num_distinct for run in runs), 2),
        "requests": runs[0].num_requests,
        "output_throughput": _median([run.throughput for run in runs]),
        "request_throughput": _median([run.num_requests / run.seconds for run in runs]),
        "total_token_throughput": _median(
            [(run.num_prompt_tokens + run.num_output_tokens) / run.seconds for run in runs]
        ),
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        row[f"{name}_ms"] = spread(np.concatenate([getattr(run, name) for run in runs]).tolist())
    if cell.bases:
        row["ratio"] = _median(cell.ratios.values())
        row["ratio_best"] = round(
            max(run.throughput for run in runs) / max(run.throughput for run in cell.bases.values()), 4
        )
        row["ratio_to_one_adapter"] = ratio_to_one(cell, one) if one is not None else None
    row["rounds"] = [_round(number, cell) for number in cell.runs]
    return row


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def ratio_to_one(cell: Cell, one: Cell) -> float | None:
    """Throughput over that with one adapter: the median over the rounds that both have, each relative to the base
    engine's run beside it; None without such a round."""
    mine, theirs = cell.ratios, one.ratios
    common = mine.keys() & theirs.keys()
    return _median(mine[number] / theirs[number] for number in common) if common else None


def _round(number: int, cell: Cell) -> dict[str, Any]:
    run, base = cell.runs[number], cell.bases.get(number)
    row: dict[str, Any] = {
        "round": number,
        "seconds": round(run.seconds, 5),
        "output_tokens": run.num_output_tokens,
        "output_throughput": round(run.throughput, 3),
        "ttft_ms": spread(run.ttft.tolist()),
        "itl_ms": spread(run.itl.tolist()),
    }
    if base is not None:
        row["base_output_throughput"] = round(base.throughput, 3)
        row["ratio"] = round(run.throughput / base.throughput, 4)
    return row


def rows(cells: Mapping[Case, Cell]) -> list[dict[str, Any]]:
    """Figures of all cases that have been measured at least once."""
    found = []
    for case, cell in cells.items():
        one = next((c for c in cells.values() if _is_one(c.case, case)), None)
        if cell.runs:
            found.append(figures(cell, one))
    return found


def _is_one(case: Case, beside: Case) -> bool:
    return case.num_adapters == 1 and (case.batch_size, case.ranks) == (beside.batch_size, beside.ranks)


class ColdRun(NamedTuple):
    """One run of warm requests, with or without a stream of others."""

    seconds: float
    """Length of the window in which gaps count."""
    itl: Seconds
    """Gaps between the tokens of warm requests."""
    stream_ttft: Seconds
    """TTFT of the stream's requests from their arrival; empty without a stream."""
    loads: Seconds
    """Duration of each load of an adapter in the window."""


def cold_figures(runs: Mapping[str, Sequence[ColdRun]], *, cold: str, loaded: str, quiet: str) -> dict[str, Any] | None:
    """ITL of warm requests by the kind of stream; None before every kind has been measured once.

    `itl_p99_ratio` is the median over rounds of the p99 with `cold` over that with `loaded`, the same stream without
    loading; `itl_p99_ratio_to_quiet` over that without any stream.
    """
    complete = min(len(runs[name]) for name in (cold, loaded, quiet))
    if complete == 0:
        return None
    p99 = {name: [_p99(run.itl) for run in found[:complete]] for name, found in runs.items()}

    def ratio(under: str) -> float:
        return _median(a / b for a, b in zip(p99[cold], p99[under], strict=True))

    return {
        "itl_p99_ratio": ratio(loaded),
        "itl_p99_ratio_to_quiet": ratio(quiet),
        "kinds": {
            name: {
                "itl_ms": spread(np.concatenate([run.itl for run in found]).tolist()),
                "stream_ttft_ms": spread(np.concatenate([run.stream_ttft for run in found]).tolist()),
                "load_ms": spread(np.concatenate([run.loads for run in found]).tolist()),
                "rounds": [
                    {"seconds": round(run.seconds, 4), "loads": len(run.loads), "itl_ms": spread(run.itl.tolist())}
                    for run in found
                ],
            }
            for name, found in ((name, found[:complete]) for name, found in runs.items())
        },
    }


def _p99(seconds: Seconds) -> float:
    return float(np.percentile(seconds, 99))
