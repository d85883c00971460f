"""In which order requests are served. A policy is a sort key: the smallest runs first and is preempted last."""

from __future__ import annotations

from collections.abc import Callable

from ..core.request import Request

Key = tuple[int, int]
Policy = Callable[[Request, int], Key]
"""Given a request and its place in the order of arrival."""


def fcfs(request: Request, arrival: int) -> Key:
    """First come, first served."""
    return (0, arrival)


def priority(request: Request, arrival: int) -> Key:
    """Lower `priority` first; among equals first come, first served."""
    return (request.priority, arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}
