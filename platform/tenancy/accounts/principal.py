"""Principals: the tenant and the key behind a request, and what they may do. Free of the database, which is
optional."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...core.errors import InvalidRequestError

Scope = Literal["inference", "admin"]
"""Purpose of a key: generating text as its tenant, or running the server (which includes the other)."""
SCOPES: tuple[Scope, ...] = ("inference", "admin")

Period = Literal["day", "week", "month"]
"""Period of a token budget, in UTC."""
PERIODS: tuple[Period, ...] = get_args(Period)

MAX_LIMIT = 10**15
"""Largest limit of any kind: more than anybody uses, and an integer in every JSON reader."""
MAX_ALLOWED_ADAPTERS = 10_000
"""Largest number of names in `allowed_adapters`."""
_MAY_BE_ZERO = ("max_queued_requests", "token_budget")


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
    """Tokens that may be used in one period."""
    budget_period: Period = "month"


NO_LIMITS = Limits()


def limit_fields(limits: Limits) -> dict[str, Any]:
    """The limits that are set, as JSON keeps them; `limits_of` reads them back."""
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(limits):
        value = getattr(limits, item.name)
        if value != item.default:
            fields[item.name] = list(value) if isinstance(value, tuple) else value
    return fields


def limits_of(fields: Mapping[str, Any], base: Limits = NO_LIMITS) -> Limits:
    """`base` with these fields in place of its own; None takes a limit away.

    Raises:
        InvalidRequestError: a field that is none, or a value out of its range; `param` names it.
    """
    known = {item.name for item in dataclasses.fields(Limits)}
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in known:
            raise _refused(name, f"there is no such limit; there are {', '.join(sorted(known))}")
        changes[name] = _checked(name, value)
    return dataclasses.replace(base, **changes)


def _checked(name: str, value: Any) -> Any:
    if name == "budget_period":
        if value is None:
            return NO_LIMITS.budget_period
        if value not in PERIODS:
            raise _refused(name, f"must be one of {', '.join(PERIODS)}")
        return value
    if value is None:
        return None
    if name == "allowed_adapters":
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
            raise _refused(name, "must be a list of names")
        if len(value) > MAX_ALLOWED_ADAPTERS:
            raise _refused(name, f"has {len(value)} names; at most {MAX_ALLOWED_ADAPTERS} are taken")
        return tuple(dict.fromkeys(value))
    lowest = 0 if name in _MAY_BE_ZERO else 1
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= MAX_LIMIT:
        raise _refused(name, f"must be an integer from {lowest} to {MAX_LIMIT}")
    return value


def _refused(name: str, problem: str) -> InvalidRequestError:
    param = f"limits.{name[:64]}"
    return InvalidRequestError(f"{param}: {problem}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The tenant and key behind a request, as of its arrival."""

    tenant: str = ""
    """Name of the tenant, its identity everywhere (a deleted tenant's name is never given again); "" without
    tenants."""
    key_id: str = ""
    """Public id of the key; "" without a database."""
    scopes: frozenset[Scope] = frozenset(SCOPES)
    weight: float = 1.0
    """The tenant's share under the fair policy, relative to others'."""
    tenant_limits: Limits = NO_LIMITS
    key_limits: Limits = NO_LIMITS
    max_adapters: int = field(default=0)
    """Adapters that the tenant may load itself, from the folders that are open for that."""
    reading: int = field(default=0, compare=False)
    """Number of the server's reading of the database: of a tenant's principals the one with the highest number has the
    present limits."""

    @property
    def is_admin(self) -> bool:
        """True when it may run the server."""
        return "admin" in self.scopes


OPEN = Principal()
"""Principal of everybody, on a server without keys."""
