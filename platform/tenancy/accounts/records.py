"""Rows of the database as plain values. Times are seconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

from .principal import NO_LIMITS, Limits, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant; its name is its identity."""

    name: str
    weight: float = 1.0
    limits: Limits = NO_LIMITS
    max_adapters: int = 0
    disabled: bool = False
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key, without the key."""

    id: str
    tenant: str
    name: str
    prefix: str
    scopes: tuple[Scope, ...]
    limits: Limits = NO_LIMITS
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def state(self, now: float) -> str:
        """ "active", "expired" or "revoked"."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Prompt prefix whose KV all tenants share."""

    name: str
    token_ids: tuple[int, ...] = field(repr=False)
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """An adapter that was loaded over HTTP."""

    tenant: str
    """Owner; "" for an adapter that all share."""
    name: str
    path: str
    draft_path: str | None = None
    pinned: bool = False
    digest: str | None = None
    """Digest of the files that were loaded, see `adapter_files.files_digest`: no server takes others for them."""
    created_at: float = 0.0
