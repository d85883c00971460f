"""Users' text inside messages."""

from __future__ import annotations

MAX_SHOWN = 200


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    """`text` for a message: at most `limit` characters of it."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
