"""Principals: the tenant and the key behind a request, and what they may do. Free of the database, which is
optional."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta

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

Bound: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]
BoundOrZero: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]
AdapterNames: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=MAX_ALLOWED_ADAPTERS)
]


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Bounds on what a tenant or a key uses; None: no bound. If both have one, both hold."""

    requests_per_minute: Bound | None = None
    tokens_per_minute: Bound | None = None
    """Prompt and output tokens; a request reserves its prompt and `max_tokens`, and gets back what it did not use."""
    max_concurrent_requests: Bound | None = None
    max_queued_requests: BoundOrZero | None = None
    """Requests that may wait for one of the concurrent slots; None: no bound, if slots are bounded."""
    max_context_tokens: Bound | None = None
    """Prompt and `max_tokens` of one request."""
    max_output_tokens: Bound | None = None
    """`max_tokens` of one request, which is lowered to it if the request names none."""
    allowed_adapters: AdapterNames | None = None
    """Names of adapters; the base model is always allowed."""
    token_budget: BoundOrZero | None = None
    """Tokens that may be used in one period."""
    budget_period: Period = "month"


NO_LIMITS = Limits()
_TYPES = get_type_hints(Limits, include_extras=True)


def limit_fields(limits: Limits) -> dict[str, Any]:
    """The limits that are set, as JSON keeps them; `merge_limits` reads them back."""
    fields: dict[str, Any] = msgspec.to_builtins(limits)
    return fields


def merge_limits(fields: Mapping[str, Any], base: Limits = NO_LIMITS) -> Limits:
    """`base` with these fields in place of its own; None takes a limit away.

    Raises:
        InvalidRequestError: a field that is none, or a value out of its range; `param` names it.
    """
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            if name not in _TYPES:
                raise ValueError(f"there is no such limit; there are {', '.join(sorted(_TYPES))}")
            checked = getattr(NO_LIMITS, name) if value is None else msgspec.convert(value, _TYPES[name])
            changes[name] = tuple(dict.fromkeys(checked)) if isinstance(checked, tuple) else checked  # each name once
        except ValueError as error:  # msgspec's too
            param = f"limits.{name[:64]}"
            raise InvalidRequestError(f"{param}: {str(error).replace('Expected', 'must be', 1)}", param=param) from None
    return msgspec.structs.replace(base, **changes)


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
    max_adapters: int = 0
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
