"""In which order requests are served. A policy is two keys: whose account a request is, and its rank inside it.

Accounts alternate by the tokens that they got (`fair`); a policy with one account for all is a plain sorted queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...core.request import Request


class Policy(NamedTuple):
    """The smallest rank of an account runs first and is preempted last; equal ranks go by arrival."""

    account: Callable[[Request], str]
    rank: Callable[[Request], int]
    is_metered: bool
    """Whether what accounts are served matters: there may be several."""


def _everybody(request: Request) -> str:
    return ""


def _tenant(request: Request) -> str:
    return request.tenant


def _equal(request: Request) -> int:
    return 0


def _priority(request: Request) -> int:
    return request.priority


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(_everybody, _equal, is_metered=False),
    "priority": Policy(_everybody, _priority, is_metered=False),
    "fair": Policy(_tenant, _priority, is_metered=True),
}
