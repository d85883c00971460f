"""Sends requests to a server at their times, and measures whether the client kept up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..request_figures import RequestRecord
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


class _Probe:
    """Delay of the event loop, measured by a task that should run every 10 ms."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + _PROBE_SECONDS
            await asyncio.sleep(_PROBE_SECONDS)
            self.delays.append(time.perf_counter() - due)


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
    delays: list[float] = []
    probe = _Probe()
    # Garbage collection would delay all requests.
    gc.collect()
    gc.disable()
    probing = asyncio.create_task(probe.run())
    started, used = time.perf_counter(), time.process_time()

    async def one(sample: Sample, record: RequestRecord, due: float) -> None:
        nonlocal running, peak
        async with seats:
            running += 1
            peak = max(peak, running)
            await ask(sample, record)
            running -= 1
        if max_concurrency is None:
            delays.append(record.started - due)
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
        **_late("loop_delay", probe.delays),
        **_late("send_delay", delays),
    }
    return Load(records, started, duration, client)


def _late(name: str, delays: Sequence[float]) -> dict[str, float]:
    if not delays:
        return {}
    ms = np.asarray(delays) * 1e3
    return {f"mean_{name}_ms": round(float(ms.mean()), 3), f"p99_{name}_ms": round(float(np.percentile(ms, 99)), 3)}
