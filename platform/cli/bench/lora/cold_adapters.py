"""Part two: latencies of running (warm) requests while requests for unread (cold) adapters stream in."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ....core.lora_request import LoRARequest
from ....core.messages import EngineRequest
from ..engine_runs import Run
from ..request_figures import spread
from .lora_engines import Engines

QUIET, LOADED, COLD = KINDS = ("no stream", "loaded adapters stream in", "cold adapters stream in")
WARM_TOKENS = 1024
"""Most output tokens of a warm request. Warm requests should outlast the stream: their own prompts are steps too."""
STREAM_INPUT, STREAM_OUTPUT = 16, 4
"""Tokens of the stream's requests: few, because the loading is measured."""
STREAM_SEATS = 16
"""Number of the stream's requests that may run at once."""
_LEAD_STEPS, _LEAST_STEPS = 3, 3
"""Steps before the stream, and at least during it: two are needed for a gap between tokens."""


class ColdRun(NamedTuple):
    """One run of warm requests, with or without a stream of others."""

    itl: list[float]
    """Gaps between the tokens of warm requests, in the time of the stream."""
    stream_ttft: list[float]
    """TTFT of the stream's requests from their arrival; empty without a stream."""
    loads: list[float]
    """Duration of each load of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdPlan:
    """Sizes of the measurement."""

    cold: Sequence[LoRARequest]
    """Adapters that are not registered."""
    warm: Sequence[LoRARequest]
    """Registered adapters, for the warm requests in turn."""
    num_warm: int
    """Number of warm requests at once: when one ends, the next begins."""
    warm_tokens: int
    rate: float
    """Arrivals of the stream's requests, per second."""


def run_with_stream(engines: Engines, plan: ColdPlan, kind: str, number: int) -> ColdRun:
    """Run warm requests until the stream of this kind has passed and its time of arrival is over."""
    engines.take_load_seconds()  # those of before
    run = Run(engines.serving, f"bench lora: {kind}")
    loaded = [plan.warm[index % len(plan.warm)] for index in range(len(plan.cold))]
    adapters = {QUIET: [], LOADED: loaded, COLD: plan.cold}[kind]
    stream = [
        engines.workload.request(f"stream {number} {index}", STREAM_OUTPUT, lora, input_len=STREAM_INPUT)
        for index, lora in enumerate(adapters)
    ]
    try:
        warm, window = _run_stream(run, engines, plan, number, stream)
    finally:
        run.abort()
        if kind == COLD:
            engines.unregister(plan.cold)
    gaps = [gap for name in warm for gap in gaps_within(run.records[name].arrivals, window)]
    ttft = [record.ttft for name, record in run.records.items() if name not in warm and record.ttft is not None]
    return ColdRun(gaps, ttft, engines.take_load_seconds())


def _run_stream(
    run: Run, engines: Engines, plan: ColdPlan, number: int, stream: Sequence[EngineRequest]
) -> tuple[set[str], tuple[float, float]]:
    """Returns the ids of the warm requests, and the first and last moment of the stream."""
    warm: set[str] = set()

    def step() -> None:
        for _ in range(plan.num_warm - len(run.live & warm)):
            name, lora = f"warm {number} {len(warm)}", plan.warm[len(warm) % len(plan.warm)]
            warm.add(name)
            run.add(engines.workload.request(name, plan.warm_tokens, lora))
        run.step()

    step()
    while not all(run.records[name].arrivals for name in warm):
        step()
    for _ in range(_LEAD_STEPS):
        step()
    waiting, num_steps = deque(stream), 0
    began = now = time.perf_counter()
    while waiting or run.live - warm or now - began < len(plan.cold) / plan.rate or num_steps < _LEAST_STEPS:
        while waiting and now >= (arrived := began + (len(stream) - len(waiting)) / plan.rate):
            run.add(waiting.popleft(), arrived)
        step()
        now, num_steps = time.perf_counter(), num_steps + 1
    return warm, (began, now)


def gaps_within(arrivals: Sequence[float], window: tuple[float, float]) -> list[float]:
    """Gaps between arrivals that began and ended within a window of time."""
    first, last = window
    inside = [arrival for arrival in arrivals if first <= arrival <= last]
    return [later - earlier for earlier, later in pairwise(inside)]


def cold_figures(runs: Mapping[str, Sequence[ColdRun]]) -> dict[str, Any]:
    """ITL of warm requests by the kind of stream, from equally many runs of each.

    `itl_p99_ratio` is the median over rounds of the p99 with cold adapters over that with loaded ones, the same
    stream without loading; `itl_p99_ratio_to_quiet` over that without any stream.
    """
    p99 = {kind: [float(np.percentile(run.itl, 99)) for run in found] for kind, found in runs.items()}

    def ratio(under: str) -> float:
        return round(statistics.median(a / b for a, b in zip(p99[COLD], p99[under], strict=True)), 4)

    return {
        "itl_p99_ratio": ratio(LOADED),
        "itl_p99_ratio_to_quiet": ratio(QUIET),
        "kinds": {
            kind: {
                "itl_ms": spread([gap for run in found for gap in run.itl]),
                "stream_ttft_ms": spread([ttft for run in found for ttft in run.stream_ttft]),
                "load_ms": spread([load for run in found for load in run.loads]),
                "rounds": [{"loads": len(run.loads), "itl_ms": spread(run.itl)} for run in found],
            }
            for kind, found in runs.items()
        },
    }
