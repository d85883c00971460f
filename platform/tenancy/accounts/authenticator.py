"""Authentication: API key -> principal."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Protocol

from .principal import Principal, Scope


class Authenticator(Protocol):
    """Authenticator of keys. It is called on the event loop for every request, so it never waits."""

    def authenticate(self, key: str) -> Principal | None:
        """The principal of a key, "" if a request brings none; None: access is denied."""


class StaticKeys:
    """The keys of the command line, without tenants. Without API keys everybody may generate, and without admin keys
    everybody who may generate may run the server too."""

    def __init__(self, api_keys: Sequence[str] = (), admin_api_keys: Sequence[str] = ()) -> None:
        self._digests = [hash_key(key) for key in api_keys]
        self._admin_digests = [hash_key(key) for key in admin_api_keys]
        scopes: set[Scope] = {"inference"} if admin_api_keys else {"inference", "admin"}
        self._user = Principal(scopes=frozenset(scopes))
        self._admin = Principal(scopes=frozenset[Scope]({"inference", "admin"}))

    def authenticate(self, key: str) -> Principal | None:
        """See Authenticator."""
        # All keys are compared, and digests have one length: the time says nothing about a key.
        digest = hash_key(key)
        as_admin = [hmac.compare_digest(digest, known) for known in self._admin_digests]
        as_user = [hmac.compare_digest(digest, known) for known in self._digests]
        if any(as_admin):
            return self._admin
        return self._user if any(as_user) or not self._digests else None


def hash_key(key: str) -> bytes:
    """SHA-256 of a key: what is stored and compared. A key has 256 random bits, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode()).digest()
