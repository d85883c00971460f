"""Number of replicas that a load needs, by requests at once and by use of the KV cache."""

from __future__ import annotations

from collections.abc import Collection

KV_TARGET = 0.8
"""Share of the KV blocks that replicas should use on average: above it long prompts soon wait or preempt others."""


def replicas_needed(requests: float, target_requests: float, kv_usage: Collection[float]) -> float:
    """Number of replicas, not rounded, with which neither of both is above its target.

    Args:
        requests: Requests of all replicas that run or wait.
        target_requests: Requests of one replica above which another one is started.
        kv_usage: Share of the KV blocks in use, of each replica.
    """
    return max(requests / target_requests, sum(kv_usage) / KV_TARGET)
