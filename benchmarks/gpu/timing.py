"""Times of work on a device with cold caches, and the device's limits: measured, not looked up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .report import Context

_CPU_REPEATS = 3


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Median seconds of a run of `work`, after a warm-up; on a GPU with cold caches, and launches do not count."""
    if device == "cuda":
        from outrider.tools.tune.search import seconds_on_gpu

        return seconds_on_gpu(work)
    work()
    times = []
    for _ in range(_CPU_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_ceilings(context: Context) -> None:
    """Measure copy bandwidth (bytes read and written) and the rate of a bfloat16 matrix product on random data."""
    size = 1 << 22 if context.quick else 1 << 31
    source = torch.empty(size // 8, dtype=torch.int64, device=context.device).random_()
    target = torch.empty_like(source)
    # An operation, since a copy in a graph is made by the copy engine, which is slower; one on bytes is slower too.
    bandwidth = 2 * size / seconds_of(lambda: torch.bitwise_not(source, out=target), context.device)
    n = 256 if context.quick else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=context.device) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * n**3 / seconds_of(lambda: torch.mm(a, b, out=out), context.device)
    context.ceilings.update(copy_bytes=bandwidth, matmul_flops=rate)
    context.row("copy", gigabytes_per_second=bandwidth / 1e9)
    context.row("matmul bf16", teraflops=rate / 1e12)
