"""One request's row in the ledger, in memory and as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["stop", "length", "abort", "error", "lost"]
"""End of a request; "lost": its server died, and the end is unknown."""

_MAX_LENGTHS = {
    "request_id": 128,
    "client_request_id": 256,
    "tenant": 64,
    "key_id": 32,
    "endpoint": 64,
    "model": 512,
    "adapter": 512,
    "adapter_digest": 64,
    "status": 16,
    "error_type": 64,
}
"""Characters of the columns that hold text."""


class UsageRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A row of `schema.usage`, whose columns these fields are. Times: seconds since the epoch."""

    request_id: str
    client_request_id: str = ""
    tenant: str = ""
    key_id: str = ""
    endpoint: str
    model: str = ""
    adapter: str = ""
    adapter_digest: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    received_at: float
    first_token_at: float | None = None
    finished_at: float
    status: str = "lost"
    """A `Status`, or that of another version."""
    error_type: str = ""

    @property
    def total_tokens(self) -> int:
        """Tokens that count for limits and budgets."""
        return self.prompt_tokens + self.output_tokens

    def values(self) -> dict[str, Any]:
        """Values by column, in types that every database takes."""
        return {name: _clean(name, getattr(self, name)) for name in self.__struct_fields__}


def row_to_json(row: UsageRow) -> bytes:
    """One line of compact JSON, without fields at their default."""
    return msgspec.json.encode(UsageRow(**row.values()))


def row_from_json(data: bytes) -> UsageRow:
    """The row that `row_to_json` wrote, here or in another version: unknown fields are left out.

    Raises:
        ValueError: it is no row.
    """
    return msgspec.json.decode(data, type=UsageRow)


def _clean(name: str, value: Any) -> Any:
    """Text without what databases refuse: NUL, lone surrogates, more than fits the column."""
    if isinstance(value, str):
        if not value.isprintable():
            value = value.replace("\0", "").encode("utf-8", "replace").decode()
        return value[: _MAX_LENGTHS[name]]
    return value
