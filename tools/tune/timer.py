"""Timer of work on a CUDA device whose inputs come from memory, not from the second-level cache."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from ...kernels.graphs import CudaGraphs
from .workloads import Workload

_REPEATS = 10
_WARM_UP = 2
_MIN_CALLS, _MAX_COPIES = 8, 256


class CudaTimer:
    """Timer with a captured graph of calls, each on the next copy of the inputs. The copies are twice as large as the
    cache together, so none is still there. A graph's launches cost nothing, and the events enclose all calls."""

    def __init__(self, device: torch.device, repeats: int = _REPEATS) -> None:
        self._device, self._repeats = device, repeats
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def seconds(self, workload: Workload) -> float:
        """Seconds of one call; the median of the repeats."""
        copies = num_copies(workload.num_bytes, self._cache_bytes)
        runs = [workload.make(self._device) for _ in range(copies)]
        calls = runs * -(-_MIN_CALLS // copies)

        def all_calls() -> tuple[Tensor, ...]:
            return tuple(tensor for run in calls for tensor in run())

        graph = CudaGraphs(self._device).capture(all_calls)
        times = []
        for _ in range(_WARM_UP + self._repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000 / len(calls))
        return statistics.median(times[_WARM_UP:])


def num_copies(num_bytes: int, cache_bytes: int) -> int:
    """Number of inputs of `num_bytes` that are twice as large as the cache together."""
    return min(_MAX_COPIES, max(1, -(-2 * cache_bytes // max(1, num_bytes))))
