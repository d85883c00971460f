"""Scheduling policies: in which order requests are served.

Accounts alternate by the tokens that they got (`fair`); a policy with one account for all is a plain sorted queue.
"""

from __future__ import annotations

from typing import NamedTuple


class Policy(NamedTuple):
    """Order of requests. Inside an account the smallest priority runs first, equal ones go by arrival."""

    by_tenant: bool
    """Each tenant has an account; else all requests share one, and nothing is charged."""
    by_priority: bool
    """Whether priorities count."""


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(by_tenant=False, by_priority=False),
    "priority": Policy(by_tenant=False, by_priority=True),
    "fair": Policy(by_tenant=True, by_priority=True),
}
