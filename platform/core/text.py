"""Users' text inside messages, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_SHOWN = 200


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    """`text` for a message: at most `limit` characters of it."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name, such as "; did you mean 'top_p'?"; "" when none is close."""
    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
