"""Arrival times of requests."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Seconds from the start at which `count` requests arrive, ascending.

    Gaps are gamma-distributed with shape `burstiness` and mean 1 / `request_rate`: a burstiness of 1 is a Poisson
    process, less makes bursts, more makes even gaps. As in vLLM's benchmark the gaps are stretched so that the last
    request arrives at exactly `count` / `request_rate`: a short run offers the given load. With an infinite rate all
    arrive at once.
    """
    if math.isinf(request_rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (request_rate * burstiness), count)
    times = np.cumsum(gaps)
    if times[-1] > 0:  # a tiny shape can give nothing but zeros
        times *= count / request_rate / times[-1]
    return times
