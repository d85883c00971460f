"""Requests that the server makes to itself on behalf of a client: the lines of batches."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import Scope

from ...tenancy.accounts.principal import Principal

ACTING = "outrider.acting"
"""Key of a request's scope, which no client can set: its `Acting`, in place of a key."""


class Acting(NamedTuple):
    """The principal of such a request, and what its body may leave out."""

    principal: Principal
    priority: int = 0


def acting_in(scope: Scope) -> Acting | None:
    """The `Acting` of a request; None for a client's own."""
    acting = scope.get(ACTING)
    assert acting is None or isinstance(acting, Acting)
    return acting
