"""Who a request comes from, and what its tenant and key may do. Free of the database, which is optional."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Scope = Literal["inference", "admin"]
"""What a key is for: generating text as its tenant, or running the server (which includes the other)."""
SCOPES: tuple[Scope, ...] = ("inference", "admin")

Period = Literal["day", "week", "month"]
"""Of a token budget, in UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what a tenant or a key uses; None: no bound. Where both have one, both hold."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens; a request reserves its prompt and `max_tokens`, and gets back what it did not use."""
    max_concurrent_requests: int | None = None
    max_queued_requests: int | None = None
    """Requests that may wait for one of the concurrent places; None: no bound, where places are bounded."""
    max_context_tokens: int | None = None
    """Prompt and `max_tokens` of one request."""
    max_output_tokens: int | None = None
    """`max_tokens` of one request, which is lowered to it where the request names none."""
    allowed_adapters: tuple[str, ...] | None = None
    """Names of adapters; the base model is always allowed."""
    token_budget: int | None = None
    """Tokens a period."""
    budget_period: Period = "month"


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The tenant and key behind a request, as of its arrival."""

    tenant: str = ""
    """Its name, which is its identity everywhere (a deleted tenant's name is never given again); "" without tenants."""
    key_id: str = ""
    """Public id of the key; "" without a database."""
    scopes: frozenset[Scope] = frozenset(SCOPES)
    weight: float = 1.0
    """The tenant's share under the fair policy, relative to others'."""
    tenant_limits: Limits = NO_LIMITS
    key_limits: Limits = NO_LIMITS
    max_adapters: int = field(default=0)
    """Adapters that the tenant may load itself, from the folders that are open for that."""

    @property
    def is_admin(self) -> bool:
        """Whether it may run the server."""
        return "admin" in self.scopes


OPEN = Principal()
"""Everybody, on a server without keys."""
