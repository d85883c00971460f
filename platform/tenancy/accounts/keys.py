"""API keys: their form, and the parts of one that are kept."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from .authenticator import hash_key

KEY_START = "sk-or-"
"""First characters of every key, so that people and secret scanners recognise one."""
NUM_RANDOM_BYTES = 32
PREFIX_LENGTH = 12
"""Characters of a key that are kept in clear. The six random ones among them leave 220 random bits to guess."""


class NewKey(NamedTuple):
    """A key that was just made."""

    id: str
    """Public name of the key."""
    secret: str
    """The key itself: shown once, kept nowhere."""
    prefix: str
    digest: bytes


def make_key() -> NewKey:
    """A key of 256 random bits from the system's generator."""
    secret = KEY_START + secrets.token_urlsafe(NUM_RANDOM_BYTES)
    return NewKey(f"key-{secrets.token_hex(8)}", secret, secret[:PREFIX_LENGTH], hash_key(secret))
