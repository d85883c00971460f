"""What a key may look like: it travels in an HTTP header."""

from __future__ import annotations

API_KEY_VARIABLE = "OUTRIDER_API_KEY"


def key_problem(key: str) -> str:
    """Why no client could send `key`; "" for a good one. The key itself is never repeated."""
    if not (key.isascii() and (key.isprintable() or not key)):
        return "a key must be printable ASCII: clients send it in an HTTP header"
    if key != key.strip():
        return "a key must not begin or end with a space"
    return ""
