"""Sends requests to a server at their times, and measures whether the client kept up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..request_figures import RequestRecord, spread
from .datasets import Sample

_PROBE_SECONDS = 0.01


class Load(NamedTuple):
    """Result of the load."""

    records: list[RequestRecord]
    started: float
    duration: float
    """Seconds from the first request's time to the end of the last request."""
    client: dict[str, Any]
    """Load of the client, and delays of its requests."""


async def _probe(delays: list[float]) -> None:
    """Add the delay of the event loop, as a task sees it that should run every 10 ms."""
    while True:
        due = time.perf_counter() + _PROBE_SECONDS
        await asyncio.sleep(_PROBE_SECONDS)
        delays.append(time.perf_counter() - due)


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Seconds from the start at which `count` requests arrive, ascending.

    Gaps are gamma-distributed with shape `burstiness` and mean 1 / `request_rate`: a burstiness of 1 is a Poisson
    process, less makes bursts, more makes even gaps. As in vLLM's benchmark the gaps are stretched so that the last
    request arrives at exactly `count` / `request_rate`: a short run offers the given load. With an infinite rate all
    arrive at once.
    """
    if math.isinf(request_rate):
        return np.zeros(count)
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1 / (request_rate * burstiness), count))
    if times[-1] > 0:  # a tiny shape can give nothing but zeros
        times *= count / request_rate / times[-1]
    return times


async def offer(
    samples: Sequence[Sample],
    times: Sequence[float],
    ask: Callable[[Sample, RequestRecord], Awaitable[None]],
    max_concurrency: int | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> Load:
    """Send `samples` at their `times`, in seconds from now, with at most `max_concurrency` at once.

    The latencies of a request that waits for the end of another one count from its sending.
    """
    seats = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else contextlib.nullcontext()
    records = [RequestRecord(index) for index in range(len(samples))]
    running = peak = 0
    send_delays: list[float] = []
    loop_delays: list[float] = []
    # Garbage collection would delay all requests.
    gc.collect()
    gc.disable()
    probing = asyncio.create_task(_probe(loop_delays))
    started, used = time.perf_counter(), time.process_time()

    async def one(sample: Sample, record: RequestRecord, due: float) -> None:
        nonlocal running, peak
        async with seats:
            running += 1
            peak = max(peak, running)
            await ask(sample, record)
            running -= 1
        if max_concurrency is None:
            send_delays.append(record.started - due)
        on_end(record)

    tasks = []
    try:
        for sample, record, at in zip(samples, records, times, strict=True):
            wait = started + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(sample, record, started + at)))
        await asyncio.gather(*tasks)
    finally:
        gc.enable()
        for task in [probing, *tasks]:
            task.cancel()
    duration = max(record.ended for record in records) - started
    client = {
        "cpu_share": round((time.process_time() - used) / (time.perf_counter() - started), 4),
        "peak_concurrency": peak,
        **_late("loop_delay", loop_delays),
        **_late("send_delay", send_delays),
    }
    return Load(records, started, duration, client)


def _late(name: str, delays: Sequence[float]) -> dict[str, float]:
    found = spread(delays)
    return {f"{share}_{name}_ms": found[share] for share in ("mean", "p99")} if found else {}
