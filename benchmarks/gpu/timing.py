"""Times of work on a device with cold caches, and the device's limits: measured, not looked up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.kernels.graphs import CudaGraphs

from .report import Context

FLUSH_BYTES = 512 << 20
"""Bytes written before each run: several times any second-level cache, and long enough to hide a launch."""
REPEATS = 20


class Timer:
    """Timer of work: medians of repeated runs."""

    def __init__(self, device: str, repeats: int = REPEATS) -> None:
        self.device = torch.device(device)
        self.repeats = repeats
        self._flush = torch.empty(0)
        if self.device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
            self._graphs = CudaGraphs(self.device)

    def seconds(self, work: Callable[[], object], *, graph: bool = True) -> float:
        """Seconds of one run of `work`, after a warm-up and with cold caches.

        On a GPU as a captured graph, so that launches do not count; without `graph`, where it cannot be captured.
        """
        if self.device.type != "cuda":
            return self._on_cpu(work)
        run: Callable[[], object] = work
        if graph:
            run = self._graphs.capture(lambda: _tensors(work())).replay
        else:
            work()
        times = []
        for _ in range(3 + self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return statistics.median(times[3:])

    def _on_cpu(self, work: Callable[[], object]) -> float:
        work()
        times = []
        for _ in range(3):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def _tensors(result: object) -> tuple[Tensor, ...]:
    """Objects of a capture that must stay alive."""
    return (result,) if isinstance(result, Tensor) else ()


def measure_ceilings(context: Context) -> None:
    """Measure copy bandwidth (bytes read and written) and the rate of a bfloat16 matrix product on random data."""
    timer = Timer(context.device)
    size = 1 << 22 if context.quick else 1 << 31
    source = torch.empty(size, dtype=torch.int8, device=context.device).random_(-128, 127)
    target = torch.empty_like(source)
    bandwidth = 2 * size / timer.seconds(lambda: target.copy_(source))
    n = 256 if context.quick else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=context.device) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * n**3 / timer.seconds(lambda: torch.mm(a, b, out=out))
    context.report.ceilings.update(copy_bytes=bandwidth, matmul_flops=rate)
    context.row("copy", gigabytes_per_second=bandwidth / 1e9)
    context.row("matmul bf16", teraflops=rate / 1e12)
